"""Models with a block that predicts the token after next: random ones with transformers' layers, and right ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.families import CASES, SMALL, make_config, make_folder, random_model
from helpers.gguf_files import ARCHITECTURES, DELTA, Stored, as_f32, convert, rewritten
from helpers.models import edit_config
from nanoinfer.checkpoints.gguf import model as gguf
from nanoinfer.checkpoints.huggingface import open_folder

NAMES = {
    "qwen3_5": ("mtp.layers.0.", "mtp.norm.", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"),
    "deepseek_v3": tuple(
        f"model.layers.4.{part}" for part in ("", "shared_head.norm.", "eh_proj", "enorm", "hnorm")
    ),
}  # fmt: skip
NAMES["qwen3_5_moe"] = NAMES["qwen3_5"]


@dataclass
class WithBlock:
    """A folder of a target with a block."""

    folder: Path
    target: Any
    """The model of transformers."""
    expected: Callable[[Tensor, Tensor], Tensor]
    """(token ids, hidden states before them), (T) and (T, C) -> the block's logits, (T, V)."""
    block: Any
    """A model of transformers whose layer and final norm are the block's."""
    inputs: tuple[Tensor, Tensor, Tensor]
    """(C, 2 C), and the weights of the norms of embeddings and of hidden states."""


def make_mtp_folder(case: str, folder: Path) -> WithBlock:
    """Write a random target with a random block to a folder."""
    target = make_folder(case, folder)
    config = make_config(case)
    config.num_hidden_layers = 1
    if case == "deepseek_v3":
        config.first_k_dense_replace = 0
        edit_config(folder, num_nextn_predict_layers=1)
    else:
        config.layer_types = ["full_attention"]
    block = random_model(config)
    block.save_pretrained(folder / "block")
    generator, size = torch.Generator().manual_seed(5), config.hidden_size
    one = 0.0 if case.startswith("qwen") else 1.0
    norm_e, norm_h = (torch.randn(size, generator=generator) * 0.3 + one for _ in range(2))
    c_in = torch.randn(size, 2 * size, generator=generator) * 0.3
    layer, norm, *inputs = NAMES[case]
    tensors = load_file(folder / "model.safetensors")
    for name, t in load_file(folder / "block" / "model.safetensors").items():
        for theirs, ours in (("model.layers.0.", layer), ("model.norm.", norm)):
            if name.startswith(theirs):
                tensors[ours + name.removeprefix(theirs)] = t
    tensors |= {f"{name}.weight": t for name, t in zip(inputs, (c_in, norm_e, norm_h), strict=True)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        offset = 1.0 - one
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight + offset, config.rms_norm_eps)

    def expected(ids: Tensor, previous: Tensor) -> Tensor:
        embedded = target.model.embed_tokens(ids)
        x = torch.cat((normed(embedded, norm_e), normed(previous, norm_h)), -1) @ c_in.T
        hidden = block.model(inputs_embeds=x[None]).last_hidden_state[0]
        return target.lm_head(hidden)  # type: ignore[no-any-return]

    return WithBlock(folder, target, expected, block, (c_in, norm_e, norm_h))


def make_right(made: WithBlock, folder: Path, reads: str) -> Path:
    """Write a model of the same shape that continues t with t + 1, and whose block is right by what it reads.

    Embeddings are rotated by the same angles from each token to the next; the layers add nothing. The block's input is
    the embedding of its token (reads="token"), or the hidden state of the token before it, rotated once ("hidden").
    """
    shutil.copytree(made.folder, folder)
    case = "deepseek_v3" if "deepseek" in made.target.config.model_type else "qwen3_5"
    tensors = load_file(folder / "model.safetensors")
    vocab, size = tensors["model.embed_tokens.weight"].shape
    angles = torch.arange(1, size // 2 + 1, dtype=torch.float64) * 2 * torch.pi / vocab
    turn = torch.block_diag(*(torch.tensor([[a.cos(), -a.sin()], [a.sin(), a.cos()]]) for a in angles)).float()
    rows = [torch.tensor([1.0, 0.0] * (size // 2))]
    while len(rows) < vocab:
        rows.append(turn @ rows[-1])
    _, norm, c_in, norm_e, norm_h = NAMES[case]
    for name, t in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            tensors[name] = torch.zeros_like(t)
    one = torch.full((size,), 0.0 if case == "qwen3_5" else 1.0)
    tensors |= {
        name: one.clone() for name in ("model.norm.weight", f"{norm}weight", f"{norm_e}.weight", f"{norm_h}.weight")
    }
    nothing = torch.zeros(size, size)
    tensors[f"{c_in}.weight"] = torch.cat((torch.eye(size), nothing) if reads == "token" else (nothing, turn), 1)
    tensors["model.embed_tokens.weight"] = torch.stack(rows)
    tensors["lm_head.weight"] = torch.stack([*rows[-1:], *rows[:-1]])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def check_gguf(made: WithBlock, folder: Path) -> None:
    """Write a GGUF file of a target and its block as llama.cpp does; compare the block with the folder's."""
    arch, added = ARCHITECTURES[made.target.config.model_type], float(made.target.config.model_type in DELTA)
    block, last = dict[str, Stored](), made.target.config.num_hidden_layers
    rewritten(convert(made.block, folder / "block.gguf"), block.update)
    more = {name.replace("blk.0.", f"blk.{last}."): t for name, t in block.items() if name.startswith("blk.0.")}
    c_in, *norms = (t.numpy() for t in made.inputs)
    for name, values in zip(
        ("eh_proj", "enorm", "hnorm"), (c_in, *(n + np.float32(added) for n in norms)), strict=True
    ):
        more[f"blk.{last}.nextn.{name}.weight"] = as_f32(values)
    more[f"blk.{last}.nextn.shared_head_norm.weight"] = block["output_norm.weight"]
    more[f"blk.{last}.nextn.embed_tokens.weight"] = block["token_embd.weight"]  # a copy, which is not read
    keys = {f"{arch}.block_count": last + 1, f"{arch}.nextn_predict_layers": 1}
    path = rewritten(convert(made.target, folder / "a.gguf"), lambda t: t.update(more), **keys)
    of_file, of_folder = (weights.mtp for weights in (gguf.open_file(path)[0], open_folder(made.folder)))
    assert of_file is not None
    assert of_folder is not None
    plain = [replace(mtp(False).config, bos_token_id=None, eos_token_ids=()) for mtp in (of_file, of_folder)]
    assert plain[0] == plain[1]
    expected = {name: t.float32() for name, t in of_folder(False).read()}
    for name, t in of_file(False).read():
        np.testing.assert_allclose(t.float32(), expected.pop(name), atol=1e-6)
    assert not expected


@dataclass
class WithAssistant:
    """A folder of a target, with that of its assistant in it, and the models of transformers."""

    folder: Path
    target: Any
    assistant: Any

    def expected(self, token_ids: list[int], num: int) -> Tensor:
        """Return the logits, (V), of the last of `num` greedy proposals; the newest token has no keys."""
        cache, ids = transformers.DynamicCache(), torch.tensor([token_ids])
        h = self.target(ids[:, :-1], output_hidden_states=True, past_key_values=cache).hidden_states[-1][:, -1:]
        kv = dict(zip(self.target.config.layer_types, ((c.keys, c.values) for c in cache.layers), strict=False))
        token, pos = ids[:, -1:], torch.tensor([[ids.shape[1] - 1]])
        for _ in range(num):
            x = torch.cat((self.target.get_input_embeddings()(token), h), -1)
            out = self.assistant(inputs_embeds=x, position_ids=pos, shared_kv_states=kv)
            h, token = out.last_hidden_state, out.logits.argmax(-1)
        return out.logits[0, 0]  # type: ignore[no-any-return]


def make_assistant(case: str, groups: int, folder: Path) -> WithAssistant:
    """Write a random target and its assistant; groups: of the assistant's tokens, 3 of which are scored; 0: none."""
    config, vocab = make_config(case), 64
    config.vocab_size = config.vocab_size_per_layer_input = vocab
    (target := random_model(config)).save_pretrained(folder)
    fields = SMALL | CASES[case][1] | {
        "hidden_size": 20, "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False, "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"], "num_hidden_layers": 3, "vocab_size": vocab,
        "vocab_size_per_layer_input": 0,
    }  # fmt: skip
    fields_of_head = {"use_ordered_embeddings": groups > 0, "num_centroids": groups, "centroid_intermediate_top_k": 3}
    text, width = transformers.Gemma4TextConfig(**fields), config.hidden_size
    of_assistant = transformers.Gemma4AssistantConfig(text_config=text, backbone_hidden_size=width, **fields_of_head)
    with pytest.MonkeyPatch.context() as patch:  # transformers 5.23 refuses a model all of whose layers share keys
        patch.setattr(transformers.Gemma4TextConfig, "kv_sharing_modes", property(lambda c: ["reuse"] * 3))
        assistant = random_model(of_assistant)
    if groups:
        assistant.masked_embedding.token_ordering.copy_(torch.randperm(vocab))
    assistant.save_pretrained(folder / "assistant")
    return WithAssistant(folder, target, assistant)
