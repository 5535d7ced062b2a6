"""What the tests assert of errors that users see."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nanoinfer.errors import NanoinferError


def refuses(call: Callable[[], object], *words: str) -> None:
    """Assert that `call` raises a NanoinferError whose message is one line and contains all `words`."""
    with pytest.raises(NanoinferError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def check_messages(err: str) -> None:
    """Every line is one of ours, without a traceback or a character that a terminal obeys."""
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    lines = err.removesuffix("\n").split("\n") if err else []
    for line in lines:
        assert line.isprintable(), line[:300]
        assert len(line) <= 1100
