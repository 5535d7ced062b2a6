"""The page at `/`: its files, with a strict Content-Security-Policy.

`routes()` reads the files of page/ once. No file is read because of a request. The files are the same for everybody and
have nothing of the model in them, so no API key is needed for them: the page asks for the key when /info answers 401.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "page"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # ask again with the ETag: after an update, no file is older than the others
}


def routes() -> list[Route]:
    """Return a route for each file of the page: / is index.html, the others are /page/NAME."""
    return [_route(path) for path in sorted(FOLDER.iterdir()) if path.suffix in MEDIA_TYPES]


def paths() -> frozenset[str]:
    """Return the paths of the routes, which need no API key."""
    return frozenset(route.path for route in routes())


def _route(path: Path) -> Route:
    content = path.read_bytes()
    headers = {**HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:16]}"'}

    async def serve(request: Request) -> Response:
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=MEDIA_TYPES[path.suffix], headers=headers)

    return Route("/" if path.name == "index.html" else f"/page/{path.name}", serve)
