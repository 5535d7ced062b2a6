"""What the soak test sends: requests whose answers are compared with the library's, and abuse that may only be refused.

Both use a few threads, because the client shares the machine's cores with the server. Two tables have an entry for each
route and each kind of abuse: VALID and ABUSE.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from helpers.tools import TWO, tool
from nanoinfer import LLM, SamplingParams
from nanoinfer.protocols.fields import CHAT, COMPLETIONS, COUNT_TOKENS, EMBEDDINGS, MESSAGES, RESPONSES
from nanoinfer.server.app import ROUTES

PROMPTS = [
    "O Romeo,", "To be", "ROMEO:\nWhat", "First Citizen:\n", "é", " " * 20, "O Romeo, Romeo, wherefore", "x" * 300,
]  # fmt: skip
SHAPES: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 24},
    {"seed": 1, "max_tokens": 40, "top_k": 20},
    {"seed": 2, "max_tokens": 16, "n": 3, "top_p": 0.9},
    {"seed": 3, "max_tokens": 30, "logprobs": 3},
    {"seed": 4, "max_tokens": 60, "stop": ["\n", "the"]},
    {"seed": 5, "max_tokens": 30, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    {"seed": 6, "max_tokens": 600, "overflow": "slide"},
    {"seed": 7, "max_tokens": 1, "logit_bias": {"5": 3.0}},
    {"seed": 8, "max_tokens": 40, "structured_outputs": {"regex": "[a-z]{3,9}( [a-z]{3,9}){2}"}},
    {"seed": 9, "max_tokens": 40, "structured_outputs": {"json": '{"enum": ["yes", "no", 5]}'}, "temperature": 2.0},
]
THINKING = {"enable_thinking": True, "thinking_token_budget": 12}
ONE_CALL = {"enable_thinking": False, "parallel_tool_calls": False}
CHAT_SHAPES: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 20},
    {"seed": 1, "max_tokens": 30, "n": 2},
    {"seed": 2, "max_tokens": 60, "tools": TWO},
    {"seed": 3, "max_tokens": 60, "tools": TWO, "tool_choice": "required", "n": 2, **ONE_CALL},
    {"seed": 4, "max_tokens": 80, "tools": TWO, "tool_choice": "add", **THINKING},
    {"seed": 5, "max_tokens": 40, **THINKING},
]
TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls", "enable_thinking", "thinking_token_budget")
COMPARED = ("compared whole", "compared stream", "compared call", "compared reasoning")
TEXTS = ["O Romeo, Romeo", "é and more\n\n", "word " * 2000]
MEGABYTE = random.Random(0).randbytes(10**6).translate(bytes(97 + i % 26 if i > 9 else 32 for i in range(256))).decode()
NUM_TOKENS = 500  # of a long prompt; the context length is 512


class Server:
    """What is known of the server that is tested.

    Args:
        url: where it listens.
        max_connections: that it allows.
        seconds: how long traffic is sent.
    """

    def __init__(self, url: str, max_connections: int, seconds: float) -> None:
        self.host, _, port = url.removeprefix("http://").partition(":")
        self.port, self.max_connections = int(port), max_connections
        self.end = time.monotonic() + seconds
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.floods: deque[float] = deque([0.0], maxlen=1)
        """When the last flood ended; infinity while one lasts."""
        self.spans: deque[tuple[str, float, float]] = deque(maxlen=50_000)
        """Kind, begin and end of each abuse, in seconds of time.time()."""

    @property
    def goes_on(self) -> bool:
        """Whether the time is not over and nothing was wrong."""
        return time.monotonic() < self.end and not self.wrong

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=120)

    def socket(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=120)

    def may_refuse(self, since: float) -> bool:
        """Whether there were too many connections at a time, or before it: a busy server closes them late."""
        return since < self.floods[0] + 60


def has_ended(connection: http.client.HTTPConnection) -> bool:
    """Return whether the server has closed a connection that is not used."""
    if connection.sock is None:
        return False
    connection.sock.setblocking(False)
    try:
        return connection.sock.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    finally:
        connection.sock.settimeout(connection.timeout)


class Refused(Exception):
    """The server has no room for another connection."""


def run(server: Server, clients: list[Callable[[], None]]) -> None:
    """Run clients in threads until the time is over."""
    sys.setswitchinterval(0.001)  # no thread waits long for another one's JSON
    threads = [threading.Thread(target=client) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, server.end - time.monotonic()) + 300)
    if any(thread.is_alive() for thread in threads):
        server.wrong.append("a client waits for an answer")


# What is compared -------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """What is compared of an output."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """Name and arguments of each."""
    finish_reason: str | None = None

    def add(self, part: dict[str, Any]) -> None:
        """Add a message, or a delta."""
        self.content += part.get("content") or ""
        self.reasoning += part.get("reasoning_content") or ""
        for i, call in enumerate(part.get("tool_calls") or ()):
            index, function = call.get("index", i), call["function"]
            if index == len(self.calls):
                self.calls.append([function["name"], ""])
            self.calls[index][1] += function["arguments"]


def _chat_answers(llm: LLM, messages: list[dict[str, Any]], shape: dict[str, Any]) -> list[Answer]:
    options = {name: shape[name] for name in TOOL_FIELDS if name in shape}
    params = SamplingParams(**{name: value for name, value in shape.items() if name not in options})
    answers = []
    for o in llm.chat(messages, params, **options)[0].outputs:
        assert o.message is not None
        answers.append(Answer(finish_reason=o.finish_reason))
        answers[-1].add(o.message.as_message())
        answers[-1].calls = [[call.name, call.arguments] for call in o.message.tool_calls]
        if o.message.tool_calls and o.finish_reason == "stop":
            answers[-1].finish_reason = "tool_calls"
    return answers


class Expected:
    """The library's answers."""

    def __init__(self, llm: LLM) -> None:
        self.embeddings = [output.outputs.embedding for output in llm.embed(PROMPTS)]
        self.cases = [(prompt, shape) for prompt in PROMPTS for shape in SHAPES]
        outputs = llm.generate([p for p, _ in self.cases], [SamplingParams(**_python(s)) for _, s in self.cases])
        self.chats = [([{"role": "user", "content": prompt}], shape) for prompt in PROMPTS for shape in CHAT_SHAPES]
        self.answers: list[list[Answer]] = [
            [Answer(o.text, finish_reason=o.finish_reason) for o in output.outputs] for output in outputs
        ]
        self.chat_answers = [_chat_answers(llm, messages, shape) for messages, shape in self.chats]
        self.tokens = [llm.tokenize(text) for text in TEXTS]


def _python(shape: dict[str, Any]) -> dict[str, Any]:
    bias = shape.get("logit_bias")
    return shape if bias is None else {**shape, "logit_bias": {int(token): value for token, value in bias.items()}}


class Client:
    """Sends one valid request after the other on a connection of its own."""

    def __init__(self, server: Server, expected: Expected, number: int) -> None:
        self.server, self.expected, self.rng = server, expected, random.Random(number)
        self.connection = server.connect()

    def __call__(self) -> None:
        """Run until the time is over."""
        while self.server.goes_on:
            route = self.rng.choice(ROUTES)
            if has_ended(self.connection):  # the read of a slow response may outlast the server's keep_alive_sec
                self.connection.close()
            try:
                VALID[route.path](self)
                self.server.counts[route.path] += 1
            except Refused:
                self.server.counts["refused"] += 1
                time.sleep(0.2)
            except Exception as e:
                self.server.wrong.append(f"{route.path}: {type(e).__name__}: {e}")
        self.connection.close()

    def ask(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        """Return the response, whose status is 200."""
        began = time.monotonic()
        try:
            self.connection.request(method, path, None if body is None else json.dumps(body))
            response = self.connection.getresponse()
        except (ConnectionError, http.client.BadStatusLine) as e:
            self.connection.close()
            if self.server.may_refuse(began):
                raise Refused from e
            raise
        if response.status != 200:
            content = response.read(500)
            self.connection.close()
            if response.status == 503 and self.server.may_refuse(began):
                raise Refused
            if response.status == 429 and path == "/page/explain":  # one recording at a time
                raise Refused
            raise AssertionError(f"status {response.status}: {content!r}")
        return response

    def get(self, path: str) -> Any:
        content = self.ask("GET", path).read()
        return json.loads(content) if content[:1] in (b"{", b"[") else content

    def generate(self, path: str) -> None:
        """Compare an answer: whole, or a stream, some of which are read slowly. Leave some in the middle."""
        chat, how = path == CHAT, self.rng.choice(("whole", "stream", "slow", "leave"))
        i = self.rng.randrange(len(self.expected.chats if chat else self.expected.cases))
        prompt, shape = self.expected.chats[i] if chat else self.expected.cases[i]
        body = {"messages" if chat else "prompt": prompt, **shape, "stream": how != "whole"}
        if how == "leave":
            return self.leave(path, {**body, "max_tokens": 50_000, "overflow": "slide"})
        response = self.ask("POST", path, body)
        answers = (self.expected.chat_answers if chat else self.expected.answers)[i]
        found = [Answer() for _ in answers]
        chunks = self._chunks(response, 0.02 if how == "slow" else 0) if body["stream"] else [json.load(response)]
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            one = found[choice["index"]]
            one.add(choice["message" if how == "whole" else "delta"] if chat else {"content": choice["text"]})
            one.finish_reason = choice["finish_reason"] or one.finish_reason
        assert found == answers, f"{body}: {found} is not {answers}"
        self.server.counts["compared call"] += any(one.calls for one in found)
        self.server.counts["compared reasoning"] += any(one.reasoning for one in found)
        self.server.counts[f"compared {how}"] += 1

    def _chunks(self, response: http.client.HTTPResponse, pause: float) -> Iterator[Any]:
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
            time.sleep(pause)

    def leave(self, path: str, body: dict[str, Any]) -> None:
        """Leave in the middle of an answer, or before it begins."""
        if self.rng.random() < 0.5:
            self.ask("POST", path, body).read(self.rng.randrange(1, 2000))
        else:
            with suppress(ConnectionError):
                self.connection.request("POST", path, json.dumps(body))
            time.sleep(self.rng.random() / 20)
        self.connection.close()

    def messages(self) -> None:
        i = self.rng.choice([i for i, (_, shape) in enumerate(self.expected.chats) if "temperature" in shape])
        (prompt, shape), answers = self.expected.chats[i], self.expected.chat_answers[i]
        body = {"model": self.model_name(), "messages": prompt, **shape}
        found = json.load(self.ask("POST", MESSAGES, body))
        assert [block["text"] for block in found["content"]] == [answer.content for answer in answers]
        del body["temperature"], body["max_tokens"]
        count = json.load(self.ask("POST", COUNT_TOKENS, body))
        assert count["input_tokens"] == found["usage"]["input_tokens"]

    def respond(self) -> None:
        """Compare an answer of /v1/responses, some of which are streams."""
        others = {"n", *TOOL_FIELDS}
        i = self.rng.choice([i for i, (_, shape) in enumerate(self.expected.chats) if not others & shape.keys()])
        (message,), shape = self.expected.chats[i]
        body = {"input": message["content"], "stream": self.rng.random() < 0.5}
        body |= {"max_output_tokens" if name == "max_tokens" else name: value for name, value in shape.items()}
        response = self.ask("POST", RESPONSES, body)
        found = list(self._chunks(response, 0))[-1]["response"] if body["stream"] else json.load(response)
        (answer,) = self.expected.chat_answers[i]
        ends = {"completed": "stop", "incomplete": "length"}
        text, status = found["output"][0]["content"][0]["text"], found["status"]
        assert Answer(text, finish_reason=ends[status]) == answer, f"{body}: {found}"

    def tokenize(self) -> None:
        i = self.rng.randrange(len(TEXTS))
        assert json.load(self.ask("POST", "/tokenize", {"prompt": TEXTS[i]}))["tokens"] == self.expected.tokens[i]

    def detokenize(self) -> None:
        i = self.rng.randrange(len(TEXTS))
        assert json.load(self.ask("POST", "/detokenize", {"tokens": self.expected.tokens[i]}))["prompt"] == TEXTS[i]

    def embed(self) -> None:
        found = json.load(self.ask("POST", EMBEDDINGS, {"input": PROMPTS}))["data"]
        assert [item["embedding"] for item in found] == self.expected.embeddings

    def models(self) -> None:
        (listed,) = {model["root"] for model in self.get("/v1/models")["data"]}
        assert listed

    def model_name(self) -> str:
        name: str = self.rng.choice(self.get("/v1/models")["data"])["id"]
        return name

    def model(self) -> None:
        name = self.model_name()
        assert self.get(f"/v1/models/{name}")["id"] == name


VALID: dict[str, Callable[[Client], Any]] = {
    COMPLETIONS: lambda client: client.generate(COMPLETIONS),
    CHAT: lambda client: client.generate(CHAT),
    MESSAGES: Client.messages,
    COUNT_TOKENS: Client.messages,
    RESPONSES: Client.respond,
    "/v1/models": Client.models,
    "/v1/models/{model:path}": Client.model,
    "/tokenize": Client.tokenize,
    "/detokenize": Client.detokenize,
    EMBEDDINGS: Client.embed,
    "/page/markdown": lambda client: client.ask("POST", "/page/markdown", {"text": "*a*"}).read(),
    "/page/explain": lambda client: client.ask("POST", "/page/explain", {"prompt": "a", "max_tokens": 3}).read(),
    **{path: (lambda client, path=path: client.get(path))
       for path in ("/tokenizer_info", "/info", "/health", "/metrics", "/openapi.json")},
}  # fmt: skip


# What is refused, or takes long -----------------------------------------------------------------------------


class Abuser:
    """Sends one kind of abuse after the other, on connections of its own."""

    def __init__(self, server: Server, number: int) -> None:
        self.server, self.rng, self.number = server, random.Random(number), number
        self._next_grammar = number << 32

    def __call__(self) -> None:
        """Run until the time is over."""
        kinds: list[str] = []
        while self.server.goes_on:
            kinds = kinds or self.rng.sample([*ABUSE], len(ABUSE))  # each of them in each turn
            kind, began = kinds.pop(), time.time()
            try:
                ABUSE[kind](self)
            except Exception as e:
                self.server.wrong.append(f"{kind}: {type(e).__name__}: {e}")
            self.server.counts[kind] += 1
            self.server.spans.append((kind, began, time.time()))
            time.sleep(self.rng.random() / 2)

    def post(self, path: str, body: Any, *allowed: int) -> int:
        """Return the status of a response, which is read to its end. 503 and a reset are allowed after a flood."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        began = time.monotonic()
        with closing(self.server.connect()) as connection:
            try:
                with suppress(ConnectionError):  # refused before all is sent: the response is there
                    connection.request("POST", path, content)
                response = connection.getresponse()
                start = response.read(500)
                while response.read(1 << 16):
                    pass
            except (ConnectionError, http.client.HTTPException):
                if not self.server.may_refuse(began):
                    raise
                return 503
        ok = response.status in (allowed or (200, 400, 413, 429)) or (
            response.status == 503 and self.server.may_refuse(began)
        )
        assert ok, f"status {response.status}: {start!r}"
        return response.status

    @contextmanager
    def sent(self, path: str, body: Any, count: int) -> Iterator[list[socket.socket]]:
        """Send a request on several connections without reading the answers; close them at the end."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: {self.server.host}\r\ncontent-length: {len(content)}\r\n\r\n".encode()
        opened = [self.server.socket() for _ in range(count)]
        try:
            for one in opened:
                with suppress(ConnectionError):
                    one.sendall(head + content)
            yield opened
        finally:
            for one in opened:
                one.close()

    def long_prompt(self) -> list[int]:
        return [self.rng.randrange(1000) for _ in range(NUM_TOKENS)]

    def scrape_during_prompts(self) -> None:
        """Ask for metrics while long prompts are processed."""
        body = {"prompt": self.long_prompt(), "max_tokens": 2}
        with self.sent(COMPLETIONS, {**body, "n": 8, "logprobs": 5}, 2), self.sent(COMPLETIONS, body, 6):
            for path in ("/metrics", "/info", "/v1/models", "/metrics"):
                with closing(self.server.connect()) as connection, suppress(ConnectionError):
                    connection.request("GET", path)
                    assert connection.getresponse().status in (200, 503)

    def strings_of_a_large_text(self) -> None:
        self.post("/tokenize", {"prompt": MEGABYTE})

    def logprobs_of_a_prompt(self) -> None:
        """Ask for the log-probabilities of a long prompt, once for each choice."""
        for stream in (True, False):
            body = {"prompt": self.long_prompt(), "echo": True, "logprobs": 20, "n": 32, "max_tokens": 2}
            self.post(COMPLETIONS, {**body, "stream": stream})

    def too_long_prompts(self) -> None:
        """Send prompts that do not fit; half of the clients leave at once."""
        with self.sent(COMPLETIONS, {"prompt": MEGABYTE}, 2):
            self.post(COMPLETIONS, {"prompt": MEGABYTE}, 400, 413)
            self.post(CHAT, {"messages": [{"role": "user", "content": MEGABYTE}]}, 400, 413)

    def many_grammars(self) -> None:
        for _ in range(20):
            self._next_grammar += 1
            name = f"k{self._next_grammar}"
            schema = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
            self.post(COMPLETIONS, {"prompt": "a", "max_tokens": 3, "structured_outputs": {"json": schema}}, 200)

    def many_tools(self) -> None:
        """Call one of 60 tools, which are new; then tools that are refused."""
        number = self.rng.randrange(10**9)
        tools = [tool(f"t{i}", {f"p{number}": {"type": "boolean"}}) for i in range(129)]
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 40, "tool_choice": "required"}
        self.post(CHAT, {**body, "tools": tools[:60], "stream": True}, 200)
        deep: dict[str, Any] = {"type": "null"}
        for _ in range(60):
            deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
        for refused in (tools, tools[:1] * 2, [tool("a b", {})]):
            self.post(CHAT, {**body, "tools": refused}, 400)
        self.post(CHAT, {**body, "tools": [tool(f"a{number}", {"b": {"$ref": "#/x"}})]}, 200)
        self.post(CHAT, {**body, "tools": [tool("deep", {"a": deep})]}, 200, 400)

    def many_choices(self) -> None:
        choices = [f"option {i} of {self.rng.randrange(10**6)}" for i in range(self.rng.randrange(2001, 4000))]
        self.post(COMPLETIONS, {"prompt": "a", "max_tokens": 20, "structured_outputs": {"choice": choices}})

    def optional_properties(self) -> None:
        schema = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(2500)}}
        self.post(COMPLETIONS, {"prompt": "a", "max_tokens": 20, "structured_outputs": {"json": schema}})

    def flood(self) -> None:
        """Open more connections than the server allows, send half a request on some, and reset half of them."""
        self.server.floods.append(float("inf"))
        opened: list[socket.socket] = []
        try:
            while len(opened) < self.server.max_connections + 60:
                opened.append(self.server.socket())
                if self.rng.random() < 0.1:
                    with suppress(ConnectionError):
                        opened[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-len")
            time.sleep(0.5)
            for one in opened:
                with suppress(BlockingIOError, ConnectionError):
                    answer = one.recv(4096, socket.MSG_DONTWAIT)
                    assert not answer or answer.startswith(b"HTTP/1.1 503"), answer  # none: half a head for too long
                    self.server.counts["refused in a flood"] += len(answer) > 0
        finally:
            for i, one in enumerate(opened):
                if i % 2:  # a reset instead of an orderly end
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                one.close()
            self.server.floods.append(time.monotonic())

    def odd_heads(self) -> None:
        """Send what is no request, or not one for this server."""
        host = f"host: {self.server.host}\r\n"
        for head in (
            "GET /info HTTP/1.1\r\nhost: localhost:80@evil.example\r\n\r\n",
            f"POST {COMPLETIONS} HTTP/1.1\r\n{host}origin: http://a.example\r\norigin: http://b.example\r\n\r\n",
            f"POST {COMPLETIONS} HTTP/1.1\r\n{host}content-length: 65536\r\n\r\n" + "[" * 65536,
            f"POST {COMPLETIONS} HTTP/1.1\r\n{host}transfer-encoding: chunked\r\n\r\nzz\r\n",
            f"GET /{'x' * 20_000} HTTP/1.1\r\n{host}\r\n",
            f"GET /nothing HTTP/1.1\r\n{host}\r\n",
            "\x16\x03\x01\x02\r\n\r\n",
        ):
            with self.server.socket() as one, suppress(ConnectionError):
                one.sendall(head.encode("latin-1"))
                status = one.recv(4096)[9:12]
                assert status in (b"400", b"403", b"404", b"431", b"503", b""), (head[:80], status)

    def slow_heads_and_readers(self) -> None:
        """Send a head byte by byte, and read a long stream byte by byte, for a second."""
        body = {"prompt": "a", "max_tokens": 10**6, "overflow": "slide", "stream": True, "ignore_eos": True}
        with self.sent(COMPLETIONS, body, 2) as readers, self.server.socket() as slow:
            for byte in b"POST /v1/completions HTTP/1.1\r\n":
                with suppress(ConnectionError):
                    slow.send(bytes([byte]))
                    for reader in readers:
                        reader.recv(1)
                time.sleep(0.03)


ABUSE: dict[str, Callable[[Abuser], None]] = {
    "scrape_during_prompts": Abuser.scrape_during_prompts,
    "strings_of_a_large_text": Abuser.strings_of_a_large_text,
    "logprobs_of_a_prompt": Abuser.logprobs_of_a_prompt,
    "too_long_prompts": Abuser.too_long_prompts,
    "many_grammars": Abuser.many_grammars,
    "many_tools": Abuser.many_tools,
    "many_choices": Abuser.many_choices,
    "optional_properties": Abuser.optional_properties,
    "flood": Abuser.flood,
    "odd_heads": Abuser.odd_heads,
    "slow_heads_and_readers": Abuser.slow_heads_and_readers,
}
