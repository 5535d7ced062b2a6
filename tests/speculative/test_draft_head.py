"""Draft heads: what the engines show of the hidden state, speculation with a head, its files, and its training."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.cli import command, one_thread
from helpers.drafters import Scripted
from helpers.engines import (
    BATCHES,
    GREEDY,
    V,
    make_engine,
    naive_greedy,
    nightly_if_interpreted,
    prompt,
    slow_if_interpreted,
)
from helpers.errors import refuses
from helpers.models import CHARS, TINY, load_gpt, make_folder, make_limits, make_model, make_weights, submit, weights_of
from helpers.speculation import SAMPLED, generate, make_core, plain
from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoints import huggingface
from nanoinfer.checkpoints.load import builtin_names
from nanoinfer.checkpoints.transforms import widen
from nanoinfer.cli.train import _Writer
from nanoinfer.config import EngineConfig
from nanoinfer.engines.base import StepBatch
from nanoinfer.engines.native import NativeEngine
from nanoinfer.engines.registry import ENGINES
from nanoinfer.models.transformer import Transformer
from nanoinfer.sampling.sampler import SamplerRow, sample
from nanoinfer.speculative import draft_head, numpy_ops, torch_ops
from nanoinfer.speculative.base import DraftRequest
from nanoinfer.speculative.draft_head import DraftHead, DraftHeadConfig, HeadDrafter, TargetEmbeddings
from nanoinfer.tokenizers import tokenizer as tokenizers
from nanoinfer.tokenizers.tokenizer import CharTokenizer, char_to_json, fingerprint
from nanoinfer.training import distill
from nanoinfer.training.loop import TrainProgress, prepare, train, validate
from nanoinfer.training.train_config import TrainConfig
from nanoinfer.training.train_draft_head import STEPS, HeadRun, RecurrentHead
from nanoinfer.utils.arrays import Array, to_numpy

CONFIG = DraftHeadConfig("tiny", V, TINY.n_embd, 24, fingerprint(CharTokenizer(CHARS)))
TEXT = "the cat sat on the mat, and the dog sat on the log. " * 80
native = pytest.mark.skipif(ENGINES["native"].unavailable() is not None, reason="built without the extension")


def make_head(config: DraftHeadConfig = CONFIG, seed: int = 0, std: float = 0.3) -> DraftHead:
    """A head with random weights, large enough that it says different things."""
    generator, shapes = np.random.default_rng(seed), draft_head.shapes(config)
    return DraftHead(config, {name: np.float32(generator.normal(0.0, std, shape)) for name, shape in shapes.items()})


def make_drafter(gpt: Transformer, head: DraftHead | None = None, kind: str = "numpy") -> HeadDrafter:
    head = head or make_head()
    frame = draft_head.target_embeddings(head.config, weights_of(gpt), "target")
    ops: ModuleType = torch_ops if kind == "torch" else numpy_ops
    if kind != "numpy":
        place = torch_ops.placement("cpu", "float32") if kind == "torch" else numpy_ops.native_placement(threads=2)
        head, frame = head.map(place), frame.map(place)
    return HeadDrafter("head", head, frame, sample, V, ops=ops, max_num_seqs=4)


# The engines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ENGINES)
@slow_if_interpreted
def test_the_hidden_states_are_what_the_logits_are_made_from(name: str, tied: bool) -> None:
    gpt = make_model(replace(TINY, block_size=400, tie_word_embeddings=tied))
    engine = make_engine(name, gpt)
    a, b, c = engine.open(), engine.open(), engine.open()
    steps = ([(a, 5, 5), (b, 3, 1), (c, 2, 0)], [(c, 1, 1), (a, 4, 2)], [(b, 300, 290), (c, 7, 7)], [(a, 1, 0)])
    for step in steps:
        batch = StepBatch()
        for handle, num_new, num_logits in step:
            batch.add(handle, prompt(num_new, handle), num_logits)
        logits = torch.as_tensor(engine.extend(batch))
        engine.truncate(step[0][0], engine.length(step[0][0]) - 1)  # nothing but the next step changes them
        hidden = torch.as_tensor(engine.hidden())
        assert hidden.dtype == torch.float32
        assert hidden.shape == (sum(n for _, _, n in step), TINY.n_embd)
        torch.testing.assert_close(F.linear(hidden, gpt.lm_head.weight), logits, atol=1e-4, rtol=1e-4)
    found = []
    for hidden_only, num_rows in ((True, 0), (False, 5)):
        batch = StepBatch(hidden_only=hidden_only)
        batch.add(b, prompt(6, 1), 4)
        batch.add(c, prompt(2, 2), 1)
        assert engine.extend(batch).shape == (num_rows, TINY.vocab_size)
        found.append(torch.as_tensor(engine.hidden()).clone())
        engine.truncate(b, engine.length(b) - 6)
        engine.truncate(c, engine.length(c) - 2)
    assert torch.equal(*found)
    engine.extend(StepBatch())
    assert engine.hidden().shape == (0, TINY.n_embd)


@native
@pytest.mark.parametrize(("quantization", "tolerance"), [("int8", 0.05), ("int4", 0.4)])
def test_the_hidden_states_of_fewer_bits(quantization: str, tolerance: float) -> None:
    """They are not rounded themselves: what differs is the head, and the layers before."""
    gpt = make_model()
    engines = [NativeEngine(weights_of(gpt), make_limits(), EngineConfig(quantization=q)) for q in (None, quantization)]
    for engine in engines:
        batch = StepBatch()
        batch.add(engine.open(), prompt(9), 9)
        engine.extend(batch)
    exact, rounded = (to_numpy(e.hidden()) for e in engines)
    assert np.linalg.norm(exact - rounded) < tolerance * np.linalg.norm(exact)


@native
def test_the_decoder_checks_what_it_writes_to() -> None:
    engine = NativeEngine(weights_of(make_model()), make_limits())
    batch = StepBatch()
    batch.add(engine.open(), prompt(3), 2)
    engine.extend(batch)
    for shape in ((1, 16), (3, 16), (2, 15), (0, 16)):
        with pytest.raises(ValueError, match=r"out must be \(2, 16\)"):
            engine._decoder.hidden(out=torch.zeros(shape))
    with pytest.raises(TypeError):
        engine._decoder.hidden(out=torch.zeros(2, 16, dtype=torch.float64))


# Speculation ---------------------------------------------------------------------------------------------


class Watcher(Scripted):
    """Checks what it is shown: the newest token is drawn from the hidden state of its own row."""

    def __init__(
        self, gpt: Transformer, texts: dict[tuple[int, ...], list[int]], num_right: Callable[[int], int]
    ) -> None:
        super().__init__(texts, num_right)
        self._gpt = gpt
        self.said: dict[SamplerRow, list[int]] = {}

    def update_hidden(self, rows: Sequence[SamplerRow], hidden: Array) -> None:
        assert hidden.shape == (len(rows), TINY.n_embd)
        for row, token in zip(
            rows, F.linear(torch.as_tensor(hidden), self._gpt.lm_head.weight).argmax(-1).tolist(), strict=True
        ):
            self.said.setdefault(row, []).append(token)


@pytest.mark.parametrize("name", ENGINES)
@nightly_if_interpreted
def test_a_drafter_sees_the_state_of_the_newest_token(name: str) -> None:
    """Greedy, so that the state says which token that is: after rejections, in a batch, with forks and slid windows."""
    gpt = make_model()
    prompts = [prompt(n, i) for i, n in enumerate((4, 1, 9))]
    params = [replace(GREEDY, max_tokens=40, overflow="slide"), GREEDY, replace(GREEDY, n=2)]
    texts = {
        tuple(p): naive_greedy(gpt, p, q.max_tokens, TINY.block_size // 2) for p, q in zip(prompts, params, strict=True)
    }
    watcher = Watcher(gpt, texts, lambda i: (3, 0, 2, 1)[i % 4])
    core = make_core(make_engine(name, gpt), watcher, 3, max_num_batched_tokens=8)
    requests = [submit(core, None, p, q, 0) for p, q in zip(prompts, params, strict=True)]
    while core.unfinished:
        core.step()
        for r in requests:
            for s in r.sequences:
                if (said := watcher.said.get(s)) and not s.finish_reason:  # type: ignore[call-overload]
                    assert said[-1] == s.token_ids[-1]
    assert [list(s.output_token_ids) for r in requests for s in r.sequences] == [
        *(texts[tuple(p)] for p in prompts), texts[tuple(prompts[2])]
    ]  # fmt: skip
    assert len(watcher.said) == 4


@pytest.mark.parametrize("batch", BATCHES, ids=lambda b: b.replace(" ", "-"))
@pytest.mark.parametrize("k", [1, 4, None], ids=lambda k: f"k-{k or 'auto'}")
@pytest.mark.parametrize("name", ENGINES)
@nightly_if_interpreted
@pytest.mark.nightly_if(lambda name, k: name not in ("native", "static") and k != 4)
def test_greedy_tokens_equal_the_naive_loop(name: str, k: int | None, batch: str) -> None:
    gpt = make_model()
    prompts = [prompt(n, i) for i, n in enumerate(BATCHES[batch])]
    params = [replace(GREEDY, max_tokens=3 + 4 * i) for i in range(len(prompts))]
    drafter = make_drafter(gpt)
    made = generate(make_core(make_engine(name, gpt), drafter, k), prompts, params)
    expected = [naive_greedy(gpt, p, q.max_tokens) for p, q in zip(prompts, params, strict=True)]
    assert [outputs[0][0] for outputs in made] == expected  # type: ignore[index]
    assert not drafter._hidden


@pytest.mark.parametrize("params", SAMPLED.values(), ids=SAMPLED)
@pytest.mark.parametrize("k", [3, None], ids=lambda k: f"k-{k or 'auto'}")
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.nightly_if(lambda name: name not in ("native", "static"))
@pytest.mark.slow_if(lambda name: name != "native")
def test_the_same_seed_gives_the_same_text(name: str, k: int | None, params: SamplingParams) -> None:
    gpt = make_model()
    engine, drafter = make_engine(name, gpt), make_drafter(gpt)
    prompts = [prompt(n, i) for i, n in enumerate((5, 1, 12, 20))]
    core = make_core(engine, drafter, k)
    assert generate(core, prompts, [params] * 4, eos=(11,)) == plain(engine, prompts, [params] * 4, eos=(11,))
    assert not drafter._hidden


class Row:
    """A sequence of which nothing has been generated."""

    seed, sample_index, num_output_tokens = 5, 0, 0
    prompt_token_ids, output_token_ids, end_token_ids, bad_words = (3,), (), (), None

    def __init__(self, temperature: float) -> None:
        self.params = SamplingParams(temperature=temperature)


@pytest.mark.parametrize("kind", ["numpy", pytest.param("native", marks=native), "torch"])
@pytest.mark.parametrize("keep_weights", [False, True])
def test_what_it_proposes(keep_weights: bool, kind: str) -> None:
    """Token by token what the module's docstring says, whatever else is asked for at the same time."""
    gpt, head = make_model(), make_head()
    drafter, module = make_drafter(gpt, head, kind), RecurrentHead.of(head)
    rows = [Row(0.0), Row(0.0), Row(1.0), Row(0.0)]
    hidden = torch.randn(3, TINY.n_embd, generator=torch.Generator().manual_seed(1))
    drafter.update_hidden(rows[:3], hidden if kind == "torch" else hidden.numpy())
    requests = [
        DraftRequest(row, [1, 2, 7 + i], 0, k, keep_weights)
        for i, (row, k) in enumerate(zip(rows, (2, 5, 3, 4), strict=True))
    ]
    proposals = drafter.propose(requests)
    assert [len(p.token_ids) for p in proposals] == [2, 5, 3, 0]  # the last has shown nothing yet
    wte = gpt.transformer["wte"].weight
    for i in (0, 1):
        state, token, expected = hidden[i], 7 + i, []
        for _ in range(requests[i].num_tokens):
            state = module(state, wte[token])
            token = int(F.linear(state, wte).argmax())
            expected.append(token)
        assert proposals[i].token_ids == expected
    for p in proposals[:3]:
        assert (p.weights is not None) == keep_weights
        if p.weights is not None:
            assert p.weights.shape == (len(p.token_ids), V)
    (alone,) = drafter.propose([requests[2]])
    assert alone.token_ids == proposals[2].token_ids
    assert drafter.num_behind(requests[0]) == 0
    assert 0 < drafter.estimate_sec(1, 2, 0) <= drafter.estimate_sec(4, 8, 0)


def test_the_operations_on_arrays_are_pytorchs() -> None:
    generator = torch.Generator().manual_seed(0)
    x, other = (torch.randn(5, 7, generator=generator) * 4 for _ in range(2))
    weight, bias = torch.randn(3, 7, generator=generator), torch.randn(7, generator=generator)
    for name, arguments in {
        "linear": (x, weight, bias[:3]),
        "layer_norm": (x, weight[0], bias),
        "gelu": (x * 3,),
        "like": (x, weight),
        "finite": (torch.tensor([1.0, float("nan"), float("inf"), -float("inf")]),),
    }.items():
        ours = getattr(numpy_ops, name)(*(a.numpy() for a in arguments))
        assert ours.dtype == np.float32
        torch.testing.assert_close(torch.from_numpy(ours), getattr(torch_ops, name)(*arguments))
    for name in ("concatenate", "stack"):
        assert np.array_equal(
            getattr(numpy_ops, name)([x.numpy(), other.numpy()]), getattr(torch_ops, name)([x, other])
        )
    head, state, embedded = make_head(), torch.randn(2, 5, TINY.n_embd), torch.randn(2, 5, TINY.n_embd)
    ours = draft_head.next_state(numpy_ops, head.parameters, state.numpy(), embedded.numpy())
    trained = RecurrentHead.of(head)(state, embedded)
    torch.testing.assert_close(torch.from_numpy(ours), trained.detach())


def test_a_head_that_overflows_costs_time_and_nothing_else() -> None:
    gpt, head = make_model(), make_head(std=1e30)
    params = [GREEDY, replace(SAMPLED["plain"], max_tokens=9)]
    core = make_core(make_engine("static", gpt), make_drafter(gpt, head), 3)
    assert generate(core, [prompt(5)] * 2, params) == plain(make_engine("static", gpt), [prompt(5)] * 2, params)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_widened_target_is_proposed_the_same(tied: bool) -> None:
    gpt = make_model(replace(TINY, tie_word_embeddings=tied))
    tallies = []
    for target in (gpt, load_gpt(widen(weights_of(gpt), n_embd=3 * TINY.n_embd, n_layer=3))):
        core = make_core(make_engine("static", target), make_drafter(target), 4)
        requests = [submit(core, None, prompt(6, i), replace(GREEDY, max_tokens=20), 0) for i in range(3)]
        said: list[list[int]] = []
        propose = core.speculator.drafter.propose  # type: ignore[union-attr]

        def listen(
            requests: Sequence[DraftRequest], propose: Callable[..., list] = propose, said: list[list[int]] = said
        ) -> list:
            proposals = propose(requests)
            said += [p.token_ids for p in proposals]
            return proposals

        core.speculator.drafter.propose = listen  # type: ignore[union-attr,method-assign]
        while core.unfinished:
            core.step()
        tallies.append((said, [core.output(r).outputs[0].token_ids for r in requests]))
    assert tallies[0] == tallies[1]
    assert len(tallies[0][0]) > 3


# Files and names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_saved_and_loaded(tmp_path: Path, dtype: str) -> None:
    head = make_head()
    draft_head.save(head, tmp_path / "head", dtype)
    loaded = draft_head.load(tmp_path / "head")
    assert loaded.config == CONFIG
    stored = load_file(tmp_path / "head" / "draft_head.safetensors")
    assert stored.keys() == head.parameters.keys() == loaded.parameters.keys()
    for name, p in head.parameters.items():
        expected = torch.tensor(p).to(getattr(torch, dtype))
        assert torch.equal(stored[name], expected)
        assert stored[name].dtype == expected.dtype
        assert np.array_equal(loaded.parameters[name], expected.float())
    again = RecurrentHead.of(loaded).to_head()
    assert all(np.array_equal(again.parameters[name], p) for name, p in loaded.parameters.items())
    assert draft_head.find(str(tmp_path / "head")) == tmp_path / "head"
    for nothing in (str(tmp_path), "shakespeare", "prompt-lookup", "x" * 5000, "self:int8", "\0"):
        assert draft_head.find(nothing) is None


@pytest.mark.slow
def test_a_head_by_its_name(tmp_path: Path) -> None:
    folder, head = make_folder(tmp_path / "m"), tmp_path / "head"
    draft_head.save(make_head(), head)
    params = [SamplingParams(max_tokens=12, temperature=t, seed=3) for t in (0.0, 1.0)]
    expected = [o.outputs for o in LLM(str(folder)).generate(["Go", "To be"], params)]
    for engine in [n for n, spec in ENGINES.items() if spec.unavailable() is None]:
        llm = LLM(str(folder), engine=engine, draft=str(head), speculate_k=3)
        outputs = llm.generate(["Go", "To be"], params)
        assert [o.outputs for o in outputs] == expected
        assert all(o.metrics.speculation.num_proposed > 0 for o in outputs)  # type: ignore[union-attr]
    rejecting = LLM(str(folder), draft=str(head), speculate_k=3, speculate_rule="reject")
    assert rejecting.generate("Go", params[0])[0].outputs == expected[0]
    assert len(rejecting.generate("Go", params[1])[0].outputs[0].token_ids) == 12


def test_the_built_in_head_is_no_model() -> None:
    assert "shakespeare-head" not in builtin_names()
    folder = draft_head.find("shakespeare-head")
    assert folder is not None
    head = draft_head.load(folder)
    assert head.config.target == "shakespeare"
    llm = LLM("shakespeare", draft="shakespeare-head", speculate_k=4)
    params = SamplingParams(max_tokens=60, temperature=0)
    (output,) = llm.generate("KING RICHARD III:\nWhat", params)
    assert output.outputs == LLM("shakespeare").generate("KING RICHARD III:\nWhat", params)[0].outputs
    assert output.metrics.speculation is not None
    assert output.metrics.speculation.mean_accepted_length > 1.5  # type: ignore[operator]


def test_a_head_of_another_target_is_refused(tmp_path: Path) -> None:
    folder, head = str(make_folder(tmp_path / "m")), tmp_path / "head"

    def names(config: DraftHeadConfig, *words: str) -> None:
        draft_head.save(make_head(config), head)
        refuses(lambda: LLM(folder, draft=str(head)), "'tiny'", folder, *words)

    names(replace(CONFIG, n_embd=8), "n_embd=8", "n_embd=16")  # a divisor, but the target is not widened
    names(replace(CONFIG, n_embd=32), "n_embd=32", "n_embd=16")
    names(replace(CONFIG, vocab_size=V + 1), f"vocab_size={V + 1}", f"vocab_size={V}")
    other = fingerprint(CharTokenizer(CHARS[::-1]))
    names(replace(CONFIG, vocabulary=other), "different tokens for the same 59 ids")
    draft_head.save(make_head(replace(CONFIG, vocabulary=None)), head)
    LLM(folder, draft=str(head))
    huggingface.save(make_weights(), tmp_path / "ids")  # a target without a tokenizer: only the number can be compared
    draft_head.save(make_head(), head)
    LLM(str(tmp_path / "ids"), draft=str(head))


def test_broken_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "head"

    def breaks(change: Callable[[], object], *words: str) -> None:
        draft_head.save(make_head(), path)
        change()
        refuses(lambda: draft_head.load(path), str(path), *words)

    def config(**changes: object) -> Callable[[], object]:
        file = path / "draft_head.json"
        return lambda: file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    def weights(change: Callable[[dict[str, Tensor]], object]) -> Callable[[], object]:
        def rewrite() -> None:
            tensors = load_file(path / "draft_head.safetensors")
            change(tensors)
            save_file(tensors, path / "draft_head.safetensors")

        return rewrite

    breaks(lambda: (path / "draft_head.json").write_text("{"), "cannot be read as a draft head's config")
    breaks(lambda: (path / "draft_head.json").write_text("[" * 50000), "cannot be read as a draft head's config")
    breaks(lambda: (path / "draft_head.json").write_text("[1]"), "a list", "n_hidden")
    breaks(lambda: (path / "draft_head.json").write_text(" " * 70000), "70000 bytes", "65536")
    breaks(lambda: (path / "draft_head.json").unlink(), "cannot be read")
    breaks(config(surprise=1), "surprise")
    breaks(config(n_embd=0), "n_embd=0")
    breaks(config(n_hidden="many"), "n_hidden='many'")
    breaks(config(target=""), "target=''")
    breaks(config(vocabulary=7), "vocabulary=7")
    breaks(config(n_hidden=2**31 - 1), "c_fc.weight is [24, 32]", "[2147483647, 32]")  # nothing of it is allocated
    breaks(lambda: (path / "draft_head.safetensors").unlink(), "draft_head.safetensors")
    breaks(lambda: (path / "draft_head.safetensors").write_bytes(b"\xff" * 99), "draft_head.safetensors")
    breaks(weights(lambda t: t.pop("c_fc.bias")), "c_fc.bias is missing")
    breaks(weights(lambda t: t.update(more=torch.zeros(1))), "unexpected tensor 'more'")
    breaks(weights(lambda t: t.update({"c_fc.bias": torch.zeros(24, dtype=torch.int8)})), "c_fc.bias is 'int8'")
    breaks(weights(lambda t: t["c_fc.bias"].fill_(float("nan"))), "c_fc.bias has values that are not finite")
    (tmp_path / "file").write_text("")
    refuses(lambda: draft_head.save(make_head(), tmp_path / "file" / "sub"), "cannot be written")


def test_fingerprints() -> None:
    prints = [fingerprint(CharTokenizer(c)) for c in (CHARS, CHARS[::-1], CHARS[:-1], CHARS)]
    assert prints[0] == prints[3]
    assert len(set(prints)) == 3
    again = tokenizers.from_json(char_to_json(CHARS), "there")
    assert fingerprint(again) == prints[0]


# Training ------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    (tmp_path / "text.txt").write_text(TEXT)
    return TrainConfig(
        data=(str(tmp_path / "text.txt"),), out=str(tmp_path / "out"), draft_head=str(make_folder(tmp_path / "target")),
        distill_tokens=3000, head_hidden=64, block_size=32, batch_size=8, max_steps=60, warmup_steps=10,
        learning_rate=1e-2, eval_interval=20,
    )  # fmt: skip


def run(config: TrainConfig, *, resume: bool = False) -> list[TrainProgress]:
    history: list[TrainProgress] = []
    train(prepare(config, resume=resume, complete=_Writer(config)), history.append)
    return history


def test_a_head_learns_what_its_target_says(config: TrainConfig) -> None:
    start = validate(prepare(config, complete=_Writer(config)))
    history = run(config)
    validations = [p.val_loss for p in history if p.val_loss is not None]
    assert validations[-1] < validations[0] < start
    assert validations[-1] < 0.7 * start
    head = draft_head.load(Path(config.out))
    assert head.config == replace(CONFIG, target=str(config.draft_head), n_hidden=64)
    accepted = []
    for draft in (config.out, str(config.data[0]) + ".random"):
        if draft != config.out:
            draft_head.save(make_head(replace(CONFIG, n_hidden=64), std=3.0), Path(draft))  # right by chance only
        llm = LLM(str(config.draft_head), draft=draft, speculate_k=2)
        outputs = llm.generate(["the", "dog sat", "on the m"], SamplingParams(max_tokens=24, temperature=0))
        accepted.append(sum(o.metrics.speculation.num_accepted for o in outputs))  # type: ignore[union-attr]
    assert accepted[0] > 2 * accepted[1]


def test_the_loss_is_that_of_every_step(config: TrainConfig) -> None:
    """Against the module's docstring, one position and one step at a time."""
    gpt, head = make_model(), RecurrentHead.of(make_head())
    tokens = torch.randint(V, (3, 10), generator=torch.Generator().manual_seed(0))
    batches = distill.run_target(gpt, tokens, V, 0, torch.float32)
    wte = gpt.transformer["wte"].weight
    part = HeadRun(config, torch.device("cpu"), head, "", batches, batches, 1.0, wte=wte)
    head.eval()
    found = part.loss(tokens, batches.hidden)
    losses = []
    for b in range(3):
        for t in range(10 - STEPS):
            state = batches.hidden[b, t]
            for k in range(1, STEPS + 1):
                state = head(state, wte[tokens[b, t + k]])
                p, q = (F.linear(x, wte).log_softmax(-1) for x in (batches.hidden[b, t + k], state))
                losses.append((p.exp() * (p - q)).sum())
    torch.testing.assert_close(found, torch.stack(losses).mean(), atol=1e-4, rtol=1e-4)
    head.train()
    assert part.loss(tokens, batches.hidden) > found


@pytest.mark.slow
def test_resuming_gives_the_same_weights(config: TrainConfig, tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def kill(progress: TrainProgress) -> None:
        if progress.step == 30:
            raise Killed

    whole, cut = (replace(config, out=str(tmp_path / name)) for name in ("whole", "cut"))
    history = run(whole)
    with pytest.raises(Killed):
        train(prepare(cut, complete=_Writer(cut)), kill)
    assert [p.loss for p in run(cut, resume=True)] == [p.loss for p in history[20:]]
    one, other = (Path(c.out) / "draft_head.safetensors" for c in (whole, cut))
    assert one.read_bytes() == other.read_bytes()
    refuses(lambda: run(cut), "already holds training.state")
    refuses(lambda: run(replace(cut, head_hidden=32), resume=True), "head_hidden=64, not 32")


def test_what_cannot_be_trained_is_refused(config: TrainConfig, tmp_path: Path) -> None:
    def writer(*_: object) -> list[list[int]]:
        raise AssertionError("asked to write before everything was checked")

    nameless = make_folder(tmp_path / "nameless", chars=None)
    for changed, words in (
        (replace(config, draft_head=str(nameless)), ("draft_head=", "nameless", "no tokenizer")),
        (replace(config, block_size=33), ("block_size=33 is more than the 32 of draft_head=",)),
        (replace(config, block_size=4), ("block_size=4 is too short", "use 5 or more")),
    ):
        refuses(lambda c=changed: prepare(c, complete=writer), *words)  # type: ignore[misc]
    refuses(lambda: replace(config, distill="gpt2"), "remove distill and init")
    refuses(lambda: replace(config, head_hidden=0), "head_hidden=0")


@pytest.mark.slow
def test_the_command(config: TrainConfig) -> None:
    done = subprocess.run(
        command(
            "train", "--data", *config.data, "--out", config.out, "--draft-head", config.draft_head,
            "--distill-tokens", 1000, "--block-size", 32, "--head-hidden", 16, "--max-steps", 4, "--eval-interval", 2,
        ),
        capture_output=True, text=True, env=one_thread(), check=True,
    )  # fmt: skip
    assert done.stdout.startswith(f"best KL divergence from {config.draft_head} on validation text ")
    assert done.stdout.rstrip().endswith(f"draft head in {config.out}")
    assert "step 4/4" in done.stderr


def test_a_frame_in_another_dtype() -> None:
    wte, place = np.ones((5, 4), np.float32), torch_ops.placement("cpu", "bfloat16")
    tied = TargetEmbeddings(wte, wte, 2.0).map(place)
    assert tied.lm_head is tied.wte
    assert TargetEmbeddings(wte, wte.copy(), 1.0).map(place).lm_head.dtype == torch.bfloat16  # type: ignore[attr-defined]
