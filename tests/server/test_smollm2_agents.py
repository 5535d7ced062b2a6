"""Ten turns of agents' requests on SmolLM2-135M-Instruct: each turn finds its prompt in the cache (make test-smollm2).

The requests have the shapes of Claude Code's (/v1/messages) and Codex's (/v1/responses): tools whose schemas zod
writes, declarations that only the vendors' servers can run, a system block that changes with each request, images in
results, and system messages between the turns. `pytest -s` prints the share of each turn's prompt that was cached.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("httpx", reason="the extra test is not installed")
pytest.importorskip("starlette", reason="the extra server is not installed")
pytest.importorskip("llguidance", reason="the extra structured is not installed")

from helpers import smollm2
from helpers.server_client import Client
from nanoinfer import LLM
from nanoinfer.entrypoints.chat import ChatFormatter
from nanoinfer.protocols.fields import MESSAGES, RESPONSES

pytestmark = smollm2.needs_smollm2

NUM_TURNS = 10
TEMPLATE = """{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'system' and not loop.first %}{{ raise_exception('a system message is not the first') }}{% endif %}
    {{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
    {%- for call in m.tool_calls or [] %}
        {{- '\\n<tool_call>\\n' }}{{ call.function | tojson }}{{ '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""SmolLM2's, with tools. As many others do, it refuses a system message that is not the first one."""
NAMES = (
    "Task", "Bash", "Glob", "Grep", "Read", "Edit", "Write", "NotebookEdit", "WebFetch", "TodoWrite", "BashOutput",
    "KillShell", "Skill", "SlashCommand", "EnterPlanMode", "ExitPlanMode", "AskUserQuestion", "ListResources",
    "ReadResource", "LSP",
)  # fmt: skip


ZOD: tuple[dict[str, Any], ...] = (
    {"env": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"}}},
    {"mode": {"anyOf": [{"enum": ["content", "count"]}, {"type": "null"}]}, "url": {"type": "string", "format": "uri"}},
    {"todos": {"type": "array", "minItems": 1, "uniqueItems": True, "items": {"not": {"type": "null"}}}},
    {"limit": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991}},
)
"""Properties as zod writes them, with keywords that few grammars support."""


def schema(name: str) -> dict[str, Any]:
    """Return the schema of a tool's input."""
    path = {"type": "string", "description": f"The absolute path of the file for {name}"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"file_path": path, **ZOD[len(name) % len(ZOD)]},
        "required": ["file_path"],
        "additionalProperties": False,
    }


def describe(name: str) -> str:
    return f"{name}: use it when the user asks for it. Results are cut after 2000 lines. Prefer it to the shell."


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    llm = LLM(str(smollm2.FILES[0]), engine="native", dtype="float32", max_num_seqs=2, kv_cache_memory=2 << 30)
    llm.formatter = ChatFormatter(replace(llm.model, chat_template=TEMPLATE))
    made = Client(llm, served_model_name=("tiny",))
    yield made
    made.async_llm.shutdown()


class CachedShares:
    """Measures the share of each turn's prompt that was cached."""

    def __init__(self, client: Client) -> None:
        self._stats = client.llm.core.scheduler.stats
        self._before = self._counts()
        self.shares: list[float] = []

    def _counts(self) -> tuple[int, int]:
        return self._stats.num_shared_tokens, self._stats.num_prompt_tokens

    def add(self, what: str) -> None:
        (cached, total), (cached_before, total_before) = after, _ = self._counts(), self._before
        cached, total, self._before = cached - cached_before, total - total_before, after
        self.shares.append(cached / total)
        print(f"{what}, turn {len(self.shares)}: {cached} of {total} tokens cached, {cached / total:.1%}")


def check(shares: list[float]) -> None:
    assert len(shares) == NUM_TURNS
    assert min(shares[1:]) > 0.95


def test_claude_code_finds_its_prefixes(client: Client) -> None:
    tools = [{"name": name, "description": describe(name), "input_schema": schema(name)} for name in NAMES]
    tools[-1] |= {"defer_loading": True, "input_examples": [{"file_path": "/a"}]}
    tools.append({"type": "web_search_20250305", "name": "web_search", "max_uses": 8})
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "<system-reminder>Today is Monday.</system-reminder>"}
    ]
    measured = CachedShares(client)
    for turn in range(NUM_TURNS):
        header = f"x-anthropic-billing-header: cc_version=2.1.{turn}; cc_entrypoint=cli; cch={turn:05x};"
        texts = (header, "You are Claude Code, a CLI.", "Be brief. " * 20)
        choice = {"type": "tool", "name": "Read"} if turn % 2 else {"type": "auto"}
        made = client.post(
            MESSAGES, model="tiny", max_tokens=24, temperature=0, messages=messages, tools=tools,
            system=[{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in texts],
            tool_choice=choice, thinking={"type": "enabled", "budget_tokens": 1024}, betas=["interleaved-thinking"],
            metadata={"user_id": "u"}, context_management={"edits": []},
        )  # fmt: skip
        measured.add("Claude Code")
        call = {"type": "tool_use", "id": f"toolu_{turn}", "name": "Read", "input": {"file_path": f"/src/{turn}.py"}}
        said = [block for block in made["content"] if block["type"] == "text"]
        calls = [block for block in made["content"] if block["type"] == "tool_use"] or [call]
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block["id"],
                "content": [{"type": "text", "text": f"line {turn}"}, image],
            }
            for block in calls
        ]
        messages += [{"role": "assistant", "content": [*said, *calls]}, {"role": "user", "content": results}]
        if turn % 3 == 2:
            messages.append({"role": "system", "content": f"The todo list has {turn} items. Do not tell the user."})
    check(measured.shares)


def test_codex_finds_its_prefixes(client: Client) -> None:
    tools: list[dict[str, Any]] = [
        {"type": "function", "name": name, "description": describe(name), "strict": False, "parameters": schema(name)}
        for name in NAMES[:16]
    ]
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /.+/'}
    tools += [
        {"type": "custom", "name": "apply_patch", "description": "Edit files with a patch.", "format": grammar},
        {"type": "local_shell"}, {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "mcp__docs", "description": "Docs", "tools": tools[:1]},
    ]  # fmt: skip
    items: list[dict[str, Any]] = [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Sandbox: read-only. " * 20}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<cwd>/src</cwd>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Mend the parser."}]},
    ]
    measured = CachedShares(client)
    for turn in range(NUM_TURNS):
        choice: Any = {"type": "custom", "name": "apply_patch"} if turn % 2 else "auto"
        response = client.request("POST", RESPONSES, json={
            "model": "tiny", "max_output_tokens": 24, "temperature": 0, "input": items, "tools": tools, "stream": True,
            "instructions": "You are Codex, a coding agent.", "tool_choice": choice, "parallel_tool_calls": False,
            "store": False, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
            "reasoning": {"effort": "medium", "summary": "auto"}, "text": {"verbosity": "low"},
        })  # fmt: skip
        assert response.status_code == 200, response.text
        last = json.loads(response.text.split("\n\n")[-2].partition("data: ")[2])
        measured.add("Codex")
        said = [item for item in last["response"]["output"] if item["type"] == "message"]
        call = {
            "type": "custom_tool_call",
            "call_id": f"call_{turn}",
            "name": "apply_patch",
            "input": f"*** {turn}\n+a",
        }
        shown = [
            {"type": "input_text", "text": "Done!"},
            {"type": "input_image", "image_url": "data:image/png;base64,"},
        ]
        items += [*said, call, {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": shown}]
        items += [
            {"type": "web_search_call", "id": f"ws_{turn}", "status": "completed"},
            {"type": "function_call", "call_id": f"f_{turn}", "name": "Read", "arguments": ""},
            {"type": "function_call_output", "call_id": f"f_{turn}", "output": f"line {turn}"},
        ]
        if turn % 3 == 2:
            text = {"type": "input_text", "text": f"Approval policy {turn}: never."}
            items.append({"type": "message", "role": "developer", "content": [text]})
    check(measured.shares)
