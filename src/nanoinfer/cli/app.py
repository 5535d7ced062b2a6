"""`nanoinfer`: the table of sub-commands, and the one place where errors become one line and an exit code.

A sub-command's module is imported when the command is chosen: `nanoinfer --help` needs none of them.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

import click
from click.exceptions import Exit

import nanoinfer
from nanoinfer.cli import terminal
from nanoinfer.errors import NanoinferError, ResultError

# Sub-command -> its function, and the first line of the function's docstring.
COMMANDS = {
    "generate": ("generate:generate", "Generate text from prompts, streamed as it is generated."),
    "chat": ("chat:chat", "Hold a conversation with a model that has a chat template."),
    "batch": ("batch:batch", "Generate for each line of a JSONL file; continue after an interruption."),
    "serve": ("serve:serve", "Serve models over HTTP with OpenAI's interface."),
    "pack": ("convert:pack", "Pack weights into a folder that engine native maps into memory."),
    "export": ("convert:export", "Write a model as a GGUF file, which llama.cpp loads."),
    "models": ("lists:models", "List the built-in models and those in the Hub's cache, and whether they run here."),
    "engines": ("lists:engines", "List the engines and what each supports on this machine."),
    "eval": ("measure:evaluate", "Print the perplexity of a text file, and bits per character."),
    "bench": ("measure:bench", "Measure engines and peers, next to the limits of the hardware."),
    "explain": ("generate:explain", "Write a page that shows a generation step by step."),
    "profile": ("measure:profile", "Print the time of each part of the model and of each operator."),
    "roofline": ("measure:roofline", "Print the FLOPs, bytes and time limits of a model on a device."),
    "train": ("train:train", "Train a model or a draft model."),
}
COMPLETE = "_NANOINFER_COMPLETE"
"""Variable by which a shell requests completions: eval "$(_NANOINFER_COMPLETE=bash_source nanoinfer)"."""


class _Commands(click.Group):
    """The sub-commands, each imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a sub-command; None if there is none of this name."""
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names and what each does, from the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


def load_command(name: str) -> click.Command:
    """Import a sub-command's module and return the command."""
    module, _, function = COMMANDS[name][0].partition(":")
    command: click.Command = getattr(import_module(f"nanoinfer.cli.{module}"), function)
    return command


def _print_version(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        print(nanoinfer.__version__)
        raise Exit


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version."
)
@click.pass_context
def app(context: click.Context) -> None:
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
    if os.environ.get(COMPLETE):  # the shell requests completions: click prints them and exits
        app.main(arguments, "nanoinfer")
    more: list[str] = []
    try:  # not app(): it would turn a closed pipe and Ctrl-C into exit codes of its own
        with app.make_context("nanoinfer", arguments) as context:
            app.invoke(context)
    except Exit as e:
        return e.exit_code
    except click.ClickException as e:
        message, code = e.format_message(), e.exit_code
        if (where := getattr(e, "ctx", None)) is not None:
            message = f"{message.rstrip('.')} (see `{where.command_path} --help`)"
            if isinstance(e, click.MissingParameter) and where.command.name in ("chat", "serve"):  # the model
                from nanoinfer.cli.lists import commands

                more = ["Models on this machine:", *commands(where.command.name)]
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
    terminal.complain(message, *more)
    return code
