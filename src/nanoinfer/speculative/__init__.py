"""Speculative decoding: a drafter proposes tokens, and the engine verifies all of them in one step."""
