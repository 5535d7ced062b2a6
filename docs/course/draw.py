"""Draw the pictures of the lessons from real runs of the ladder: `python docs/course/course.py pictures 01 02`."""

from __future__ import annotations

import struct
import sys
import zlib
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

COURSE = Path(__file__).resolve().parent
FOLDER = COURSE / "pictures"
sys.path.insert(0, str(COURSE.parents[1] / "ladder"))
load = import_module("model").load

GREY, BLUE, GREEN, RED, ORANGE = "#e8eaed", "#9ec5fe", "#a6d8a8", "#f4a7a3", "#ffd08a"
REQUESTS = [  # as in the commands of lesson 9
    "O Romeo, Romeo! wherefore art thou Romeo?",
    "To be",
    "First Citizen: Before we proceed any further, hear me speak. All: Speak, speak.",
    "What say you, my lord? What say you now, my lord?",
]


def rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    """Return a rectangle."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"/>'


def text(x: float, y: float, words: str, size: int = 16, anchor: str = "start", fill: str = "#202124") -> str:
    """Return a line of text."""
    font = f'font-family="DejaVu Sans" font-size="{size}" text-anchor="{anchor}" fill="{fill}"'
    return f'<text x="{x:g}" y="{y:g}" {font} xml:space="preserve">{escape(words)}</text>'


def key(*entries: tuple[str, str]) -> list[str]:
    """Return the key of a picture, (fill, label) of each entry, in its first 50 pixels."""
    parts, x = [], 20.0
    for fill, label in entries:
        parts += [rect(x, 16, 18, 18, fill), text(x + 25, 31, label)]
        x += 45 + 9.2 * len(label)
    return parts


def save(name: str, width: float, height: float, parts: list[str]) -> None:
    """Write NAME.png, on white."""
    import vl_convert

    body = f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}">{body}'
    (FOLDER / f"{name}.png").write_bytes(recompressed(vl_convert.svg_to_png(svg, scale=1.5)))


def recompressed(png: bytes) -> bytes:
    """Return a PNG file with its pixels compressed as well as zlib can: a fifth of the bytes here."""
    chunks, at = [], 8
    while at < len(png):
        size = int.from_bytes(png[at : at + 4], "big")
        chunks.append((png[at + 4 : at + 8], png[at + 8 : at + 8 + size]))
        at += 12 + size
    pixels = zlib.decompress(b"".join(data for kind, data in chunks if kind == b"IDAT"))
    header = next(data for kind, data in chunks if kind == b"IHDR")
    out = png[:8]
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(pixels, 9)), (b"IEND", b"")):
        out += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return out


def label(piece: str) -> str:
    """Return the text of a token with its spaces and line ends visible."""
    return piece.replace(" ", "·").replace("\n", "↵")


def cells_of_steps(name: str, module: str, kept: str, fill: str) -> None:
    """Draw the tokens of each step of a rung: those that came before, those that it computes, and the one it yields."""
    model, encode, decode = load("shakespeare")
    prompt, steps = encode("O Romeo,"), []
    (output,) = import_module(module).generate(model, [prompt], 8, steps)
    tokens = [label(decode([token])) for token in prompt + output]
    x = [110.0]
    for token in tokens:
        x.append(x[-1] + 34 + 9 * len(token))
    parts = key((fill, kept), (BLUE, "computed for the first time"), (GREEN, "the next token"))
    for i, (_, num_computed, _) in enumerate(steps):
        y, known = 56 + 44 * i, len(prompt) + i
        num_old = known - 1 if i else 0  # of the tokens that an earlier step computed
        parts += [text(20, y + 24, f"step {i + 1}"), text(x[-1] + 70, y + 24, str(num_computed), 18, "end")]
        for j in range(known + 1):
            color = GREEN if j == known else fill if j < num_old else BLUE
            parts += [rect(x[j], y, x[j + 1] - x[j] - 4, 36, color)]
            parts += [text((x[j] + x[j + 1]) / 2 - 2, y + 24, tokens[j], 17, "middle")]
    bottom = 56 + 44 * len(steps)
    parts.append(text(x[-1] + 70, 46, "computed", 16, "end"))
    parts.append(text(x[-1] + 70, bottom + 22, f"sum {sum(T for _, T, _ in steps)}", 18, "end"))
    save(name, x[-1] + 90, bottom + 38, parts)


def picture_01() -> None:
    """Draw what each step of the loop computes: all tokens."""
    cells_of_steps("01", "01_recompute", "computed again", ORANGE)


def picture_02() -> None:
    """Draw what each step computes with a cache: the new token."""
    cells_of_steps("02", "02_kv_cache", "keys and values kept", GREY)


class Written(TorchDispatchMode):
    """Sums the bytes that concatenation and assignment write to keys and values: tensors of four dimensions."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation of PyTorch."""
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("cat", "copy_") and out.dim() == 4:
            self.num_bytes += out.nbytes
        return out


def picture_03() -> None:
    """Draw the bytes that each step of rungs 2 and 3 writes to the cache."""
    model, encode, _ = load("shakespeare")
    prompt, num_new, runs = encode("O Romeo,"), 200, []
    for module in ("02_kv_cache", "03_static_cache"):
        written: list[int] = []
        with Written() as mode:

            class Steps(list):  # type: ignore[type-arg]  # a rung appends to it after each step
                def append(self, _: object, mode: Written = mode, written: list[int] = written) -> None:
                    written.append(mode.num_bytes - sum(written))

            import_module(module).generate(model, [prompt], num_new, Steps())
        runs.append(written)
    left, bottom, height, width, largest = 90, 380, 300, 800, max(runs[0])
    parts = key((ORANGE, "rung 2: all keys and values"), (BLUE, "rung 3: those of the new tokens"))
    for mb in (0, 0.5, 1, 1.5, 2, 2.5):
        if (y := bottom - height * mb * 1e6 / largest) > 50:
            parts += [rect(left, y, width, 1, GREY), text(left - 8, y + 5, f"{mb:g} MB", 15, "end")]
    for fill, written in zip((ORANGE, BLUE), runs, strict=True):
        step = width / num_new
        for i, num_bytes in enumerate(written):
            parts.append(
                rect(left + i * step, bottom - height * num_bytes / largest, step, height * num_bytes / largest, fill)
            )
        place = bottom - height * written[-1] / largest
        parts.append(text(left + width + 8, min(place + 6, bottom), f"{sum(written) / 1e6:.1f} MB in all", 15))
    parts += [text(left + width * i / 200, bottom + 24, str(i), 15, "middle") for i in (0, 50, 100, 150, 200)]
    parts.append(text(left + width / 2, bottom + 50, "step", 16, "middle"))
    save("03", left + width + 150, bottom + 66, parts)


def texts_of_checks() -> tuple[Any, list[list[int]]]:
    """Return the built-in model and the four prompts of unequal lengths of each `--check`."""
    model, encode, _ = load("shakespeare")
    return model, [encode(prompt) for prompt in import_module("measure").PROMPTS]


def picture_04() -> None:
    """Draw the rows of two steps of a batch: what is computed, and which keys are read."""
    rung: Any = import_module("04_batch")
    model, prompts = texts_of_checks()
    steps: list[Any] = []
    plain, positions = rung.attend_with, []

    def attend_with(k_cache: Any, v_cache: Any, pos: Any) -> Any:
        positions.append(pos)
        return plain(k_cache, v_cache, pos)

    rung.attend_with = attend_with
    rung.generate(model, prompts, 2, steps)
    rung.attend_with = plain
    size, left = 26, 110
    parts = key((BLUE, "computed"), (ORANGE, "computed for padding"), (GREY, "read"), (RED, "read and masked"))
    for step, pos in enumerate(positions):
        top, num_read = 86 + 190 * step, int(pos.max()) + 1
        own = sum(len(prompt) + step for prompt in prompts)
        title = f"step 1 computes {pos.numel()} tokens, {own} of them of the texts"
        if step:
            title = (
                f"step 2 computes {len(pos)} tokens, and reads keys at {steps[1][2]} places, {own} of them of the texts"
            )
        parts.append(text(20, top - 10, title))
        for i, prompt in enumerate(prompts):
            y, new = top + 38 * i, set(pos[i].tolist())
            parts.append(text(20, y + 22, f"text {i + 1}"))
            for j in range(num_read):
                color = (BLUE if j < len(prompt) + step else ORANGE) if j in new else GREY if j < len(prompt) else RED
                parts.append(rect(left + size * j, y, size - 2, 32, color))
    save("04", left + size * (int(positions[1].max()) + 1) + 20, 86 + 190 * 2 - 20, parts)


def picture_05() -> None:
    """Draw the tables of four texts, and where each block's tokens come from."""
    rung: Any = import_module("05_pages")
    model, prompts = texts_of_checks()
    origins: dict[tuple[int, int], str] = {}  # (block, place) -> color
    snapshots: list[tuple[list[list[int]], dict[tuple[int, int], str], list[int]]] = []
    ends: list[tuple[Any, list[list[int]]]] = []
    plain_pool: Any = rung.Pool
    plain_prefill, plain_attend = rung.prefill, rung.attend_with

    class Recorded(plain_pool):  # type: ignore[misc]
        def reserve(self, table: list[int], start: int, T: int) -> None:
            before = list(table)
            super().reserve(table, start, T)
            for old, new in zip(before, table, strict=False):
                if old != new:
                    origins.update({(new, place): ORANGE for place in range(start % rung.BLOCK)})

    def attend_with(pool: Any, tables: list[list[int]], pos: Any) -> Any:
        for table, row in zip(tables, pos.tolist(), strict=True):
            origins.update({(table[p // rung.BLOCK], p % rung.BLOCK): BLUE for p in row})
        return plain_attend(pool, tables, pos)

    def prefill(model: Any, pool: Any, prompts: Any, steps: Any) -> Any:
        tables, tokens = plain_prefill(model, pool, prompts, steps)
        snapshots.append(([list(table) for table in tables], dict(origins), list(pool.num_tables)))
        ends.append((pool, tables))
        return tables, tokens

    rung.Pool, rung.prefill, rung.attend_with = Recorded, prefill, attend_with
    rung.generate(model, prompts, 32, [])
    rung.Pool, rung.prefill, rung.attend_with = plain_pool, plain_prefill, plain_attend
    ((pool, tables),) = ends
    snapshots.append((tables, origins, pool.num_tables))
    parts = key(
        (BLUE, "computed by this text"), (GREEN, "by an earlier one: shared"), (ORANGE, "copied"), (GREY, "free")
    )
    left, size, top = 100, 11, 86
    for title, (tables, colors, num_tables) in zip(
        ("after the prompts", "after 31 more tokens each"), snapshots, strict=True
    ):
        used = sum(n > 0 for n in num_tables)
        parts.append(text(20, top - 12, f"{title}: {used} blocks in use, {sum(map(len, tables))} in tables"))
        seen: set[int] = set()
        for i, table in enumerate(tables):
            y = top + 46 * i
            parts.append(text(20, y + 22, f"text {i + 1}"))
            for j, block in enumerate(table):
                x = left + (rung.BLOCK * size + 40) * j
                parts.append(text(x, y + 22, str(block), 14, fill="#5f6368"))
                for place in range(rung.BLOCK):
                    color = colors.get((block, place), GREY)
                    color = GREEN if block in seen and color != GREY else color
                    parts.append(rect(x + 24 + size * place, y, size - 1.5, 34, color))
            seen.update(table)
        top += 46 * len(tables) + 44
    save("05", left + (rung.BLOCK * size + 40) * 4 + 10, top - 40, parts)


def picture_06() -> None:
    """Draw the choice of a token: probabilities, what is kept of them, the running sum in the vocabulary's order."""
    rung: Any = import_module("06_sampling")
    model, encode, decode = load("shakespeare")
    logits_of: list[torch.Tensor] = []
    plain, at = rung.sample, 12

    def sample(logits: torch.Tensor, position: int, **sampling: Any) -> int:
        logits_of.append(logits)
        return int(plain(logits, position, **sampling))

    rung.sample = sample
    (output,) = rung.generate(model, [encode("O Romeo,")], at + 1, [], **rung.SAMPLING)
    rung.sample = plain
    options, logits, u = rung.SAMPLING, logits_of[at].double(), rung.uniform(rung.SAMPLING["seed"], at)
    scaled = (logits - logits.max()) / options["temperature"]
    probs, raw = scaled.softmax(-1), logits.softmax(-1)
    kept = rung.kept_without_sort(scaled, options["top_k"], options["top_p"])
    names = {i: label(decode([i])) for i in range(len(probs))}
    order = probs.argsort(descending=True)[:18].tolist()
    left, bottom, width, height = 60, 330, 52, 230
    parts = key((BLUE, "kept"), (GREY, "dropped by top_p"), (GREEN, "chosen"), ("#202124", "at temperature 1"))
    parts.append(text(20, 62, f"…{decode(output[at - 6 : at])}  _".replace("\n", "↵"), 17))
    for j, i in enumerate(order):
        x, (p, p_raw) = left + (width + 6) * j, (height * float(q[i] / probs[order[0]]) for q in (probs, raw))
        color = GREEN if i == output[at] else BLUE if kept[i] else GREY
        parts += [rect(x, bottom - p, width, p, color), rect(x - 2, bottom - p_raw - 1, width + 4, 2, "#202124")]
        parts.append(text(x + width / 2, bottom + 22, names[i], 15, "middle"))
        parts.append(text(x + width / 2, bottom - max(p, p_raw) - 7, f"{float(probs[i]):.1%}", 13, "middle"))
    weights = torch.where(kept, probs, 0.0)
    total, x, top = float(weights.sum()), float(left), bottom + 74.0
    whole = (width + 6) * len(order) - 6
    parts.append(text(left, top - 12, f"the {int(kept.sum())} kept tokens in the order of the vocabulary, and u"))
    for i in kept.nonzero()[:, 0].tolist():
        part = whole * float(weights[i]) / total
        parts += [rect(x, top, part - 1.5, 44, GREEN if i == output[at] else BLUE)]
        parts += [text(x + part / 2, top + 28, names[i], 15, "middle")] if part > 11 * len(names[i]) else []
        x += part
    for tick in (0, 0.25, 0.5, 0.75, 1):
        parts.append(text(left + whole * tick, top + 64, f"{tick:g}", 14, "middle"))
    x = left + whole * u
    parts += [
        rect(x - 1.5, top - 8, 3, 60, "#b3261e"),
        text(x, top + 68, f"u = {u:.3f}", 15, "middle", "#b3261e"),
    ]
    save("06", left + whole + 30, top + 84, parts)


def picture_07() -> None:
    """Draw two groups of weights with the levels of 4 bits, and the errors of 8 and of 4 bits."""
    rung: Any = import_module("07_fewer_bits")
    linear = load("shakespeare")[0].transformer.h[0].mlp.c_fc
    row, n = 15, 2 * rung.GROUP
    with torch.no_grad():
        w = linear.weight.detach()[row, :n]
        rounded = {bits: rung.QuantizedLinear(linear, bits).weight()[row, :n] for bits in (8, 4)}
        scales = rung.QuantizedLinear(linear, 4).scale[row, :2, 0].tolist()
    left, middle, step = 80, 220, 13
    tall = 150 / float(w.abs().max())
    parts = key((BLUE, "weight"), (ORANGE, "rounded to 4 bits"), ("#5f6368", "levels of 4 bits"))
    for group, scale in enumerate(scales):
        x, width = left + group * step * rung.GROUP, step * rung.GROUP - 8
        parts += [rect(x, middle - level * scale * tall - 0.5, width, 1, "#5f6368") for level in range(-7, 8)]
    for i in range(n):
        x, y, r = left + step * i, float(w[i]) * tall, float(rounded[4][i]) * tall
        parts.append(rect(x, middle - max(y, 0), step - 5, abs(y), BLUE))
        parts.append(rect(x - 1, middle - r - 2.5, step - 3, 5, ORANGE))
    parts.append(text(left - 8, middle + 5, "0", 15, "end"))
    largest = max(float((w - r).abs().max()) for r in rounded.values())
    for j, (bits, values) in enumerate(rounded.items()):
        base = 450 + 110 * j
        parts.append(rect(left, base, step * n, 1, "#202124"))
        parts.append(text(left - 8, base + 5, f"{bits} bits", 15, "end"))
        for i, error in enumerate((values - w).tolist()):
            h = abs(error) / largest * 40
            parts.append(rect(left + step * i, base - h if error > 0 else base, step - 5, h, RED))
    ratio = float((rounded[4] - w).norm() / (rounded[8] - w).norm())
    title = f"errors, enlarged {40 / largest / tall:.1f} times; those of 4 bits are {ratio:.0f} times those of 8"
    parts.append(text(left, 396, f"{title} (root mean square)", 16))
    save("07", left + step * n + 20, 620, parts)


def picture_08() -> None:
    """Draw the target's steps: accepted and rejected proposals, and the target's own token."""
    rung: Any = import_module("08_speculation")
    rows: list[tuple[list[int], list[int]]] = []
    model, encode, decode = load("shakespeare")
    plain = rung.step

    def step(m: Any, cache: Any, idx: torch.Tensor, pos: torch.Tensor, steps: Any) -> torch.Tensor:
        logits: torch.Tensor = plain(m, cache, idx, pos, steps)
        if m is model and int(pos[0, 0]):  # not the prompt
            rows.append((idx[0].tolist(), logits[0].argmax(-1).tolist()))
        return logits

    rung.step = step
    rung.generate(model, [encode("To be, or not to be, that is")], 24, [])
    rung.step = plain
    parts = key(
        (GREY, "newest token"), (GREEN, "accepted proposal"), (RED, "rejected"), (BLUE, "the target's own token")
    )
    for i, (idx, chosen) in enumerate(rows):
        y = 60 + 46 * i
        n = [*(a == b for a, b in zip(idx[1:], chosen, strict=False)), False].index(False)
        cells = [
            (GREY, idx[0]),
            *((GREEN if j < n else RED, token) for j, token in enumerate(idx[1:])),
            (BLUE, chosen[n]),
        ]
        parts.append(text(20, y + 25, f"step {i + 1}"))
        for j, (fill, token) in enumerate(cells):
            x = 100 + 130 * j + 24 * (j > rung.K)
            label = repr(decode([token]))[1:-1].replace(" ", "·")
            parts += [rect(x, y, 124, 38, fill), text(x + 62, y + 25, label, 17, "middle")]
    save("08", 920, 70 + 46 * len(rows), parts)


def picture_09() -> None:
    """Draw requests by steps: prompts in chunks, decoding, waiting, preemption."""
    rung: Any = import_module("09_scheduler")
    model, encode, _ = load("shakespeare")
    prompts = [encode(prompt) for prompt in REQUESTS]
    plain: Any = rung.Scheduler
    requests: list[Any] = []
    record: list[tuple[dict[int, tuple[int, bool]], dict[int, bool], int]] = []

    class Recorded(plain):  # type: ignore[misc]
        def __init__(self, new: list[Any], num_blocks: int) -> None:
            super().__init__(new, num_blocks)
            requests.extend(new)

        def schedule(self) -> Any:
            before, work = list(self.running), super().schedule()
            new = {requests.index(r): (n, len(r.tokens) > len(prompts[requests.index(r)])) for r, n in work.items()}
            waiting = {requests.index(r): r in before for r in self.waiting}  # whether it was preempted in this step
            record.append((new, waiting, len(self.free)))
            return work

    rung.Scheduler = Recorded
    rung.generate(model, prompts, 24, [], 8)
    rung.Scheduler = plain
    parts = key((BLUE, "prompt, with its tokens"), (GREEN, "one token"), (ORANGE, "computed again"), (GREY, "waits"))
    bottom = 60 + 50 * len(prompts)
    parts += [text(20, 84 + 50 * i, f"request {i + 1}") for i in range(len(prompts))]
    parts += [text(20, bottom + 24, "free blocks"), text(20, bottom + 54, "step")]
    for t, (new, waiting, num_free) in enumerate(record):
        x = 130 + 26 * t
        for i, (n, begun) in new.items():
            parts.append(rect(x, 60 + 50 * i, 24, 38, (GREEN if n == 1 else ORANGE) if begun else BLUE))
            parts += [text(x + 12, 85 + 50 * i, str(n), 14, "middle")] if n > 1 or not begun else []
        for i, preempted in waiting.items():
            parts.append(rect(x, 72 + 50 * i, 24, 14, GREY))
            parts += [text(x + 12, 86 + 50 * i, "✕", 18, "middle", "#b3261e")] if preempted else []
        parts.append(text(x + 12, bottom + 24, str(num_free), 14, "middle"))
        parts.append(text(x + 12, bottom + 54, str(t + 1), 14, "middle", "#5f6368"))
    save("09", 150 + 26 * len(record), bottom + 70, parts)


def picture_10() -> None:
    """Draw the operations of a step of PyTorch in their order, and the one call of `native`."""
    rung: Any = import_module("10_launches")
    rows: list[list[str]] = [[]]
    model, encode, _ = load("shakespeare")
    fills = {"linear": BLUE, "index_put_": GREEN, "scaled_dot_product_attention": RED, "view": GREY}

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            if name == "layer_norm" and rows[-1].count("linear") in (0, 4):  # the first of a layer, or the last of all
                rows.append([])
            rows[-1].append("view" if func.is_view or name == "detach_" else name)
            return func(*args, **(kwargs or {}))

    with torch.inference_mode():
        step = rung.Eager(model, 1)
        (token,) = step([encode("O Romeo,")])
        with Names():
            step([[token]])
    kinds = ["product", "store keys, values", "attention", "other", "view: computes nothing"]
    parts = key(*zip((BLUE, GREEN, RED, ORANGE, GREY), kinds, strict=True))
    names = ["embedding", *(f"layer {i + 1}" for i in range(model.n_layer)), "head"]
    for i, (name, row) in enumerate(zip(names, rows, strict=True)):
        y = 58 + 36 * i
        parts += [rect(120 + 26 * j, y, 23, 28, fills.get(operation, ORANGE)) for j, operation in enumerate(row)]
        parts += [text(20, y + 20, name), text(130 + 26 * len(row), y + 20, str(len(row)))]
    y, width = 74 + 36 * len(rows), 26 * max(map(len, rows))
    parts += [text(20, y + 20, "native"), rect(120, y, width - 3, 28, BLUE), text(130 + width, y + 20, "1")]
    parts.append(text(120 + width // 2, y + 20, "one call", 16, "middle"))
    save("10", 180 + width, y + 44, parts)


def picture_11() -> None:
    """Draw the tokens of four texts: in a state that another text left, computed again, computed, proposed."""
    rung: Any = import_module("11_recurrent_state")
    toy = Path(rung.__file__).parent / "toy"
    model, (encode, decode) = rung.Toy(toy), import_module("model").tokenizer(toy)
    calls: dict[Any, list[tuple[int, int, list[int], list[int]]]] = {}  # first new token, number again, new, chosen
    prompts, plain = [encode(prompt) for prompt in rung.PROMPTS], rung.Text

    class Recorded(plain):  # type: ignore[misc]
        def extend(self, new: list[int], steps: Any) -> torch.Tensor:
            start, logits = len(self.tokens), super().extend(new, steps)
            calls.setdefault(self, []).append((start, steps[-1][1] - len(new), new, logits.argmax(-1).tolist()))
            return logits  # type: ignore[no-any-return]

    rung.Text = Recorded
    outputs = rung.generate(model, prompts, 20, [])
    rung.Text = plain
    parts = key(
        (GREY, "in a state of an earlier text"), (ORANGE, "computed again"), (BLUE, "computed"),
        (GREEN, "accepted proposal"), (RED, "rejected"), ("#202124", "kept state"),
    )  # fmt: skip
    left, size, longest = 70, 16, max(map(len, prompts)) + 20
    for i, (prompt, output, (of, steps)) in enumerate(zip(prompts, outputs, calls.items(), strict=True)):
        y, tokens, fills = 60 + 84 * i, prompt + output, [GREY] * len(prompt) + [BLUE] * 20
        parts.append(text(10, y + 22, f"text {i + 1}"))
        below = end = 0
        for start, again, new, chosen in steps:
            if start < len(prompt):
                fills[start - again : start + len(new)] = [ORANGE] * again + [BLUE] * len(new)
                continue
            n = rung.num_equal(new[1:], chosen)
            fills[start + 1 : start + 1 + n] = [GREEN] * n
            below = 36 if start + n >= end else 94 - below  # on the other line if the last ones reach this far
            for j in range(start + 1 + n, start + len(new)):
                parts.append(rect(left + size * j, y + below, size - 1, 21, RED))
                parts.append(text(left + size * j + 7, y + below + 16, label(decode([new[j - start]])), 14, "middle"))
            end = start + len(new) if len(new) > 1 else end
        for j, token in enumerate(tokens):
            parts.append(rect(left + size * j, y, size - 1, 32, fills[j]))
            parts.append(text(left + size * j + 7, y + 21, label(decode([token])), 14, "middle"))
        parts += [rect(left + size * n - 2, y - 6, 3, 44, "#202124") for n in of.kept if 0 < n <= len(prompt)]
    save("11", left + size * longest + 10, 60 + 84 * len(prompts), parts)


def pictures(names: list[str]) -> None:
    """Draw the pictures of some lessons, or of all."""
    for name in names or sorted(n.removeprefix("picture_") for n in globals() if n.startswith("picture_")):
        globals()[f"picture_{name}"]()
