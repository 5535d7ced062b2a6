"""Assistants of Gemma 4: small models that attend to the keys of the model that they draft for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

from helpers.mtp import make_assistant
from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoints.huggingface import open_folder
from nanoinfer.errors import NanoinferError
from nanoinfer.speculative import assistant
from nanoinfer.speculative.draft_factory import DraftFactory
from nanoinfer.utils.arrays import to_numpy

CASES = [("native", "gemma4-shared", 0), ("native", "gemma4-keys-as-values", 8)]
CASES += [(engine, "gemma4-shared", 16) for engine in ("native", "dynamic", "static", "paged")]


@pytest.mark.parametrize(("engine", "case", "groups"), CASES)
def test_proposals_have_the_logits_of_transformers(
    engine: str, case: str, groups: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each round of a batch: after chunks of a prompt, rejected proposals, and within and beyond windows."""
    made, load, sample = make_assistant(case, groups, tmp_path), DraftFactory._load, assistant.sample_next
    errors: list[float] = []

    def compare(builders, logits, sampler) -> None:  # type: ignore[no-untyped-def]
        for b, row in zip(builders, to_numpy(logits), strict=True):
            expected = made.expected(b.request.token_ids[b.request.start :], 1 + len(b.token_ids))
            errors.append(np.abs(row - expected.detach().numpy()).max())
        sample(builders, logits, sampler)

    monkeypatch.setattr(DraftFactory, "_load", lambda self, name: (load(self, name)[0], None))  # not in 8 bits
    monkeypatch.setattr(assistant, "sample_next", compare)
    options = {"engine": engine, "device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 16}
    llm = LLM(str(tmp_path), **options, draft=str(tmp_path / "assistant"), speculate_k=3)
    prompts = [{"prompt_token_ids": [(5 * i * i + 3 * i) % 64 for i in range(n)]} for n in (50, 1, 9)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))
    assert [len(o.outputs[0].token_ids) for o in outputs] == [9] * 3
    assert len(errors) > 40
    assert max(errors) < 1e-4


def test_an_assistant_of_another_model_is_refused(tmp_path: Path) -> None:
    make_assistant("gemma4-shared", 0, tmp_path)
    draft, options = str(tmp_path / "assistant"), {"engine": "native", "device": "cpu"}
    with pytest.raises(NanoinferError, match="is an assistant, whose keys are another model's"):
        LLM(draft, **options)
    with pytest.raises(NanoinferError, match="reads keys: use engine dynamic, static, paged or native"):
        LLM(str(tmp_path), engine="recompute", device="cpu", draft=draft)
    own, target = (open_folder(folder).config for folder in (tmp_path / "assistant", tmp_path))
    one_head = replace(own, layers=(replace(own.layers[0], num_kv_heads=1), *own.layers[1:]))
    heads = r"\(heads, width\) of the keys of layer 0=\(1, 6\), not \(2, 6\)"
    for ours, theirs, wrong in ((own, replace(target, n_embd=28), "hidden_size=24, not 28"), (one_head, target, heads)):
        with pytest.raises(NanoinferError, match=f"is for a model with {wrong}: use an assistant of this model"):
            assistant.attached(ours, theirs, "a")
