"""The Markdown of the page as a tree of elements: names, bounds, and nothing that the page should not make."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("starlette", reason="pip install '.[server]'")
pytest.importorskip("markdown_it", reason="pip install '.[server]'")

from helpers.asgi import Response, call, serve
from helpers.models import TINY, make_folder
from nanoinfer import LLM
from nanoinfer.protocols.fields import FieldError
from nanoinfer.server import page_routes
from nanoinfer.server.page_routes import MAX_CHARS, MAX_DEPTH, tree

PATH = "/page/markdown"
ADDRESSES = (
    "javascript:alert(1)", "JaVaScRiPt:alert(1)", "java\tscript:alert(1)", "&#106;avascript:alert(1)", "vbscript:x",
    "data:text/html,<script>alert(1)</script>", "data:image/png;base64,AAAA", "file:///etc/passwd", "blob:x",
    "//other.example/x", "/info", "#top", "x",
)  # fmt: skip


@pytest.mark.parametrize(
    "text, nodes",
    [
        ("", []),
        ("a\nb", [["p", ["a", ["br", []], "b"]]]),
        ("*a* **b**", [["p", [["em", ["a"]], " ", ["strong", ["b"]]]]]),
        ("~~c~~ `d`", [["p", [["s", ["c"]], " ", ["code", ["d"]]]]]),
        ("# a\n###### b", [["h3", ["a"]], ["h6", ["b"]]]),
        ("- a\n- b", [["ul", [["li", ["a"]], ["li", ["b"]]]]]),
        ("3. a\n\n   b", [["ol", [["li", [["p", ["a"]], ["p", ["b"]]]]], 3]]),
        ("```html\n<b>\n```", [["pre", [["code", ["<b>\n"]]]]]),
        ("    x", [["pre", [["code", ["x\n"]]]]]),
        ("> a\n\n---", [["blockquote", [["p", ["a"]]]], ["hr", []]]),
        ("[a](HTTPS://b.c) <d@e.f>", [["p", [["a", ["a"], "HTTPS://b.c"], " ", ["a", ["d@e.f"], "mailto:d@e.f"]]]]),
        ("![a](http://b/c.png)![](http://b)", [["p", [["a", ["a"], "http://b/c.png"], ["a", ["image"], "http://b"]]]]),
        ("<b onclick=x>&lt;i&gt;\\*", [["p", ["<b onclick=x><i>*"]]]),
    ],
)  # fmt: skip
def test_elements(text: str, nodes: list[Any]) -> None:
    assert tree(text) == nodes


def test_a_table() -> None:
    head = ["thead", [["tr", [["th", ["a"]], ["th", ["b"]]]]]]
    assert tree("a|b\n-|-\n1|2") == [["table", [head, ["tbody", [["tr", [["td", ["1"]], ["td", ["2"]]]]]]]]]


@pytest.mark.parametrize("address", ADDRESSES)
def test_other_addresses_are_no_links(address: str) -> None:
    text = f"[a]({address}) ![b]({address}) <{address}> [c][r] [d](<{address}>)\n\n[r]: {address}"
    found: list[Any] = []

    def visit(nodes: list[Any]) -> None:
        for node in nodes:
            if isinstance(node, list):
                found.append(node[0])
                visit(node[1])

    visit(tree(text))
    assert set(found) <= {"p", "br"}


def depth(nodes: Any) -> int:
    return 1 + max((depth(node[1]) for node in nodes if isinstance(node, list)), default=0)


@pytest.mark.parametrize("text", ["*" * 2000 + "a" + "*" * 2000, "**a *b " * 900 + "*c** " * 900])
def test_the_depth_of_emphasis_is_bounded_and_the_text_remains(text: str) -> None:
    nodes = tree(text)
    assert 10 < depth(nodes) <= MAX_DEPTH + 2
    assert json.dumps(nodes).count("a") >= text.count("a")


def test_the_depth_of_blocks_is_bounded() -> None:
    for mark in ("> ", "- "):
        assert depth(tree(mark * 10 + "a")) >= 10
        with pytest.raises(FieldError, match="text: its lists and quotes nest deeper than 32 levels: use fewer"):
            tree(mark * 2000 + "a")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(make_folder(tmp_path_factory.mktemp("markdown") / "tiny", TINY)), engine="native", threads=1)


def ask(llm: LLM, *bodies: Any) -> list[Response]:
    found = []

    async def main(app: Any, model: Any) -> None:
        for body in bodies:
            found.append(await call(app, "POST", PATH, body=json.dumps(body).encode()))

    serve(llm, main)
    return found


def test_the_route(llm: LLM) -> None:
    long = "*a* " * 2000  # is written in pieces
    small, large = ask(llm, {"text": "*a*"}, {"text": long})
    assert (small.status, json.loads(small.content)) == (200, {"nodes": [["p", [["em", ["a"]]]]]})
    assert json.loads(large.content)["nodes"] == tree(long)


@pytest.mark.parametrize(
    "body, message",
    [
        ({}, "text: the body has something else than a text: send {'text': ...}"),
        ({"text": 5}, "text: the body has something else than a text: send {'text': ...}"),
        ({"text": "a", "html": True}, "text: the body has something else than a text: send {'text': ...}"),
        ({"text": "a" * (MAX_CHARS + 1)}, "text has 32769 characters; the limit of Markdown is 32768: send less"),
    ],
)
def test_what_is_refused(llm: LLM, body: Any, message: str) -> None:
    (found,) = ask(llm, body)
    error = json.loads(found.content)["error"]
    assert (found.status, error["param"], error["message"]) == (400, "text", message)


def test_without_the_package(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_routes, "PARSER", None)
    (found,) = ask(llm, {"text": "*a*"})
    assert found.status == 501
    assert json.loads(found.content)["error"]["message"].startswith("markdown-it-py is not installed: pip install")
