"""Which texts speculation draws, and how often a proposal is right: chi-square tests against exact answers.

The models are tables: the next logits are a row chosen by the last token. So the probability of every text of
six tokens is known (`joint` computes all 4^6 with a sampler of its own, in NumPy), and so is the probability that a
proposal is kept: sum min(p, q) for rule reject, and for rule reproduce the share of uniforms for which target and
draft take the same token.

All seeds are fixed, so a verdict never changes. A p-value below LEAST is a failure: no seed was looked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import chi2_contingency, chisquare
from torch import Tensor

from helpers.models import submit
from helpers.table_engine import Clock, TableEngine
from nanoinfer.config import EngineLimits, SchedulerConfig
from nanoinfer.core.core import Core
from nanoinfer.sampling.rng import ACCEPT, REPLACE, uniform
from nanoinfer.sampling.sampler import sample
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Request
from nanoinfer.scheduling.work import ScheduledSequence
from nanoinfer.speculative.base import Drafter, DraftRequest, Proposal
from nanoinfer.speculative.draft_model import DraftModel
from nanoinfer.speculative.speculator import Speculator, StepProposals
from nanoinfer.speculative.step_costs import StepTimes

V = 4
LEN = 6  # the prompt's step draws one, a round of four proposals five
LEAST = 1e-4
NUM_TEXTS = 900
INF = math.inf
FLAT = StepTimes({1: 1.0})
Array = NDArray[np.float64]


def random_table(seed: int, spread: float = 1.0) -> Tensor:
    return spread * torch.randn(V, V, generator=torch.Generator().manual_seed(seed))


TARGET = random_table(0)
TARGET_HOLES = TARGET.clone().index_put_((torch.arange(V), torch.tensor([1, 3, 0, 2])), torch.tensor(-INF))
DRAFTS = {
    "near": TARGET + 0.6 * random_table(1),
    "far": random_table(2, 1.5),
    "holes": random_table(3).index_put_((torch.arange(V), torch.tensor([2, 0, 3, 0])), torch.tensor(-INF)),
    "same": TARGET,
}


class Fixed(Drafter):
    """A drafter that is no model and draws nothing: always the next letters, or always the same one."""

    name = "fixed"

    def __init__(self, token: int | None = None) -> None:
        self._token = token

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        if self._token is not None:
            return [Proposal([self._token] * a.num_tokens) for a in requests]
        return [Proposal([(a.token_ids[-1] + i) % V for i in range(1, a.num_tokens + 1)]) for a in requests]


class Scaled(Fixed):
    """A draft whose weights come with any factor: they are proportional to q and need not add up to 1."""

    def __init__(self, draft: DraftModel) -> None:
        self._draft = draft
        self.forget = draft.forget  # type: ignore[method-assign]

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        made = self._draft.propose(requests)
        return [replace(p, weights=p.weights * 7.5 if p.weights is not None else None) for p in made]


class Watched(Speculator):
    """Notes for each round how many proposals there were and how many of them were kept."""

    def __init__(self, drafter: Drafter, rule: str, k: int) -> None:
        super().__init__(drafter, rule=rule, speculate_k=k)
        self.rounds: list[tuple[int, int]] = []

    def learn(
        self, work: Sequence[ScheduledSequence], done: StepProposals, tokens: Sequence[Sequence[int]], step_sec: float
    ) -> None:
        super().learn(work, done, tokens, step_sec)
        drawing = [w.sequence for w in work if w.samples and not w.forks]
        if len(drawing) == len(tokens):  # not the prompt's step
            for s, kept in zip(drawing, tokens, strict=True):
                if (p := done.proposals.get(s)) is not None:
                    self.rounds.append((len(p.token_ids), len(kept) - 1))


@dataclass
class Drawn:
    """Texts as (NUM, LEN) tokens, in order of request and sample, and the rounds that made them."""

    texts: NDArray[np.int64]
    rounds: list[tuple[int, int]]


def make_draft(table: Tensor) -> DraftModel:
    engine = TableEngine(table, EngineLimits(NUM_TEXTS, 64, NUM_TEXTS * 64), Clock())
    return DraftModel("table", engine, sample, V, FLAT)


def make_drafter(kind: str) -> Drafter:
    if kind == "fixed":
        return Fixed()
    draft = make_draft(DRAFTS[kind.removeprefix("scaled ")])
    return Scaled(draft) if kind.startswith("scaled ") else draft


def draw_texts(
    target: Tensor,
    params: SamplingParams,
    *,
    first_seed: int,
    drafter: Drafter | None = None,
    rule: str = "reject",
    k: int = 1,
    num_texts: int = NUM_TEXTS,
    prompt: Sequence[int] = (0, 2),
) -> Drawn:
    """Draw texts all at once; the seeds follow one another, params.n samples each."""
    engine = TableEngine(target, EngineLimits(num_texts, 64, num_texts * 64), Clock())
    speculator = Watched(drafter, rule, k) if drafter is not None else None
    scheduler = Scheduler(engine, SchedulerConfig(max_num_batched_tokens=1 << 20))
    core = Core(engine, scheduler, sample, None, V, speculator=speculator)
    seeds = range(first_seed, first_seed + num_texts // params.n)
    requests: list[Request] = [submit(core, None, [*prompt], params, seed) for seed in seeds]
    while core.unfinished:
        core.step()
    texts = [s.token_ids[len(prompt) :] for r in requests for s in r.sequences]
    texts = [t + t[-1:] * (params.max_tokens - len(t)) for t in texts]  # one that ended goes on with its end token
    return Drawn(np.array(texts), speculator.rounds if speculator is not None else [])


# The exact answer --------------------------------------------------------------------------------------------


def next_probs(logits: Array, seen: Array, counts: Array, position: int, p: SamplingParams) -> Array:
    """(H, V) logits -> probabilities: docs/sampling.md once more, in NumPy. No ties here, so none are handled."""
    x = logits.copy()
    if p.repetition_penalty != 1:
        x = np.where(seen > 0, np.where(x > 0, x / p.repetition_penalty, x * p.repetition_penalty), x)
    x = x - p.presence_penalty * (counts > 0) - p.frequency_penalty * counts
    for token, bias in (p.logit_bias or {}).items():
        x[:, token] += bias
    if position < p.min_tokens:
        x[:, list(p.stop_token_ids)] = -INF
    probs = np.exp((x - x.max(1, keepdims=True)) / p.temperature)
    probs /= probs.sum(1, keepdims=True)
    order = np.argsort(-probs, axis=1)
    ranked = np.take_along_axis(probs, order, 1)
    if p.top_k:
        ranked[:, p.top_k :] = 0.0
        ranked /= ranked.sum(1, keepdims=True)
    if p.top_p < 1:
        ranked[np.cumsum(ranked, 1) - ranked >= p.top_p] = 0.0
    if p.min_p:
        ranked[ranked < p.min_p * ranked[:, :1]] = 0.0
    np.put_along_axis(probs, order, ranked, 1)
    return probs / probs.sum(1, keepdims=True)


def joint(target: Tensor, params: SamplingParams, prompt: Sequence[int] = (0, 2)) -> Array:
    """Return the probability of each text: an array of LEN axes."""
    table = target.double().numpy()
    probs, last = np.ones(1), np.array([prompt[-1]])
    counts, prompted = np.zeros((1, V)), np.isin(np.arange(V), prompt).astype(float)[None]
    for position in range(LEN):
        p = next_probs(table[last], prompted + counts, counts, position, params)
        for token in params.stop_token_ids:  # a text that has ended goes on with its end token
            p[counts[:, token] > 0] = np.eye(V)[token]
        probs = (probs[:, None] * p).ravel()
        counts = (counts[:, None, :] + np.eye(V)).reshape(-1, V)
        last = np.tile(np.arange(V), len(last))
    return probs.reshape((V,) * LEN)


WINDOWS = ((0, 1, 2), (1, 2, 3), (2, 3, 4), (3, 4, 5), (1, 3, 5))


def marginal(whole: Array, window: tuple[int, ...]) -> Array:
    return whole.sum(tuple(i for i in range(LEN) if i not in window)).ravel()


def counted(texts: NDArray[np.int64], window: tuple[int, ...]) -> Array:
    cells = np.ravel_multi_index(tuple(texts[:, list(window)].T), (V,) * len(window))
    return np.bincount(cells, minlength=V ** len(window)).astype(float)


def merged(expected: Array, observed: Array) -> tuple[Array, Array]:
    """Pool the cells in which fewer than 5 are expected; their sum is one cell. Impossible ones must be empty."""
    assert observed[expected == 0].sum() == 0, "a text of probability 0 was drawn"
    small = expected < 5
    e, o = np.append(expected[~small], expected[small].sum()), np.append(observed[~small], observed[small].sum())
    return (e, o) if e[-1] >= 1 else (np.append(e[:-2], e[-2:].sum()), np.append(o[:-2], o[-2:].sum()))


def assert_drawn_from(whole: Array, texts: NDArray[np.int64]) -> None:
    """Assert that every window of three tokens is distributed as it should be, together with each other."""
    for window in WINDOWS:
        e, o = merged(marginal(whole, window) * len(texts), counted(texts, window))
        p = chisquare(o, e * o.sum() / e.sum()).pvalue if len(e) > 1 else 1.0
        assert p > LEAST / len(WINDOWS), (window, p)


CONTROLS = {
    "none": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(top_k=3),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.25),
    "penalties": SamplingParams(presence_penalty=0.7, frequency_penalty=0.5, repetition_penalty=1.4),
    "bias": SamplingParams(logit_bias={1: 1.5, 3: -2.0}),
    "min_tokens": SamplingParams(min_tokens=3, stop_token_ids=(2,)),
    "all": SamplingParams(
        temperature=1.2,
        top_k=3,
        top_p=0.95,
        min_p=0.05,
        frequency_penalty=0.6,
        repetition_penalty=1.3,
        logit_bias={0: 0.5},
    ),
}
CONTROLS = {name: replace(p, max_tokens=LEN) for name, p in CONTROLS.items()}


# Rule reject: the distribution --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, k",
    [("near", 1), ("near", 4), ("far", 2), ("far", 4), ("holes", 3), ("scaled far", 3), ("fixed", 1), ("fixed", 4)],
)
@pytest.mark.slow_if(lambda kind, k: (kind, k) != ("near", 4))
@pytest.mark.nightly_if(lambda k: k < 3)
def test_rejection_draws_texts_of_the_target_s_probabilities(kind: str, k: int) -> None:
    drawn = draw_texts(TARGET, CONTROLS["none"], first_seed=10_000 * k, drafter=make_drafter(kind), k=k)
    assert_drawn_from(joint(TARGET, CONTROLS["none"]), drawn.texts)


@pytest.mark.parametrize("kind", ["far", "holes", "fixed"])
@pytest.mark.slow
@pytest.mark.nightly_if(lambda kind: kind == "far")
def test_what_the_target_never_says_is_never_kept(kind: str) -> None:
    """Zeros of p where q has none, zeros of q where p has none, and a drafter that often proposes a zero of p."""
    drawn = draw_texts(TARGET_HOLES, CONTROLS["none"], first_seed=50_000, drafter=make_drafter(kind), k=3)
    assert_drawn_from(joint(TARGET_HOLES, CONTROLS["none"]), drawn.texts)


@pytest.mark.parametrize("name", [name for name in CONTROLS if name != "none"])
@pytest.mark.slow
@pytest.mark.nightly_if(lambda name: name not in ("all", "top_p", "penalties"))
def test_rejection_under_controls(name: str) -> None:
    """Both distributions are filtered; penalties and min_tokens count the tokens that are proposed before."""
    drawn = draw_texts(TARGET, CONTROLS[name], first_seed=70_000, drafter=make_drafter("far"), k=3)
    assert_drawn_from(joint(TARGET, CONTROLS[name]), drawn.texts)


# Rule reproduce: plain sampling -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "all", "min_tokens"])
@pytest.mark.slow
@pytest.mark.nightly_if(lambda name: name != "all")
def test_reproduced_texts_are_plain_decoding_s_and_so_of_its_probabilities(name: str) -> None:
    params = replace(CONTROLS[name], n=3)
    plain = draw_texts(TARGET, params, first_seed=0, num_texts=2 * NUM_TEXTS).texts
    assert_drawn_from(joint(TARGET, params), plain)
    drafts = {"model": make_draft(DRAFTS["near"]), "fixed": Fixed()}
    for k, drafter in enumerate(drafts.values(), start=3):
        drawn = draw_texts(TARGET, params, first_seed=0, drafter=drafter, rule="reproduce", k=k)
        assert np.array_equal(drawn.texts, plain[:NUM_TEXTS])
        assert sum(kept for _, kept in drawn.rounds) > NUM_TEXTS / 2  # bursts there were


# How often a proposal is right --------------------------------------------------------------------------------

P = np.array([0.45, 0.1, 0.25, 0.2])
Q = np.array([0.2, 0.3, 0.1, 0.4])


def memoryless(probs: Array) -> Tensor:
    """A table whose next token never depends on the last: the positions of a text are independent."""
    return torch.tensor(np.log(probs), dtype=torch.float32).repeat(V, 1)


def agreement(p: Array, q: Array) -> float:
    """Return how often one uniform gives the same token under both: the overlap of their steps in (0, 1)."""
    p_ends, q_ends = np.cumsum(p), np.cumsum(q)
    overlap = np.minimum(p_ends, q_ends) - np.maximum(p_ends - p, q_ends - q)
    return float(np.maximum(overlap, 0.0).sum())


def test_agreement_by_hand() -> None:
    assert agreement(np.array([0.5, 0.5]), np.array([0.9, 0.1])) == pytest.approx(0.6)  # as much as min(p, q)
    assert agreement(P, Q) == pytest.approx(0.2 + 0.05 + 0.05 + 0.2)  # less than 0.2 + 0.1 + 0.1 + 0.2
    assert np.minimum(P, Q).sum() == pytest.approx(0.6)


RATES: dict[str, tuple[str, Callable[[], Drafter], float]] = {
    "reject": ("reject", lambda: make_draft(memoryless(Q)), float(np.minimum(P, Q).sum())),
    "reject, itself": ("reject", lambda: make_draft(memoryless(P)), 1.0),
    "reject, one token": ("reject", lambda: Fixed(2), P[2]),
    "reproduce": ("reproduce", lambda: make_draft(memoryless(Q)), agreement(P, Q)),
    "reproduce, itself": ("reproduce", lambda: make_draft(memoryless(P)), 1.0),
    "reproduce, one token": ("reproduce", lambda: Fixed(2), P[2]),
}


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("case", RATES)
@pytest.mark.slow_if(lambda k: k == 1)
def test_proposals_are_accepted_as_often_as_computed_by_hand(case: str, k: int) -> None:
    rule, make, acceptance = RATES[case]
    params = SamplingParams(max_tokens=42)
    drawn = draw_texts(memoryless(P), params, first_seed=90_000, drafter=make(), rule=rule, k=k, num_texts=100)
    accepted = sum(kept for _, kept in drawn.rounds)
    judged = accepted + sum(kept < proposed for proposed, kept in drawn.rounds)
    assert judged >= 2000
    assert abs(accepted / judged - acceptance) <= 4 * math.sqrt(acceptance * (1 - acceptance) / judged)
    # i accepted proposals and a wrong one, or all k: the latter with a token more, so that the mean is the formula's
    full = np.bincount([kept for proposed, kept in drawn.rounds if proposed == k], minlength=k + 1)
    lengths = np.array([acceptance**i * (1 - acceptance) for i in range(k)] + [acceptance**k])
    assert (lengths * np.arange(1, k + 2)).sum() == pytest.approx(sum(acceptance**i for i in range(k + 1)))
    possible = lengths > 0
    assert full[~possible].sum() == 0
    if possible.sum() > 1:
        assert chisquare(full[possible], full.sum() * lengths[possible]).pvalue > LEAST


# Independence -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["reject", "reproduce"])
@pytest.mark.parametrize("pairs", ["seeds", "samples", "positions"])
@pytest.mark.slow_if(lambda pairs, rule: (pairs, rule) != ("seeds", "reproduce"))
def test_a_token_says_nothing_about_another(pairs: str, rule: str) -> None:
    """Of the neighbouring seed, of the request's other sample, of the next position: no model joins them here."""
    params = SamplingParams(max_tokens=LEN, n=2 if pairs == "samples" else 1)
    drafter = make_draft(memoryless(Q))
    texts = draw_texts(memoryless(P), params, first_seed=30_000, drafter=drafter, rule=rule, k=3, num_texts=800).texts
    if pairs == "positions":
        some, other = texts[:, 0::2].ravel(), texts[:, 1::2].ravel()
    else:
        some, other = texts[0::2].ravel(), texts[1::2].ravel()
    table = np.bincount(some * V + other, minlength=V * V).reshape(V, V)
    assert chi2_contingency(table).pvalue > LEAST
    assert chisquare(table.ravel(), table.sum() * np.outer(P, P).ravel()).pvalue > LEAST


def test_the_three_uniforms_of_a_token_are_independent_of_each_other() -> None:
    """Of its proposal, of accepting and of replacing it."""
    cells = np.zeros(64)
    for seed in range(4000):
        u = [int(4 * uniform(seed=seed, sample=s, position=5)) for s in (0, ACCEPT, REPLACE)]
        cells[16 * u[0] + 4 * u[1] + u[2]] += 1
    assert chisquare(cells).pvalue > LEAST
