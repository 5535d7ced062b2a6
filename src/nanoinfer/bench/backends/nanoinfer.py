"""Our engines as backends."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from nanoinfer.bench.case import Case, Work, make_work
from nanoinfer.bench.stats import RunTimes
from nanoinfer.bench.verify_cost import synchronize, verify_ratio
from nanoinfer.engines.registry import ENGINES
from nanoinfer.kv.plan import SLOTS, slot_tokens
from nanoinfer.llm import LLM
from nanoinfer.outputs import Delta, RequestOutput


class NanoinferBackend:
    """One of our engines, driven through the public interface."""

    def __init__(self, case: Case, weights: Path) -> None:
        self._case = case
        self._totals: dict[str, float] = {}
        self._llm = LLM(
            str(weights),
            engine=case.backend,
            device=case.device,
            dtype=case.dtype,
            quantization=case.quantization,
            max_num_seqs=case.batch,
        )

    def run(self, work: Work) -> tuple[list[list[int]], RunTimes]:
        """Generate; a token's arrival is the return of the step that drew it."""
        params = [self._case.params(n) for n in work.output_tokens]
        self._totals = {}
        synchronize(self._llm.device)  # of the run before: closing a text may clear its part of the cache
        start = time.perf_counter()
        ids, stream = self._llm.stream_outputs(work.prompts, params)
        arrivals: dict[int, list[float]] = {request_id: [] for request_id in ids}
        tokens: dict[int, list[int]] = {}
        for item in stream:
            if isinstance(item, Delta):
                arrivals[item.request_id] += _spread(
                    arrivals[item.request_id], time.perf_counter() - start, item.num_tokens
                )
            elif isinstance(item, RequestOutput):
                tokens[item.request_id] = item.check().outputs[0].token_ids
                if (made := item.metrics.speculation) is not None:
                    self._add(dataclasses.asdict(made))
        times = RunTimes(sum(map(len, work.prompts)), [arrivals[i] for i in ids])
        return [tokens[i] for i in ids], times

    def _add(self, made: dict[str, float]) -> None:
        for name in ("num_proposed", "num_accepted", "num_rejected", "num_verify_steps"):
            self._totals[name] = self._totals.get(name, 0) + made[name]
        self._totals["draft_share"] = max(made["draft_share"], self._totals.get("draft_share", 0.0))

    def speculate(self, case: Case) -> None:
        """Decode from now on as a case says: with its draft, or plainly. Drafts are loaded once."""
        self._llm.set_draft(case.draft, speculate_k=case.speculate_k, speculate_rule=case.speculate_rule)

    def speculation(self) -> dict[str, float]:
        """Return what the last run proposed, over all of its requests."""
        return self._totals

    def breakdown(self) -> dict[str, float]:
        """Return where the time of a decode step goes, in percent."""
        from nanoinfer.profiling.profiler import breakdown_percent

        case = self._case
        params = case.params(17)  # one token from the prompt, 16 decoded
        return breakdown_percent(self._llm, batch=case.batch, prompt_tokens=case.prompt_tokens, params=params)

    def launches(self) -> dict[str, float]:
        """Return the fields of `launches.Launches`: what a decode step launches on a GPU."""
        from nanoinfer.profiling.launches import measure_launches

        case = self._case
        params = case.params(1)  # how many tokens is the measurement's own choice
        made = measure_launches(self._llm, batch=case.batch, prompt_tokens=case.prompt_tokens, params=params)
        return dataclasses.asdict(made)

    def verify(self) -> float:
        """Return what verifying 5 tokens costs in decode steps, after the case's first prompt."""
        prompt = make_work(self._case, self._llm.config.vocab_size).prompts[0]
        return verify_ratio(self._llm.engine, prompt)

    @property
    def kv_cache_bytes(self) -> int | None:
        """Return the size of the keys and values that the engine has reserved; None where they come and go."""
        layout, limits = ENGINES[self._llm.engine_name].memory, self._llm.engine.limits
        if layout not in SLOTS:
            return None
        tokens = limits.max_num_seqs * slot_tokens(layout, limits.block_size)
        return tokens * self._llm.config.kv_bytes_per_token(self._llm.dtype.itemsize)


def _spread(arrivals: list[float], now: float, num_tokens: int) -> list[float]:
    """Return when each token of a step arrived: those of a burst evenly since the text's last token.

    _spread([1.0], 4.0, 3)  ->  [2.0, 3.0, 4.0]
    """
    before = arrivals[-1] if arrivals else now
    return [before + (now - before) * (i + 1) / num_tokens for i in range(num_tokens)]


def open_nanoinfer(case: Case, weights: Path) -> NanoinferBackend:
    """Load an engine of ours. Raises NanoinferError for an engine that does not exist or does not fit."""
    return NanoinferBackend(case, weights)
