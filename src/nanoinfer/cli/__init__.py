"""The command line: one entry point, one file per sub-command.

Results go to stdout, progress and logs to stderr. Exit codes: 0 done, 1 done but something failed (said
in one line), 2 bad input or something this machine cannot do, 130 interrupted.
"""

from __future__ import annotations

import atexit
import signal
import sys


def main() -> None:
    """Run the command line and exit with its code. Ctrl-C is handled from here on, during imports too."""
    try:
        from nanoinfer.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while Python shuts down: no traceback
    sys.exit(code)
