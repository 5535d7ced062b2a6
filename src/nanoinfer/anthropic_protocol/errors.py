"""Errors in Anthropic's shape, whose message has the name of the field."""

from __future__ import annotations

from typing import Any

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
          429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}  # fmt: skip


def error_object(message: str, status: int, request_id: str | None = None) -> dict[str, Any]:
    """Return the body of an error.

    Args:
        message: one line.
        status: the HTTP status, which determines the type.
        request_id: of the response's X-Request-Id.
    """
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
