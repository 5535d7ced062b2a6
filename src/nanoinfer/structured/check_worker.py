"""The child process that compiles grammars on trial (grammars.py starts it). It imports nothing of this package.

It reads one JSON document a line: first its limits, then grammars, {"text": ..., "convert": whether it may be GBNF}. It
answers each with {"lark": the grammar in llguidance's variant of Lark, "error": null if it compiles}.

A grammar comes from a request, so it is untrusted. llguidance bounds some of the work; but 106 KB of references that
refer to references overflow the stack, a large multipleOf takes any amount of time and memory, and the conversion of
GBNF is quadratic. The operating system
limits what happens here, and the serving process compiles only what has compiled here.
"""

from __future__ import annotations

import json
import sys

if __name__ == "__main__":  # the folder of llguidance; the process starts without site-packages
    sys.path += sys.argv[1:]

import resource
import signal

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

MAX_ERROR = 1000  # characters


def check(tokenizer: llguidance.LLTokenizer, grammar: str, limits: llguidance.LLParserLimits) -> str | None:
    """Return why a grammar cannot be used, or None."""
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error()[:MAX_ERROR] if matcher.is_error() else None


def to_lark(text: str) -> tuple[str, str | None]:
    """Return a grammar in Lark, and why it cannot be converted, or None."""
    try:
        return any_to_lark(text), None
    except Exception as e:  # of many types
        return "", f"neither Lark nor GBNF: {e}"[:MAX_ERROR]


def main() -> None:
    """Answer until standard input is closed."""
    setup = json.loads(sys.stdin.buffer.readline())
    tokenizer = llguidance.LLTokenizer("byte")
    parser_limits = llguidance.LLParserLimits(**setup["limits"])
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    limits = {"AS": setup["memory_bytes"], "STACK": setup["stack_bytes"], "NOFILE": 3, "FSIZE": 0, "CORE": 0}
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, setup["cpu_sec"])
        request = json.loads(line)
        lark, error = to_lark(request["text"]) if request["convert"] else (request["text"], None)
        error = error or check(tokenizer, lark + setup["options"], parser_limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps({"lark": lark, "error": error}).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
