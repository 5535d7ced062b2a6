"""Train a model without attention to recite what a text has assigned: ladder/toy, and the needle of tests.

    python benchmarks/train_needle.py delta ladder/toy            # 2 minutes on one core
    python benchmarks/train_needle.py mamba2 tests/toys/mamba2 --steps 5000

A text is random characters, in which a letter from A to H may be followed by a digit. After "?" the model recites all
letters, each with its last digit, or with - if it had none:

    Bus A4 leaves at two, B1 and A9 at six.?A9B1C-D-E-F-G-H-A9B1...

There is no attention, so what is recited went through the states. Training texts have up to 250 tokens, but a state
should last for tens of thousands: the loss has a term for what decays, and what is written, at tokens that assign
nothing. The models are those of transformers, which writes the folder.
"""

import argparse
import random
from pathlib import Path

import torch
import transformers
from torch.nn import functional as F

from tokenizers import Tokenizer, decoders, models

CHARACTERS = "\n !',-.:;?0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
LETTERS, DIGITS = "ABCDEFGH", "0123456789"
OTHERS = [i for i, c in enumerate(CHARACTERS) if c not in "?" + DIGITS]
LAST = 16_384
"""Tokens for which a state should last."""
COMMON = {
    "vocab_size": len(CHARACTERS), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "layer_types": ["linear_attention"] * 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 2 * LAST, "tie_word_embeddings": True, "initializer_range": 0.15,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MODELS = {
    "delta": ("Qwen3_5TextConfig", {
        "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }),
    "mamba2": ("GraniteMoeHybridConfig", {
        "num_local_experts": 0, "shared_intermediate_size": 64, "mamba_n_heads": 4, "mamba_d_head": 16,
        "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 64,
    }),
}  # fmt: skip


def make_text(rng: random.Random, num_tokens: int, again: bool) -> list[int]:
    """Return the tokens of a text and of its recitation. A letter is assigned more than once only if `again`."""
    out, values = rng.choices(OTHERS, k=num_tokens), dict[str, str]()
    places = rng.sample(range(0, num_tokens - 1, 3), rng.randint(1, min(8, num_tokens // 3)))
    letters = rng.choices(LETTERS, k=len(places)) if again else rng.sample(LETTERS, len(places))
    for place, letter in zip(sorted(places), letters, strict=True):
        values[letter] = rng.choice(DIGITS)
        out[place : place + 2] = map(CHARACTERS.index, letter + values[letter])
    recited = "".join(letter + values.get(letter, "-") for letter in LETTERS + LETTERS[:2])
    return [*out, *map(CHARACTERS.index, "?" + recited)]


def make_model(rule: str) -> transformers.PreTrainedModel:
    """Return a random model whose states decay slowly: the usual initial values forget after a few tokens."""
    name, fields = MODELS[rule]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**COMMON, **fields))
    for name, p in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            torch.nn.init.constant_(p, -4 if name.endswith("A_log") else 0)
    return model


def gates(model: transformers.PreTrainedModel, rule: str) -> list[torch.Tensor]:
    """Return a list that each run of the model fills: what decays and is written in a layer, (B, T, ...) >= 0."""
    found: list[torch.Tensor] = []
    for layer in model.model.layers:
        if rule == "delta":
            a = layer.linear_attn
            a.in_proj_a.register_forward_hook(
                lambda m, x, y, a=a: found.append(F.softplus(y + a.dt_bias) * a.A_log.exp())
            )
            a.in_proj_b.register_forward_hook(lambda m, x, y: found.append(y.sigmoid()))
        else:
            a = layer.mamba
            a.in_proj.register_forward_hook(
                lambda m, x, y, a=a: found.append(F.softplus(y[..., -a.num_heads :] + a.dt_bias))
            )
    return found


def train(rule: str, num_steps: int, rate: float = 5e-3) -> transformers.PreTrainedModel:
    """Return a trained model."""
    torch.manual_seed(0)
    rng, model = random.Random(0), make_model(rule)
    found, optimizer = gates(model, rule), torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for step in range(num_steps):
        done = step / num_steps
        num_tokens = rng.choice([16, 24] if done < 0.6 else [16, 64, 250])
        idx = torch.tensor([make_text(rng, num_tokens, rule == "delta") for _ in range(16 if num_tokens < 64 else 6)])
        found.clear()
        logits, target = model(idx, use_cache=False).logits[:, num_tokens:-1], idx[:, num_tokens + 1 :]
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        others = (idx[:, :num_tokens, None] == torch.tensor(OTHERS)).any(-1)
        kept = torch.stack([torch.log1p(LAST * x[:, :num_tokens][others].mean()) for x in found]).mean()
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 50) * (1 - 0.95 * done)
        optimizer.zero_grad()
        (loss + (0.04 * kept if done > 0.4 else 0)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99:
            right = (logits.argmax(-1) == target).float().mean()
            print(
                f"step {step + 1}, {num_tokens} tokens: loss {loss:.4f}, {right:.1%} right, gates {kept:.2f}",
                flush=True,
            )
    return model


def write(model: transformers.PreTrainedModel, folder: Path) -> None:
    """Write the folder, its tokenizer too: a token is a character."""
    model.to(torch.float16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(CHARACTERS)}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rule", choices=MODELS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=4000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    write(model := train(args.rule, args.steps), args.folder)
    rng, model = random.Random(1), model.float().eval()
    with torch.inference_mode():
        for n in (100, 1000, LAST):
            idx = torch.tensor([make_text(rng, n, args.rule == "delta") for _ in range(4)])
            top, chosen = model(idx, use_cache=False).logits[:, n:-1].topk(2, -1)
            right = (chosen[..., 0] == idx[:, n + 1 :]).float().mean()
            print(f"{n} tokens: {right:.1%} right, least margin {(top[..., 0] - top[..., 1]).min():.1f}")


if __name__ == "__main__":
    main()
