"""The child process that compiles grammars on trial (grammars.py starts it). It imports nothing of this package.

It reads one JSON document a line: first its limits, then grammars, {"text": ..., "convert": whether it may be GBNF}. It
answers each with {"lark": the grammar in llguidance's variant of Lark, "error": null if it can be used, "num_bytes":
memory that it has when it is compiled, null if the C library does not tell}.

A grammar comes from a request, so it is untrusted. llguidance bounds some of the work; but 106 KB of references that
refer to references overflow the stack, a large multipleOf takes any amount of time and memory, and the conversion of
GBNF is quadratic. The operating system limits what happens here, and the serving process compiles only what has
compiled here.

Some limits are exceeded only by certain outputs: a position where too much may follow is found when it is reached. So
the grammar is followed along a few outputs, which are the same each time. Not covered: positions that these outputs do
not reach, and what depends on the model's tokens, which are longer than a byte.
"""

from __future__ import annotations

import json
import sys

if __name__ == "__main__":  # the folder of llguidance; the process starts without site-packages
    sys.path += sys.argv[1:]

import ctypes
import random
import resource
import signal
import time
from collections.abc import Callable

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

MAX_ERROR = 1000  # characters
DEAD_END = "NoExtensionBias"  # llguidance's name for: no byte can come next


WALKS, MAX_BYTES, WALK_SEC = 4, 250, 0.3  # outputs, the bytes of each, and their CPU time
LIKELY = (ord("{"), ord('"'))  # half of the time: begin an object where a value begins, end a string within one


class TokenTable:
    """What `llguidance.TokenizerWrapper` reads: the bytes of the tokens, of which the last is the end."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int]) -> None:
        self.tokens, self.special_token_ids = tokens, special_token_ids
        self.eos_token_id = len(tokens) - 1

    def __call__(self, text: str | bytes) -> list[int]:
        """Not called: no grammar forces tokens (grammars.py)."""
        raise NotImplementedError


def byte_tokens(special_token_ids: list[int]) -> TokenTable:
    """Return a vocabulary of the bytes, special tokens named <special_ID>, and the end."""
    names = [b"<special_%d>" % token_id for token_id in special_token_ids]
    tokens = [*(bytes([i]) for i in range(256)), *names, b"<end>"]
    return TokenTable(tokens, list(range(256, len(tokens))))


class Mallinfo(ctypes.Structure):
    """The result of glibc's mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in (*"abcd", "mapped", *"ef", "used", *"gh")]


def memory() -> Callable[[], int] | None:
    """Return a function that returns the bytes that are allocated; None without glibc 2.33."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    mallinfo.restype = Mallinfo

    def allocated() -> int:
        found = mallinfo()
        return int(found.used + found.mapped)

    return allocated


def check(matcher: llguidance.LLMatcher, num_tokens: int) -> str | None:
    """Return why a grammar cannot be used, or None.

    Args:
        matcher: at the start of an output, not in error.
        num_tokens: bytes and special tokens.
    """
    matcher.compute_bitmask()
    if matcher.is_error():
        return matcher.get_error()[:MAX_ERROR]
    end = time.process_time() + WALK_SEC
    for seed in range(WALKS):
        if (error := walk(matcher.deep_copy(), random.Random(seed), end, num_tokens)) is not None:
            return error[:MAX_ERROR]
    return None


def walk(matcher: llguidance.LLMatcher, chance: random.Random, end: float, num_tokens: int) -> str | None:
    """Follow an output byte by byte; return the error if a limit is exceeded."""
    for _ in range(MAX_BYTES):
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            break
        permitted = [token_id for token_id in range(num_tokens) if bits >> token_id & 1]
        if not permitted or time.process_time() > end:
            return None
        likely = LIKELY[len(permitted) > 64]
        byte = likely if likely in permitted and chance.random() < 0.5 else chance.choice(permitted)
        if not matcher.consume_token(byte) or matcher.is_stopped():
            break
    return matcher.get_error() if matcher.is_error() and DEAD_END not in matcher.get_error() else None


def to_lark(text: str) -> tuple[str, str | None]:
    """Return a grammar in Lark, and why it cannot be converted, or None."""
    try:
        return any_to_lark(text), None
    except Exception as e:  # of many types
        return "", f"neither Lark nor GBNF: {e}"[:MAX_ERROR]


def main() -> None:
    """Answer until standard input is closed."""
    setup = json.loads(sys.stdin.buffer.readline())
    vocabulary = byte_tokens(setup["special_token_ids"])
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary))
    num_tokens = len(vocabulary.tokens) - 1
    parser_limits = llguidance.LLParserLimits(**setup["limits"])
    allocated = memory()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    limits = {"AS": setup["memory_bytes"], "STACK": setup["stack_bytes"], "NOFILE": 3, "FSIZE": 0, "CORE": 0}
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, setup["cpu_sec"])
        request = json.loads(line)
        lark, error = to_lark(request["text"]) if request["convert"] else (request["text"], None)
        num_bytes = None
        if error is None:
            before = allocated() if allocated is not None else 0
            matcher = llguidance.LLMatcher(tokenizer, lark + setup["options"], log_level=0, limits=parser_limits)
            num_bytes = allocated() - before if allocated is not None else None
            error = matcher.get_error()[:MAX_ERROR] if matcher.is_error() else check(matcher, num_tokens)
            del matcher
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer = {"lark": lark, "error": error, "num_bytes": num_bytes}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
