"""Solutions of the exercises of lesson 5."""

from importlib import import_module

import torch

pages = import_module("05_pages")


def num_blocks(num_texts, num_shared, num_own):
    of_text = -(-(num_shared + num_own) // pages.BLOCK)
    shared = num_shared // pages.BLOCK  # a block that is shared in part is the first text's; each other copies it
    return num_texts * of_text, shared + num_texts * (of_text - shared)


class PrefixIndex:
    def __init__(self):
        self.blocks = {}

    def keys(self, tokens):
        for i in range(0, len(tokens) - pages.BLOCK + 1, pages.BLOCK):
            yield tuple(tokens[i : i + pages.BLOCK])

    def insert(self, tokens, table):
        before = None
        for key, block in zip(self.keys(tokens), table, strict=False):
            before = self.blocks.setdefault((before, key), block)

    def find(self, tokens):
        blocks, before = [], None
        for key in self.keys(tokens[:-1]):
            before = self.blocks.get((before, key))
            if before is None:
                break
            blocks.append(before)
        return blocks


def attend_by_blocks(q, k_pool, v_pool, table, length):
    H, D = q.shape
    largest, total, y = torch.full((H,), -torch.inf), torch.zeros(H), torch.zeros(H, D)
    for i, block in enumerate(table):
        n = min(pages.BLOCK, length - i * pages.BLOCK)
        scores = torch.einsum("hd,nhd->hn", q, k_pool[block, :n]) / D**0.5
        larger = torch.maximum(largest, scores.amax(1))
        weights, scale = (scores - larger[:, None]).exp(), (largest - larger).exp()
        total = total * scale + weights.sum(1)
        y = y * scale[:, None] + torch.einsum("hn,nhd->hd", weights, v_pool[block, :n])
        largest = larger
    return y / total[:, None]
