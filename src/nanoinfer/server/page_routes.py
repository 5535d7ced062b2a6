"""The page at `/`: its files, with a strict Content-Security-Policy, and /page/markdown, which it calls.

/page/explain.html is the page of a recording without a recording: the page at `/` sends it that of its last request.

`routes()` reads the files of page/ once. No file is read because of a request. The files are the same for everybody and
have nothing of the model in them, so no API key is needed for them: the page asks for the key when /info answers 401.

The Markdown of an answer becomes a tree of names of elements, texts and addresses, from which the page creates the
elements that it knows. HTML in the Markdown is text, an image is a link to it, and a link that is not http, https or
mailto is its text.

    "*a* [b](https://c)"  ->  [["p", [["em", ["a"]], " ", ["a", ["b"], "https://c"]]]]
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from markdown_it.token import Token
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from nanoinfer.errors import missing_extra
from nanoinfer.explain.record import page, policy
from nanoinfer.protocols.fields import FieldError
from nanoinfer.server.http import LARGE_VALUES
from nanoinfer.server.service import Service

FOLDER = Path(__file__).parent / "page"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
SOURCES = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:"
NOTHING_ELSE = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
EXPLAIN = "/page/explain.html"
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # ask again with the ETag: after an update, no file is older than the others
}


def routes() -> list[Route]:
    """Return a route for each file of the page: / is index.html, the others are /page/NAME; and EXPLAIN."""
    files = [path for path in sorted(FOLDER.iterdir()) if path.suffix in MEDIA_TYPES]
    paths = ["/" if file.name == "index.html" else f"/page/{file.name}" for file in files]
    own = [_route(path, file.read_bytes(), file.suffix, SOURCES) for path, file in zip(paths, files, strict=True)]
    return [*own, _route(EXPLAIN, page(None).encode(), ".html", policy())]


def paths() -> frozenset[str]:
    """Return the paths of the routes, which need no API key."""
    return frozenset(route.path for route in routes())


def _route(path: str, content: bytes, suffix: str, sources: str) -> Route:
    headers = {**HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:16]}"'}
    headers["Content-Security-Policy"] = f"{sources}; {NOTHING_ELSE}"

    async def serve(request: Request) -> Response:
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=MEDIA_TYPES[suffix], headers=headers)

    return Route(path, serve)


MAX_CHARS = 1 << 15
"""Of a text. The slowest known one takes 0.5 to 0.8 s."""
MAX_DEPTH = 32
"""Levels of the tree. The parser leaves out deeper lists and quotes; deeper emphasis is a part of this level."""
try:  # not at the first request: the server imports everything before it listens
    from markdown_it import MarkdownIt
except ImportError:
    PARSER = None
else:
    PARSER = MarkdownIt("commonmark", {"html": False, "maxNesting": MAX_DEPTH}).enable(["table", "strikethrough"])
SCHEMES = ("http://", "https://", "mailto:")
Node = Any
"""A text, or [name of an element, its nodes], or ["a", nodes, address], or ["ol", nodes, first number]."""


async def markdown(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Return the elements of a Markdown text, for the page."""
    text = await service.bodies.read(receive, _text)
    nodes = await service.bodies.write(lambda: tree(text))
    await service.bodies.respond(send, lambda: {"nodes": nodes}, LARGE_VALUES + 1 if len(text) > LARGE_VALUES else 0)


def _text(body: Mapping[str, Any]) -> str:
    """Return the field `text` of a body, which has no other. Raises FieldError."""
    text = body.get("text")
    if not isinstance(text, str) or len(body) > 1:
        raise FieldError("text: the body has something else than a text: send {'text': ...}", "text")
    if len(text) > MAX_CHARS:
        raise FieldError(f"text has {len(text)} characters; the limit of Markdown is {MAX_CHARS}: send less", "text")
    if PARSER is None:
        raise FieldError(missing_extra("markdown-it-py", "server"), "text", 501)
    return text


def tree(text: str) -> list[Node]:
    """Return the nodes of a Markdown text. Raises FieldError if lists and quotes nest too deep."""
    assert PARSER is not None
    tokens = PARSER.parse(text)
    if any(token.nesting > 0 and token.level >= MAX_DEPTH - 1 for token in tokens):
        raise FieldError(f"text: its lists and quotes nest deeper than {MAX_DEPTH} levels: use fewer", "text")
    nodes: list[Node] = []
    path = [nodes]  # the lists of nodes from the root to the element that is open
    for token in chain.from_iterable((t.children or ()) if t.type == "inline" else (t,) for t in tokens):
        if token.hidden:  # the paragraph of an item in a list without blank lines
            continue
        if token.nesting < 0:
            path.pop()
            continue
        made = _node(token) if token.nesting == 0 or len(path) <= MAX_DEPTH else None
        if made:  # an element, or a text that is not empty
            path[-1].append(made)
        if token.nesting > 0:
            path.append(path[-1] if made is None else made[1])
    return nodes


def _node(token: Token) -> Node | None:
    """Return the node of a token, without what is inside of it; None: only that is shown."""
    match token.type:
        case "text":
            return token.content
        case "softbreak" | "hardbreak":  # models mean the ends of their lines
            return ["br", []]
        case "fence" | "code_block":
            return ["pre", [["code", [token.content]]]]
        case "code_inline":
            return ["code", [token.content]]
        case "image":
            source = str(token.attrs.get("src", ""))
            return _link([token.content or "image"], source) or token.content
        case "link_open":
            return _link([], str(token.attrs.get("href", "")))
        case "heading_open":  # below those of the page
            return [f"h{min(6, int(token.tag[1:]) + 2)}", []]
        case "ordered_list_open":
            return ["ol", [], int(token.attrs.get("start", 1))]
    return [token.tag, []]


def _link(nodes: list[Node], address: str) -> Node | None:
    return ["a", nodes, address] if address.lower().startswith(SCHEMES) else None
