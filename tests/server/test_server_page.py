"""The page at / in headless Chromium, against a server whose answers the prompt chooses (page_stub.py)."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("starlette", reason="pip install '.[server]'")
pytest.importorskip("uvicorn", reason="pip install '.[server]'")

import nanoinfer
from helpers import page_stub
from nanoinfer import LLM, AsyncLLM, SamplingParams
from nanoinfer.explain.record import Recording, record
from nanoinfer.explain.record import page as document
from nanoinfer.sampling_params import COMMAND_DEFAULTS
from nanoinfer.server import page_routes
from nanoinfer.server.config import ServerConfig

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

ARGS = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
        " --disable-component-update --disable-sync").split()  # fmt: skip
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 360, "height": 740}
TEXT = page_stub.TEXT
IDLE = "#stop:disabled"
SVG_NAMESPACE = "http://www.w3.org/2000/svg"


@pytest.fixture(scope="module")
def browser() -> Iterator[BrowserContext]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-clients")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on PATH (Debian: apt install chromium)")
    with tempfile.TemporaryDirectory() as folder, api.sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            folder, executable_path=chromium, headless=True, args=ARGS, viewport=DESKTOP
        )
        context.set_default_timeout(10_000)
        yield context
        context.close()


@pytest.fixture(scope="module")
def shared_stub() -> Iterator[page_stub.Stub]:
    stub = page_stub.Stub()
    with page_stub.serve(stub.app()) as stub.url:
        yield stub


@pytest.fixture
def stub(shared_stub: page_stub.Stub) -> page_stub.Stub:
    shared_stub.reset()
    return shared_stub


@pytest.fixture
def page(browser: BrowserContext, stub: page_stub.Stub) -> Iterator[Page]:
    """The loaded page. At the end, the console has no error but those of responses that the test asked for."""
    page = browser.new_page()
    errors: list[str] = []
    page.on("console", lambda m: errors.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: errors.append(str(e)))
    open_page(page, stub.url)
    yield page
    page.evaluate("localStorage.clear()")
    page.close()
    assert [e for e in errors if not re.match("Failed to load resource: (the server responded with|net::ERR)", e)] == []


def open_page(page: Page, url: str) -> None:
    page.goto(url)
    page.wait_for_selector("#c-temperature, #alert:not([hidden])", state="attached")


def ask(page: Page, prompt: str, *, mode: str = "completion") -> None:
    """Send a prompt and wait for the end of the answer."""
    begin(page, prompt, mode=mode)
    page.wait_for_selector(IDLE)


def begin(page: Page, prompt: str, *, mode: str = "completion") -> None:
    page.check(f"input[value={mode}]", force=True)
    page.fill("#input", prompt)
    page.press("#input", "Enter")


def tokens(page: Page) -> list[str]:
    """Return the texts of the tokens of the last answer."""
    last = "[...document.querySelectorAll('.tokens')].at(-1)"
    found: list[str] = page.evaluate(f"[...{last}.children].map(e => e.textContent)")
    return found


def until(page: Page, condition: str) -> None:
    """Wait for a condition. Page.wait_for_function evaluates it by eval, which the page's policy forbids."""
    deadline = time.monotonic() + 10
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(20)


# The files ----------------------------------------------------------------------------------------------------


def test_the_routes_send_the_files_with_security_headers() -> None:
    from starlette.applications import Starlette
    from starlette.testclient import TestClient

    client = TestClient(Starlette(routes=page_routes.routes()))
    names = {p.name for p in page_routes.FOLDER.iterdir()}
    files = {"/", *(f"/page/{name}" for name in names - {"index.html"})}
    assert page_routes.paths() == files | {page_routes.EXPLAIN}
    for path in files:
        response = client.get(path)
        name = path.removeprefix("/page/") if path != "/" else "index.html"
        assert response.content == (page_routes.FOLDER / name).read_bytes()
        kind = {"html": "text/html", "css": "text/css", "js": "text/javascript"}[name.rpartition(".")[2]]
        assert response.headers["content-type"] == f"{kind}; charset=utf-8"
        assert response.headers["content-security-policy"].startswith(
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
            " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["cache-control"] == "no-cache"
        again = client.get(path, headers={"If-None-Match": response.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert client.get(path, headers={"If-None-Match": '"other"'}).status_code == 200
        assert client.head(path).headers["content-length"] == str(len(response.content))
        assert client.post(path).status_code == 405
    for path in ("/page/", "/page/../page_routes.py", "/page/%2e%2e/page_routes.py", "/index.html"):
        assert client.get(path).status_code == 404


def test_the_files_have_nothing_inline_and_no_external_resource() -> None:
    files = {p.name: p.read_text() for p in page_routes.FOLDER.iterdir()}
    page = files["index.html"]
    assert re.findall(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", page) == []
    for name, text in files.items():
        urls = re.findall(r"""(?:(?:src|href)=["']|\burl\(|import\(|from ")(.*?)["')]|(https?://[^'"\s]+)""", text)
        for url in (first or second for first, second in urls):
            assert url.startswith(("page/", "./", "#", "data:image/svg+xml,", SVG_NAMESPACE)), (name, url)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), name
        assert len(text.splitlines()) <= 400, name
        assert [line for line in text.splitlines() if len(line) > 120 and "data:image" not in line] == [], name


# Answers ------------------------------------------------------------------------------------------------------


def test_a_completion(page: Page, stub: page_stub.Stub) -> None:
    ask(page, "O Romeo,")
    assert tokens(page) == TEXT
    assert page.inner_text("#completion .output").strip() == "O Romeo, to be,\n oré\nfinish_reason length"
    display = {"logprobs": 5, "return_token_ids": True, "stream_options": {"include_usage": True}}
    params = {"max_tokens": 128, "temperature": 0.8, "top_k": 50}  # as on the command line
    assert 0 <= stub.bodies[0][1].pop("seed") < 2**32
    assert stub.bodies == [
        ("/v1/completions", {"model": "tiny", "prompt": "O Romeo,", "stream": True, **params, **display})
    ]
    assert page.input_value("#input") == "O Romeo,"
    assert page.inner_text("#status") == "Finished: 6 tokens."


def test_a_chat_sends_the_conversation(page: Page, stub: page_stub.Stub) -> None:
    assert page.is_checked("input[value=chat]")
    page.click("text=System message")
    page.fill("#system", "Be brief.")
    ask(page, "one", mode="chat")
    assert page.input_value("#input") == ""
    ask(page, "two", mode="chat")
    answer = {"role": "assistant", "content": "".join(TEXT)}
    path, body = stub.bodies[1]
    assert path == "/v1/chat/completions"
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        answer,
        {"role": "user", "content": "two"},
    ]
    assert (body["logprobs"], body["top_logprobs"]) == (True, 5)
    assert tokens(page) == TEXT
    page.click("#clear")
    assert page.locator("#chat article").count() == 0
    ask(page, "three", mode="chat")
    assert stub.bodies[2][1]["messages"][1:] == [{"role": "user", "content": "three"}]


def test_no_chat_without_a_chat_template(page: Page, stub: page_stub.Stub) -> None:
    stub.info = {**stub.info, "has_chat_template": False}
    open_page(page, stub.url)
    assert page.is_disabled("input[value=chat]")
    assert page.is_checked("input[value=completion]")
    assert page.inner_text("#mode-note") == "No chat: this model has no chat template."


def test_probabilities_and_alternatives_of_a_token(page: Page) -> None:
    ask(page, "x")
    page.hover(".token >> nth=1")
    page.wait_for_selector("#tip")
    assert page.locator("#tip p").all_inner_texts() == ['" be" token 11, accepted from the draft', "probability 60.7%"]
    rows = [re.split(r"\s*\t\s*", row) for row in page.locator("#tip tr").all_inner_texts()]
    assert [(row[0], row[-1]) for row in rows] == [('" be"', "60.7%"), ('" other"', "22.3%")]
    page.hover("h1")
    assert page.is_hidden("#tip")


@pytest.mark.parametrize("mode", ["completion", "chat"])
def test_tokens_by_keyboard(page: Page, mode: str) -> None:
    ask(page, "x", mode=mode)
    page.focus(".token >> nth=0")
    for key, index in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 4), ("Home", 0)):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.textContent") == TEXT[index]
        assert page.get_attribute(f".token >> nth={index}", "aria-describedby") == "tip"
    assert page.inner_text("#tip p >> nth=0") == '" to" token 10'
    assert page.evaluate("document.querySelectorAll('.token[tabindex=\"0\"]').length") == 1
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")


BESIDE = """(element, height) => {
    const token = element.getBoundingClientRect(), tip = document.getElementById('tip').getBoundingClientRect();
    const gap = Math.max(tip.top - token.bottom, token.top - tip.bottom);
    return token.top >= 0 && token.bottom <= height && gap >= 0 && gap < 8;
}"""


def test_output_and_prompt_are_never_html(page: Page) -> None:
    prompt = "<img src=x onerror=\"document.title='injected'\">"
    for mode in ("completion", "chat"):
        ask(page, prompt, mode=mode)
        ask(page, "html", mode=mode)
        assert tokens(page) == page_stub.HTML
        page.hover(".tokens >> visible=true >> nth=-1 >> .token >> nth=1")
        assert page.inner_text("#tip code >> nth=0") == json.dumps(page_stub.HTML[1])
        assert page.inner_text(f"#{mode} .{'prompt' if mode == 'completion' else 'text'} >> nth=0") == prompt
    page.click("#code summary")
    assert page.evaluate("document.querySelectorAll('img, #transcript b, #tip b').length") == 0
    assert page.title() == "tiny · nanoinfer"


@pytest.mark.parametrize("by", ["key", "button"])
def test_stop_in_the_middle(page: Page, stub: page_stub.Stub, by: str) -> None:
    begin(page, "long")
    page.wait_for_selector(".token >> nth=5")
    assert page.get_attribute("#transcript", "aria-busy") == "true"
    if by == "key":
        page.keyboard.press("Escape")
    else:
        page.click("#stop")
    page.wait_for_selector(IDLE)
    shown = tokens(page)
    assert 6 <= len(shown) < 1000
    assert page.inner_text(".output small") == "stopped"
    assert page.inner_text("#status") == f"Stopped after {len(shown)} tokens."
    stub.wait_until_closed(1)
    assert page.is_hidden("#alert")
    ask(page, "x")
    assert tokens(page) == TEXT


# Errors -------------------------------------------------------------------------------------------------------


def test_an_error_of_a_field_marks_its_control(page: Page, stub: page_stub.Stub) -> None:
    page.fill("#c-temperature", "9")
    ask(page, "x")
    message = "temperature=9.0 is not in [0, 5]"
    assert page.inner_text("#alert") == message
    assert page.inner_text("#error-temperature") == message
    assert page.get_attribute("#c-temperature", "aria-invalid") == "true"
    assert page.evaluate("document.activeElement.id") == "c-temperature"
    assert page.locator("#completion article").count() == 0  # the prompt is still in its field
    assert page.input_value("#input") == "x"
    page.click("text=Reset parameters")
    ask(page, "x")
    assert page.is_hidden("#alert")
    assert page.get_attribute("#c-temperature", "aria-invalid") is None
    assert stub.bodies[1][1]["temperature"] == 0.8


@pytest.mark.parametrize(
    "prompt, message, kept",
    [
        ("busy", "the queue is full Try again in 3 s.", None),
        ("lost", "The connection to the server was lost: the answer is not complete.", TEXT[:2]),
        ("fails", "logits are not finite", TEXT[:2]),
        ("garbage", "The page has failed: SyntaxError: Expected property name or '}' in JSON", TEXT[:2]),
    ],
)
def test_other_errors_are_shown(page: Page, prompt: str, message: str, kept: list[str] | None) -> None:
    ask(page, prompt)
    assert page.inner_text("#alert").startswith(message)
    assert page.locator("#completion article").count() == (1 if kept else 0)
    if kept:
        assert tokens(page) == kept
        assert page.inner_text(".output small") == "incomplete"
    ask(page, "x")
    assert page.is_hidden("#alert")


def test_the_api_key_is_asked_for_and_kept_for_the_session(page: Page, stub: page_stub.Stub) -> None:
    stub.wants_key = True
    open_page(page, stub.url)
    assert page.inner_text("#alert") == "the API key is missing or wrong"
    assert page.evaluate("document.activeElement.id") == "key"
    for key in ("wrong", "\u00e9\u20ac", f" {page_stub.KEY}\u00e9"):
        page.fill("#key", key)
        page.press("#key", "Enter")
        page.wait_for_selector("#c-temperature, #key-form:not([hidden])", state="attached")
    page.wait_for_selector("#c-temperature")
    assert page.is_hidden("#key-form")
    ask(page, "x")
    assert tokens(page) == TEXT
    assert page.evaluate("[JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]") == [
        json.dumps({"nanoinfer.api_key": page_stub.KEY}, separators=(",", ":")), "{}", "",
    ]  # fmt: skip
    page.click("#code summary")
    assert page_stub.KEY not in page.content()
    assert '"Authorization: Bearer $NANOINFER_API_KEY"' in page.inner_text("#curl")
    assert 'api_key=os.environ["NANOINFER_API_KEY"]' in page.inner_text("#python")


# The real server ----------------------------------------------------------------------------------------------


TEMPLATE = "{% for m in messages %}{{ m.role | upper }}:\n{{ m.content }}\n\n{% endfor %}ROMEO:\n"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """The model shakespeare, with a chat template."""
    folder = tmp_path_factory.mktemp("page") / "theatre"
    shutil.copytree(Path(nanoinfer.__file__).parent / "models/builtin/shakespeare", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return LLM(str(folder), engine="native", threads=1)


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[str]:
    from nanoinfer.server.app import build_app

    served = AsyncLLM.from_llm(llm)
    with page_stub.serve(build_app(served, ServerConfig())) as url:
        yield url
    served.shutdown()


@pytest.mark.parametrize("mode", ["completion", "chat"])
def test_the_answer_is_that_of_the_library(page: Page, server: str, llm: LLM, mode: str) -> None:
    open_page(page, server)
    hidden = {"prompt_logprobs", "detokenize", "spaces_between_special_tokens", "output_kind"}
    names = {f"c-{f.name}" for f in fields(SamplingParams) if f.name not in hidden}
    assert set(page.evaluate("[...document.querySelectorAll('#controls [id^=c-]')].map(e => e.id)")) == names
    page.fill("#c-max_tokens", "40")
    page.fill("#c-seed", "7")
    page.fill("#c-stop", "zzz")
    ask(page, "O Juliet,", mode=mode)
    params = SamplingParams(max_tokens=40, seed=7, logprobs=5, **COMMAND_DEFAULTS)
    if mode == "chat":
        (result,) = llm.chat([{"role": "user", "content": "O Juliet,"}], params)
    else:
        (result,) = llm.generate("O Juliet,", params)
    (output,) = result.outputs
    steps = [next(iter(step.values())) for step in output.logprobs or ()]
    assert tokens(page) == [step.decoded_token for step in steps]
    page.hover(f"#{mode} .token >> nth=3")
    shown = page.locator("#tip p").all_inner_texts()
    assert shown[0] == f"{json.dumps(steps[3].decoded_token)} token {output.token_ids[3]}"
    assert float(re.findall(r"probability (.*)%", shown[1])[0]) == pytest.approx(
        100 * math.exp(steps[3].logprob), rel=0.01, abs=0.005
    )
    assert page.locator("#tip tr").count() in (5, 6)  # with the token itself, if it is not among the most likely ones


def test_the_tokens_that_a_draft_proposed(page: Page) -> None:
    from nanoinfer.server.app import build_app

    served = AsyncLLM("shakespeare", engine="native", threads=1, draft="shakespeare-draft", speculate_k=3)
    with page_stub.serve(build_app(served, ServerConfig())) as url:
        open_page(page, url)
        page.fill("#c-max_tokens", "40")
        page.fill("#c-temperature", "0")
        with page.expect_response("**/v1/completions") as found:
            ask(page, "ROMEO:")
        chunks = [json.loads(event[6:]) for event in found.value.text().split("\n\n") if event.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    accepted = [flag for choice in choices for flag in choice.get("draft_accepted", ())]
    coloured = "[...document.querySelectorAll('.token')].map(e => e.classList.contains('accepted'))"
    assert page.evaluate(coloured) == accepted
    assert 0 < sum(accepted) < len(accepted) == 40
    assert page.inner_text("div:has(> dt.accepted) dd") == str(sum(accepted))
    served.shutdown()


def test_the_page_of_a_server_with_an_api_key(page: Page, llm: LLM) -> None:
    from nanoinfer.server.app import build_app

    served = AsyncLLM.from_llm(llm)
    with page_stub.serve(build_app(served, ServerConfig(api_key=("first", "second")))) as url:
        open_page(page, url)
        assert page.is_visible("#key-form")
        page.fill("#key", "second")
        page.click("text=Use key")
        page.wait_for_selector("#c-temperature")
        page.fill("#c-max_tokens", "16")
        ask(page, "O Romeo,")
        assert len(tokens(page)) == 16
        page.evaluate("sessionStorage.setItem('nanoinfer.api_key', 'third')")
        ask(page, "O Romeo,")
        assert page.inner_text("#alert").startswith("the API key is missing or wrong")
        page.fill("#key", "first")
        page.press("#key", "Enter")  # sends the request again
        page.wait_for_selector(".answer >> nth=1")
        page.wait_for_selector(IDLE)
        assert len(tokens(page)) == 16
    served.shutdown()


# Parameters and code ------------------------------------------------------------------------------------------


def test_controls_have_names_defaults_ranges_and_help_of_the_server(page: Page, stub: page_stub.Stub) -> None:
    page.check("input[value=completion]", force=True)
    read = """[...document.querySelectorAll('#controls .control')].map(row => {
        const input = row.querySelector('input, select, textarea');
        const value = input.type == 'checkbox' ? input.checked : input.value;
        return [row.querySelector('label').textContent, input.type, value];
    })"""
    assert page.evaluate(read) == [
        ["max_tokens", "number", "128"],
        ["temperature", "number", "0.8"],
        ["top_k", "number", "50"],
        ["seed", "number", ""],
        ["stop", "textarea", ""],
        ["logprobs", "number", "5"],
        ["presence_penalty", "number", "0"],
        ["stop_token_ids", "textarea", ""],
        ["ignore_eos", "checkbox", False],
        ["logit_bias", "textarea", ""],
        ["overflow", "select-one", "stop"],
    ]
    assert page.get_attribute("#c-temperature", "min") == "0"
    assert page.get_attribute("#c-temperature", "max") == "1000000"
    page.focus("#c-temperature")
    assert page.inner_text("#help") == "0 is greedy decoding. At least 0. At most 1000000."
    page.check("input[value=chat]", force=True)  # whose default is another one
    assert page.input_value("#c-max_tokens") == "1024"
    page.fill("#c-temperature", "1")  # the server's default is not sent
    ask(page, "x", mode="chat")
    assert "temperature" not in stub.bodies[0][1]
    page.click("#controls button")
    assert page.input_value("#c-temperature") == "0.8"


def test_changed_parameters_are_sent_and_kept_when_the_mode_changes(page: Page, stub: page_stub.Stub) -> None:
    page.evaluate("document.querySelector('#controls details').open = true")
    values = {"max_tokens": "7", "temperature": "0.85", "seed": "3", "stop": '\\n\\n\n"a', "logprobs": "2",
              "stop_token_ids": "[5, 6]", "logit_bias": '{"50": -1.5}'}  # fmt: skip
    for name, value in values.items():
        page.fill(f"#c-{name}", value)
    page.check("#c-ignore_eos")
    page.select_option("#c-overflow", "slide")
    changed = page.locator(".changed label").all_inner_texts()
    assert set(changed) == {*values, "ignore_eos", "overflow", "top_k"}
    sent = {"max_tokens": 7, "temperature": 0.85, "seed": 3, "stop": ["\n\n", '"a'], "stop_token_ids": [5, 6],
            "logit_bias": {"50": -1.5}, "ignore_eos": True, "overflow": "slide"}  # fmt: skip
    for mode, logprobs in (("completion", {"logprobs": 2}), ("chat", {"logprobs": True, "top_logprobs": 2})):
        ask(page, "x", mode=mode)
        assert stub.bodies[-1][1].items() >= {**sent, **logprobs}.items()


HARD = "it's \"quoted\" \\n $HOME `x` 'é\U0001f600\n</pre>"


@pytest.mark.parametrize("mode", ["completion", "chat"])
def test_the_request_as_curl_and_as_python(page: Page, stub: page_stub.Stub, mode: str) -> None:
    pytest.importorskip("openai")
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    page.fill("#c-top_k", "40")
    page.fill("#c-temperature", "0.5")
    page.check(f"input[value={mode}]", force=True)
    page.fill("#input", HARD)
    page.click("#code summary")
    curl, python = page.inner_text("#curl"), page.inner_text("#python")
    page.press("#input", "Control+Enter")
    page.wait_for_selector(IDLE)
    path, body = stub.bodies.pop()
    for name in ("logprobs", "top_logprobs", "return_token_ids", "seed", "stream_options"):  # for the display
        body.pop(name, None)
    done = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("data: [DONE]\n\n")
    assert stub.bodies.pop() == (path, body)
    done = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "".join(TEXT)
    assert stub.bodies.pop() == (path, body)


# Appearance and accessibility ---------------------------------------------------------------------------------

NAMES = """[...document.querySelectorAll('input, select, textarea, button, meter, summary')].map(e => [
    e.id || e.outerHTML,
    (e.labels?.[0]?.textContent ?? e.ariaLabel ?? (e.matches('button, summary') ? e.textContent : '')).trim(),
])"""
CONTRAST = """() => {
    const channels = (c) => { const x = c.match(/[\\d.]+/g).map(Number); return {rgb: x.slice(0, 3), a: x[3] ?? 1}; };
    const light = (rgb) => rgb.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const back = (e) => {
        const color = channels(getComputedStyle(e).backgroundColor);
        return color.a || !e.parentElement ? color.rgb : back(e.parentElement);
    };
    const low = [];
    let count = 0;
    for (const e of document.querySelectorAll('body *')) {
        const text = [...e.childNodes].some(n => n.nodeType == 3 && n.textContent.trim());
        if (!text || !e.checkVisibility() || e.matches(':disabled, :disabled *, :disabled + *')) continue;
        const [a, b] = [light(channels(getComputedStyle(e).color).rgb), light(back(e))].sort((x, y) => y - x);
        count++;
        if ((a + 0.05) / (b + 0.05) < 4.5) low.push([e.outerHTML.slice(0, 80), (a + 0.05) / (b + 0.05)]);
    }
    return {low, count};
}"""


def test_the_policy_forbids_scripts_and_styles_of_others(browser: BrowserContext, stub: page_stub.Stub) -> None:
    page = browser.new_page()
    open_page(page, stub.url)
    page.evaluate(
        """() => {
            window.violated = [];
            document.addEventListener('securitypolicyviolation', e => violated.push(e.effectiveDirective));
            const add = (name, values) => document.body.append(Object.assign(document.createElement(name), values));
            add('img', {src: 'http://127.0.0.1:9/x.png'});
            add('style', {textContent: 'body {color: red}'});
            try { document.body.innerHTML = '<b>x</b>'; } catch { violated.push('innerHTML'); }
            fetch('http://127.0.0.1:9/').catch(() => 0);
        }"""
    )
    until(page, "violated.length >= 5")
    assert set(page.evaluate("violated")) == {
        "img-src", "style-src-elem", "innerHTML", "require-trusted-types-for", "connect-src",
    }  # fmt: skip
    page.close()


# Markdown -----------------------------------------------------------------------------------------------------


def answered(page: Page, stub: page_stub.Stub, *deltas: Any, prompt: str = "x") -> None:
    """Send a prompt in a chat, to which the stub answers with these deltas; a text is one of content."""
    stub.answers[prompt] = [{"content": delta} if isinstance(delta, str) else delta for delta in deltas]
    ask(page, prompt, mode="chat")


MARKDOWN = ["# Title\n\n", "- *a*\n- `b`\n\n", "1 & 2\n[link](https://example.org/?a=1) ![pic](http://example.org/i)"]
LINK = '<a href="https://example.org/?a=1" rel="noopener noreferrer" target="_blank">link</a>'
SHOWN = f"""<h3>Title</h3><ul><li><em>a</em></li><li><code>b</code></li></ul><p>1 &amp; 2<br>{LINK} <a \
href="http://example.org/i" rel="noopener noreferrer" target="_blank">pic</a></p>"""


def test_markdown_is_shown_at_the_end_of_an_answer_and_its_tokens_on_demand(page: Page, stub: page_stub.Stub) -> None:
    answered(page, stub, *MARKDOWN)
    page.wait_for_selector(".markdown")
    assert page.inner_html(".markdown") == SHOWN
    assert page.is_hidden(".tokens")
    page.focus(".view")
    page.keyboard.press("Enter")
    assert page.is_visible(".tokens")
    assert page.is_hidden(".markdown")
    assert page.text_content(".tokens") == "".join(MARKDOWN)
    assert page.inner_text(".view") == "Markdown"
    page.keyboard.press("Enter")
    assert page.is_visible(".markdown")
    assert page.inner_text(".view") == "Tokens"
    ask(page, "y", mode="chat")  # without markup
    page.wait_for_timeout(200)
    assert page.locator(".markdown").count() == 1
    assert page.is_visible(".tokens >> nth=1")
    assert stub.bodies[1][1]["messages"][1] == {"role": "assistant", "content": "".join(MARKDOWN)}


HOSTILE = [
    "<script>injected()</script>", "<img src=x onerror=injected()>", "<svg/onload=injected()>",
    '<iframe srcdoc="<script>parent.injected()</script>"></iframe>', "<style>*{display:none}</style>",
    '<a href="javascript:injected()" onclick="injected()">a</a>', "[a](javascript:injected())",
    "[a](JAVASCRIPT:injected())", "[a](java&#115;cript:injected())", "[a](data:text/html,<script>injected()</script>)",
    "[a](vbscript:x) [b](file:///etc/passwd) [c](//example.org) [d](/info)", "<javascript:injected()>",
    "![a](http://127.0.0.1:9/pixel.png)", "![a](javascript:injected())", "![a](data:image/svg+xml,<svg/onload=x()>)",
    "[a]\n\n[a]: javascript:injected()", '[a](https://example.org "x\\" onclick=injected() ")', "<form action=/x><b>b",
    "<meta http-equiv=refresh content=0;url=/x><base href=//example.org><link rel=stylesheet href=//example.org>",
    "```html\n<script>injected()</script>\n```", "# <img src=x onerror=injected()>",
    "|<b onclick=x()>|b|\n|-|-|\n|1|2|", "[<img src=x onerror=injected()>](https://example.org)",
    "**" * 3000 + "a", "<details open ontoggle=injected()>*a*",
]  # fmt: skip
MADE = """[...document.querySelectorAll('#chat *')].filter(e => !e.matches('button, form.results, textarea')).map(e => [
    e.localName, ...[...e.attributes].map(a => a.name == 'href' ? a.value : a.name)])"""
MAY_HAVE = {"open", "class", "tabindex", "aria-label", "rel", "target", "href", "start", "hidden", "aria-describedby"}


def test_hostile_answers_make_no_script_no_handler_and_no_request(page: Page, stub: page_stub.Stub) -> None:
    page.evaluate("() => { window.injected = () => { document.title = 'injected'; }; }")
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url.removeprefix(stub.url)))
    for i, text in enumerate(HOSTILE):
        call = {"index": 0, "id": text, "type": "function", "function": {"name": text, "arguments": json.dumps(text)}}
        answered(
            page,
            stub,
            {"reasoning_content": text},
            f"*a* {text}",
            f"\n\n{text}",
            {"tool_calls": [call]},
            prompt=f"{i} {text}",
        )
        page.wait_for_selector(f".answer >> nth={i} >> .markdown", state="attached")
    page.evaluate("document.querySelectorAll('#chat details').forEach(d => d.open = true)")
    page.wait_for_timeout(200)
    names = set()
    for name, *attributes in page.evaluate(MADE):
        names.add(name)
        others = {a for a in attributes if a not in MAY_HAVE}
        assert all(name == "a" and a.startswith(("https://example.org", "http://127.0.0.1:9/")) for a in others), others
        assert name != "a" or {"rel", "target"} <= set(attributes)
    assert names <= set(
        """a article blockquote br code details div em form h3 h4 h5 h6 hr label li ol p pre s small span
        strong summary table tbody td th thead tr ul""".split()
    )
    assert set(urls) == {"v1/chat/completions", "page/markdown"}
    assert page.title() == "tiny · nanoinfer"


def test_without_the_package_text_is_plain_and_the_page_says_so_once(
    page: Page, stub: page_stub.Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoinfer.server.page_routes.PARSER", None)
    answered(page, stub, "*a*")
    page.wait_for_selector(".output small")
    assert page.inner_text(".output small").startswith("Markdown is not shown: markdown-it-py is not installed: pip")
    answered(page, stub, "*a*")
    page.wait_for_timeout(200)
    assert page.locator(".output small").count() == 1
    assert tokens(page) == ["*a*"]


# Tools and reasoning ------------------------------------------------------------------------------------------

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def call_parts(index: int, name: str, *arguments: str) -> list[dict[str, Any]]:
    """Return the deltas of a call."""
    first = {"index": index, "id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": ""}}
    later = [{"index": index, "function": {"arguments": piece}} for piece in arguments]
    return [{"tool_calls": [part]} for part in (first, *later)]


CALLS = [
    {"reasoning_content": "Two", "reasoning": "Two"}, {"reasoning_content": " cities."}, {"content": "Let me see."},
    *call_parts(0, "weather", '{"city": ', '"Turin"}'), *call_parts(1, "time", "{}"),
]  # fmt: skip
ASSISTANT = {
    "role": "assistant",
    "content": "Let me see.",
    "reasoning_content": "Two cities.",
    "tool_calls": [
        {"id": "call_0", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Turin"}'}},
        {"id": "call_1", "type": "function", "function": {"name": "time", "arguments": "{}"}},
    ],
}
RESULTS = [
    {"role": "tool", "tool_call_id": "call_0", "content": "Rain"},
    {"role": "tool", "tool_call_id": "call_1", "content": ""},
]


def test_reasoning_and_calls_are_folded_while_they_arrive(page: Page, stub: page_stub.Stub) -> None:
    stub.answers["x"] = [*CALLS, *[{"tool_calls": [{"index": 1, "function": {"arguments": " "}}]}] * 300]
    begin(page, "x", mode="chat")
    page.wait_for_selector("summary:text('Call of time')")
    titles = ["Reasoning", 'Call of weather {"city": "Turin"}', "Call of time {}"]
    shown = "JSON.stringify([...document.querySelectorAll('.output summary')].map(e => e.innerText.trim()))"
    until(page, f"{shown} == {json.dumps(json.dumps(titles, separators=(',', ':')))}")
    assert page.locator(".output details[open]").count() == 0
    page.click(".output >> text=Reasoning")
    page.click("text=Call of weather")
    assert page.inner_text(".output details >> nth=0 >> .tokens") == "Two cities."
    assert page.inner_text(".output pre >> nth=0") == '{"city": "Turin"}'
    assert page.inner_text(".output > .tokens") == "Let me see."
    assert page.is_enabled("#stop")
    page.keyboard.press("Escape")
    page.wait_for_selector(IDLE)
    ask(page, "y", mode="chat")
    found = stub.bodies[1][1]["messages"][1]
    found["tool_calls"][1]["function"]["arguments"] = found["tool_calls"][1]["function"]["arguments"].rstrip()
    assert found == ASSISTANT


def test_tools_are_pasted_and_their_calls_answered_by_hand(page: Page, stub: page_stub.Stub) -> None:
    page.click("text=Tools and reasoning")
    assert page.inner_text("#tools-note").startswith("This model's chat template does not show tools")
    page.fill("#c-tools", json.dumps([WEATHER]))
    page.select_option("#c-tool_choice", "required")
    page.select_option("#c-enable_thinking", "false")
    page.fill("#c-reasoning_effort", "low")
    answered(page, stub, *CALLS)
    sent = {"tools": [WEATHER], "tool_choice": "required", "enable_thinking": False, "reasoning_effort": "low"}
    assert stub.bodies[0][1].items() >= sent.items()
    assert "parallel_tool_calls" not in stub.bodies[0][1]
    page.focus(".results textarea >> nth=0")
    page.keyboard.insert_text("Rain")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".answer >> nth=1")
    page.wait_for_selector(IDLE)
    assert stub.bodies[1][1]["messages"] == [{"role": "user", "content": "x"}, ASSISTANT, *RESULTS]
    assert page.locator(".question summary").all_inner_texts() == ["Result of weather", "Result of time"]
    assert page.is_hidden(".results")
    assert page.evaluate("document.activeElement.id") == "send"
    ask(page, "y", mode="chat")
    roles = [message["role"] for message in stub.bodies[2][1]["messages"]]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "user"]


# Editing, retrying, files -------------------------------------------------------------------------------------


def contents(stub: page_stub.Stub) -> list[str]:
    return [message["content"] for message in stub.bodies[-1][1]["messages"]]


def test_a_message_is_edited(page: Page, stub: page_stub.Stub) -> None:
    for text in ("one", "two", "three"):
        answered(page, stub, f"to {text}", prompt=text)
    page.focus(".question >> nth=1 >> text=Edit")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "input"
    assert page.input_value("#input") == "two"
    assert page.is_visible("#edit-note")
    page.keyboard.press("Escape")
    assert (page.input_value("#input"), page.is_visible("#edit-note")) == ("", False)
    page.click(".question >> nth=1 >> text=Edit")
    page.fill("#c-temperature", "9")
    ask(page, "2", mode="chat")  # is refused: the conversation is as it was
    assert page.locator("#chat .text").all_inner_texts() == ["one", "two", "three"]
    assert page.is_visible("#edit-note")
    page.fill("#c-temperature", "1")
    ask(page, "2", mode="chat")
    assert contents(stub) == ["one", "to one", "2"]
    assert page.locator("#chat .text").all_inner_texts() == ["one", "2"]
    assert page.is_hidden("#edit-note")
    ask(page, "four", mode="chat")
    assert contents(stub) == ["one", "to one", "2", "".join(TEXT), "four"]


def saved(page: Page, name: str) -> str:
    page.evaluate("document.getElementById('file-box').open = true")
    with page.expect_download() as found:
        page.click(f"#{name}")
    return found.value.path().read_text(encoding="utf-8")


def test_a_conversation_is_saved_and_loaded(page: Page, stub: page_stub.Stub, tmp_path: Path) -> None:
    page.click("text=System message")
    page.fill("#system", "Be brief.")
    page.click("text=Tools and reasoning")
    page.fill("#c-tools", json.dumps([WEATHER]))
    answered(page, stub, *CALLS)
    page.fill(".results textarea >> nth=0", "Rain")
    page.click("text=Send results")
    page.wait_for_selector(".answer >> nth=1")
    page.wait_for_selector(IDLE)
    document = json.loads(saved(page, "save-json"))
    last = {"role": "assistant", "content": "".join(TEXT)}
    expected = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}, ASSISTANT, *RESULTS, last]
    assert document == {"messages": expected, "tools": [WEATHER]}
    assert saved(page, "save-markdown") == (
        "## system\n\nBe brief.\n\n## user\n\nx\n\n## assistant\n\n> Two cities.\n\nLet me see.\n\n"
        'Call of weather (call_0):\n\n    {"city": "Turin"}\n\nCall of time (call_1):\n\n    {}\n\n'
        f"## tool (call_0)\n\nRain\n\n## tool (call_1)\n\n## assistant\n\n{''.join(TEXT)}\n"
    )
    shown = page.evaluate("document.getElementById('chat').textContent")
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(document))
    page.reload()
    page.wait_for_selector("#c-temperature")
    page.evaluate("document.getElementById('file-box').open = true")
    page.set_input_files("#load", file)
    page.wait_for_selector(".answer >> nth=1")
    assert page.input_value("#system") == "Be brief."
    assert json.loads(page.evaluate("document.getElementById('c-tools').value")) == [WEATHER]
    assert page.evaluate("document.getElementById('chat').textContent") == re.sub(
        "finish_reason (length|stop)", "", shown
    )
    ask(page, "next", mode="chat")
    assert stub.bodies[-1][1]["messages"] == [*expected, {"role": "user", "content": "next"}]
    assert json.loads(saved(page, "save-json"))["messages"][: len(expected)] == expected


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP])
def test_a_chat_with_everything_fits_and_is_used_by_keyboard(
    page: Page, stub: page_stub.Stub, size: Any, theme: Any
) -> None:
    page.set_viewport_size(size)
    page.emulate_media(color_scheme=theme)
    answered(
        page,
        stub,
        "> quote\n\n| " + "wide | " * 30 + "\n" + "|-" * 30 + "|\n\n```\n" + "W" * 200 + "\n```\n[a](http://a)",
    )
    answered(page, stub, {"reasoning_content": "W" * 200}, *call_parts(0, "w" * 64, json.dumps({"city": "W" * 300})))
    page.wait_for_selector(".markdown")
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    page.click(".question >> nth=1 >> text=Edit")
    assert page.evaluate("document.documentElement.scrollWidth") == size["width"]
    outside = "[...document.querySelectorAll('body *')].filter(e => e.checkVisibility() && !e.closest('pre, table')" \
        f" && e.getBoundingClientRect().right > {size['width']} + 1).map(e => e.outerHTML.slice(0, 80))"  # fmt: skip
    assert page.evaluate(outside) == []
    assert page.evaluate(CONTRAST)["low"] == []
    assert [e for e, name in page.evaluate(NAMES) if not name] == []
    page.evaluate("document.activeElement.blur()")
    page.evaluate("document.querySelector('.skip').focus()")
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("(document.activeElement.id || document.activeElement.textContent).slice(0, 12)"))
    assert reached >= {
        "Edit",
        "Retry",
        "Tokens",
        "Reasoning",
        "Send results",
        "save-json",
        "save-markdow",
        "load",
        "cancel",
        "c-tools",
    }


def test_a_call_and_its_result_with_a_model(page: Page, tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="pip install '.[structured]'")
    from helpers.tools import TWO, check_call, tools_folder
    from nanoinfer.server.app import build_app

    served = AsyncLLM(str(tools_folder(tmp_path / "tiny")), engine="native", threads=1)
    with page_stub.serve(build_app(served, ServerConfig())) as url:
        open_page(page, url)
        page.click("text=Tools and reasoning")
        page.fill("#c-tools", json.dumps(TWO))
        page.select_option("#c-tool_choice", "required")
        page.select_option("#c-parallel_tool_calls", "false")
        page.select_option("#c-enable_thinking", "true")
        page.fill("#c-thinking_token_budget", "5")
        page.fill("#c-seed", "3")
        page.fill("#c-max_tokens", "150")
        ask(page, "Hi", mode="chat")
        name = page.inner_text(".results span").removeprefix("Result of ")
        check_call(name, page.evaluate("document.querySelector('.output pre').textContent"), TWO)
        assert page.locator(".output summary").all_inner_texts()[0] == "Reasoning"
        page.select_option("#c-tool_choice", "none")
        page.fill(".results textarea", "5")
        with page.expect_request("**/v1/chat/completions") as found:
            page.click("text=Send results")
        page.wait_for_selector(".answer >> nth=1")
        page.wait_for_selector(IDLE)
        assert [m["role"] for m in json.loads(found.value.post_data or "")["messages"]] == ["user", "assistant", "tool"]
        assert page.is_hidden("#alert")
        page.fill("#c-tools", '[{"type": "function", "function": {"name": "a b"}}]')
        ask(page, "x", mode="chat")
        assert page.inner_text("#error-tools") == page.inner_text("#alert") != ""
    served.shutdown()


# A recording --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["completion", "chat"])
def test_the_recording_of_the_last_request(page: Page, browser: BrowserContext, server: str, mode: str) -> None:
    open_page(page, server)
    assert not page.is_visible("#explain")
    page.fill("#c-max_tokens", "12")
    ask(page, "O Juliet,", mode=mode)
    with browser.expect_page() as opened:
        page.click("#explain")
    explained = opened.value
    explained.wait_for_selector("main")
    explained.keyboard.press("End")
    assert tokens(page) == explained.locator(".token").all_text_contents()
    assert explained.inner_text("#number") == f"{len(tokens(page))} / {len(tokens(page))}"
    explained.close()


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Two sequences of a prompt and one of another that waits for them, in steps with proposals of a draft."""
    draft = {"draft": "shakespeare-draft", "speculate_k": 3}
    llm = LLM("shakespeare", engine="paged", dtype="float32", device="cpu", max_num_seqs=2, **draft)
    params = SamplingParams(max_tokens=20, n=2, temperature=0.8, seed=1)
    return record(llm, ["O Romeo, what is your name?", "First Citizen:"], params)


def test_a_recording_is_stepped_through_by_keys(browser: BrowserContext, recording: Recording, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(document(recording), "utf-8")
    page = browser.new_page()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    address = (tmp_path / "page.html").as_uri()
    page.goto(address)
    num_steps = len(recording.steps)
    for key, step in (("End", num_steps), ("ArrowLeft", num_steps - 1), ("Home", 0), ("ArrowRight", 1), ("Home", 0)):
        page.keyboard.press(key)
        assert page.inner_text("#number") == f"{step} / {num_steps}"
        assert page.input_value("#slider") == str(step)
        assert page.url == f"{address}#{step}"
    classes = "new accepted rejected own shared copied kept free".split()
    seen = set()
    for step in recording.steps:
        page.keyboard.press("ArrowRight")
        assert page.locator(".token.new, .token.accepted").count() == sum(len(row.tokens) for row in step.rows)
        first = next((row for row in step.rows if row.tokens), None)
        if first is not None:
            (candidates,) = (dict(c) for c in first.candidates[-1:])
            shown = page.locator(".candidate span").all_inner_texts()
            assert shown == [f"{100 * p:.1f}%" for p in candidates.values()]
        waiting = page.inner_text("#summary").partition("waiting: ")[2]
        assert len(waiting.split(", ")) == (len(step.waiting) or 1)
        seen |= {c for c in classes if page.locator(f"#texts .{c}, #blocks .{c}").count()}
    assert seen == {*classes}
    expected = [[t for s in recording.steps for r in s.rows if r.sequence == i for t in r.tokens] for i in range(4)]
    assert page.locator(".token").all_text_contents() == [recording.texts[t] for ids in expected for t in ids]
    page.locator(".token").nth(3).focus()
    page.keyboard.press("Enter")
    assert page.inner_text("#candidates p").startswith("Sequence 1a, token 4.")
    page.keyboard.press("Home")
    page.keyboard.press(" ")
    until(page, "document.getElementById('number').textContent.startsWith('2 ')")
    page.keyboard.press(" ")
    assert requests == [address]
    page.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP])
def test_a_recording_fits_and_is_legible(
    browser: BrowserContext, recording: Recording, tmp_path: Path, size: Any, theme: Any
) -> None:
    (tmp_path / "page.html").write_text(document(recording), "utf-8")
    page = browser.new_page()
    page.set_viewport_size(size)
    page.emulate_media(color_scheme=theme, reduced_motion="reduce")
    page.goto((tmp_path / "page.html").as_uri())
    assert not page.is_visible("#play")
    for _ in recording.steps:
        assert page.evaluate("document.documentElement.scrollWidth") == size["width"]
        assert page.evaluate(CONTRAST)["low"] == []
        page.keyboard.press("ArrowRight")
    assert [e for e, name in page.evaluate(NAMES) if not name] == []
    page.close()
