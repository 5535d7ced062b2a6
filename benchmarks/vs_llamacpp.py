"""Compare the greedy answers of engine native with llama.cpp's on the very same GGUF file, and run both step by step.

    python benchmarks/vs_llamacpp.py MODEL.gguf

It needs llama-cpp-python (pip install '.[peers]'). Both compute with the file's own bits. gguf_files.py compares
speed and memory, quality.py perplexity.
"""

from __future__ import annotations

import argparse
import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer import LLM
from nanoinfer.engines.base import StepBatch
from nanoinfer.utils.environment import num_cpus

Logits = NDArray[np.float32]
Rows = list[tuple[int, list[int], bool]]
"""(sequence, its new tokens, whether logits after each of them are needed; otherwise only after the last)."""
QUESTIONS = (
    "What is the capital of France?", "Write a story about the sea.", "How many days are in a week, and why?",
    "Explain what a computer is.", "What is 2 + 3?", "Who wrote Hamlet, and what happens in it?",
    "Write a Python function that adds two numbers.", "Tell me a joke.", "How is bread made?",
)  # fmt: skip


class Native:
    """Engine native on sequences 0, 1, ..., which are opened when they are first used."""

    def __init__(self, path: str, sequences: int, length: int, **options: Any) -> None:
        room = {"kv_cache_memory": 2 << 30, "max_num_seqs": sequences, "max_model_len": length}
        self.llm = LLM(path, engine="native", **(room | options))
        self.engine = self.llm.engine
        self.handles: dict[int, Any] = {}

    def run(self, rows: Rows) -> Logits:
        """Append tokens; return logits in the order of the rows. They are valid until the next call."""
        batch = StepBatch()
        for sequence, tokens, every in rows:
            handle = self.handles.setdefault(sequence, None)
            if handle is None:
                handle = self.handles[sequence] = self.engine.open()
            batch.add(handle, tokens, len(tokens) if every else 1)
        return np.asarray(self.engine.extend(batch))

    def clear(self) -> None:
        """Forget all sequences."""
        self.engine.reset()
        self.handles.clear()


class LlamaCpp:
    """llama.cpp through its C interface."""

    def __init__(
        self,
        path: str,
        sequences: int,
        length: int,
        threads: int | None = None,
        *,
        use_mmap: bool = True,
        **context: int,
    ) -> None:
        import llama_cpp

        self._options = context  # fields of llama_context_params

        self.lib: Any = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, user_data: None)  # llama.cpp keeps the pointer
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        modes = llama_cpp.LLAMA_LOAD_MODE_NONE, llama_cpp.LLAMA_LOAD_MODE_MMAP
        options.n_gpu_layers, options.load_mode = 0, modes[use_mmap]
        self._threads, self.context = threads or num_cpus(), None
        if not (model := llama_cpp.llama_model_load_from_file(path.encode(), options)):
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._model = model
        self.batch = llama_cpp.llama_batch_init(2048, 0, 1)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.lengths: dict[int, int] = {}
        self.resize(sequences, length)

    def resize(self, sequences: int, length: int) -> None:
        """Replace the context by an empty one for this many sequences of this length."""
        if self.context is not None:
            self.lib.llama_free(self.context)
        params = self.lib.llama_context_default_params()
        params.n_seq_max, params.n_ctx, params.n_batch = sequences, sequences * length, 2048
        params.n_threads = params.n_threads_batch = self._threads
        for name, value in self._options.items():
            setattr(params, name, value)
        self.context = self.lib.llama_init_from_model(self._model, params)
        self.lengths.clear()

    def run(self, rows: Rows) -> Logits:
        """As `Native.run`. All rows must fit in a batch of 2,048 tokens."""
        count = wanted = 0
        for sequence, tokens, every in rows:
            for i, token in enumerate(tokens):
                b, needed = self.batch, every or i == len(tokens) - 1
                b.token[count], b.pos[count] = token, self.lengths.get(sequence, 0) + i
                b.n_seq_id[count], b.seq_id[count][0], b.logits[count] = 1, sequence, needed
                count, wanted = count + 1, wanted + needed
            self.lengths[sequence] = self.lengths.get(sequence, 0) + len(tokens)
        self.batch.n_tokens = count
        if code := self.lib.llama_decode(self.context, self.batch):
            raise RuntimeError(f"llama_decode of {count} tokens returned {code}")
        logits: Logits = np.ctypeslib.as_array(self.lib.llama_get_logits(self.context), (wanted, self.vocab_size))
        return logits

    def clear(self) -> None:
        """Forget all sequences."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), False)
        self.lengths.clear()


def main() -> None:
    """Print how far the answers are equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    given = parser.parse_args()
    print("\n".join(compare_answers(Native(given.model, 1, 1024), LlamaCpp(given.model, 1, 1024))[0]))


@dataclass
class Answer:
    """What both systems answer to one question, up to the first token that differs."""

    num_equal: int = 0
    ended: bool = False
    """Whether the last of the equal tokens ends the answer."""
    rounding: float = 0.0
    """Largest difference of the systems in the distance of native's two best logits, where the best is the same."""
    margin: float | None = None
    """Where the best tokens differ: the larger of the distances between their logits in the two systems."""


def compare_answer(ours: Native, theirs: LlamaCpp, question: str, num_tokens: int) -> Answer:
    """Generate greedy answers with both systems."""
    new = ours.llm.apply_chat_template([{"role": "user", "content": question}])
    ours.clear()
    theirs.clear()
    answer = Answer()
    while answer.num_equal < num_tokens and not answer.ended:
        a, b = (system.run([(0, new, False)])[0] for system in (ours, theirs))
        best, second = (int(token) for token in a.argsort()[:-3:-1])
        if (other := int(b.argmax())) != best:
            answer.margin = float(max(a[best] - a[other], b[other] - b[best]))
            break
        answer.rounding = max(answer.rounding, abs(float((a[best] - a[second]) - (b[best] - b[second]))))
        answer.num_equal, answer.ended, new = answer.num_equal + 1, best in ours.llm.config.eos_token_ids, [best]
    return answer


def compare_answers(ours: Native, theirs: LlamaCpp, num_tokens: int = 96) -> tuple[list[str], list[Answer]]:
    """Return a line for each question, and the answers.

    The last line has the rounding: the largest difference of the systems in the distance of two logits, measured where
    they agree. Where the answers differ, the distance must be smaller.
    """
    answers = [compare_answer(ours, theirs, question, num_tokens) for question in QUESTIONS]
    lines = []
    for question, answer in zip(QUESTIONS, answers, strict=True):
        line = f"{question} {answer.num_equal} tokens are equal"
        if answer.margin is not None:
            line += f", then the two best logits are {answer.margin:.3f} apart"
        lines.append(f"{line}, then both end" if answer.ended else line)
    return [*lines, f"rounding: {max(a.rounding for a in answers):.3f}"], answers


if __name__ == "__main__":
    main()
