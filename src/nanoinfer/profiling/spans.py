"""Spans around the parts of a running model, attached for a measurement and removed afterwards.

    generate ............................................... "Python and host": time outside of the spans below
      sampler .............................................. sampling
      engine.extend ........................................ rest of the engine (token tensors, masks, lookups)
        wte, wpe ........................................... embedding
        block, its attn and mlp ............................ activation and residual (and rotation)
          ln_1, ln_2, post_1, q_norm, ... (and ln_f) ....... norms
          c_attn, c_proj, c_fc, c_gate ..................... matrix products
          attend, including storing keys and values ........ attention
        lm_head ............................................ output head

Spans nest. Time counts for the innermost span, so the parts add up to the total. The core calls its observer when a
step enters the engine and the sampler; modules of the model get PyTorch hooks. Both are removed at the end of the
`with` block, also after an exception.

Covered: engines that run the modules of `transformer.py` in Python with attention as an argument, and those that time
their parts (`part_seconds`: native). Not covered: engines that run the model in one call (a replayed graph, or compiled
code, which ignores hooks added later). Their time is "rest of the engine", and `tells_apart` returns False.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from nanoinfer.core import step as observer
from nanoinfer.core.core import Core
from nanoinfer.core.step import Observer

if TYPE_CHECKING:
    from torch import nn
    from torch.profiler import record_function

    from nanoinfer.config import ModelConfig
    from nanoinfer.models.transformer import LayerAttend

MATRIX_PRODUCTS = "matrix products"
ATTENTION = "attention"
OUTPUT_HEAD = "output head"
SAMPLING = "sampling"
NORMS = "norms"
RESIDUAL = "activation and residual"
EMBEDDING = "embedding"
ENGINE = "rest of the engine"
HOST = "Python and host"
PARTS = (
    MATRIX_PRODUCTS, ATTENTION, OUTPUT_HEAD, SAMPLING, NORMS, RESIDUAL, EMBEDDING, ENGINE, HOST,
)  # fmt: skip

_PART_OF = {  # last component of a module's name -> its part
    **dict.fromkeys(("c_attn", "c_proj", "state_proj", "c_fc", "c_gate", "c_in", "q_b", "k_b", "v_b"), MATRIX_PRODUCTS),
    **dict.fromkeys(
        ("ln_1", "ln_2", "post_1", "post_2", "q_norm", "k_norm", "kv_norm", "sub_norm", "ln_e", "ln_f", "norm", "post"),
        NORMS,
    ),
    **dict.fromkeys(("wte", "wpe"), EMBEDDING),
    "lm_head": OUTPUT_HEAD,
}
PREFIX = "nanoinfer: "  # of a span's name in a trace: "nanoinfer: attention"


class Spans(Observer):
    """Observer of the core that counts the entries of each part, and measures its wall time without its inner spans.

    Args:
        clock: seconds; for tests.
        mark_ranges: also mark the spans as ranges in the running torch profiler.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, *, mark_ranges: bool = False) -> None:
        self.calls: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self._clock, self._since, self._mark_ranges = clock, 0.0, mark_ranges
        self._open: list[tuple[str, record_function | None]] = []

    @contextmanager
    def span(self, part: str) -> Iterator[None]:
        """Put a span around a call of the engine or the sampler."""
        self.enter({observer.ENGINE: ENGINE, observer.SAMPLER: SAMPLING}[part])
        try:
            yield
        finally:
            self.leave()

    def enter(self, part: str) -> None:
        """Begin a span inside the current one; time now counts for it."""
        self.calls[part] += 1
        marked = None
        if self._mark_ranges:
            from torch.profiler import record_function

            marked = record_function(PREFIX + part)
            marked.__enter__()  # type: ignore[no-untyped-call]
        self._charge_open()
        self._open.append((part, marked))

    def leave(self) -> None:
        """End the innermost span; time now counts for the enclosing one."""
        self._charge_open()
        if (marked := self._open.pop()[1]) is not None:
            marked.__exit__(None, None, None)

    def _charge_open(self) -> None:
        """Count the time since the last change for the innermost span."""
        now = self._clock()
        if self._open:
            self.seconds[self._open[-1][0]] += now - self._since  # type: ignore[assignment]
        self._since = now

    def charge(self, part: str, calls: int, seconds: float) -> None:
        """Add the calls and seconds of a part that the engine measured inside its steps, of whose time it is a part."""
        self.calls[part] += calls
        self.seconds[part] += seconds  # type: ignore[assignment]
        self.seconds[ENGINE] -= seconds  # type: ignore[assignment]


@contextmanager
def attached(core: Core, spans: Spans) -> Iterator[None]:
    """Attach spans to the parts of a core's model for the duration of the `with` block.

    A span takes about 3 us. At batch 1, they make a step of the built-in model 15% longer, of GPT-2 124M 2%.
    """
    engine = core.engine
    before = engine.part_seconds()
    with ExitStack() as hooks:
        if engine.model is not None:
            _hook(engine.model, spans, hooks)
        hooks.callback(setattr, core, "observer", Observer())
        core.observer = spans
        yield
    steps, after = spans.calls[ENGINE], engine.part_seconds()
    for part, calls in (
        (MATRIX_PRODUCTS, _num_products(engine.config)),
        (ATTENTION, engine.config.n_layer + sum(kind.beside for kind in engine.config.layers)),
        (OUTPUT_HEAD, 1),
    ):
        if part in after:
            spans.charge(part, calls * steps, after[part] - before[part])


def _hook(model: nn.Module, spans: Spans, hooks: ExitStack) -> None:
    """Put spans around the modules of a model, until the stack is closed."""
    from torch import nn

    from nanoinfer.models.transformer import Block

    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        part = RESIDUAL if isinstance(module, Block) else _PART_OF.get(last)
        if last == "attn":
            hooks.callback(module.register_forward_pre_hook(_attend_hook(spans)).remove)
        elif part is not None and not isinstance(module, nn.Identity):
            hooks.callback(module.register_forward_pre_hook(lambda *_, part=part: spans.enter(part)).remove)
            hooks.callback(module.register_forward_hook(lambda *_: spans.leave()).remove)


def _attend_hook(spans: Spans) -> Callable[..., Any]:
    """Return a forward pre-hook of Attention.forward(x, attend, rotation) that puts a span around `attend`, or both."""

    def in_span(attend: LayerAttend) -> LayerAttend:
        def run(*tensors: Any) -> Any:
            spans.enter(ATTENTION)
            try:
                return attend(*tensors)
            finally:
                spans.leave()

        return run

    def wrap(module: nn.Module, args: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        x, attend, rotation = args
        return x, tuple(map(in_span, attend)) if isinstance(attend, tuple) else in_span(attend), rotation

    return wrap


def tells_apart(spans: Spans, config: ModelConfig) -> bool:
    """Return whether the spans include all matrix products of every step: those of the layers, and the output head."""
    steps = spans.calls[ENGINE]
    return (spans.calls[MATRIX_PRODUCTS], spans.calls[OUTPUT_HEAD]) == (_num_products(config) * steps, steps)


def _num_products(config: ModelConfig) -> int:
    """Return the number of matrix products of all layers: c_attn, c_proj, c_fc, c_proj, and those of some models.

    With per-layer embeddings, these are a gate and a product of each layer, and one for the inputs of all.
    """
    latent = 0 if config.latent is None else 2 + bool(config.latent.query_rank)
    per_layer = 2 * config.n_layer + 1 if config.per_layer_dim else 0
    kinds = [config.layer(i) for i in range(config.n_layer)]
    return per_layer + sum(2 + latent + kind.beside + (3 if config.gated_mlp else 2) * kind.mlp for kind in kinds)
