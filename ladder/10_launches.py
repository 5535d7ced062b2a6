"""Rung 10, launches: a step is one call, not one for each of its operations.

PyTorch runs a step as hundreds of operations, and each takes the host some microseconds before it computes anything. A
small model waits for that longer than for its weights. The operations of a decode step are always the same if shapes
are: keys and values are read up to the end of the context, with a mask, and lengths are numbers in a tensor. So

    graph    on a GPU, its kernels are recorded once and launched together, by one call (CUDA graphs)
    native   on a CPU, the whole step is one call into C++ (nanoinfer's engine of this name)

and `eager` is rung 4, to compare. Left out: the scheduler of rung 9, which would call any of them (core/step.py).
"""

from contextlib import nullcontext

import torch
from measure import main
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode


def attend_with(k_cache, v_cache, pos):
    rows = torch.arange(len(pos), device=pos.device)[:, None]  # (B, 1)
    mask = torch.arange(k_cache.size(3), device=pos.device) <= pos[:, None, :, None]  # (B, 1, T, S), S: whole context

    def attend(layer, q, k, v):
        k_cache[layer, rows, :, pos] = k.transpose(1, 2)  # (B, T, H, D)
        v_cache[layer, rows, :, pos] = v.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k_cache[layer], v_cache[layer], attn_mask=mask)

    return attend


class Eager:
    def __init__(self, model, B):
        self.model, self.device = model, model.lm_head.weight.device
        shape = (model.n_layer, B, model.n_head, model.block_size, model.n_embd // model.n_head)
        self.k_cache, self.v_cache = (torch.zeros(shape, device=self.device) for _ in "kv")
        self.lengths = torch.zeros(B, 1, dtype=torch.long, device=self.device)

    def run(self, idx, pos, last):
        x = self.model(idx, pos, attend_with(self.k_cache, self.v_cache, pos))
        return self.model.lm_head(x[torch.arange(len(idx), device=self.device), last]).argmax(-1)

    def __call__(self, new):
        """Return the next token of each text, from its new tokens: a prompt, or the last token."""
        longest = max(map(len, new))
        idx = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in new], device=self.device)
        num_new = torch.tensor([len(tokens) for tokens in new], device=self.device)
        pos = self.lengths + torch.arange(longest, device=self.device)
        tokens = self.step(idx, pos) if longest == 1 else self.run(idx, pos, num_new - 1)
        self.lengths += num_new[:, None]
        return tokens.tolist()

    def step(self, idx, pos):
        return self.run(idx, pos, torch.zeros_like(pos[:, 0]))


class Graph(Eager):
    graph = None

    def step(self, idx, pos):
        if self.graph is None:
            self.idx, self.pos = idx.clone(), pos.clone()  # the graph reads these addresses at each replay
            with torch.cuda.stream(torch.cuda.Stream()):  # libraries allocate in the first run
                super().step(self.idx, self.pos)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.tokens = super().step(self.idx, self.pos)
        self.idx.copy_(idx)
        self.pos.copy_(pos)
        self.graph.replay()
        return self.tokens


class Native:
    def __init__(self, model, B):
        from nanoinfer.checkpoints.load import load_model
        from nanoinfer.config import EngineConfig
        from nanoinfer.engines import registry

        weights = load_model(model.path).take()
        self.engine = registry.build(registry.ENGINES["native"], weights, EngineConfig(max_num_seqs=B), "cpu")
        self.handles = [self.engine.open() for _ in range(B)]

    def __call__(self, new):
        from nanoinfer.engines.base import StepBatch

        batch = StepBatch(self.handles, [t for tokens in new for t in tokens], [*map(len, new)], [1] * len(new))
        return self.engine.extend(batch).argmax(-1).tolist()


class Count(TorchDispatchMode):
    """Counts the operations that PyTorch runs."""

    num_operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_operations += 1
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def generate(model, prompts, max_new_tokens, steps, by=None):
    by = by or ("graph" if torch.cuda.is_available() else "native")
    if by == "graph" and not torch.cuda.is_available():
        raise SystemExit("--by graph: no CUDA device here; use --by native or --by eager")
    longest = max(map(len, prompts)) + max_new_tokens
    assert longest <= model.block_size, f"{longest} tokens: more than the context, {model.block_size}"
    model = model.cuda() if by == "graph" else model
    step = {"eager": Eager, "graph": Graph, "native": Native}[by](model, len(prompts))
    new, outputs = prompts, []
    for _ in range(max_new_tokens):
        with Count() if by == "eager" else nullcontext() as count:
            tokens = step(new)
        outputs.append(tokens)
        S = model.block_size if by != "native" else max(map(len, prompts)) + len(outputs) - 1
        steps.append((len(prompts), max(map(len, new)), len(prompts) * S))
        new = [[token] for token in tokens]
    if by == "eager":
        print(f"a step runs {count.num_operations} operations of PyTorch")
    return [list(row) for row in zip(*outputs, strict=True)]


def also(model, prompts):
    assert generate(model, prompts, 32, [], "eager") == generate(model, prompts, 32, [])


if __name__ == "__main__":
    main(generate, __file__, option=("by", "native", "what runs a step: eager, graph or native"), also=also)
