"""Exercises of lesson 5, pages. `pytest docs/course/exercises/test_05.py` checks them."""

from importlib import import_module

pages = import_module("05_pages")  # BLOCK, Pool


def num_blocks(num_texts, num_shared, num_own):
    """Return how many blocks hold texts that begin alike: (without sharing, with rung 5's).

    Args:
        num_texts: 1 or more.
        num_shared: tokens at the beginning that all texts have in common.
        num_own: further tokens of each text, 1 or more; the first of them differs already.
    """
    raise NotImplementedError


class PrefixIndex:
    """A dictionary of full blocks by their tokens, to find the beginning of a prompt in all earlier texts.

    Rung 5 compares a prompt with each text of the batch, token by token; here one access answers for a block. Keys and
    values of a block depend on all tokens before it as well, so these have to be a part of its dictionary key: for
    example the pair (block before it or None, tuple of its tokens).
    """

    def __init__(self):
        raise NotImplementedError

    def insert(self, tokens, table):
        """Add the full blocks of a text, but for those whose tokens the index has already, behind the same tokens.

        Args:
            tokens: list of token ids.
            table: list of blocks, as of rung 5: block i has the tokens i * BLOCK to (i + 1) * BLOCK - 1.
        """
        raise NotImplementedError

    def find(self, tokens):
        """Return the list of blocks that hold the beginning of a prompt: as many full blocks as the index has in a row.

        At least one token of the prompt is left over: its logits are needed.
        """
        raise NotImplementedError


def attend_by_blocks(q, k_pool, v_pool, table, length):
    """Attend with one query to the tokens of a table, block by block, without a copy of the whole text.

    Rung 5 gathers all keys and values in one tensor, because PyTorch's attention reads no tables. A kernel reads block
    after block and keeps three things: the largest score so far, the sum of exp(score - largest), and the sum of
    exp(score - largest) * value. When a block has a larger score, both sums are scaled to it.

    Args:
        q: (H, D). The score of a key is q . k / sqrt(D).
        k_pool, v_pool: (blocks, BLOCK, H, D), of one layer.
        table: list of blocks.
        length: number of tokens; the places behind it in the last block hold values of another text, or NaN.

    Returns:
        (H, D).
    """
    raise NotImplementedError
