"""Folders of packed weights."""

from __future__ import annotations

from pathlib import Path

from helpers.models import CHARS, TINY, make_model
from nanoinfer import SamplingParams
from nanoinfer.checkpoints import packed
from nanoinfer.checkpoints.gpt_loading import weights_of
from nanoinfer.config import ModelConfig
from nanoinfer.tokenizers.tokenizer import char_to_json

GREEDY = SamplingParams(max_tokens=12, temperature=0)
TEXT = [5, 1, 7, 30, 2, 9, 44]


def pack(folder: Path, format: str, config: ModelConfig = TINY) -> Path:
    packed.write_folder(weights_of(make_model(config)), folder, format, char_to_json(CHARS), threads=1)
    return folder
