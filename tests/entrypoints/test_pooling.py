"""Embeddings and scores: those of transformers, on every engine, in any company; what a model's files say; bounds.

Scoring on every CPU engine: prompt_logprobs, loglikelihood and perplexity equal float64 arithmetic on the logits."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tokenizers as hf
from helpers.async_llm import freed
from helpers.chat import chat_folder
from helpers.environment import ROOT
from helpers.models import CHARS, TINY, make_folder, make_model, refuses
from nanoinfer import LLM, AsyncLLM, PoolingParams, RequestOutput, ResultError, SamplingParams
from nanoinfer.engines.base import StepBatch
from nanoinfer.engines.registry import ENGINES
from nanoinfer.entrypoints.pooling import Reading, make_all
from nanoinfer.entrypoints.scoring import _logprob, split_pair, windows
from nanoinfer.errors import QueueFull
from nanoinfer.models import pooling
from nanoinfer.models.pooling import Pooling
from nanoinfer.outputs import Logprob
from nanoinfer.tokenizers import tokenizer
from nanoinfer.tokenizers.tokenizer import from_core
from nanoinfer.utils.arrays import Array
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


async def test_async(tiny_folder: Path) -> None:
    llm = LLM(str(tiny_folder), max_num_seqs=3)
    texts = [*CHARS[:20]]
    expected, scores = llm.embed(texts), llm.score("a", texts)
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


CPU_ENGINES = [name for name, spec in ENGINES.items() if "cpu" in spec.devices]
BLOCK = TINY.block_size
ONE = SamplingParams(max_tokens=1, temperature=0)
TEXT = "To be, or not to be: that is"


def expected_logprobs(ids: list[int], vocab_size: int = TINY.vocab_size) -> Tensor:
    """(len(ids) - 1, V) float64: what the reference model gives for ids[1:]."""
    return make_model()(torch.tensor([ids[:-1]]))[0, :, :vocab_size].double().log_softmax(-1)


@pytest.fixture
def llm(tiny_folder: Path) -> LLM:
    return LLM(str(tiny_folder), max_num_seqs=4)


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("engine", CPU_ENGINES)
def test_prompt_logprobs_equal_the_reference_models(tiny_folder: Path, engine: str, count: int) -> None:
    llm = LLM(str(tiny_folder), engine=engine)
    (out,) = llm.generate(TEXT, replace(ONE, prompt_logprobs=count))
    ids, expected = out.prompt_token_ids, expected_logprobs(out.prompt_token_ids)
    assert out.prompt_logprobs is not None
    assert len(out.prompt_logprobs) == len(ids)
    assert out.prompt_logprobs[0] is None
    for row, token, found in zip(expected, ids[1:], out.prompt_logprobs[1:], strict=True):
        assert found is not None
        assert next(iter(found)) == token
        assert set(found) == {token, *row.topk(count).indices.tolist()}
        for i, logprob in found.items():
            assert logprob.logprob == pytest.approx(row[i].item(), abs=1e-4)
            assert (logprob.rank, logprob.decoded_token) == (int((row > row[i]).sum()) + 1, CHARS[i])


@pytest.mark.parametrize("engine", CPU_ENGINES)
def test_loglikelihood_and_perplexity_equal_the_reference_models(tiny_folder: Path, engine: str) -> None:
    llm = LLM(str(tiny_folder), engine=engine)
    ids = llm.tokenize(TEXT)
    rows = expected_logprobs(ids)
    values = [row[t].item() for row, t in zip(rows, ids[1:], strict=True)]
    (found,) = llm.loglikelihood(TEXT[:11], TEXT[11:])
    assert (found.token_ids, found.num_tokens, found.num_dropped_tokens) == (ids[11:], 17, 0)
    assert found.token_logprobs == pytest.approx(values[10:], abs=1e-4)
    assert found.log_likelihood == sum(found.token_logprobs)
    assert not found.is_greedy
    (whole,) = llm.perplexity(TEXT)
    assert whole.log_likelihood == pytest.approx(sum(values), abs=1e-3)


@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0, 12.0])
@pytest.mark.parametrize("lead", [0.0, 5.0, 11.0, 40.0], ids=lambda lead: f"ahead by {lead:g}")
def test_log_probabilities_are_those_of_float64(scale: float, lead: float) -> None:
    """Also where many equal values far from the largest add up: their rounding has one sign."""
    rows = np.random.default_rng(0).normal(0, scale, (4, 50257)).astype(np.float32)
    rows[2:] = rows[2:, :1]
    rows[:, 7] += lead
    for row in rows:
        expected = torch.tensor(row).double().log_softmax(-1).numpy()
        for target in (0, 7, 50256, int(row.argmax())):
            value, is_greedy = _logprob(row, target)
            assert abs(value - expected[target]) < 1e-6
            assert is_greedy == (row[target] == row.max())


@pytest.mark.parametrize("row", [[0.0, math.nan, 1.0], [0.0, math.inf, 1.0], [-math.inf] * 3], ids=str)
def test_log_probabilities_of_logits_that_are_not_finite_are_nan(row: list[float]) -> None:
    value, _ = _logprob(np.array(row, np.float32), 0)
    assert math.isnan(value)
    assert _logprob(np.array([3e38, -3e38, -math.inf], np.float32), 2) == (-math.inf, False)


def test_greedy_continuations_are_greedy(llm: LLM) -> None:
    (made,) = llm.generate("Go", SamplingParams(max_tokens=6, temperature=0, logprobs=0))
    ids = made.outputs[0].token_ids
    other = [*ids[:-1], (ids[-1] + 1) % TINY.vocab_size]
    prompt = made.prompt_token_ids
    greedy, not_greedy = llm.loglikelihood([prompt], [ids, other])
    assert (greedy.is_greedy, not_greedy.is_greedy) == (True, False)
    assert greedy.log_likelihood == pytest.approx(made.outputs[0].cumulative_logprob, abs=1e-4)
    assert not_greedy.token_logprobs[:-1] == pytest.approx(greedy.token_logprobs[:-1], abs=1e-5)


def test_prompt_logprobs_with_everything_else_on(tiny_folder: Path, llm: LLM) -> None:
    """Chunks of 128 positions and of the scheduler, several samples, several requests, speculation."""
    params = SamplingParams(max_tokens=9, seed=3, n=2, prompt_logprobs=1, logprobs=1)
    prompts = [TEXT, "a", "Go away"]
    alone = [llm.generate(p, replace(params, n=1))[0] for p in prompts]
    speculating = LLM(str(tiny_folder), max_num_seqs=4, draft="prompt-lookup")
    for model in (llm, speculating):
        together = model.generate(prompts, params)
        for one, out in zip(alone, together, strict=True):
            assert out.outputs[0].token_ids == one.outputs[0].token_ids
            assert logprobs_of(out.prompt_logprobs) == pytest.approx(logprobs_of(one.prompt_logprobs), abs=1e-4)
        assert together[1].prompt_logprobs == [None]
    ids, stream = llm.stream_outputs(prompts, params)
    finished = {item.request_id: item for item in stream if hasattr(item, "outputs")}
    assert [logprobs_of(finished[i].prompt_logprobs) for i in ids] == [
        pytest.approx(logprobs_of(one.prompt_logprobs), abs=1e-4) for one in alone
    ]
    assert llm.generate(TEXT, ONE)[0].prompt_logprobs is None


def logprobs_of(found: list[dict[int, Logprob] | None] | None) -> list[float]:
    assert found is not None
    return [logprob.logprob for at in found if at is not None for logprob in at.values()]


def test_a_generated_token_has_the_same_logprob_as_a_prompts(llm: LLM) -> None:
    (first,) = llm.generate("Go", SamplingParams(max_tokens=6, seed=1, logprobs=2))
    whole = first.prompt_token_ids + first.outputs[0].token_ids
    (second,) = llm.generate(whole, replace(ONE, prompt_logprobs=2))
    assert second.prompt_logprobs is not None
    assert first.outputs[0].logprobs is not None
    for ours, theirs in zip(first.outputs[0].logprobs, second.prompt_logprobs[-6:], strict=True):
        assert theirs is not None
        assert list(ours) == list(theirs)
        assert [v.logprob for v in ours.values()] == pytest.approx([v.logprob for v in theirs.values()], abs=1e-4)


def test_long_prompts_are_read_in_chunks_of_128_positions(tmp_path: Path) -> None:
    config = replace(TINY, block_size=300)
    llm = LLM(str(make_folder(tmp_path / "long", config)))
    rows: list[int] = []
    extend = llm.engine.extend
    llm.engine.extend = lambda batch: (rows.append(sum(batch.num_logits)), extend(batch))[1]  # type: ignore[method-assign]
    ids = torch.randint(TINY.vocab_size, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    (out,) = llm.generate([ids], replace(ONE, prompt_logprobs=0))
    assert rows == [128, 128, 43 + 1]  # the last token is sampled from its row
    logprobs = make_model(config)(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    expected = [row[t].item() for row, t in zip(logprobs, ids[1:], strict=True)]
    assert logprobs_of(out.prompt_logprobs) == pytest.approx(expected, abs=1e-4)


def test_a_prompt_past_the_context_has_no_prompt_logprobs(llm: LLM) -> None:
    ids = torch.randint(TINY.vocab_size, (BLOCK + 9,), generator=torch.Generator().manual_seed(0)).tolist()
    params = replace(ONE, prompt_logprobs=0, overflow="slide")
    refuses(lambda: llm.generate([ids], params), f"of the prompt's {BLOCK + 9} tokens are outside the context")
    (out,) = llm.generate([ids[:BLOCK]], params)
    assert len(logprobs_of(out.prompt_logprobs)) == BLOCK - 1


def test_ids_without_text_are_not_among_prompt_logprobs(tmp_path: Path) -> None:
    llm = LLM(str(make_folder(tmp_path / "padded", chars=CHARS[:-4])))
    (out,) = llm.generate("To be", replace(ONE, prompt_logprobs=1000))
    expected = expected_logprobs(out.prompt_token_ids, len(CHARS) - 4)
    assert out.prompt_logprobs is not None
    for row, found in zip(expected, out.prompt_logprobs[1:], strict=True):
        assert found is not None
        assert sorted(found) == list(range(len(CHARS) - 4))
        assert found[7].logprob == pytest.approx(row[7].item(), abs=1e-4)
    refuses(lambda: llm.generate([1, 58], replace(ONE, prompt_logprobs=0)), "prompt_logprobs: token id 58")


def test_logits_that_are_not_finite_end_that_request_alone(llm: LLM) -> None:
    bad = llm.tokenize("Q")[0]
    extend = llm.engine.extend

    def poison(batch: StepBatch) -> Array:
        logits, token, row = extend(batch), 0, 0
        for num_new, num_logits in zip(batch.num_new, batch.num_logits, strict=True):
            if bad in batch.token_ids[token : token + num_new]:
                logits[row : row + num_logits] = math.nan
            token, row = token + num_new, row + num_logits
        return logits

    llm.engine.extend = poison  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=1)
    good, failed = llm.generate(["ab", "aQa"], params)
    assert failed.outputs[0].finish_reason == "error"
    assert "not finite" in (failed.outputs[0].error or "")
    assert (failed.prompt_logprobs, failed.finished) == (None, True)
    assert (good.outputs[0].finish_reason, len(good.outputs[0].token_ids)) == ("length", 3)
    ids, stream = llm.stream_outputs(["aQa", "ab"], params)
    finished = {item.request_id: item for item in stream if hasattr(item, "outputs")}
    assert [finished[i].outputs[0].finish_reason for i in ids] == ["error", "length"]
    refuses(lambda: llm.loglikelihood("a", "Qa"), "the log-likelihood of the continuation is nan")
    assert not llm.core.unfinished


def test_contexts_and_continuations(llm: LLM) -> None:
    pairs = llm.loglikelihood(["To be", "or not"], [", or", " to be"])
    assert [llm.decode(p.token_ids) for p in pairs] == [", or", " to be"]
    choices = llm.loglikelihood("To be", [", or", " to be"])
    assert choices[0] == pairs[0]
    assert choices[1].token_ids == pairs[1].token_ids
    assert choices[1].log_likelihood != pairs[1].log_likelihood
    (moved,) = llm.loglikelihood("To be  ", "or")
    assert llm.decode(moved.token_ids) == "  or"
    assert moved == llm.loglikelihood("To be", "  or")[0]
    assert llm.loglikelihood("", "Go") == llm.loglikelihood([[0]], [llm.tokenize("Go")])  # the start token is 0
    ids, after = llm.tokenize("a" * BLOCK), llm.tokenize("bcd")
    (long,) = llm.loglikelihood([ids], [after])
    assert long.num_dropped_tokens == 2
    assert replace(long, num_dropped_tokens=0) == llm.loglikelihood([ids[2:]], [after])[0]
    assert llm.loglikelihood("a", []) == []


def test_pairs_that_cannot_be_scored_are_named(llm: LLM, tmp_path: Path) -> None:
    refuses(lambda: llm.loglikelihood(["a", "b", "c"], ["d", "e"]), "3 contexts, but 2 continuations")
    refuses(lambda: llm.loglikelihood("a", [" b", ""]), "continuation 2 of 2: continuation=''", "adds no token")
    refuses(lambda: llm.loglikelihood("a", [[1]]), "continuation=[1]: give both as text, or both as token ids")
    refuses(lambda: llm.loglikelihood("a", "b" * (BLOCK + 1)), "has 33 tokens, but the context length is 32")
    bare = LLM(str(make_folder(tmp_path / "bare", replace(TINY, bos_token_id=None))))
    refuses(lambda: bare.loglikelihood("", "Go"), "has no start token")


def test_split_pair_moves_spaces_and_keeps_the_wholes_tokens() -> None:
    def encode(text: str) -> list[int]:  # "ab" is one token
        return [ord(c) for c in text.replace("ab", "X")]

    assert split_pair(encode, "c ", "d") == ([ord("c")], [ord(" "), ord("d")])
    assert split_pair(encode, "ca", "bd") == ([ord("c"), ord("a")], [ord("d")])  # as lm-evaluation-harness does
    assert split_pair(encode, "  ", "d") == ([], [ord(" "), ord(" "), ord("d")])


def test_windows_score_every_token_once() -> None:
    assert list(windows(10, 4, 2)) == [(0, 1, 5), (2, 5, 7), (4, 7, 9), (5, 9, 10)]
    assert list(windows(1, 4, 2)) == []
    assert list(windows(3, 4, 2)) == [(0, 1, 3)]


# In the steps of other requests ------------------------------------------------------------------------------


def test_many_continuations_process_their_context_once(llm: LLM) -> None:
    counts: list[int] = []
    extend = llm.engine.extend
    llm.engine.extend = lambda batch: (counts.append(len(batch.token_ids)), extend(batch))[1]  # type: ignore[method-assign]
    context = llm.tokenize(TEXT[:20])
    continuations = [[i, 2 * i + 1, i + 2] for i in range(10)]
    together = llm.loglikelihood([context], continuations)
    assert sum(counts) == len(context) - 1 + 10 * 3  # the last token of a continuation is not an input
    assert len(counts) < 10
    for one, ids in zip(together, continuations, strict=True):
        llm.reset_prefix_cache()
        (alone,) = llm.loglikelihood([context], [ids])
        assert one.token_logprobs == pytest.approx(alone.token_logprobs, abs=1e-5)


def test_a_stream_goes_on_in_every_step_of_a_long_text(tmp_path: Path) -> None:
    config = replace(TINY, block_size=300)
    llm = LLM(str(make_folder(tmp_path / "long", config)), engine="native", max_num_seqs=2)
    steps: list[tuple[int, int]] = []
    extend = llm.engine.extend

    def watched(batch: StepBatch) -> Any:
        steps.append((sum(n == 1 for n in batch.num_new), sum(batch.num_logits)))
        return extend(batch)

    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    expected = llm.generate("Go", params)[0].outputs[0].text
    text = [int(t) for t in np.random.default_rng(0).integers(0, TINY.vocab_size, 301)]
    alone = llm.perplexity([text])[0].log_likelihood
    stream = llm.stream("Go", params)
    first = next(stream)
    llm.engine.extend = watched  # type: ignore[method-assign]
    assert llm.perplexity([text])[0].log_likelihood == alone
    assert steps == [(1, 129), (1, 129), (1, 45)]  # 128 positions of the text and the stream's next token
    assert first + "".join(stream) == expected


def test_scoring_waits_for_its_turn_and_frees_it_after_an_interrupt(tiny_folder: Path) -> None:
    llm = LLM(str(tiny_folder), max_num_seqs=1)
    expected = llm.perplexity(TEXT)[0].log_likelihood
    _, stream = llm.stream_outputs(["Go", "To"], SamplingParams(max_tokens=5, temperature=0))
    next(stream)
    assert llm.perplexity(TEXT)[0].log_likelihood == pytest.approx(expected, abs=1e-5)
    assert len(list(stream)) > 2

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.perplexity(TEXT * 3, stride=1, progress=interrupt)
    assert not llm.core.unfinished
    assert set(llm.engine.handles) == llm.core.scheduler.handles


def test_prompt_logprobs_are_read_in_the_requests_own_prefill(tiny_folder: Path) -> None:
    llm = LLM(str(tiny_folder))
    num_tokens: list[int] = []
    extend = llm.engine.extend
    llm.engine.extend = lambda batch: (num_tokens.append(len(batch.token_ids)), extend(batch))[1]  # type: ignore[method-assign]
    (out,) = llm.generate(TEXT, replace(ONE, prompt_logprobs=0, n=2))
    num_prompt = len(out.prompt_token_ids)
    assert num_tokens[0] == num_prompt
    (again,) = llm.generate(TEXT, replace(ONE, prompt_logprobs=0))  # what is read is computed again
    assert (again.num_cached_tokens, again.prompt_logprobs) == (0, out.prompt_logprobs)
    assert llm.generate(TEXT, ONE)[0].num_cached_tokens == num_prompt - 1
