"""Response templates of our own, with the constructions of published ones, and pieces of answers to them."""

from __future__ import annotations

import random
from typing import Any

CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
IN_JSON = {"type": "function", "function": "{content}"}
THINK = {"open": "<think>", "close": "</think>"}
TEMPLATES: dict[str, dict[str, Any]] = {
    "json": {  # SmolLM3: text that nothing surrounds is content
        "defaults": {"role": "assistant"},
        "start_anchor": "<|bot|>\n",
        "fields": {
            "thinking": THINK,
            "tool_calls": {
                "open": "<call>",
                "close": "</call>",
                "repeats": True,
                "content": "json",
                "transform": IN_JSON,
            },
            "content": {"close": "<|stop|>"},
        },
    },
    "list": {  # Cohere: everything is surrounded, and calls are one list with keys of its own
        "start_anchor": ["<BOT>", "<BOT><GO>"],
        "fields": {
            "content": {"open": "<SAY>", "close": "</SAY>"},
            "thinking": {"open": "<THINK>", "close": "</THINK>"},
            "tool_calls": {
                "open": "<ACT>",
                "close": "</ACT>",
                "content": "json",
                "transform_each": True,
                "transform": {"function": {"name": "{tool}", "arguments": "{parameters}"}},
            },
        },
    },
    "tags": {  # Qwen 3.5: the name and the arguments are in tags; markers with white space
        "start_anchor": "<|bot|>\n",
        "fields": {
            "reasoning_content": THINK,
            "tool_calls": {
                "open_pattern": r"\s*<call>\s*<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*</call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"<arg=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</arg>"},
                "transform": CALL,
            },
            "content": {"close_pattern": r"\s*(?:<\|stop\|>|<\|end\|>)"},
        },
    },
    "channels": {  # gpt-oss: no end marker of a call, which is the end token
        "start_anchor": "<|start|>bot",
        "fields": {
            "thinking": {"open": "<|ch|>analysis<|msg|>", "close": "<|end|>"},
            "content": {"open": "<|ch|>final<|msg|>", "close": "<|end|>"},
            "tool_calls": {
                "open_pattern": r"<\|ch\|>comment to=f\.(?P<name>\w+).*?<\|msg\|>",
                "close": "<|do|>",
                "repeats": True,
                "content": "json",
                "transform": CALL,
            },
        },
    },
    "dialect": {  # Gemma 4: a dialect of JSON
        "start_anchor": ["<|turn>bot\n", "<result|>"],
        "fields": {
            "reasoning_content": {"open": "<|ch>thought\n", "close": "<ch|>"},
            "tool_calls": {
                "open_pattern": r"<\|call>call:(?P<name>\w+)",
                "close": "<call|>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": CALL,
            },
            "content": {"close": ["<turn|>", "<|result>", "<turn|>!"]},
        },
    },
    "prefilled": {  # Ernie: reasoning begins with the answer; a marker that may be empty
        "start_anchor": "Bot:",
        "fields": {
            "thinking": {"open_pattern": r"(?:^|<think>\s*)", "close": "</think>"},
            "content": {"open": "<say>\n", "close_pattern": r"\n?</say>"},
            "tool_calls": {
                "open": "<call>",
                "close": "</call>",
                "repeats": True,
                "content": "json",
                "transform": IN_JSON,
            },
        },
    },
    "blocks": {  # Inkling: blocks that are joined, with an optional header; a value within the JSON
        "start_anchor": "<|from|>",
        "fields": {
            "thinking": {
                "open_pattern": r"(?:<\|from\|>)?[^<]*<\|think\|>",
                "close": "<|end|>",
                "repeats": True,
                "join": "",
                "content_args": {"strip": False},
            },
            "content": {
                "open_pattern": r"(?:<\|from\|>)?[^<]*<\|say\|>",
                "close": "<|end|>",
                "repeats": True,
                "join": " ",
            },
            "tool_calls": {
                "open_pattern": r"(?:<\|from\|>)?[^<]*<\|do\|>",
                "close": "<|end|>",
                "repeats": True,
                "content": "json",
                "transform": {"function": {"name": "{content.name}", "arguments": "{content.args}"}},
            },
        },
    },
    "lines": {  # lines of keys and values; kinds of patterns
        "start_anchor_pattern": r"bot\d?:",
        "fields": {
            "reasoning": {
                "open_pattern": r"(?i:<why>)s+?t?",
                "close_pattern": r"(?<=x)y|z{2,3}(?!w)|\bk\b|<(?:a|bc)+e>",
            },
            "tool_calls": {
                "open_pattern": r"\[(?P<name>\w+)(?=\])\]",
                "close": "\n\n",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"(?P<key>\w+)=(?P<value>[^\n]*)",
                    "value_parser": {"name": "json", "args": {"allow_non_json": True}},
                },
                "transform": CALL,
            },
            "content": {},
        },
    },
}
MARKERS = {
    "json": ["<think>", "</think>", "<call>", "</call>", "<|stop|>"],
    "list": ["<SAY>", "</SAY>", "<THINK>", "</THINK>", "<ACT>", "</ACT>"],
    "tags": ["<think>", "</think>", "<call>", "<function=", "add>", "<arg=n>", "</arg>", "</function>", "</call>"],
    "channels": ["<|ch|>final<|msg|>", "<|end|>", "<|ch|>comment to=f.", "add", "<|msg|>", "<|do|>"],
    "dialect": ["<|ch>thought\n", "<ch|>", "<|call>call:", "add", "<call|>", "<turn|>", "!", "<|result>"],
    "prefilled": ["<think>", "</think>", "<say>\n", "</say>", "<call>", "</call>"],
    "blocks": ["<|from|>", "<|think|>", "<|say|>", "<|do|>", "<|end|>"],
    "lines": ["<why>", "<WHY>", "s", "t", "xy", "zz", "z", "w", " k ", "<a", "bc", "e>", "[add]", "\n\n"],
}
BLOCKS = {
    "json": ['<call>\n{"name": "add", "arguments": {"n": "3"}}\n</call>', "<think>a\n</think>\n"],
    "list": ['<ACT>[{"tool": "add", "parameters": {"n": 3}}]</ACT>', "<SAY> a </SAY>", "<THINK>b</THINK>"],
    "tags": [
        "<call>\n<function=add>\n<arg=n>3</arg>\n<arg=s> é\n</arg></function>\n</call>\n",
        "<call><function=add></function></call>",
        "<think>a</think>",
    ],
    "channels": ['<|ch|>comment to=f.add json<|msg|>{"n": 3}<|do|>', "<|ch|>final<|msg|>a\n<|end|>"],
    "dialect": ['<|call>call:add{n:3,s:<|"|>"{<|"|>}<call|>', "<|ch>thought\na<ch|>"],
    "prefilled": ['<call>{"name": "add", "arguments": {"on": null}}</call>', "<say>\n a</say>", "<think>b</think>"],
    "blocks": [
        '<|from|>me<|do|>{"name": "add", "args": {"n": 3}}<|end|>',
        "<|from|><|say|> a <|end|>",
        "<|think|> b<|end|>",
    ],
    "lines": ["[add]\nn=3\ns=a b\n\n", "<why>ss a k b"],
}  # complete ones
TEXT = ["a", " ", "\n", "<", "|", ">", "é", "word"]


def random_answer(name: str, chance: random.Random) -> str:
    """Return complete calls and blocks, with other text between them, half of the time markers among it."""
    groups = [BLOCKS[name], TEXT, TEXT, MARKERS[name]][: chance.choice([3, 4])]
    return "".join(chance.choice(chance.choice(groups)) for _ in range(chance.randint(0, 15)))


def random_pieces(text: str, chance: random.Random) -> list[str]:
    """Cut a text."""
    pieces = []
    while text:
        size = chance.choice([1, 1, 2, 3, 10, 50])
        pieces.append(text[:size])
        text = text[size:]
    return pieces
