"""Files as others make them (make test-published): the proof behind the columns of docs/models.md and docs/gguf.md.

For each published model, transformers saves a small random one with its config; llama.cpp's converter makes a GGUF file
of it; this package reads both. What was found is written to docs/results/published.json and into the pages.
"""

from __future__ import annotations

import json
import re
import runpy
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenizers

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

from helpers.engines import make_engine  # noqa: E402
from helpers.environment import ROOT  # noqa: E402
from helpers.families import random_model, rename  # noqa: E402
from helpers.models import edit_config, submit  # noqa: E402
from nanoinfer import LLM, SamplingParams  # noqa: E402
from nanoinfer.checkpoints.gguf.file import read_gguf  # noqa: E402
from nanoinfer.checkpoints.gguf.splits import SPLITS  # noqa: E402
from nanoinfer.checkpoints.gguf.tokenizer import read_tokenizer  # noqa: E402
from nanoinfer.checkpoints.gpt_loading import load_gpt  # noqa: E402
from nanoinfer.checkpoints.load import open_weights  # noqa: E402
from nanoinfer.config import SchedulerConfig  # noqa: E402
from nanoinfer.core.core import Core  # noqa: E402
from nanoinfer.engines.registry import ENGINES  # noqa: E402
from nanoinfer.errors import NanoinferError  # noqa: E402
from nanoinfer.models.transformer import Transformer  # noqa: E402
from nanoinfer.sampling.sampler import sample  # noqa: E402
from nanoinfer.scheduling.scheduler import Scheduler  # noqa: E402
from nanoinfer.tokenizers.tokenizer import byte_level  # noqa: E402
from published import llama_cpp  # noqa: E402
from published.cases import CASES, SMALL, Case  # noqa: E402
from published.vocabularies import PUBLISHED, TEXTS, Vocabulary, read, with_tokens, write  # noqa: E402

pytestmark = pytest.mark.skipif(not (PUBLISHED / "installed").exists(), reason="make test-published downloads files")
RESULTS = ROOT / "docs" / "results" / "published.json"
RUNGS = [name for name in ENGINES if name != "triton"]
"""Triton's interpreter takes minutes with a published vocabulary: tests/gpu/test_triton_families.py has each family."""
LENGTH, NEW = 24, 6
MAX_MODEL_LEN = 96
NONE = "–"
"""Of a check for which nothing could be had."""
SEPARATORS = {"<|fim_pad|>", "<fim_pad>", "<|repo_name|>", "<|file_sep|>"}
"""llama.cpp ends at these names, too, which no answer has."""
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Grüße, wie geht's?"}]},
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
    },
    {
        "messages": [{"role": "user", "content": "Is it raining in Rome?"}],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "weather",
                    "description": "The weather in a city.",
                    "parameters": {
                        "type": "object",
                        "properties": {"city": {"type": "string", "description": "Its name."}},
                        "required": ["city"],
                    },
                },
            }
        ],
    },
]


@pytest.fixture(scope="module", autouse=True)
def _pages() -> Iterator[None]:
    """Write the columns of the pages when the tests end."""
    yield
    runpy.run_path(str(ROOT / "benchmarks" / "model_tables.py"))["write_proofs"]()


@pytest.mark.parametrize("name", CASES)
def test_a_published_model_runs(name: str, tmp_path: Path) -> None:
    """Numbers, tokens of every engine, ids of texts, ends of answers and chats; what fails is what the case says."""
    case = CASES[name]
    row = Proof(case, tmp_path).row()
    failed = {key for key, value in row.items() if str(value).startswith("no: ")}
    if failed == set(case.known):
        row |= {key: f"no: {reason}" for key, reason in case.known.items()}
    for key in [key for key, value in row.items() if value == "–, –"]:
        row[key] = NONE
    rows = json.loads(RESULTS.read_text()) | {name: row}
    RESULTS.write_text(json.dumps({n: rows[n] for n in CASES if n in rows}, indent=1, ensure_ascii=False) + "\n")
    assert failed == set(case.known), row


@pytest.mark.parametrize(
    "path", sorted((llama_cpp.LLAMA_CPP / "models").glob("ggml-vocab-*.out")), ids=lambda path: path.name
)
def test_vocabularies_give_the_ids_that_llama_cpp_expects(path: Path) -> None:
    metadata = read_gguf(path.with_suffix("")).metadata
    if metadata["tokenizer.ggml.model"] == "bert":
        pytest.skip("a vocabulary of encoders")
    tokenizer = read_tokenizer(metadata, path.name)
    texts = path.with_suffix(".inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    ids = [[int(i) for i in line.split()] for line in path.read_text().splitlines()]
    differ = [text for text, expected in zip(texts, ids, strict=False) if tokenizer.encode(text) != expected]
    # Qwen's tokenizer composes text (NFC), llama.cpp does not.
    assert [text for text in differ if "qwen35" not in path.name or unicodedata.is_normalized("NFC", text)] == []


class Proof:
    """What is found about a published model."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.vocabulary = case, with_tokens(read(case.vocabulary), case.added)
        self.folder, self.file = folder / "model", folder / "model.gguf"
        self.template, self.family = template_of(case, self.vocabulary), case.model_type
        self.context = min(4096, case.fields.get("max_position_embeddings", 4096))

    def row(self) -> dict[str, Any]:
        """Return the cells: `yes`, `ids` or `pieces`, `no: REASON`, or a dash."""
        case, row = self.case, {"family": self.case.model_type, "architecture": NONE, "pre": self.case.pre or "spm"}
        row["vocabulary"] = case.vocabulary
        columns: dict[str, Callable[[], str]] = {"folder": self.check_folder, "logits": self.check_logits}
        row |= {name: cell(check) for name, check in columns.items()} | {"family": self.family}
        if self.file.exists():
            row["architecture"] = read_gguf(self.file).metadata["general.architecture"]
        others = {
            "Q8_0, Q4_K_M": self.check_quantized,
            "llama.cpp": self.check_llama_cpp,
            "ik_llama.cpp": self.check_ik,
            "text": self.check_text,
            "end": self.check_ends,
            "chat": self.check_chat,
        }
        try:
            self.llm = LLM(str(self.file), max_num_seqs=2, max_model_len=self.context)
        except NanoinferError:  # one reason is enough
            return row | dict.fromkeys(others, NONE)
        return row | {name: cell(check) for name, check in others.items()}

    def check_folder(self) -> str:
        """transformers' logits from the folder; sets what the other checks expect."""
        fields = {"vocab_size": len(self.vocabulary.tokens)} | SMALL | self.case.fields
        config = transformers.AutoConfig.for_model(self.case.model_type, **fields)
        for key, token in self.vocabulary.special.items():
            setattr(config, f"{key}_id", self.vocabulary.tokens.index(token))
        self.model = random_model(config)
        self.model.save_pretrained(self.folder)
        if self.case.family is not None:
            rename(self.folder, self.case.family)
        edit_config(self.folder, **{name: value for name, value in self.case.stored.items() if value is not None})
        if "mtp_num_hidden_layers" in self.case.stored:
            add_mtp(self.folder, config.layer_types.index("full_attention"))
        write(self.vocabulary, self.folder, self.template, self.case.tokenizer_class)
        generator = torch.Generator().manual_seed(0)
        self.prompt = torch.randint(100, config.vocab_size, (1, LENGTH), generator=generator)
        ids = self.prompt
        with torch.inference_mode():
            for _ in range(NEW):
                logits = self.model(ids).logits
                ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        self.expected, self.greedy = logits[:, :LENGTH], ids[0, LENGTH:].tolist()
        gpt = opened(self.folder)
        self.family = gpt.config.family
        with torch.inference_mode():
            assert_close(gpt(self.prompt), self.expected)
        return "yes"

    def check_logits(self) -> str:
        """transformers' logits from the converter's file, and its greedy tokens on every engine."""
        llama_cpp.convert(self.folder, self.file, self.case.pre, self.case.stored)
        gpt = opened(self.file)
        with torch.inference_mode():
            self.unquantized = gpt(self.prompt)
        assert_close(self.unquantized, self.expected)
        for name in RUNGS:
            engine = make_engine(name, gpt, max_num_seqs=1)
            scheduler = Scheduler(engine, SchedulerConfig(target_step_ms=None))
            core = Core(engine, scheduler, sample, None, gpt.config.vocab_size)
            params = SamplingParams(max_tokens=NEW, temperature=0)
            request = submit(core, None, self.prompt[0].tolist(), params, seed=7, end_token_ids=())
            while core.unfinished:
                core.step()
            tokens = core.output(request).outputs[0].token_ids
            assert tokens == self.greedy, f"engine {name}: {tokens} in place of {self.greedy}"
        return "yes"

    def check_quantized(self) -> str:
        """Files of a quantizer of llama.cpp's: errors of logits as shares of their standard deviation, and native's."""
        return ", ".join(self.error_of(format, limit) for format, limit in (("Q8_0", 0.2), ("Q4_K_M", 0.6)))

    def error_of(self, format: str, limit: float) -> str:
        file = self.folder.with_name(f"model.{format}.gguf")
        if not llama_cpp.quantize(self.file, file, format):
            return NONE
        gpt = opened(file)
        with torch.inference_mode():
            logits = gpt(self.prompt)
        error = ((logits - self.unquantized).square().mean().sqrt() / self.unquantized.std()).item()
        llm = LLM(str(file), max_num_seqs=1, max_model_len=MAX_MODEL_LEN)
        params = SamplingParams(max_tokens=1, temperature=0, logprobs=1, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": self.prompt[0].tolist()}], params)[0].outputs
        ((token, logprob),) = output.logprobs[0].items()
        native = abs(logprob.logprob - logits[0, -1].log_softmax(-1)[token].item()) / logits.std().item()
        limit *= 2 if gpt.config.experts is not None else 1  # tokens get other experts; llama.cpp is as far off
        assert error < limit, f"{format}: {error:.1%} of the logits' standard deviation"
        assert native < 0.3, f"{format}, engine native: {native:.1%} of the logits' standard deviation"
        return f"{error:.1%} (native {native:.1%})"

    def check_llama_cpp(self) -> str:
        """The difference of llama.cpp's logits, as a share of their standard deviation; it is no failure."""
        logits = llama_cpp.logits(self.file, self.prompt[0].tolist())
        if logits is None:
            return NONE
        return f"{((torch.from_numpy(logits) - self.unquantized[0]).abs().max() / self.unquantized.std()).item():.2g}"

    def check_ik(self) -> str:
        """The greedy tokens of a fork of llama.cpp, as far as it loads the file; a difference is no failure."""
        tokens = llama_cpp.greedy(self.file, self.prompt[0].tolist(), NEW)
        if not tokens:
            return NONE
        same = next(
            (i for i, pair in enumerate(zip(tokens, self.greedy, strict=False)) if len(set(pair)) > 1), len(tokens)
        )
        return "same tokens" if same == NEW else f"{same} tokens of {NEW} the same"

    def check_text(self) -> str:
        """The ids of the published vocabulary, or the pieces of llama.cpp's pattern where there is none."""
        case, encode = self.case, self.llm.tokenizer.encode
        if case.pre is None or (self.vocabulary.ids and SPLITS[case.pre] == SPLITS[str(self.vocabulary.pre)]):
            for text, ids in self.vocabulary.ids.items():
                assert encode(text) == ids, f"{text[:40]!r}: {encode(text)[:12]} in place of {ids[:12]}"
            return "ids"
        if case.pre in llama_cpp.SPLIT_BY_CODE:
            return NONE
        split = byte_level(tokenizers.models.BPE({}, []), SPLITS[case.pre].patterns).pre_tokenizer
        texts = [unicodedata.normalize("NFC", text) for text in TEXTS] if SPLITS[case.pre].compose else TEXTS
        for text in texts:
            assert self.llm.decode(encode(text)) == text
            pieces = [text[a:b] for _, (a, b) in split.pre_tokenize_str(text)]
            assert pieces == llama_cpp.pieces(text, case.pre), f"{text[:40]!r}"
        return "pieces"

    def check_ends(self) -> str:
        """An answer ends at these tokens and at no others."""
        if not self.case.ends:
            return NONE
        tokens = self.vocabulary.tokens
        names = {tokens[i] for i in self.llm.config.eos_token_ids} - SEPARATORS
        assert names == set(self.case.ends), f"ends at {sorted(names)} in place of {sorted(self.case.ends)}"
        for name in self.case.ends:
            (output,) = self.llm.generate("a", ending(tokens.index(name)))[0].outputs
            assert (output.finish_reason, output.text) == ("stop", ""), f"{name}: {output}"
        return "yes"

    def check_chat(self) -> str:
        """Prompts as transformers renders them, and an answer that ends."""
        if self.template is None:
            return NONE
        render = transformers.utils.chat_template_utils.render_jinja_template
        chats = [chat for chat in CHATS if "tools" in chat or "tool_use" not in str(self.case.template)]
        for chat in chats:
            tools = chat.get("tools")
            (expected,), _ = render([chat["messages"]], tools=tools, chat_template=self.template,
                add_generation_prompt=True, **self.vocabulary.special)  # fmt: skip
            ids = self.llm.apply_chat_template(chat["messages"], tools=tools)
            assert self.llm.decode(ids) == self.llm.decode(self.llm.formatter.encode(expected)), chat
        end = self.llm.config.eos_token_ids[0]
        (output,) = self.llm.chat(chats[0]["messages"], ending(end), tools=chats[0].get("tools"))[0].outputs
        assert output.finish_reason == "stop"
        return "yes"


def add_mtp(folder: Path, layer: int) -> None:
    """Add a block that predicts the token after next, a copy of a layer, as Qwen3.5's folders have one."""
    tensors, start = safetensors.load_file(folder / "model.safetensors"), f"model.layers.{layer}."
    block = {name.replace(start, "mtp.layers.0."): t.clone() for name, t in tensors.items() if name.startswith(start)}
    norm = tensors["model.norm.weight"]
    names = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    block |= {f"mtp.{name}.weight": norm.clone() for name in names}
    block["mtp.fc.weight"] = torch.randn(len(norm), 2 * len(norm))
    safetensors.save_file(tensors | block, folder / "model.safetensors", {"format": "pt"})


def cell(check: Callable[[], str]) -> str:
    try:
        return check()
    except (Exception, SystemExit) as e:
        line = next(iter(str(e).splitlines()), "")
        return f"no: {type(e).__name__}: {re.sub(r'/[^ ]+/', '', line)}"[:300]


def ending(token: int) -> SamplingParams:
    return SamplingParams(max_tokens=3, temperature=0, allowed_token_ids=[token])


def opened(path: Path) -> Transformer:
    """Return the reference model of a file or a folder, without its tokenizer."""
    return load_gpt(open_weights(path).shortened(MAX_MODEL_LEN))


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * expected.std().item())


def template_of(case: Case, vocabulary: Vocabulary) -> str | None:
    if case.template == "own":
        return str(vocabulary.settings["chat_template"])
    return None if case.template is None else (llama_cpp.LLAMA_CPP / "models" / "templates" / case.template).read_text()
