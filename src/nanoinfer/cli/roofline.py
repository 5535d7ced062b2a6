"""`nanoinfer roofline`: what a model costs, and the limits that a device sets to its speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanoinfer.cli.help import argument, command
from nanoinfer.cli.options import flags, option
from nanoinfer.cli.terminal import finite_json, report_console, report_table
from nanoinfer.roofline.measure import DEVICES
from nanoinfer.roofline.report import Question, answer

if TYPE_CHECKING:
    from rich.table import Table

_PARTS = {
    "attention": "attention, 1 layer",
    "mlp": "MLP, 1 layer",
    "layer": "1 layer",
    "head": "head",
    "model": "model",
}
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"))
_STEPS = {"prefill": "prefill: N tokens of each sequence", "decode": "cached decoding: 1 token of each sequence"}


@command("roofline")
@argument("model", metavar="MODEL", help="A preset (gpt2-xl), a built-in model, a folder, or a checkpoint file.")
@option("as_json", "Print one JSON document; keys name the units.")
@flags(Question, "question")
def roofline(model: str, as_json: bool, question: Question) -> None:
    """Print the FLOPs, bytes and time limits of a model on a device.

    Examples:
        nanoinfer roofline gpt2-xl --device h100 --batch 64 --context 1024
        nanoinfer roofline gpt2 --dtype int8                # measures this machine
        nanoinfer roofline model.gguf                       # the file's own formats
        nanoinfer roofline gpt2-xl --device h100 --draft gpt2 --acceptance 0.8
        nanoinfer roofline gpt2-xl --device a100 --json | jq .decode.tokens_per_sec
    """
    from nanoinfer.engines.devices import resolve_device

    local = "cpu" if question.device in DEVICES else resolve_device("auto")
    result = answer(model, question, local)
    text = finite_json(result, indent=2)
    if as_json:
        print(text)
    else:
        _show(result)


def _show(r: dict[str, Any]) -> None:
    """Print the document as text of at most 80 columns."""
    console = report_console()
    device, memory = r["device"], r["memory"]
    console.print(
        f"{r['model']}, {r['dtype']} weights, B = {r['batch']:,} sequences, N = {r['context_tokens']:,} tokens\n"
        f"on {device['name']}: {si(device['bandwidth_bytes_per_sec'], 'B/s')},"
        f" {si(device['flops_per_sec'][r['compute_dtype']], 'FLOP/s')} in {r['compute_dtype']},"
        f" ridge at {r['ridge_flops_per_byte']:,.1f} FLOP/B\n({device['source']})"
    )
    for key, title in _STEPS.items():
        console.print(f"\n{title}")
        console.print(_costs(r[key]))
        _print_step(console, r[key], device["bandwidth_bytes_per_sec"])
    console.print(
        f"\nKV cache: {memory['kv_cache_layer_formula']} bytes a layer = {si(memory['kv_cache_layer_bytes'], 'B')},\n"
        f"  {memory['kv_cache_formula']} bytes in all = {si(memory['kv_cache_bytes'], 'B')};"
        f" weights {si(memory['weight_bytes'], 'B')}" + _fits(memory["fits"], device["memory_bytes"])
    )
    g = r["generation"]
    console.print(
        f"\ncached over naive: {g['cached_over_naive']:,.2f} times for {g['num_new_tokens']:,} tokens after a prompt"
        f" of {g['num_prompt_tokens']:,}\n  ({si(g['cached_sec'], 's')} against {si(g['naive_sec'], 's')});"
        f" {g['cached_over_naive_last_step']:,.2f} times for the last token alone"
    )
    if "speculation" in r:
        _print_speculation(console, r["speculation"])


def _costs(step: dict[str, Any]) -> Table:
    """Return the table of a step: for each part its FLOPs and bytes, as numbers and as formulas."""
    table = report_table()
    for column in ("part", "", "number", "formula"):
        table.add_column(column, justify="right" if column == "number" else "left", overflow="fold")
    for key, name in _PARTS.items():
        table.add_row(name, "FLOPs", si(step[key]["flops"], ""), step[key]["flops_formula"])
        table.add_row("", "bytes", si(step[key]["bytes"], ""), step[key]["bytes_formula"])
    return table


def _print_step(console: Any, step: dict[str, Any], bandwidth: float) -> None:
    """Print what a step is bound by and how long it takes."""
    console.print(
        f"{step['bound']}-bound, {step['bound_ratio']:,.2f} times: {si(step['memory_sec'], 's')} for the bytes,"
        f" {si(step['compute_sec'], 's')} for the FLOPs\n"
        f"{si(step['step_sec'], 's')} a step, {step['tokens_per_sec']:,.0f} tokens/s,"
        f" {step['intensity_flops_per_byte']:,.2f} FLOP/B"
    )
    if step["bandwidth_bytes_per_sec"] != bandwidth:
        console.print(
            f"the caches hold some of the bytes: {si(step['bandwidth_bytes_per_sec'], 'B/s')},"
            f" ridge at {step['ridge_flops_per_byte']:,.1f} FLOP/B"
        )


def _print_speculation(console: Any, s: dict[str, Any]) -> None:
    """Print what the draft costs, and the best number of speculated tokens."""
    console.print(
        f"\nspeculation with {s['draft']}: a draft step takes {si(s['draft_step_sec'], 's')},"
        f" {s['draft_cost']:.4f} of a target step\n({s['draft_bytes_over_target']:.4f} of its bytes,"
        f" {s['draft_flops_over_target']:.4f} of its FLOPs); verifying {s['verify_num_tokens']} tokens costs"
        f" {s['verify_cost']:.3f} steps"
    )
    table = report_table()
    for column in ("acceptance", "bonus token", "best k", "tokens a round", "speed-up"):
        table.add_column(column, justify="left" if column == "bonus token" else "right")
    for row in s["best"]:
        k = row["speculate_k"]
        table.add_row(
            f"{row['acceptance']:g}",
            "yes" if row["bonus"] else "no",
            f"{k}" + (" (the limit)" if k and k == s["max_k"] else ""),
            f"{row['tokens_per_round']:.2f}",
            f"{row['speedup']:.2f}",
        )
    console.print(table)
    console.print(
        "best k = 0: speculation is not faster. Acceptance, greedy: how often the most\n"
        "likely tokens of both agree; sampled: the sum of min(p, q) over the vocabulary."
    )


def _fits(fits: bool | None, limit: int | None) -> str:
    """Return the line about the device's memory."""
    if fits is None or limit is None:
        return ""
    return f"\n  {'fits in' if fits else 'DOES NOT FIT in'} the device's {si(limit, 'B')}"


def si(value: float, unit: str) -> str:
    """Return a number with an SI prefix, 4 digits.

    si(3115000000, "B") -> "3.115 GB"      si(0.00093, "s") -> "930 us"
    """
    scale, prefix = next(((s, p) for s, p in _PREFIXES if value >= s * 0.99995), _PREFIXES[-1])
    digits = f"{value / scale:.4g}" if value / scale < 9999.5 else f"{value / scale:,.0f}"
    return f"{digits} {prefix}{unit}".rstrip()
