"""A small random chat model with a byte-level tokenizer."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers as hf
from helpers.chat_templates import CHATML
from helpers.models import make_weights
from nanoinfer.checkpoints import huggingface
from tokenizers import decoders, models, pre_tokenizers, trainers

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "hidden_act": "silu",
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>"]
HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]


@cache
def tokenizer_json() -> str:
    core = hf.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["system user assistant the and hello there be brief again answer"] * 9, trainer)
    text: str = core.to_str()
    return text


def chat_folder(path: Path, template: str | None = CHATML, **config: object) -> Path:
    """Write a random llama with a byte-level tokenizer and a chat template to a folder and return it."""
    path.mkdir(parents=True, exist_ok=True)
    vocab_size = hf.Tokenizer.from_str(tokenizer_json()).get_vocab_size()
    (path / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": vocab_size} | config))
    weights = make_weights(huggingface.read_config(path / "config.json"), std=0.4)
    huggingface.save(weights, path, tokenizer_json())
    tokens = {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "bos_token": None, "pad_token": "<pad>"}
    (path / "tokenizer_config.json").write_text(json.dumps(tokens | ({"chat_template": template} if template else {})))
    return path
