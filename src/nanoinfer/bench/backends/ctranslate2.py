"""CTranslate2: its Generator, with a callback for each token; and the export to its model folder.

The callback ends each request at its own number of tokens, and CTranslate2 removes it from the batch. It has no
continuous batching, and of the prompts of a batch it reads the shortest one's length at once and the rest one token at
a time. So unequal prompts run sorted by length, 32 at a time, which takes a quarter less processor time for the mix of
suite `serving` than one batch of all. Every GPT-2 is exported, with a vocabulary of "t0", "t1", ...
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nanoinfer.bench.backends import FOLDER, Recorder, export_once, require_case, require_module, require_room
from nanoinfer.bench.case import Case, Requests
from nanoinfer.bench.stats import RunTimes
from nanoinfer.checkpoints import huggingface
from nanoinfer.checkpoints.huggingface import open_folder
from nanoinfer.config import DTYPES
from nanoinfer.errors import NanoinferError
from nanoinfer.utils.environment import num_cpus
from nanoinfer.utils.files import reason

SORTED_BATCH = 32  # requests of unequal prompts at a time


def compute_type(case: Case) -> str:
    """Return CTranslate2's name for a case's weights and arithmetic ; raise NanoinferError for others."""
    require_case(case, dtypes=DTYPES, quantizations=("int8",))
    name = case.dtype
    if case.quantization is not None:
        name = "int8" if case.dtype == "float32" else f"int8_{case.dtype}"
    device, _, index = case.device.partition(":")
    try:
        have = require_module("ctranslate2").get_supported_compute_types(device, int(index or 0))
    except (ValueError, RuntimeError) as e:  # no such device, or built without CUDA
        raise NanoinferError(f"ctranslate2 on device={case.device!r}: {reason(e)}") from None
    if name not in have:
        raise NanoinferError(f"ctranslate2 has no {name} on this {device}: it has {', '.join(sorted(have))}")
    return name


class CTranslate2:
    """A Generator on all cores."""

    def __init__(self, case: Case, weights: Path) -> None:
        ctranslate2 = require_module("ctranslate2")
        device, _, index = case.device.partition(":")
        self._block_size = huggingface.read_config(weights / "config.json").block_size
        self._generator: Any = ctranslate2.Generator(
            str(self.export(case, weights)), device=device, device_index=int(index or 0),
            compute_type=compute_type(case), inter_threads=1, intra_threads=num_cpus(),
        )  # fmt: skip

    @staticmethod
    def export(case: Case, weights: Path) -> Path:
        """Return the model folder for a case, made from `weights` if it does not exist, with converted weights."""
        kind = compute_type(case)

        def write(partial: Path) -> None:
            spec = _spec(weights)
            spec.validate()
            try:
                spec.optimize(quantization=kind)
            except RuntimeError as e:  # CTranslate2 converts to bfloat16 with torch
                raise NanoinferError(f"ctranslate2 cannot convert the model to {kind}: {reason(e)}") from None
            spec.save(str(partial))

        return export_once(weights / FOLDER / f"ctranslate2-{kind}", write)

    def run(self, requests: Requests) -> tuple[list[list[int]], RunTimes]:
        """Generate; a token's arrival is its callback."""
        recorder = Recorder(requests)
        require_room("ctranslate2", requests.longest, self._block_size)

        def note(step: Any) -> bool:
            i: int = step.batch_id
            return recorder.add(i, [step.token_id]) >= requests.output_tokens[i]

        self._generator.generate_batch(
            [[f"t{i}" for i in prompt] for prompt in requests.prompts],
            max_length=max(requests.output_tokens), min_length=max(requests.output_tokens),
            end_token=[],  # no token ends a sequence, and min_length bans none
            include_prompt_in_result=False, beam_size=1, sampling_topk=1, callback=note,
            max_batch_size=SORTED_BATCH if len(set(map(len, requests.prompts))) > 1 else 0,
        )  # fmt: skip
        return recorder.result()


def _spec(weights: Path) -> Any:
    """Return CTranslate2's description of the model in a folder, which holds its weights."""
    opened, specs = open_folder(weights), require_module("ctranslate2").specs
    config = opened.config
    if not config.is_gpt2:
        raise NanoinferError("ctranslate2 cannot run this model here: only GPT-2 is exported to its file format")
    tensors = {name: np.ascontiguousarray(tensor.float32()) for name, tensor in opened.read()}
    activation = specs.Activation.GELUTanh if config.activation == "gelu_new" else specs.Activation.GELU
    spec = specs.TransformerDecoderModelSpec.from_config(
        config.n_layer, config.n_head, pre_norm=True, activation=activation
    )
    spec.register_vocabulary([f"t{i}" for i in range(config.vocab_size)])
    spec.config.layer_norm_epsilon = config.norm_epsilon
    for name in ("unk_token", "bos_token", "eos_token"):  # one that is not in the vocabulary would be added to it
        setattr(spec.config, name, "t0")
    decoder, embedding = spec.decoder, tensors["transformer.wte.weight"]
    decoder.scale_embeddings = False  # by sqrt(C), as translation models do
    decoder.embeddings.weight = embedding
    decoder.position_encodings.encodings = tensors["transformer.wpe.weight"]
    decoder.projection.weight = tensors.get("lm_head.weight", embedding)
    parts = {"transformer.ln_f": decoder.layer_norm}
    for i, layer in enumerate(decoder.layer):
        attention, mlp, h = layer.self_attention, layer.ffn, f"transformer.h.{i}"
        parts |= {
            f"{h}.ln_1": attention.layer_norm, f"{h}.attn.c_attn": attention.linear[0],
            f"{h}.attn.c_proj": attention.linear[1], f"{h}.ln_2": mlp.layer_norm, f"{h}.mlp.c_fc": mlp.linear_0,
            f"{h}.mlp.c_proj": mlp.linear_1,
        }  # fmt: skip
    for name, part in parts.items():
        for own, theirs in (("weight", "gamma"), ("bias", "beta")):
            setattr(part, theirs if ".ln_" in name else own, tensors[f"{name}.{own}"])
    return spec
