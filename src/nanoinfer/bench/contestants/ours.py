"""Our engines as contestants."""

from __future__ import annotations

import time
from pathlib import Path

from nanoinfer.bench.case import Case, Work
from nanoinfer.bench.stats import RunTimes
from nanoinfer.llm import LLM
from nanoinfer.outputs import Delta, RequestOutput


class Ours:
    """One of our engines, driven through the public interface."""

    def __init__(self, case: Case, weights: Path) -> None:
        self._case = case
        self._llm = LLM(
            str(weights),
            engine=case.contestant,
            device=case.device,
            dtype=case.dtype,
            quantization=case.quantization,
            max_num_seqs=case.batch,
        )

    def run(self, work: Work) -> tuple[list[list[int]], RunTimes]:
        """Generate; a token's arrival is the return of the step that drew it."""
        params = [self._case.params(n) for n in work.output_tokens]
        start = time.perf_counter()
        ids, stream = self._llm.stream_outputs(work.prompts, params)
        arrivals: dict[int, list[float]] = {request_id: [] for request_id in ids}
        tokens: dict[int, list[int]] = {}
        for item in stream:
            if isinstance(item, Delta):
                arrivals[item.request_id].append(time.perf_counter() - start)
            elif isinstance(item, RequestOutput):
                tokens[item.request_id] = item.outputs[0].token_ids
        times = RunTimes(sum(map(len, work.prompts)), [arrivals[i] for i in ids])
        return [tokens[i] for i in ids], times

    def breakdown(self) -> dict[str, float]:
        """Return where the time of a decode step goes, in percent."""
        from nanoinfer.bench.profile import breakdown_percent

        case = self._case
        params = case.params(17)  # one token from the prompt, 16 decoded
        return breakdown_percent(self._llm, batch=case.batch, prompt_tokens=case.prompt_tokens, params=params)


def open_ours(case: Case, weights: Path) -> Ours:
    """Load an engine of ours. Raises NanoinferError for an engine that does not exist or does not fit."""
    return Ours(case, weights)
