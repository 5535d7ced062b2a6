"""`nanoinfer`: the table of sub-commands, and the one place where errors become one line and an exit code.

A sub-command's module is imported when the command is chosen: `nanoinfer --help` needs none of them.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.core

import nanoinfer
from nanoinfer.cli import help, terminal
from nanoinfer.errors import NanoinferError, ResultError

# typer carries its own copy of click from 0.20 on: name the base class through typer, whichever it is.
_ClickException: Any = typer.BadParameter.__mro__[2]

# Sub-command -> its function, and the first line of the function's docstring.
COMMANDS = {
    "generate": ("generate:generate", "Generate text from prompts, streamed as it is generated."),
    "chat": ("chat:chat", "Hold a conversation with a model that has a chat template."),
    "batch": ("batch:batch", "Generate for each line of a JSONL file; continue after an interruption."),
    "serve": ("serve:serve", "Serve a model over HTTP with OpenAI's interface."),
    "pack": ("pack:pack", "Pack weights into a folder that engine native maps into memory."),
    "engines": ("engines:engines", "List the engines and what each supports on this machine."),
    "eval": ("eval:evaluate", "Print the perplexity of a text file, and bits per character."),
    "bench": ("bench:bench", "Measure engines and peers, next to the limits of the hardware."),
    "profile": ("profile:profile", "Print the time of each part of the model and of each operator."),
    "roofline": ("roofline:roofline", "Print the FLOPs, bytes and time limits of a model on a device."),
    "train": ("train:train", "Train a model, a draft model or a draft head."),
}


class _Commands(typer.core.TyperGroup):
    """The sub-commands, each imported when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return a sub-command; None if there is none of this name."""
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the names and what each does, from the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


def load_command(name: str) -> Any:
    """Import a sub-command's module and return the command, as click has it."""
    module, _, function = COMMANDS[name][0].partition(":")
    imported = import_module(f"nanoinfer.cli.{module}")
    alone = typer.Typer(rich_markup_mode=None, add_completion=False)
    alone.command(name, cls=help.Command, epilog=help.examples(imported))(getattr(imported, function))
    return typer.main.get_command(alone)


app = typer.Typer(
    name="nanoinfer",
    cls=_Commands,
    help="Text from small language models, on every rung of the optimisation ladder.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


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
    """Text from small language models, on every rung of the optimisation ladder."""
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
