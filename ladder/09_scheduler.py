"""Rung 9, a scheduler: many requests, of which each step runs as many as fit, new prompts beside running texts.

A batch of rung 4 ends with its longest text. Here a request joins when there is room and leaves when it is finished:

    waiting --admit--> running --finish--> blocks are free
       ^                  |
       '---- preempt -----'    no free block: the request that came last gives its blocks back and begins again later

A step has a budget of tokens, since its time grows with them: running texts take one each, the rest goes to prompts, in
chunks if need be, so that a long prompt does not delay the next tokens of running texts. The new tokens of all texts
are one row without padding; only attention goes from text to text.

Left out: the shared prefixes of rung 5 and the speculation of rung 8, which fit in between (docs/scheduling.md).
"""

from collections import deque
from dataclasses import dataclass, field

import torch
from measure import main
from torch.nn import functional as F

BLOCK = 16  # tokens
BUDGET = 48  # tokens of a step


@dataclass(eq=False)
class Request:
    tokens: list  # prompt and output
    end: int  # number of tokens at which it is finished
    table: list = field(default_factory=list)  # its blocks
    num_computed: int = 0  # tokens whose keys and values are in them


class Scheduler:
    def __init__(self, requests, num_blocks):
        self.waiting, self.running, self.free = deque(requests), [], list(range(num_blocks))
        self.num_preempted = 0

    def schedule(self):
        """Return the work of a step: requests, and the number of new tokens of each."""
        work, num_preempted = {}, self.num_preempted
        for request in list(self.running):  # in the order of arrival
            num_new = min(len(request.tokens) - request.num_computed, BUDGET - sum(work.values()))
            while request in self.running and not self.reserve(request, num_new):
                self.preempt(work)
            if request in self.running and num_new:
                work[request] = num_new
        while self.waiting and sum(work.values()) < BUDGET and self.num_preempted == num_preempted:
            request = self.waiting[0]
            num_new = min(len(request.tokens), BUDGET - sum(work.values()))
            if not self.reserve(request, num_new):
                break  # it stays the first: shorter ones do not overtake it for ever
            self.running.append(self.waiting.popleft())
            work[request] = num_new
        return work

    def reserve(self, request, num_new):
        """Take blocks for new tokens, or none and return False if too few are free."""
        missing = -(-(request.num_computed + num_new) // BLOCK) - len(request.table)
        if missing > len(self.free):
            return False
        request.table += [self.free.pop() for _ in range(missing)]
        return True

    def preempt(self, work):
        """Take back the blocks of the request that came last; what it generated is kept and computed again."""
        last = self.running.pop()
        work.pop(last, None)
        self.release(last)
        self.waiting.appendleft(last)
        self.num_preempted += 1

    def release(self, request):
        self.free += request.table
        request.table, request.num_computed = [], 0

    def postprocess(self, work, tokens):
        """Append the token of each request whose tokens have all been computed; finished ones leave."""
        for (request, num_new), token in zip(work.items(), tokens, strict=True):
            request.num_computed += num_new
            if request.num_computed == len(request.tokens):
                request.tokens.append(token)
            if len(request.tokens) == request.end:
                self.running.remove(request)
                self.release(request)


def attend_with(k_pool, v_pool, work):
    """`work`: the table, the first position and the number of new tokens of each text."""

    def attend(layer, q, k, v):  # (1, H, N, D), the new tokens of all texts in a row
        out, at = [], 0
        for table, start, T in work:
            pos = torch.arange(start, start + T)
            k_pool[layer, table[pos // BLOCK], pos % BLOCK] = k[0, :, at : at + T].transpose(0, 1)
            v_pool[layer, table[pos // BLOCK], pos % BLOCK] = v[0, :, at : at + T].transpose(0, 1)
            keys = k_pool[layer, table].flatten(0, 1)[: start + T].transpose(0, 1)[None]  # (1, H, S, D)
            values = v_pool[layer, table].flatten(0, 1)[: start + T].transpose(0, 1)[None]
            mask = torch.arange(start + T) <= pos[:, None]  # (T, S)
            out.append(F.scaled_dot_product_attention(q[:, :, at : at + T], keys, values, attn_mask=mask))
            at += T
        return torch.cat(out, dim=2)

    return attend


@torch.inference_mode()
def generate(model, prompts, max_new_tokens, steps, blocks=16):
    requests = [Request(list(prompt), len(prompt) + max_new_tokens) for prompt in prompts]
    longest = max(request.end for request in requests)
    limit = min(model.block_size, blocks * BLOCK)
    assert longest <= limit, f"{longest} tokens: more than the context or {blocks} blocks, {limit}"
    scheduler = Scheduler(requests, blocks)
    shape = (model.n_layer, blocks, BLOCK, model.n_head, model.n_embd // model.n_head)
    k_pool, v_pool = torch.zeros(shape), torch.zeros(shape)
    while scheduler.waiting or scheduler.running:
        work = scheduler.schedule()
        parts = [(torch.tensor(r.table), r.num_computed, n) for r, n in work.items()]
        pos = torch.cat([torch.arange(start, start + n) for _, start, n in parts])
        idx = [token for r, n in work.items() for token in r.tokens[r.num_computed : r.num_computed + n]]
        x = model(torch.tensor([idx]), pos, attend_with(k_pool, v_pool, parts))[0]
        last = torch.tensor([n for _, _, n in parts]).cumsum(0) - 1
        scheduler.postprocess(work, model.lm_head(x[last]).argmax(-1).tolist())
        steps.append((1, len(idx), sum(start + n for _, start, n in parts)))
    print(f"{len(steps)} steps, {scheduler.num_preempted} preempted")
    return [request.tokens[len(prompt) :] for request, prompt in zip(requests, prompts, strict=True)]


if __name__ == "__main__":
    main(generate, __file__, option=("blocks", 16, f"of the pool, each of {BLOCK} tokens"))
