"""Exercises of lesson 6, sampling. `pytest docs/course/exercises/test_06.py` checks them."""

from importlib import import_module

sampling = import_module("06_sampling")  # sample, uniform, kept_by_sort, kept_without_sort


def probabilities(logits, temperature, top_k, top_p):
    """Return the probability with which `sample` of rung 6 returns each token, over all random numbers.

    Args:
        logits: (V).
        temperature: 0 or more.
        top_k, top_p: as of rung 6; 0 and 1.0 keep all tokens.

    Returns:
        (V) float64, with the sum 1.
    """
    raise NotImplementedError


def kth_largest(logits, k):
    """Return the k-th largest of the logits without a sort and without comparing floats: a radix select.

    Rung 6 finds the threshold in 32 passes over the vocabulary, a bit of it in each. Here a pass finds 8 bits: count
    how many keys have each value of the 8 bits (`torch.bincount`), take the largest value at which the counts from the
    top reach k, and go on with the keys that have this value, and with k less those above it. So 4 passes are enough.

    Args:
        logits: (V) float32. Their bits as integers, `logits.view(torch.int32)`, have the order of the floats if they
            are positive; the order of negative ones is reversed. Map them to 0 <= key < 2**32 first.
        k: 1 to V.

    Returns:
        float, one of the logits. -0.0 counts as less than 0.0.
    """
    raise NotImplementedError


def sample_by_gumbel(logits, position, temperature, seed):
    """Return a token with the probabilities softmax(logits / temperature), without a sum over the vocabulary.

    Let u_t be independent random numbers in [0, 1), one for each token t. The token with the largest

        logits[t] / temperature - log(-log(u_t))

    has that distribution (the Gumbel-max trick). Parts of a vocabulary on several devices can each find their own
    largest value. In return, a step needs V random numbers.

    Args:
        logits: (V).
        position: of the token in the output.
        temperature: more than 0.
        seed: u_t is `sampling.uniform(seed, position * V + t)`, which may be 0.

    Returns:
        int.
    """
    raise NotImplementedError
