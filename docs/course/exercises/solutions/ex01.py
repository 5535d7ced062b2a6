"""Solutions of the exercises of lesson 1."""

from importlib import import_module

import torch

loop = import_module("01_recompute")


def num_computed(prompt_len, max_new_tokens, block_size):
    return sum(min(prompt_len + i, block_size) for i in range(max_new_tokens))


@torch.inference_mode()
def score(model, tokens):
    x = model(torch.tensor([tokens]), torch.arange(len(tokens)), loop.attend)
    logprobs = model.lm_head(x[0, :-1]).log_softmax(-1)  # row t predicts token t + 1
    return logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


@torch.inference_mode()
def generate_until(model, prompt, max_new_tokens, stop):
    output, num_calls = [], 0
    while len(output) < max_new_tokens:
        idx = torch.tensor([prompt + output])
        x = model(idx, torch.arange(idx.size(1)), loop.attend)
        num_calls += 1
        output.append(int(model.lm_head(x[0, -1]).argmax()))
        if output[-len(stop) :] == stop:
            return output[: -len(stop)], num_calls
    return output, num_calls
