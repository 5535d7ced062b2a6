"""Rung 11, a state that cannot be cut: matrices of constant size in place of keys and values.

The gated delta rule (Yang et al. 2024) adds to a matrix S what S does not yet return for a key k, and lets it decay:

    S = exp(d) S        u = b (v - S^T k)        S = S + k u^T        y = S^T q        d <= 0, 0 <= b <= 1

A new value of a key replaces the old one. S is a sum over all tokens, and what decayed is lost, so the last token
cannot be taken out of it. For proposals that are rejected, and for prompts that begin alike, a text has

    states    of all layers before the newest step
    pending   the inputs of that step's tokens, which the next step applies first: a rejected proposal is dropped
    kept      the states at borders of 16 tokens: a text that parts from this one begins at the last of them

No tensor is written in place, so a fork copies nothing. This is rung 2 with another memory; what followed the last two
tokens earlier in the text is proposed. toy/ has no attention, and recites, after "?", the digits of the letters A to H.
"""

import copy
import json
from functools import partial
from pathlib import Path

import torch
from measure import main
from model import safetensors, tokenizer
from torch import nn
from torch.nn import functional as F

BORDER, K = 16, 4  # tokens; proposals a step
BUS = "Bus A4 leaves at noon, and bus B1 at two"
PROMPTS = [BUS + ".?", "The bus to town is D0.?A", BUS + "; no, B5. Bus C7 is late?", BUS + ".?A4B1C-"]


def norm(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def layer(w, x, recur):
    """Return a layer's output of x (T, C): it makes inputs of the state from tokens, and reads the state."""
    h = norm(x, w.input_layernorm)
    decay = -w.A_log.exp() * F.softplus(h @ w.in_proj_a.T + w.dt_bias)
    y = recur(torch.cat((h @ w.in_proj_qkv.T, decay, (h @ w.in_proj_b.T).sigmoid()), dim=1))  # (T, H, D)
    x = x + (norm(y, w.norm).flatten(1) * F.silu(h @ w.in_proj_z.T)) @ w.out_proj.T
    h = norm(x, w.post_attention_layernorm)
    return x + (F.silu(h @ w.gate_proj.T) * (h @ w.up_proj.T)) @ w.down_proj.T


def scan(w, state, inputs):
    """Apply tokens one after another. Return what each reads from the state, (T, H, D), and the state after them."""
    H, D = len(w.A_log), len(w.norm)
    (past, S), outputs = state, [torch.empty(0, H, D)]  # the last inputs of a convolution, (taps - 1, 3 H D); (H, D, D)
    for x, d, b in zip(*inputs.split((3 * H * D, H, H), dim=1), strict=True):
        past = torch.cat((past, x[None]))
        q, k, v = F.silu((past * w.conv1d[:, 0].T).sum(0)).view(3, H, D)
        q, k = (y * torch.rsqrt(y.square().sum(1, keepdim=True) + 1e-6) for y in (q, k))
        S = d.exp()[:, None, None] * S
        u = b[:, None] * (v - torch.einsum("hkv,hk->hv", S, k))
        past, S = past[1:], S + k[:, :, None] * u[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", S, q)[None] / D**0.5)
    return torch.cat(outputs), (past, S)


class Toy(nn.Module):
    def __init__(self, folder):
        super().__init__()
        config = json.loads((folder / "config.json").read_text())
        self.block_size, self.n_layer = config["max_position_embeddings"], config["num_hidden_layers"]
        h, rest = nn.ModuleList(nn.ParameterDict() for _ in range(self.n_layer)), nn.ParameterDict()
        for name, tensor in safetensors(folder / "model.safetensors").items():
            _, *where, part = name.removesuffix(".weight").split(".")
            one = float("norm" in part and "linear_attn" not in where)  # of these weights, 1 is left out in the file
            (h[int(where[1])] if where else rest)[part] = tensor.float() + one
        self.lm_head = wte = nn.Embedding.from_pretrained(rest.pop("embed_tokens"))
        self.transformer, self.n_embd = nn.ModuleDict({"wte": wte, "h": h, "ln_f": rest}), wte.embedding_dim

    def forward(self, idx, recur):
        """Return the logits (T, V) of tokens idx (T)."""
        x = self.transformer.wte(idx)
        for w in self.transformer.h:
            x = layer(w, x, partial(recur, w))
        return norm(x, self.transformer.ln_f.norm) @ self.lm_head.weight.T


class Text:
    def __init__(self, model):
        layers = model.transformer.h
        H, D, (width, _, taps) = len(layers[0].A_log), len(layers[0].norm), layers[0].conv1d.shape
        self.model, self.tokens, self.base = model, [], 0  # base: number of tokens in `states`
        self.states = [(torch.zeros(taps - 1, width), torch.zeros(H, D, D)) for _ in layers]
        self.pending, self.kept = [torch.zeros(0, width + 2 * H) for _ in layers], {0: self.states}

    def extend(self, new, steps):
        """Append tokens. Return the logits after each, (T, V)."""
        start, before, inputs = self.base + len(self.pending[0]), [], []
        idx = self.tokens[start:] + new  # tokens after a cut are computed again

        def recur(w, x):
            before.append(scan(w, self.states[len(before)], self.pending[len(before)])[1])
            inputs.append(x)
            return scan(w, before[-1], x)[0]

        logits = self.model(torch.tensor(idx), recur)[-len(new) :]
        self.base, self.states, self.pending, self.tokens = start, before, inputs, self.tokens + new
        self.kept = {**self.kept, **({start: before} if start % BORDER == 0 else {})}
        steps.append((1, len(idx), len(before[0][1][0])))  # reads and writes the bytes of D keys and values
        return logits

    def truncate(self, length):
        """Remove the tokens from `length` on: those of the last step cost nothing, others the way from a kept state."""
        self.tokens, self.kept = self.tokens[:length], {n: s for n, s in self.kept.items() if n <= length}
        if length < self.base:
            self.base = max(self.kept)
            self.states, self.pending = self.kept[self.base], [x[:0] for x in self.pending]
        self.pending = [x[: length - self.base] for x in self.pending]


def num_equal(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@torch.inference_mode()
def generate(model, prompts, max_new_tokens, steps, k=K):
    texts, outputs, accepted = [Text(model)], [], []
    for prompt in prompts:
        shared = {text: num_equal(text.tokens, prompt[:-1]) for text in texts}
        texts.append(text := copy.copy(parent := max(texts, key=shared.get)))
        text.truncate(shared[parent])
        while new := prompt[len(text.tokens) :][: BORDER - len(text.tokens) % BORDER]:
            logits = text.extend(new, steps)
        output = [int(logits[-1].argmax())]
        while len(output) < max_new_tokens:
            tokens = prompt + output
            ends = [i for i in range(2, len(tokens)) if tokens[i - 2 : i] == tokens[-2:]]  # as the last two
            proposals = tokens[ends[-1] :][:k] if ends else []
            chosen = text.extend([output[-1], *proposals], steps).argmax(-1).tolist()
            n = num_equal(proposals, chosen)
            text.truncate(len(text.tokens) - len(proposals) + n)
            output += chosen[: n + 1]
            accepted += [i < n for i in range(len(proposals))]
        outputs.append(output[:max_new_tokens])
    print(f"{sum(accepted)} of {len(accepted)} proposals accepted")
    return outputs


if __name__ == "__main__":
    toy = {"load": lambda path: (Toy(Path(path)), *tokenizer(Path(path))), "model": Path(__file__).parent / "toy"}
    main(generate, __file__, option=("k", K, "tokens that are proposed in a step"), prompts=PROMPTS, **toy)
