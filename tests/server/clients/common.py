"""What the conversations of this folder share. Each is a program of its own: it prints one line of JSON.

refused     status of a request with a wrong key
calls       [name, arguments] of each call, as the client has them
answer      text of the answer that follows the call's result
stream      the same answer, streamed: the text so far, after each chunk
structured  values of the type Order
"""

import json
import os
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

MODEL = "tiny"
BASE_URL, KEY = os.environ["CLIENT_BASE_URL"], os.environ["CLIENT_KEY"]
QUESTION = "What is 2 + 3?"
FINITE: Any = {"max_tokens": 120, "seed": 3}
Number = Annotated[int, Field(ge=0, le=99)]
ran: list[list[Any]] = []
"""The calls of `add`."""


def add(a: Literal[2, 3, 5], b: Literal["x", "yy"]) -> str:
    """Add two numbers."""
    ran.append(["add", {"a": a, "b": b}])
    return f"{a} and {b}"


class Order(BaseModel):
    """An order."""

    size: Literal["small", "large"]
    number: Number


def report(**found: Any) -> None:
    orders = found.pop("structured")
    print(json.dumps({**found, "structured": [order.model_dump() for order in orders]}))
