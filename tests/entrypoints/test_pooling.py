"""Embeddings and scores: those of transformers, on every engine, in any company; what a model's files say; bounds."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tokenizers as hf
from helpers.async_llm import freed
from helpers.chat import chat_folder
from helpers.environment import ROOT
from helpers.models import CHARS, TINY, make_folder, make_model, refuses
from nanoinfer import LLM, AsyncLLM, PoolingParams, RequestOutput, ResultError, SamplingParams
from nanoinfer.engines.base import StepBatch
from nanoinfer.engines.registry import ENGINES
from nanoinfer.entrypoints.pooling import Reading, make_all
from nanoinfer.errors import QueueFull
from nanoinfer.models import pooling
from nanoinfer.models.pooling import Pooling
from nanoinfer.tokenizers import tokenizer
from nanoinfer.tokenizers.tokenizer import from_core
from nanoinfer.utils.files import write_folder
from tokenizers import processors

RAW = PoolingParams(use_activation=False)
PROMPTS = [[5, 9, 11, 30, 7], [3], [8] * 23 + [1, 2, 3], list(range(17, 29))]
RUNGS = [name for name, spec in ENGINES.items() if "cpu" in spec.devices and spec.unavailable() is None]
LATER = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)


def hidden(ids: list[int]) -> torch.Tensor:
    """(len(ids), C): the final hidden states of the reference model of `make_folder`."""
    gpt = make_model()
    with torch.no_grad():
        return gpt.hidden(torch.tensor([ids]), torch.arange(len(ids)))[0]


def values(llm: LLM, prompts: Any, params: PoolingParams | None = None) -> list[list[float]]:
    return [output.outputs.embedding for output in llm.embed(prompts, params)]


def results(readings: list[Reading], outputs: list[RequestOutput]) -> list[Any]:
    return [reading.result(output).outputs for reading, output in zip(readings, outputs, strict=True)]


# The values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma3", "gpt_neox", "olmo2", "smollm3-windows"])
def test_hidden_states_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    families = pytest.importorskip("helpers.families")
    model = families.make_folder(case, tmp_path / case)
    expected = []
    with torch.no_grad():
        for ids in PROMPTS:
            expected.append(model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].double().numpy())
    for engine in ("recompute", "native") if "native" in RUNGS else ("recompute",):
        for kind, of in (("last", lambda h: h[-1]), ("mean", lambda h: h.mean(0))):
            llm = LLM(str(tmp_path / case), engine=engine, dtype="float32", pooling_type=kind, max_num_seqs=4,
                      kv_cache_dtype="float32" if engine == "native" else "auto")  # fmt: skip
            found = values(llm, PROMPTS, RAW)
            for got, states in zip(found, expected, strict=True):
                assert np.abs(np.array(got) - of(states)).max() < 1e-4, (engine, kind)


@pytest.mark.parametrize("engine", RUNGS)
@pytest.mark.nightly_if(lambda engine: engine == "compiled")
def test_every_engine_embeds(engine: str, tiny_folder: Path) -> None:
    llm = LLM(str(tiny_folder), engine=engine, max_num_seqs=3)
    for kind, of in (("last", lambda h: h[-1]), ("mean", lambda h: h.mean(0))):
        object.__setattr__(llm.model.pooling, "kind", kind)
        for got, ids in zip(values(llm, PROMPTS, RAW), PROMPTS, strict=True):
            assert np.abs(np.array(got) - of(hidden(ids).double().numpy())).max() < 1e-4


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_steps_that_only_embed_compute_no_logits(tiny_folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(tiny_folder), pooling_type=kind, max_num_seqs=3)
    engine, num_rows = llm.core.engine, []
    extend = engine.extend

    def noted(batch: StepBatch) -> Any:
        logits = extend(batch)
        num_rows.append(len(logits))
        return logits

    monkeypatch.setattr(engine, "extend", noted)
    llm.embed(PROMPTS)
    assert set(num_rows) == {0}
    num_rows.clear()
    stream = llm.stream("To be", LATER)
    next(stream)
    llm.embed(PROMPTS)
    assert num_rows[-1] > 0  # the other sequence samples
    assert "".join(stream)


def test_dimensions_and_norm(tiny_folder: Path) -> None:
    llm = LLM(str(tiny_folder), max_num_seqs=2)
    (whole,) = values(llm, [PROMPTS[0]], RAW)
    assert len(whole) == TINY.n_embd
    assert math.hypot(*whole) != pytest.approx(1)
    for params in (None, PoolingParams(use_activation=True)):
        (found,) = values(llm, [PROMPTS[0]], params)
        assert found == pytest.approx(list(np.array(whole) / math.hypot(*whole)), abs=1e-7)
    (short,) = values(llm, [PROMPTS[0]], PoolingParams(dimensions=5))
    assert short == pytest.approx(list(np.array(whole[:5]) / math.hypot(*whole[:5])), abs=1e-7)
    each = [PoolingParams(dimensions=2), PoolingParams(dimensions=3)]
    assert [len(v) for v in values(llm, ["a", "b"], each)] == [2, 3]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_native_embeddings_are_the_same_bits_in_any_company(tiny_folder: Path, kind: str) -> None:
    pytest.importorskip("nanoinfer._native")
    alone = [LLM(str(tiny_folder), engine="native", pooling_type=kind).embed([p])[0].outputs for p in PROMPTS]
    for steps, seqs in ((2048, 8), (3, 2), (1, 1)):
        llm = LLM(str(tiny_folder), engine="native", pooling_type=kind, max_num_batched_tokens=steps, max_num_seqs=seqs)
        outputs = llm.stream("To be", LATER)
        next(outputs)
        assert [output.outputs for output in llm.embed([*PROMPTS, *PROMPTS])] == alone * 2
        again = llm.embed(PROMPTS)  # the prefixes are kept: the last token is computed
        assert [output.outputs for output in again] == alone
        assert "".join(outputs) != ""


def test_prefixes_are_shared(tiny_folder: Path) -> None:
    llm = LLM(str(tiny_folder), max_num_seqs=2)
    ids = list(range(1, 25))
    assert [o.num_cached_tokens for o in llm.embed([ids]) + llm.embed([ids])] == [0, len(ids) - 1]
    assert [o.num_cached_tokens for o in llm.embed([{"prompt_token_ids": ids, "cache_salt": "x"}])] == [0]
    llm = LLM(str(tiny_folder), max_num_seqs=2, pooling_type="mean")
    assert [o.num_cached_tokens for o in llm.embed([ids]) + llm.embed([ids])] == [0, 0]  # all states are needed


def test_generation_goes_on_beside_embeddings(tiny_folder: Path) -> None:
    llm = LLM(str(tiny_folder), max_num_seqs=2)
    expected = llm.generate("To be", LATER)[0].outputs[0].text
    stream = llm.stream("To be", LATER)
    begun = next(stream)
    llm.embed(["a" * 20] * 7)
    assert begun + "".join(stream) == expected


@pytest.mark.parametrize("options", [{"draft": "prompt-lookup", "speculate_k": 3}, {"kv_cache_memory": 24_000}])
@pytest.mark.parametrize("kind", ["last", "mean"])
def test_beside_speculation_and_preemption(tiny_folder: Path, kind: str, options: dict[str, Any]) -> None:
    pytest.importorskip("nanoinfer._native")
    prompts = [[i, *range(1, 28)] for i in range(6)]
    alone = LLM(str(tiny_folder), engine="native", pooling_type=kind, kv_cache_dtype="float32")
    expected, text = alone.embed(prompts), alone.generate("To be", LATER)[0].outputs[0].text
    llm = LLM(str(tiny_folder), engine="native", pooling_type=kind, kv_cache_dtype="float32", max_num_seqs=3,
              max_num_batched_tokens=9, **options)  # fmt: skip
    streams = [llm.stream("To be", LATER) for _ in range(3)]
    begun = [next(stream) for stream in streams]
    readings = llm.pooler.embed(prompts, None, priority=-1)  # they preempt the streams
    outputs = llm._run(make_all(readings), "embed", False)
    assert results(readings, outputs) == [o.outputs for o in expected]
    assert [first + "".join(stream) for first, stream in zip(begun, streams, strict=True)] == [text] * 3
    preempted = llm.core.published.num_preempted
    assert preempted > 0
    llm.reset_prefix_cache()
    requests = make_all(readings := llm.pooler.embed(prompts, None))
    llm.core.submit(requests)
    llm.core.step()
    generated = llm.generate(["To be"] * 3, LATER, priority=[-1] * 3)  # they preempt embeddings
    assert [o.outputs[0].text for o in generated] == [text] * 3
    while not all(r.finished for r in requests):
        llm.core.step()
    assert results(readings, [llm.core.output(r) for r in requests]) == [o.outputs for o in expected]
    assert llm.core.published.num_preempted > preempted


# Inputs --------------------------------------------------------------------------------------------------


def test_bad_inputs_are_refused(tiny_folder: Path) -> None:
    llm = LLM(str(tiny_folder), max_num_seqs=2)
    refuses(
        lambda: llm.embed("a" * 33),
        "the input has 33 tokens, the maximum context length is 32",
        "truncate_prompt_tokens",
    )
    refuses(lambda: llm.embed("a" * 5000), "the input has at least ", "is 32 tokens: shorten", "truncate_prompt_tokens")
    refuses(lambda: llm.embed(["a", "b" * 40]), "prompt 2 of 2: the input has 40 tokens")
    refuses(lambda: llm.embed(""), "the input has no tokens")
    refuses(lambda: llm.embed([[5, 999]]), "token id 999")
    refuses(lambda: llm.embed("a", PoolingParams(dimensions=17)), "dimensions=17 is more than the model's 16")
    refuses(lambda: llm.embed("a", PoolingParams(truncate_prompt_tokens=33)), "truncate_prompt_tokens=33", "32")
    refuses(lambda: llm.embed("a", SamplingParams()), "is not a PoolingParams")  # type: ignore[arg-type]
    refuses(lambda: llm.embed(["a", "b"], [RAW]), "2 prompts, but 1 PoolingParams")
    refuses(lambda: PoolingParams(dimensions=0), "dimensions=0")
    refuses(lambda: PoolingParams(truncate_prompt_tokens=0), "truncate_prompt_tokens=0")
    refuses(lambda: llm.score(["a", "b"], ["c"] * 3), "2 queries, but 3 documents")
    refuses(lambda: llm.score("a", []), "0 documents")
    refuses(lambda: LLM(str(tiny_folder), pooling_type="max"), "pooling_type='max'", "last, mean")
    queued = LLM(str(tiny_folder), max_num_seqs=1, max_num_queued=2)
    with pytest.raises(QueueFull):
        queued.embed(["a"] * 5)
    assert len(queued.embed(["a"] * 3)) == 3


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    llm = LLM(str(make_folder(tmp_path / "m", chars=None)))
    assert len(values(llm, [[1, 2]])[0]) == TINY.n_embd
    refuses(lambda: llm.embed("a"), "tokenizer")


def test_long_inputs_are_shortened_at_the_beginning(tiny_folder: Path) -> None:
    llm = LLM(str(tiny_folder), max_num_seqs=2)
    text = "To be, or not to be: that is the question"
    cut, whole = llm.embed(
        [text] * 2, [PoolingParams(truncate_prompt_tokens=4), PoolingParams(truncate_prompt_tokens=-1)]
    )
    assert cut.prompt_token_ids == llm.tokenize("tion")
    assert whole.prompt_token_ids == llm.tokenize(text[-32:])
    assert llm.embed(text, PoolingParams(truncate_prompt_tokens=4))[0].outputs == cut.outputs


def test_a_text_gets_the_tokens_of_the_tokenizers_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in Qwen3-Embedding, whose tokenizer.json ends a text with <|endoftext|>."""
    folder = chat_folder(tmp_path / "m")
    core = hf.Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    core.save(str(folder / "tokenizer.json"))
    llm = LLM(str(folder), max_num_seqs=2)
    assert "for embeddings" in caplog.text
    inner = llm.requests.tokenize("the answer")
    assert llm.tokenizer is not None
    assert llm.tokenizer.suffix == (2,)
    assert inner[0] == 1
    assert inner[-1] != 2  # of a prompt that is continued
    (output,) = llm.embed("the answer")
    assert output.prompt_token_ids == [*inner, 2]
    assert llm.embed([[*inner, 2]])[0].outputs == output.outputs  # given ids are complete
    (cut,) = llm.embed("the answer", PoolingParams(truncate_prompt_tokens=3))
    assert cut.prompt_token_ids == [1, inner[-1], 2]


def test_surround_adds_both_tokens() -> None:
    core = hf.Tokenizer(hf.models.BPE(vocab={"a": 0, "<s>": 1, "</s>": 2}, merges=[]))
    core.add_special_tokens(["<s>", "</s>"])
    tokenizer.surround(core, None, ("</s>", 2))
    assert (from_core(core).bos_token_id, from_core(core).suffix) == (None, (2,))
    tokenizer.surround(core, ("<s>", 1), ("</s>", 2))
    assert (from_core(core).bos_token_id, from_core(core).suffix) == (1, (2,))


# Files ---------------------------------------------------------------------------------------------------

MODULES = "sentence_transformers.models."


def write_modules(folder: Path, *kinds: str, **configs: Any) -> Path:
    modules = [
        {"idx": i, "path": f"{i}_{k}" if k != "Transformer" else "", "type": MODULES + k} for i, k in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for i, kind in enumerate(kinds):
        if kind in configs:
            (folder / f"{i}_{kind}").mkdir(exist_ok=True)
            (folder / f"{i}_{kind}" / "config.json").write_text(json.dumps(configs[kind]))
    return folder


@pytest.mark.parametrize(("config", "kind"), [
    ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "word_embedding_dimension": 16}, "last"),
    ({"pooling_mode_mean_tokens": True}, "mean"),
    ({"pooling_mode": "lasttoken"}, "last"),
    ({"pooling_mode": "mean", "embedding_dimension": 16}, "mean"),
])  # fmt: skip
def test_modules(tmp_path: Path, config: dict[str, Any], kind: str) -> None:
    assert pooling.read(tmp_path) == Pooling("last", True)
    assert pooling.read(write_modules(tmp_path, "Transformer", "Pooling", Pooling=config)) == Pooling(kind, False)
    made = pooling.read(write_modules(tmp_path, "Transformer", "Pooling", "Normalize", Pooling=config))
    assert made == Pooling(kind, True)


BAD_FILES: dict[str, Callable[[Path], object]] = {
    "is not a list of modules": lambda f: (f / "modules.json").write_text("{}"),
    "Dense' is not supported": lambda f: write_modules(f, "Transformer", "Dense"),
    "cls_token'] is not supported": lambda f: write_modules(f, "Pooling", Pooling={"pooling_mode_cls_token": True}),
    "'max'] is not supported": lambda f: write_modules(f, "Pooling", Pooling={"pooling_mode": "max"}),
    "pooling_mode_max_tokens'] is not supported": lambda f: write_modules(
        f, "Pooling", Pooling={"pooling_mode_max_tokens": True}
    ),
    "is not the name of a folder": lambda f: (f / "modules.json").write_text(
        json.dumps([{"type": "a.Pooling", "path": "../x"}])
    ),
    "'..' is not the name of a folder": lambda f: (f / "modules.json").write_text(
        json.dumps([{"type": "a.Pooling", "path": ".."}])
    ),
    "config.json": lambda f: write_modules(f, "Pooling"),
}


@pytest.mark.parametrize("words", BAD_FILES)
def test_files_that_cannot_be_followed(tiny_folder: Path, words: str) -> None:
    """Generation works; embeddings are refused, unless an option replaces the files."""
    BAD_FILES[words](tiny_folder)
    llm = LLM(str(tiny_folder))
    assert len(llm.generate("a", SamplingParams(max_tokens=3))[0].outputs[0].token_ids) == 3
    refuses(lambda: llm.embed("a"), words, "pooling_type=")
    assert len(values(LLM(str(tiny_folder), pooling_type="mean"), "a")[0]) == TINY.n_embd


def test_a_packed_folder_says_the_same(tiny_folder: Path, tmp_path: Path) -> None:
    for made in (Pooling("mean", False), Pooling("mean", True), Pooling("last", False)):
        for name, files in made.to_files().items():
            write_folder(tmp_path / name, files)
        assert pooling.read(tmp_path) == made
    assert Pooling().to_files() == Pooling(unsupported="x").to_files() == {}


def test_gguf_files_say_how_they_embed() -> None:
    found = [pooling.of_gguf({"general.architecture": "qwen3", "qwen3.pooling_type": i}) for i in (0, 1, 3)]
    assert found == [Pooling("last"), Pooling("mean"), Pooling("last")]
    assert pooling.of_gguf({}) == Pooling()
    assert "pooling_type=4" in pooling.of_gguf({"general.architecture": "a", "a.pooling_type": 4}).unsupported


def test_a_models_files_say_how_it_embeds(tiny_folder: Path) -> None:
    write_modules(tiny_folder, "Transformer", "Pooling", Pooling={"pooling_mode_mean_tokens": True})
    (found,) = values(LLM(str(tiny_folder)), [PROMPTS[0]])
    assert np.abs(np.array(found) - hidden(PROMPTS[0]).mean(0).numpy()).max() < 1e-4


def test_models_saved_without_a_head_embed_only(tmp_path: Path) -> None:
    """AutoModel.save_pretrained writes names without "model.", and no lm_head."""
    families = pytest.importorskip("helpers.families")
    model = families.make_folder("qwen3", tmp_path / "whole")
    assert not model.config.tie_word_embeddings
    model.model.save_pretrained(tmp_path / "bare")
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "bare")
    whole, bare = (LLM(str(tmp_path / name), dtype="float32", engine="dynamic") for name in ("whole", "bare"))
    assert values(whole, PROMPTS, RAW) == values(bare, PROMPTS, RAW)
    for call in (lambda: bare.generate([5]), lambda: bare.perplexity([5, 6]), lambda: bare.loglikelihood([5], [6])):
        refuses(call, "has no output head")


def test_models_that_attend_to_both_sides_are_refused(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    for name, value in (("is_causal", False), ("use_bidirectional_attention", True)):
        (folder / "config.json").write_text(json.dumps(config | {name: value}))
        refuses(lambda: LLM(str(folder)), name)


# Scores --------------------------------------------------------------------------------------------------


def test_cosine_of_embeddings(tiny_folder: Path) -> None:
    llm = LLM(str(tiny_folder), max_num_seqs=2)
    texts = ["To be", "or not", "go"]
    vectors = [np.array(v) for v in values(llm, texts, RAW)]
    expected = [float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for a, b in ((vectors[0], v) for v in vectors)]
    outputs = llm.score(texts[0], texts)
    assert [o.outputs.score for o in outputs] == pytest.approx(expected, abs=1e-6)
    assert outputs[1].prompt_token_ids == llm.tokenize(texts[0]) + llm.tokenize(texts[1])
    assert [o.outputs.score for o in llm.score(texts, texts)] == pytest.approx([1.0] * 3)


# AsyncLLM, failures --------------------------------------------------------------------------------------


def test_async(tiny_folder: Path) -> None:
    llm = LLM(str(tiny_folder), max_num_seqs=3)
    texts = [*CHARS[:20]]
    expected, scores = llm.embed(texts), llm.score("a", texts)

    async def main() -> None:
        async with AsyncLLM.from_llm(llm) as model:
            embedded, scored, more = await asyncio.gather(
                model.embed(texts), model.score("a", texts), model.embed(texts[:3], RAW)
            )
            assert [o.outputs.values for o in embedded] == [o.outputs.values for o in expected]
            assert [o.outputs.score for o in scored] == [o.outputs.score for o in scores]
            assert len(more) == 3
            for call in (model.embed(["a", "b" * 50]), model.embed([5, 999])):
                with pytest.raises(Exception, match=r"prompt 2 of 2: the input has 50|token id 999"):
                    await call
            task = asyncio.ensure_future(model.embed(texts * 50))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await freed(model)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_states_that_are_not_finite_end_their_request_only(tiny_folder: Path) -> None:
    llm = LLM(str(tiny_folder), engine="dynamic", max_num_seqs=4)
    with torch.no_grad():
        llm.engine.model.transformer["wte"].weight[7] = math.nan  # type: ignore[union-attr,index]
    with pytest.raises(ResultError, match="prompt 2 of 2: the model's outputs are not finite"):
        llm.embed([[5], [7]])
    assert llm.core.scheduler.running == []
    assert len(values(llm, [[5]])[0]) == TINY.n_embd


# The page ------------------------------------------------------------------------------------------------


def test_the_pages_program(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "embeddings.md").read_text()
    program = re.findall(r"```python\n(.*?)```", page, re.S)[0]
    exec(program, {})
    first, second, *scores = capsys.readouterr().out.split("\n")[:4]
    assert (first.split()[0], second.split()[0]) == ("64", "64")
    assert all(-1 <= float(score) <= 1 for score in scores)
