"""Exercises of lesson 11, states that cannot be cut. `pytest docs/course/exercises/test_11.py` checks them."""


def undo(S, k, v, d, b):
    """Return the state before a token of the delta rule, from the one after it.

    With S0 the state before it, S = exp(d) S0 + b k (v - exp(d) S0^T k)^T, which is exp(d) (I - b k k^T) S0 + b k v^T.

    Args:
        S: (Dk, Dv) the state after the token.
        k: (Dk) its key, of length 1.
        v: (Dv) its value.
        d: logarithm of the decay, a number.
        b: rate of learning, a number.

    Raises:
        ValueError: the token has erased what the state returned for its key, so that many states lead to S.
    """
    raise NotImplementedError


def num_computed_again(kept, base, num_pending, length):
    """Return how many tokens are computed again after a text was cut to `length` tokens.

    Args:
        kept: numbers of tokens after which a state is kept, in any order.
        base: number of tokens before the newest step.
        num_pending: number of tokens of that step.
        length: 0 to base + num_pending.
    """
    raise NotImplementedError


def chunk(S, q, k, v, d):
    """Return the outputs (T, Dv) and the state after T tokens, by products of matrices instead of a loop over tokens.

    The rule is that of Mamba 2, S = exp(d) S + k v^T and then y = S^T q, so token t reads v of token s <= t with the
    weight (q_t k_s) exp(d_{s+1} + ... + d_t).

    Args:
        S: (Dk, Dv) the state before the tokens.
        q, k: (T, Dk).
        v: (T, Dv).
        d: (T) logarithms of the decays, at most 0. Their sum may be below -100: no exp may be of a positive number.
    """
    raise NotImplementedError
