"""Solutions of the exercises of lesson 8."""

from importlib import import_module

import torch

speculation = import_module("08_speculation")  # step and caches of the rung


@torch.inference_mode()
def generate(model, prompt, max_new_tokens, propose):
    cache, text, steps = speculation.caches(model, 1), list(prompt), []
    start, proposals = 0, []  # the first step has the prompt alone
    while len(text) < len(prompt) + max_new_tokens:
        idx = text[start:] + proposals
        pos = torch.arange(start, start + len(idx))[None]
        chosen = speculation.step(model, cache, torch.tensor([idx]), pos, steps)[0].argmax(-1).tolist()
        chosen = chosen[-len(proposals) - 1 :]  # after the newest token, and after each proposal
        n = 0
        while n < len(proposals) and proposals[n] == chosen[n]:
            n += 1
        text += chosen[: n + 1]
        start, proposals = len(text) - 1, propose(text)
    return text[len(prompt) :][:max_new_tokens], len(steps)


def speed_up(rate, k, cost):
    tokens = sum(rate**i for i in range(k + 1))  # 1 + the expected number of accepted proposals
    return tokens / (1 + k * cost)


def verify_sampled(p, q, proposal, u, v):
    if u < p[proposal] / q[proposal]:
        return proposal
    rest = (p - q).clamp(min=0)
    running = rest.cumsum(-1)
    return int((running > v * running[-1]).int().argmax())
