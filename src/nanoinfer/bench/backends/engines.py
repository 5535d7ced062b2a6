"""Our engines as backends."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from itertools import chain
from pathlib import Path

import numpy as np

from nanoinfer.bench.case import Case, Requests, RunTimes, make_requests
from nanoinfer.config import MAX_K
from nanoinfer.entrypoints.llm import LLM
from nanoinfer.outputs import Delta, RequestOutput, SpeculationMetrics
from nanoinfer.profiling.checks import decode_logits, synchronize, verify_ratio


class EngineBackend:
    """One of our engines, driven through the public interface."""

    def __init__(self, case: Case, weights: Path) -> None:
        self._case = case
        self._speculation: list[SpeculationMetrics] = []
        self._llm = LLM(
            str(weights), engine=case.backend, device=case.device, dtype=case.dtype, quantization=case.quantization,
            max_num_seqs=case.batch, enable_prefix_caching=case.prefix_caching, max_speculate_k=MAX_K,
            max_num_batched_tokens=case.max_num_batched_tokens, target_step_ms=case.target_step_ms,
        )  # fmt: skip

    def run(self, requests: Requests) -> tuple[list[list[int]], RunTimes]:
        """Generate; a token's arrival is the return of the step that sampled it. Late requests are not timed."""
        params = [self._case.params(n) for n in requests.output_tokens]
        self._speculation = []
        self._llm.reset_prefix_cache()  # rounds repeat their prompts
        synchronize(self._llm.device)  # of the previous run: closing a sequence may clear its part of the cache
        first = len(params) - requests.num_late
        start = time.perf_counter()
        ids, stream = self._llm.stream_outputs(requests.prompts[:first], params[:first])
        streams = [stream]
        arrivals: defaultdict[int, list[float]] = defaultdict(list)
        tokens: dict[int | str, list[int]] = {}
        for item in chain.from_iterable(streams):  # that of late requests is appended, and read last
            if isinstance(item, Delta):
                times = arrivals[item.request_id]
                times += _spread(times, time.perf_counter() - start, item.num_tokens)
                if len(ids) < len(params) and len(arrivals) == first:
                    late, stream = self._llm.stream_outputs(requests.prompts[first:], params[first:])
                    ids += late
                    streams.append(stream)
            elif isinstance(item, RequestOutput):
                tokens[item.request_id] = item.check().outputs[0].token_ids
                self._speculation += [counts] if (counts := item.metrics.speculation) is not None else []
        timed = RunTimes(sum(map(len, requests.prompts[:first])), [arrivals[i] for i in ids[:first]])
        return [tokens[i] for i in ids], timed

    def speculate(self, case: Case) -> None:
        """Decode with a case's draft from now on, or without one. Drafts are loaded once."""
        self._llm.set_draft(case.draft, speculate_k=case.speculate_k, speculate_rule=case.speculate_rule)

    def speculation(self) -> dict[str, float]:
        """Return the totals of `outputs.SpeculationMetrics` over the last run's requests; the largest draft share."""
        names = ("num_accepted", "num_rejected", "num_verify_steps")
        totals = {name: sum(getattr(counts, name) for counts in self._speculation) for name in names}
        return totals | {"draft_share": max((counts.draft_share for counts in self._speculation), default=0.0)}

    def launches(self) -> dict[str, float]:
        """Return the fields of `launches.Launches` for a decode step on a GPU."""
        from nanoinfer.profiling.profiler import measure_launches

        case = self._case
        counts = measure_launches(self._llm, batch=case.batch, prompt_tokens=case.prompt_tokens, params=case.params(1))
        return dataclasses.asdict(counts)

    def logits(self, path: str) -> None:
        """Write the logits that are compared with float32's to a file of NumPy."""
        prompts = make_requests(self._case, self._llm.config.vocab_size).prompts
        np.save(path, decode_logits(self._llm.engine, prompts))

    def verify(self) -> float:
        """Return the time of verifying 5 tokens after the case's first prompt, in decode steps."""
        prompt = make_requests(self._case, self._llm.config.vocab_size).prompts[0]
        return verify_ratio(self._llm.engine, prompt, device=self._llm.device)


def _spread(arrivals: list[float], now: float, num_tokens: int) -> list[float]:
    """Return when each token of a step arrived: several tokens are spread evenly since the sequence's last token.

    _spread([1.0], 4.0, 3)  ->  [2.0, 3.0, 4.0]
    """
    before = arrivals[-1] if arrivals else now
    return [before + (now - before) * (i + 1) / num_tokens for i in range(num_tokens)]
