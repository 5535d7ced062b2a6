"""GPT-2 in the names of nanoGPT, and what all files share: loading a model, measuring this machine, `main`.

The model does not attend by itself: it calls `attend(layer, q, k, v)`. Where keys and values are kept is what the files
differ in.

    B sequences   T new tokens   S positions of the cache   C = n_embd   H heads   D = C / H   V = vocab_size
"""

import json
import math
import pickle
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

BUILTIN = Path(__file__).resolve().parents[1] / "src" / "nanoinfer" / "models" / "builtin"


class CausalSelfAttention(nn.Module):
    def __init__(self, C, n_head, bias):
        super().__init__()
        self.n_head = n_head
        self.c_attn, self.c_proj = nn.Linear(C, 3 * C, bias), nn.Linear(C, C, bias)

    def forward(self, x, attend):
        B, T, C = x.shape
        # Each (B, H, T, D).
        q, k, v = (y.view(B, T, self.n_head, -1).transpose(1, 2) for y in self.c_attn(x).split(C, dim=2))
        return self.c_proj(attend(q, k, v).transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, C, n_head, bias, gelu):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(C, bias=bias), nn.LayerNorm(C, bias=bias)
        self.attn = CausalSelfAttention(C, n_head, bias)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(C, 4 * C, bias), "c_proj": nn.Linear(4 * C, C, bias)})
        self.gelu = partial(F.gelu, approximate=gelu)

    def forward(self, x, attend):
        x = x + self.attn(self.ln_1(x), attend)
        return x + self.mlp.c_proj(self.gelu(self.mlp.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, n_layer, n_head, n_embd, block_size, vocab_size, bias=True, gelu="tanh", **_):
        super().__init__()
        self.n_layer, self.n_head, self.n_embd, self.block_size = n_layer, n_head, n_embd, block_size
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(vocab_size, n_embd), "wpe": nn.Embedding(block_size, n_embd),
            "h": nn.ModuleList(Block(n_embd, n_head, bias, gelu) for _ in range(n_layer)),
            "ln_f": nn.LayerNorm(n_embd, bias=bias),
        })  # fmt: skip
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, idx, pos, attend):
        """Return the hidden states (B, T, C) of tokens idx (B, T) at positions pos, (T) or (B, T)."""
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for layer, block in enumerate(self.transformer.h):
            x = block(x, partial(attend, layer))
        return self.transformer.ln_f(x)


def load(path):
    """Return (model, encode, decode) of a built-in model, a GPT-2 folder, or nanoGPT's ckpt.pt beside its meta.pkl."""
    path = BUILTIN / path if (BUILTIN / path).is_dir() else Path(path)
    if path.suffix == ".pt":
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        args, state = {**checkpoint["model_args"], "gelu": "none"}, checkpoint["model"]
        meta = pickle.loads((path.parent / "meta.pkl").read_bytes())  # executes code: your own files only
        encode = lambda text: [meta["stoi"][c] for c in text]  # noqa: E731
        decode = lambda ids: "".join(meta["itos"][i] for i in ids)  # noqa: E731
    else:
        config = json.loads((path / "config.json").read_text())
        args, state = {**config, "block_size": config["n_positions"]}, safetensors(path / "model.safetensors")
        for name in (n for n in state if n.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight"))):
            state[name] = state[name].t()  # OpenAI's checkpoints store these as (in, out)
        encode, decode = tokenizer(path)

    names = {"transformer." + n.removeprefix("_orig_mod.").removeprefix("transformer."): n for n in state}
    model = GPT(**args)
    model.path = str(path)
    weights = model.transformer.state_dict(prefix="transformer.")
    model.load_state_dict({n: state[names[n]] for n in weights}, strict=False)  # the head is wte
    return model.eval(), encode, decode


def tokenizer(folder):
    """Return (encode, decode) of a folder."""
    from tokenizers import Tokenizer

    it = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: it.encode(text).ids, it.decode


def safetensors(path):
    """Return the tensors of a file: 8 bytes with the length of a JSON header, the header, the tensors."""
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    header = {n: t for n, t in json.loads(data[8:start]).items() if n != "__metadata__" and t["dtype"] in dtypes}
    return {
        name: torch.frombuffer(
            data, dtype=dtypes[t["dtype"]], count=math.prod(t["shape"]), offset=start + t["data_offsets"][0]
        ).view(t["shape"])
        for name, t in header.items()
    }
