"""The command line: one entry point, one file per sub-command.

Results go to stdout, progress and logs to stderr. Exit codes: 0 done, 1 done but something failed (said
in one line), 2 bad input or something this machine cannot do, 130 interrupted.
"""

from nanoinfer.cli.main import main

__all__ = ["main"]
