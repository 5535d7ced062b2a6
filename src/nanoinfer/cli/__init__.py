"""The command line: one entry point, one file per sub-command.

Results go to stdout, progress and logs to stderr. Exit codes: 0 done, 1 done but something failed (reported
in one line), 2 bad input or something this machine cannot do, 130 interrupted.
"""

from __future__ import annotations

import sys

from nanoinfer.cli.interrupts import Interrupts


def main() -> None:
    """Run the command line and exit with its code. Ctrl-C is handled from here on, during imports too."""
    interrupts = Interrupts()
    try:
        with interrupts:
            from nanoinfer.cli.app import run

            code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    except Exception:
        if not interrupts.seen:
            raise
        code = 130
    sys.exit(code)
