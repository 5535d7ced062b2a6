"""The child process that compiles grammars on trial (grammars.py starts it). It imports nothing of this package.

It reads one JSON document a line: first its limits, then grammars, {"text": ..., "convert": whether it may be GBNF}. It
answers each with {"lark": the grammar in llguidance's variant of Lark, "error": null if it can be used, "num_bytes":
memory that it has when it is compiled, 0 if the C library does not tell}.

A grammar comes from a request, so it is untrusted. llguidance bounds some of the work; but 106 KB of references that
refer to references overflow the stack, a large multipleOf takes any amount of time and memory, and the conversion of
GBNF is quadratic. The operating system limits what happens here, and the serving process compiles only what has
compiled here.

Not covered: limits that only certain outputs exceed, such as too much that may follow at a later position.
"""

from __future__ import annotations

import json
import sys

if __name__ == "__main__":  # the folder of llguidance; the process starts without site-packages
    sys.path += sys.argv[1:]

import ctypes
import resource
import signal

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

MAX_ERROR = 1000  # characters


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
    """The result of glibc's mallinfo2: the fifth of its numbers is what is mapped, the eighth what is used."""

    _fields_ = [("numbers", ctypes.c_size_t * 10)]


def allocated() -> int:
    """Return the bytes that are allocated; 0 without glibc 2.33."""
    if (mallinfo := getattr(ctypes.CDLL(None), "mallinfo2", None)) is None:
        return 0
    mallinfo.restype = Mallinfo
    numbers = mallinfo().numbers
    return int(numbers[4] + numbers[7])


def to_lark(text: str) -> tuple[str, str | None]:
    """Return a grammar in Lark, and why it cannot be converted, or None."""
    try:
        return any_to_lark(text), None
    except Exception as e:  # of many types
        return "", f"neither Lark nor GBNF: {e}"[:MAX_ERROR]


def main() -> None:
    """Answer until standard input is closed."""
    setup = json.loads(sys.stdin.buffer.readline())
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(byte_tokens(setup["special_token_ids"])))
    parser_limits = llguidance.LLParserLimits(**setup["limits"])
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    limits = {"AS": setup["memory_bytes"], "STACK": setup["stack_bytes"], "NOFILE": 3, "FSIZE": 0, "CORE": 0}
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, setup["cpu_sec"])
        request = json.loads(line)
        lark, error = to_lark(request["text"]) if request["convert"] else (request["text"], None)
        num_bytes = 0
        if error is None:
            before = allocated()
            matcher = llguidance.LLMatcher(tokenizer, lark + setup["options"], log_level=0, limits=parser_limits)
            num_bytes = allocated() - before
            matcher.compute_bitmask()
            error = matcher.get_error()[:MAX_ERROR] if matcher.is_error() else None
            del matcher
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer = {"lark": lark, "error": error, "num_bytes": num_bytes}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
