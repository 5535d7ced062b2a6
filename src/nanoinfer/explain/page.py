"""The page of a recording: one HTML file with its style, its program and the recording, which loads nothing else."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from nanoinfer.explain.record import Recording

_FOLDER = Path(__file__).parent


def page(recording: Recording) -> str:
    """Return the page, HTML in UTF-8. The recording is in it as JSON, in a script that is not executed."""
    data = json.dumps(asdict(recording), ensure_ascii=False, separators=(",", ":"))
    html = (_FOLDER / "page.html").read_text("utf-8")
    parts = {
        "STYLE": (_FOLDER / "page.css").read_text("utf-8"),
        "PROGRAM": (_FOLDER / "page.js").read_text("utf-8"),
        "RECORDING": data.replace("<", "\\u003c"),  # a token may be "</script>"
    }
    head, *rest = html.split("@@")  # text and names in turn
    return head + "".join(parts[part] if i % 2 == 0 else part for i, part in enumerate(rest))
