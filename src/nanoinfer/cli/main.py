"""`nanoinfer`: the table of sub-commands, and the one place where errors become one line and an exit code."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

from nanoinfer.cli import bench, engines, eval, generate, profile, roofline, train
from nanoinfer.errors import NanoinferError

# typer carries its own copy of click from 0.20 on: name the base class through typer, whichever it is.
_ClickException: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="nanoinfer",
    help="Text from GPT-2-family models, on every rung of the optimisation ladder.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
COMMANDS: dict[str, Callable[..., Any]] = {
    "generate": generate.generate,
    "engines": engines.engines,
    "eval": eval.evaluate,
    "bench": bench.bench,
    "profile": profile.profile,
    "roofline": roofline.roofline,
    "train": train.train,
}
for name, command in COMMANDS.items():
    app.command(name)(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            print(version("nanoinfer"))
        except PackageNotFoundError:  # run from a source tree that was never installed
            print("unknown")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Text from GPT-2-family models, on every rung of the optimisation ladder."""


def main() -> None:
    """Run the command line and exit with its code."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="nanoinfer: %(message)s")
    command: Any = typer.main.get_command(app)
    code = 0
    try:  # not app(): it would turn a closed pipe and Ctrl-C into exit codes of its own
        with command.make_context("nanoinfer", sys.argv[1:]) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as e:
        code = e.exit_code
    except _ClickException as e:
        code = _complain(e.format_message(), e.exit_code)
    except NanoinferError as e:
        code = _complain(str(e), 2)
    except MemoryError:
        code = _complain("out of memory: use a smaller model, fewer sequences or a smaller --kv-cache-memory", 1)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader of a pipe (head, less) has gone: nothing more to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _complain(message: str, code: int) -> int:
    print(f"nanoinfer: error: {message}", file=sys.stderr)
    return code
