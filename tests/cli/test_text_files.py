"""The same bytes give the same token ids by every way in: files, stdin, arguments, eval, training and bench."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.models import TINY, Run, make_folder, refuses
from nanoinfer.bench import model_folders
from nanoinfer.entrypoints.llm import LLM
from nanoinfer.tokenizers.tokenizer import from_file
from nanoinfer.training import data

TEXT = "\ufeffa\r\nb\rc\n\nd \u2028é\x0b\t\x85x"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose tokens are bytes."""
    made = make_folder(tmp_path / "bytes", replace(TINY, vocab_size=256), chars=None)
    (made / "tokenizer.json").write_text(data.train_bpe(["abc"], 256))
    return made


def test_every_way_in_gives_the_same_tokens(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tokenizer = tmp_path / "text.txt", from_file(folder / "tokenizer.json")
    path.write_bytes(TEXT.encode())
    ids = tokenizer.encode(TEXT)
    assert len(ids) == len(TEXT.encode())

    flags = ("-m", folder, "--max-tokens", 1, "--json")
    for given, stdin in (((TEXT,), None), (("--file", path), None), ((), TEXT.encode())):
        code, out, err = run("generate", *given, *flags, stdin=stdin)
        assert code == 0, err
        assert json.loads(out)["prompt_token_ids"] == ids

    scored: list[Any] = []
    perplexity = LLM.perplexity

    def noted(self: LLM, texts: str | Sequence[Any], **options: Any) -> Any:
        scored.append(texts)
        return perplexity(self, texts, **options)

    monkeypatch.setattr(LLM, "perplexity", noted)
    code, out, err = run("eval", path, "-m", folder, "--json")
    assert code == 0, err
    assert scored == [TEXT]

    assert data.encode_texts(tokenizer, data.read_texts([str(path)]), None).tolist() == ids

    long = tmp_path / "long.txt"
    long.write_bytes(TEXT.encode() * 100)
    model_folders.write_passages(tmp_path, str(folder), long)
    start = random.Random(0).randrange(100 * len(ids) - model_folders.PASSAGE_TOKENS)
    assert list(model_folders.read_passages(tmp_path)[0]) == (ids * 100)[start : start + model_folders.PASSAGE_TOKENS]


def test_a_file_that_is_no_text_is_one_line(run: Run, folder: Path, tmp_path: Path) -> None:
    bad = tmp_path / "latin1.txt"
    bad.write_bytes("naïve".encode("latin-1"))
    for arguments in (("generate", "--file", bad, "-m", folder), ("eval", bad, "-m", folder)):
        code, out, err = run(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert str(bad) in err
    for path in (bad, tmp_path, tmp_path / "none"):
        refuses(lambda p=path: data.read_texts([str(p)]), str(path))  # type: ignore[misc]
        refuses(lambda p=path: model_folders.write_passages(tmp_path, str(folder), p), str(path))  # type: ignore[misc]
