"""The child process that renders a chat template (chat_template.py starts it). It imports nothing of this package.

It reads one JSON document a line: first the template and its limits, then the variables of each rendering. It answers
each of these with {"text": ...} or {"error": ..., "refused": whether the template itself raised it}.

The template is untrusted. Jinja's sandbox keeps it from Python's internals; the operating system limits the rest: CPU
time (a timer whose signal ends the process), memory, and, in case the sandbox has a hole, no further files, sockets or
processes.
"""

from __future__ import annotations

import json
import sys

if __name__ == "__main__":  # the folders of jinja2 and markupsafe; the process starts without site-packages
    sys.path += sys.argv[1:]

import pprint  # noqa: F401  # jinja2 imports these when a template needs them, which the limits then forbid
import resource
import signal
import time
from datetime import datetime
from typing import Any

import jinja2
import jinja2.constants
import jinja2.debug
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

MAX_ERROR = 1000  # characters


class Refused(jinja2.TemplateError):
    """The template called raise_exception."""


class _Generation(jinja2.ext.Extension):
    """Accepts `{% generation %}`, which marks the assistant's tokens for training: the body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the statements between the tags."""
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [jinja2.nodes.Scope(body)]


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:
        jinja2.utils.Namespace.__init__(*args, **values)
        for name in dict(*args[1:], **values):
            _check_name(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no name {name!r}")


def _raise_exception(message: object) -> None:
    raise Refused(str(message))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON without Jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> jinja2.Environment:
    """Return the environment that transformers defines for chat templates (utils/chat_template_utils.py).

    Lists may be changed, as some published templates do: variables are decoded for each rendering.
    """
    env = jinja2.sandbox.SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    env.globals["dict"] = lambda *args, **values: dict(*args, **values)  # the class has attributes
    env.globals["namespace"] = _Namespace
    return env


def render(template: jinja2.Template, variables: dict[str, Any], max_output: int) -> str:
    """Return the rendered text. Raises OverflowError if it has more than `max_output` characters."""
    pieces, size = [], 0
    for piece in template.generate(variables):
        size += len(piece)
        if size > max_output:
            raise OverflowError(f"its output has more than {max_output} characters")
        pieces.append(piece)
    return "".join(pieces)


def answer(work: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
    """Render and return the answer.

    Args:
        work: {"template": ..., "max_output": ...}; a template that is still source is compiled and replaced.
        variables: of the template.
    """
    try:
        if isinstance(work["template"], str):
            work["template"] = environment().from_string(work["template"])
        return {"text": render(work["template"], variables, work["max_output"])}
    except Refused as e:
        return {"error": str(e)[:MAX_ERROR], "refused": True}
    except MemoryError:
        message = f"it needs more than {work['memory_bytes'] >> 20} MiB of memory"
    except OverflowError as e:
        message = str(e)
    except RecursionError:
        message = "it nests too deep"
    except jinja2.TemplateSyntaxError as e:
        message = f"line {e.lineno}: {e.message}"
    except Exception as e:
        message = f"{type(e).__name__}: {e}"
    return {"error": message[:MAX_ERROR], "refused": False}


def _set_limits(memory_bytes: int) -> None:
    time.localtime()  # reads the time zone's file
    answer({"template": "{{ 'x'|nothing }}"}, {})  # loads the codecs that a compiler needs
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for name, limit in (("AS", memory_bytes), ("NOFILE", 3), ("FSIZE", 0), ("NPROC", 0), ("CORE", 0)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))


def main() -> None:
    """Answer renderings until standard input is closed."""
    work = json.loads(sys.stdin.buffer.readline())
    _set_limits(work["memory_bytes"])
    for line in sys.stdin.buffer:
        variables = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, work["cpu_sec"])
        content = json.dumps(answer(work, variables)).encode() + b"\n"
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
