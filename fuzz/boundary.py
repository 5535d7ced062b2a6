"""Targets that call the extension with random arguments, both valid and invalid.

A call may refuse its arguments with one of ERRORS and must then change nothing: the lengths of the open sequences are
compared with expected lengths. Sanitizers detect memory errors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from choices import ANY, NUMBERS, Choices

from nanoinfer.checkpoints.gguf import formats as gguf_formats

ERRORS = (ValueError, IndexError, TypeError, OverflowError, MemoryError)
V, T, C, MLP = 21, 24, 8, 32
SHAPE: dict[str, Any] = {
    "vocab_size": V, "block_size": T, "n_layer": 1, "n_head": 2, "n_embd": C, "mlp_dim": MLP, "activation": "gelu_new",
    "tie_word_embeddings": True, "norm_epsilon": 1e-5, "weights": "float32", "cache": "float32",
    "max_num_cached_tokens": 4 * T, "threads": 1,
}  # fmt: skip
FORMATS = ("float32", "float16", "bfloat16", "int8", "q8_0")
BLOCKS = [format for format in gguf_formats.FORMATS.values() if format.native]
CACHES = ("float32", "bfloat16", "int8")
FILLS = (0.1, 0.1, 0.1, 0.0, -0.0, 1e38, -1e38, 1e-42, np.nan, np.inf, -np.inf)


def tensors() -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the model's tensors."""
    block = {"ln_1.weight": (C,), "ln_1.bias": (C,), "attn.c_attn.weight": (3 * C, C), "attn.c_attn.bias": (3 * C,),
             "attn.c_proj.weight": (C, C), "attn.c_proj.bias": (C,), "ln_2.weight": (C,), "ln_2.bias": (C,),
             "mlp.c_fc.weight": (MLP, C), "mlp.c_fc.bias": (MLP,), "mlp.c_proj.weight": (C, MLP),
             "mlp.c_proj.bias": (C,)}  # fmt: skip
    return {
        "transformer.wte.weight": (V, C),
        "transformer.wpe.weight": (T, C),
        **{f"transformer.h.0.{k}": v for k, v in block.items()},
        "transformer.ln_f.weight": (C,),
        "transformer.ln_f.bias": (C,),
    }


def array(c: Choices, shape: tuple[int, ...]) -> Any:
    """Return an array that is usually float32, contiguous and of this shape."""
    if c.odd(20):
        shape = tuple(c.pick((0, 1, 2, 3, 5, 17, 33, n)) for n in shape) + ((1,) if c.odd(4) else ())
    made: Any = np.random.default_rng(c.number(9)).standard_normal(shape, np.float32)
    if c.odd(4) and made.size:
        made.reshape(-1)[c.number(made.size)] = c.pick(FILLS)
    if c.odd(30):
        made = made.astype(c.pick((np.float64, np.float16, np.int32)))
    if c.odd(30) and made.ndim:
        made = np.repeat(made, 2, axis=-1)[..., ::2]
    if c.odd(30) and made.ndim > 1:
        made = made[::-1] if c.odd(2) else np.asfortranarray(made)
    if c.odd(40):
        made.flags.writeable = False
    return c.pick(ANY) if c.odd(60) else made


def ids(c: Choices, count: int, high: int, one_in: int = 100) -> list[Any]:
    """Return about `count` numbers, usually less than `high`."""
    return [c.pick(NUMBERS) if c.odd(one_in) else c.number(high) for _ in range(count + c.odd(100))]


def new_decoder(options: dict[str, Any]) -> Any:
    """Return a decoder without weights. Raises one of ERRORS if an option is refused."""
    from nanoinfer import _native

    given = _native.DecoderOptions()
    for name, value in options.items():
        setattr(given, name, value)
    return _native.Decoder(given)


def make_decoder(c: Choices) -> Any:
    """Return a decoder with random options."""
    from nanoinfer import _native

    options = SHAPE | {"weights": c.pick(FORMATS), "cache": c.pick(CACHES), "threads": c.pick((1, 1, 1, 2))}
    options["activation"], isas = c.pick(("gelu_new", "gelu")), _native.instruction_sets()
    options["isa"] = c.pick([name for name, missing in isas if not missing])
    if c.odd(4):
        name = c.pick(list(SHAPE))
        value = c.pick(ANY)
        try:  # tests the check of the option; the decoder is discarded, because it may be large
            new_decoder(options | {name: value})
        except ERRORS:
            pass
    decoder = new_decoder(options)
    for name, shape in tensors().items():
        if c.odd(40):
            try:
                decoder.load(name, array(c, shape))
            except ERRORS:
                pass
        decoder.load(name, np.full(shape, c.pick(FILLS), np.float32) if c.odd(30) else
                     np.random.default_rng(1).standard_normal(shape, np.float32))  # fmt: skip
    if not c.odd(50):
        decoder.check_loaded()
    return decoder


def run_decoder(data: bytes, folder: Path) -> None:
    """Open, extend, truncate, fork and close a decoder's sequences."""
    c = Choices(data)
    decoder = make_decoder(c)
    lengths: dict[int, int] = {}
    for _ in range(60):
        if not c:
            break
        handle = c.pick([*lengths, *NUMBERS]) if c.odd(8) or not lengths else c.pick(list(lengths))
        try:
            kind = c.number(10)
            if kind == 0:
                lengths[decoder.open()] = 0
            elif kind == 1 and len(lengths) < 8:
                forked = decoder.fork(handle)
                lengths[forked] = lengths[handle]
            elif kind == 2:
                to = c.pick(NUMBERS) if c.odd(4) else c.number(1 + lengths.get(handle, 1))
                decoder.truncate(handle, to)
                lengths[handle] = int(to)
            elif kind == 3:
                decoder.close(handle)
                del lengths[handle]
            elif kind == 4:
                decoder.hidden(out=array(c, (c.number(4), C)))
            elif kind == 5 and c.odd(2):
                decoder.blocks_needed(handle, c.pick(NUMBERS))
                decoder.block_table(handle)
            else:
                extend(c, decoder, lengths)
        except ERRORS:
            pass
        for known, length in lengths.items():
            assert decoder.length(known) == length, "a call that was refused changed a length"


def extend(c: Choices, decoder: Any, lengths: dict[int, int]) -> None:
    """Append tokens to some of the sequences."""
    handles: list[Any] = [h for h in lengths if c.number(2)]
    counts: list[Any] = [1 + c.number(5) for _ in handles]
    if c.odd(20):
        handles += [c.pick([*lengths, *NUMBERS])]
        counts += [c.pick(NUMBERS)]
    num = sum(n for n in counts if isinstance(n, int) and 0 <= n < 100)
    wanted = [min(c.number(3), n) if isinstance(n, int) else n for n in counts]
    if c.odd(20):
        wanted = ids(c, len(counts), 3, 4)
    rows = sum(n for n in wanted if isinstance(n, int) and 0 <= n < 100)
    logits = array(c, (rows, decoder.logits_stride))
    decoder.extend(handles=handles, token_ids=ids(c, num, V), num_new=counts, num_logits=wanted, logits=logits)
    for handle, count in zip(handles, counts, strict=True):
        lengths[handle] += count


def run_sampler(data: bytes, folder: Path) -> None:
    """Sample from random logits with random options."""
    from nanoinfer import _native

    c = Choices(data)
    size, batch = c.pick((1, 2, 17, 61, 300, 2048)), c.number(4)
    rows: list[Any] = []
    for _ in range(batch + c.odd(40)):
        given: dict[str, Any] = {"uniform": c.number(65536) / 65536}
        for name, good in (("temperature", (0.7, 0.0, 1e-300, 1e300)), ("top_k", (1, 5, size, 2**63 - 1)),
                           ("top_p", (0.9, 1e-300)), ("min_p", (0.1, 1.0)), ("repetition_penalty", (1.3, 1e-300, 1e300)),
                           ("presence_penalty", (0.5, -1e300)), ("frequency_penalty", (0.5, 1e300))):  # fmt: skip
            if c.number(3) == 0:
                given[name] = c.pick(ANY) if c.odd(12) else c.pick(good)
        for name in ("prompt_ids", "output_ids", "bias_ids", "excluded_ids"):
            if c.number(4) == 0:
                given[name] = c.pick(ANY) if c.odd(30) else ids(c, c.number(8), size, 60)
        if isinstance(given.get("bias_ids"), list):
            given["bias_values"] = [c.pick((1.0, -1e300, *NUMBERS)) for _ in given["bias_ids"]]
        try:
            rows.append(c.pick((None, 1)) if c.odd(20) else _native.SampleOptions(**given))
        except ERRORS:
            rows.append(None)
    logits = array(c, (batch, size))
    if isinstance(logits, np.ndarray) and logits.dtype == np.float32 and logits.flags.writeable and c.odd(4):
        logits[...] = c.pick(FILLS)
    try:
        tokens = _native.sample_rows(logits=logits, rows=rows)
    except ERRORS:
        return
    assert len(tokens) == len(rows) and all(-1 <= t < logits.shape[1] for t in tokens), tokens  # noqa: PT018
    for token, row, options in zip(tokens, logits, rows, strict=True):  # -1: the largest is not finite
        assert token >= 0 or options is not None or not np.isfinite(row).all(), "-1 for finite logits"


def run_kernels(data: bytes, folder: Path) -> None:
    """Call the single kernels with buffers of the exact size."""
    from nanoinfer import _native

    c = Choices(data)
    isa = c.pick([name for name, missing in _native.instruction_sets() if not missing])
    out, width, rows, depth = (c.pick((1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65, 130)) for _ in range(4))
    kind = c.number(6)
    try:
        if kind == 0:
            last = c.pick(("store", "gelu_tanh", "gelu_erf", "add"))
            y = array(c, (rows, out)) if last == "add" else None
            _native.multiply(weights=array(c, (out, width)), bias=array(c, (out,)), x=array(c, (rows, width)), y=y,
                             format=c.pick(FORMATS), epilogue=last, isa=isa)  # fmt: skip
        elif kind == 1:
            _native.unpack(weights=array(c, (out, width)), format=c.pick(FORMATS))
        elif kind == 2:
            x, weight, bias = array(c, (rows, width)), array(c, (width,)), array(c, (width,))
            name = c.pick(("layer", "rms", "l2"))
            _native.norm(kind=name, x=x, weight=weight, bias=bias, eps=c.pick((1e-5, 0.0)), isa=isa)
        elif kind == 3:
            half = width // 2
            _native.rotate(x=array(c, (rows, width)), cos=array(c, (half,)), sin=array(c, (half,)), isa=isa)
        elif kind == 4:
            run_blocks(c, out, rows, isa)
        else:
            run_attention(c, width, rows, depth, isa)
    except ERRORS:
        pass


def run_attention(c: Choices, width: int, rows: int, depth: int, isa: str) -> None:
    """Attend with one head of keys and values and several of queries, within a window or not."""
    from nanoinfer import _native

    start, group = c.pick(NUMBERS) if c.odd(20) else depth, c.pick((1, 1, 2, 3))
    options = {name: c.pick(NUMBERS) for name in ("window", "scale", "softcap") if c.odd(4)}
    q = array(c, (rows, width * group))
    k, v = (array(c, (depth + rows, width)) for _ in range(2))
    group = c.pick(NUMBERS) if c.odd(40) else group
    _native.attention(q=q, k=k, v=v, start=start, cache=c.pick(CACHES), group=group, isa=isa, **options)


def run_blocks(c: Choices, out: int, rows: int, isa: str) -> None:
    """Multiply by blocks of a GGUF format, or pack them."""
    from nanoinfer import _native

    format, count = c.pick(BLOCKS), c.pick((1, 1, 2, 3, 5))
    size = count * format.block_bytes + (c.number(256) if c.odd(20) else 0)
    blocks = np.random.default_rng(c.number(9)).integers(0, 256, (out, size), np.uint8)
    if c.odd(4):
        blocks[:] = c.pick((0, 0x7C, 0xFF))  # scales of zero, infinity and NaN
    name = c.pick((*FORMATS, "q9_9")) if c.odd(20) else format.name.lower()
    if c.odd(2):
        _native.multiply(weights=blocks, bias=None, x=array(c, (rows, count * format.block_size)), format=name, isa=isa)
    else:
        panels, _ = _native.pack_blocks(blocks=blocks, format=name, threads=1)
        wanted = _native.packed_size(format=name, rows=out, columns=size // format.block_bytes * format.block_size)[0]
        assert len(panels) == wanted, f"{len(panels)} bytes are packed, not {wanted}"
