"""`nanoinfer`: the table of sub-commands, and the one place where errors become one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

import nanoinfer
from nanoinfer.cli import bench, engines, eval, generate, help, pack, profile, roofline, terminal, train
from nanoinfer.errors import NanoinferError, ResultError

# typer carries its own copy of click from 0.20 on: name the base class through typer, whichever it is.
_ClickException: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="nanoinfer",
    help="Text from GPT-2-family models, on every rung of the optimisation ladder.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
COMMANDS: dict[str, Callable[..., Any]] = {
    "generate": generate.generate,
    "pack": pack.pack,
    "engines": engines.engines,
    "eval": eval.evaluate,
    "bench": bench.bench,
    "profile": profile.profile,
    "roofline": roofline.roofline,
    "train": train.train,
}
for name, command in COMMANDS.items():
    app.command(name, cls=help.Command, epilog=help.examples(sys.modules[command.__module__]))(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(nanoinfer.__version__)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Text from GPT-2-family models, on every rung of the optimisation ladder."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit code. Whatever happens outside of this program is one line on stderr."""
    terminal.prepare()
    code = 1
    try:
        code = _invoke(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe (head, less) has gone: nothing more to print
        code = 0 if code < 2 else code
        terminal.drop(sys.stdout)
    except OSError as e:
        code = 1
        terminal.complain(terminal.describe(e))
        terminal.drop(sys.stdout)
    return code


def _invoke(arguments: list[str]) -> int:
    """Run a sub-command; turn its errors into one line and an exit code."""
    command: Any = typer.main.get_command(app)
    if os.environ.get("_NANOINFER_COMPLETE"):  # the shell asks for completions: typer prints them and exits
        command.main(arguments, "nanoinfer")
    try:  # not app(): it would turn a closed pipe and Ctrl-C into exit codes of its own
        with command.make_context("nanoinfer", arguments) as context:
            command.invoke(context)
    except typer.Exit as e:
        return int(e.exit_code)
    except _ClickException as e:
        message, code = e.format_message(), e.exit_code
        if (context := getattr(e, "ctx", None)) is not None:
            message = f"{message.rstrip('.')} (see `{context.command_path} --help`)"
    except ResultError as e:
        message, code = str(e), 1
    except NanoinferError as e:
        message, code = str(e), 2
    except MemoryError:
        message, code = "out of memory: use a smaller model, fewer sequences or a smaller --kv-cache-memory", 1
    except KeyboardInterrupt:
        return 130
    else:
        return 0
    terminal.complain(message)
    return int(code)
