"""`nanoinfer bench`: measure engines and peers on this machine, beside the physical limit.

The table and the JSON document go to stdout or to --output; progress goes to stderr. Exit code 1 when a case failed.
"""

from __future__ import annotations

import json
import sys

import click

from nanoinfer.bench.results import to_json
from nanoinfer.bench.run import Plan, run
from nanoinfer.cli.help import command
from nanoinfer.cli.options import flags, option
from nanoinfer.cli.terminal import finite_json


@command("bench")
@option("as_json", "Print the JSON documents instead of tables.")
@option("all_columns", "Show columns that do not fit.")
@flags(Plan, "plan")
def bench(as_json: bool, all_columns: bool, plan: Plan) -> None:
    """Measure engines and peers, next to the limits of the hardware.

    Examples:
        nanoinfer bench --suite ladder --model random:gpt2 --quick
        nanoinfer bench --engine static --engine native --batch 1 --batch 8
        nanoinfer bench --suite peers --output peers.json --report out/
        nanoinfer bench --resume peers.json                 # continue after Ctrl-C
    """
    results, interrupted = run(plan, command="nanoinfer " + " ".join(sys.argv[1:]))
    text = finite_json([json.loads(to_json(r)) for r in results])
    if as_json:
        print(text)
    else:
        from rich.console import Console

        from nanoinfer.bench.table import show

        for r in results:
            show(r, Console(width=1000) if all_columns else Console())
    if interrupted:
        raise KeyboardInterrupt
    if any(r.failed for r in results):
        raise click.exceptions.Exit(1)
