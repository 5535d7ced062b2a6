"""The page of a recording: one HTML file with its style, its program and the recording, which loads nothing else."""

from __future__ import annotations

import json
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from nanoinfer.explain.record import Recording

_FOLDER = Path(__file__).parent


_STYLE, _PROGRAM = ((_FOLDER / name).read_text("utf-8") for name in ("page.css", "page.js"))


def policy() -> str:
    """Return the sources of a Content-Security-Policy that permits the style and the program of the page alone."""
    style, program = (b64encode(sha256(text.encode()).digest()).decode() for text in (_STYLE, _PROGRAM))
    return f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{program}'"


def page(recording: Recording | None) -> str:
    """Return the page, HTML in UTF-8. The recording is in it as JSON, in a script that is not executed.

    Without a recording, it is the page that requests one from the page that has opened it.
    """
    data = json.dumps(recording.document(), ensure_ascii=False, separators=(",", ":")) if recording else ""
    html = (_FOLDER / "page.html").read_text("utf-8")
    parts = {"STYLE": _STYLE, "PROGRAM": _PROGRAM, "RECORDING": data.replace("<", "\\u003c")}  # of "</script>"
    head, *rest = html.split("@@")  # text and names in turn
    return head + "".join(parts[part] if i % 2 == 0 else part for i, part in enumerate(rest))
