"""What trees of candidates would add to chains, from the proposals of a draft on held-out text (docs/speculative.md).

    python benchmarks/speculation_trees.py TEXT [--target shakespeare] [--draft shakespeare-draft] [--temperature 0]

The target continues passages of the last tenth of TEXT. At each position of its output the draft's two most likely
tokens are known, so every round of a chain or a tree can be replayed: a round ends at the first position where the
target's token was not proposed. The tree is a chain and a second one that begins with the second candidate, at the
first position ("first") or where the draft is least certain ("low"). "x": tokens per round over the chain's.
"rows": tokens that the target processes in a round, with an attention mask for the tree. Two forked sequences would
repeat the newest token and all up to the branch.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import NamedTuple

from nanoinfer import LLM, SamplingParams

PASSAGES, STRIDE, PROMPT, OUTPUT = 48, 900, 96, 160
KS = (2, 4, 6, 8, 12)


class Position(NamedTuple):
    """What is known of a token of the output."""

    token: int
    first: int
    second: int
    certainty: float
    """The draft's probability of its first candidate."""


class Rounds(NamedTuple):
    """Means over rounds."""

    tokens: float
    rows: float


def record(target: LLM, draft: LLM, text: str, params: SamplingParams) -> list[list[Position]]:
    """Return the positions of the output after each passage."""
    ids = target.tokenize(text)
    prompts = [ids[i * STRIDE : i * STRIDE + PROMPT] for i in range(min(PASSAGES, len(ids) // STRIDE))]
    full = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in target.generate(prompts, params)]
    known = draft.generate(full, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2))
    found = []
    for tokens, output in zip(full, known, strict=True):
        assert output.prompt_logprobs is not None
        positions = []
        for token, values in zip(tokens[PROMPT:], output.prompt_logprobs[PROMPT:], strict=True):
            assert values is not None
            best = sorted(((v.rank, t) for t, v in values.items() if v.rank <= 2))
            positions.append(Position(token, best[0][1], best[1][1], math.exp(values[best[0][1]].logprob)))
        found.append(positions)
    return found


def accepted(positions: list[Position]) -> int:
    """Return how many of the first positions have the draft's first candidate."""
    return next((i for i, p in enumerate(positions) if p.token != p.first), len(positions))


def replay(passages: list[list[Position]], k: int, branch: str | None, length: int) -> Rounds:
    """Replay all rounds. Args: k: of the chain. branch: first, low or None. length: of the branch, behind its first."""
    tokens = rounds = rows = 0
    for positions in passages:
        at = 0
        while at < len(positions):
            chain = positions[at : at + k]
            count, rows = accepted(chain), rows + 1 + len(chain)
            if branch is not None:
                place = min(range(len(chain)), key=lambda i: chain[i].certainty) if branch == "low" else 0
                rows += 1 + length
                if count == place and chain[place].token == chain[place].second:
                    count += 1 + accepted(positions[at + place + 1 : at + place + 1 + length])
            tokens, rounds, at = tokens + count + 1, rounds + 1, at + count + 1
    return Rounds(tokens / rounds, rows / rounds)


def main() -> None:
    """Print one line for each k."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--target", default="shakespeare")
    parser.add_argument("--draft", default="shakespeare-draft")
    parser.add_argument("--temperature", type=float, default=0.0)
    given = parser.parse_args()
    text = given.text.read_text()
    params = SamplingParams(temperature=given.temperature, top_k=50, seed=1, max_tokens=OUTPUT, ignore_eos=True)
    target, draft = (LLM(name, engine="native") for name in (given.target, given.draft))
    passages = record(target, draft, text[len(text) * 9 // 10 :], params)
    every = [p for positions in passages for p in positions]
    ones = sum(p.token == p.first for p in every) / len(every)
    twos = sum(p.token in (p.first, p.second) for p in every) / len(every)
    print(f"{len(every):,} tokens: the draft's first candidate {ones:.1%}, one of its first two {twos:.1%}")
    print("| k | chain: tokens, rows | first, 2 behind: tokens (x), rows | first, k behind | low, k behind |")
    print("|---|---|---|---|---|")
    for k in KS:
        chain = replay(passages, k, None, 0)
        cells = [f"{k}", f"{chain.tokens:.2f}, {chain.rows:.1f}"]
        for branch, length in (("first", 2), ("first", k), ("low", k)):
            tree = replay(passages, k, branch, length)
            cells.append(f"{tree.tokens:.2f} ({tree.tokens / chain.tokens:.2f}), {tree.rows:.1f}")
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
