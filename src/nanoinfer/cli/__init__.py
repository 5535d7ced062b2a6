"""The command line: one entry point, and sub-commands in files by topic.

Results go to stdout, progress and logs to stderr. Exit codes: 0 done, 1 done but something failed (reported
in one line), 2 bad input or something this machine cannot do, 130 interrupted.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs


def program() -> None:
    """Run `main` as a process of its own: Ctrl-C while Python shuts down ends it without a traceback."""
    try:
        main()
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> None:
    """Run the command line and exit with its code. Ctrl-C is handled from here on, during imports too."""
    gc.set_threshold(20_000)  # what is imported is no garbage: searching it takes a tenth of the start
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


class Interrupts:
    """A context that records Ctrl-C, and raises it again where imports and destructors of other packages suppress it.

    NumPy's import inside torch's is an example: torch catches what it raises and goes on, and NumPy cannot be imported
    a second time. In a destructor or a weak reference's callback Python prints the interrupt and discards it.
    """

    def __init__(self) -> None:
        self.seen = False
        """Whether Ctrl-C was pressed: an exception that follows is its consequence."""

    def __enter__(self) -> Interrupts:
        self._handler, self._hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
        if self._handler is signal.default_int_handler:  # not where the shell has it ignored (nohup)
            signal.signal(signal.SIGINT, self._interrupt)
            sys.unraisablehook = self._unraisable
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._handler)
        sys.unraisablehook = self._hook

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        self.seen = True
        if frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
            self._again()  # an extension that imports a module from C prints what interrupts that
        else:
            raise KeyboardInterrupt

    def _unraisable(self, args: UnraisableHookArgs) -> None:
        if issubclass(args.exc_type, KeyboardInterrupt):
            self._again()  # raised here, it would be discarded too
        else:
            self._hook(args)

    def _again(self) -> None:
        """Interrupt a little later. A signal to the main thread also ends a call that waits."""
        main_thread = threading.main_thread().ident
        again = threading.Timer(0.01, signal.pthread_kill, (main_thread, signal.SIGINT))
        again.daemon = True
        again.start()
