"""LLM.chat and conversations: prompts, errors, and turns that process their new tokens only."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.chat import HI, chat_folder
from helpers.chat_templates import CHATML, TEMPLATES
from helpers.engines import naive_greedy, prompt
from helpers.interrupts import ENGINES, check, interrupt_everywhere
from helpers.models import TINY, make_folder, make_model, refuses, submit
from helpers.overlap import make_core
from helpers.tools import TWO
from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoints.load import load_model
from nanoinfer.engines.base import StepBatch
from nanoinfer.entrypoints.chat import Conversation
from nanoinfer.kv.plan import kv_block_bytes

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("chat") / "tiny")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), max_num_seqs=3)


# LLM.chat -----------------------------------------------------------------------------------------------------


def test_chat_is_generate_on_the_rendered_prompt(llm: LLM) -> None:
    llm.reset_prefix_cache()
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    (output,) = llm.chat(HI, GREEDY)
    (expected,) = llm.generate(text, GREEDY)
    assert (output.prompt, output.outputs) == (text, expected.outputs)
    assert output.prompt_token_ids == llm.apply_chat_template(HI) == llm.tokenize(text)
    assert output.prompt_token_ids[0] == 1
    assert output.num_cached_tokens == 0
    assert "".join(llm.stream(llm.apply_chat_template(HI), GREEDY)) == output.outputs[0].text


def test_several_conversations_and_parameters(llm: LLM) -> None:
    other = [{"role": "system", "content": "No."}, {"role": "user", "content": [{"type": "text", "text": "a"}] * 2}]
    outputs = llm.chat([HI, other], [GREEDY, SamplingParams(temperature=0, max_tokens=3)], use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [8, 3]
    assert "user\na\na<|im_end|>" in str(outputs[1].prompt)
    assert outputs[0].outputs == llm.chat(HI, GREEDY)[0].outputs
    assert len(llm.chat(HI, SamplingParams(n=2, max_tokens=2))[0].outputs) == 2


def test_options_of_the_template(llm: LLM) -> None:
    template = "{{ messages[0].content }}{{ eos_token }}{{ bos_token }}{{ mood }}{{ add_generation_prompt }}"
    options: dict[str, Any] = {"chat_template": template, "chat_template_kwargs": {"mood": "!"}}
    assert llm.chat(HI, GREEDY, add_generation_prompt=False, **options)[0].prompt == "Hi<|im_end|>!False"
    assert llm.decode(llm.apply_chat_template(HI, **options)) == "Hi<|im_end|>!True"
    with pytest.raises(TypeError):
        llm.chat(HI, tool=[])
    refuses(lambda: llm.chat(HI, add_generation_prompt=1), "add_generation_prompt=1 is not a bool")  # type: ignore[arg-type]
    refuses(lambda: llm.chat(HI, chat_template_kwargs=[1]), "chat_template_kwargs=[1] is not a dict")  # type: ignore[arg-type]
    refuses(lambda: llm.chat(HI, chat_template_kwargs={"messages": 1}), "messages is a parameter of its own")
    refuses(lambda: llm.chat(HI, chat_template=""), "chat_template='' is not a Jinja template")


BAD_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages=[] is not a conversation"),
    ("Hi", "messages='Hi' is not a conversation"),
    (HI[0], "is not a conversation"),
    ([HI, []], "conversation 2 of 2: messages=[] is not a conversation"),
    (["Hi"], "message='Hi' is not a dict with role and content"),
    ([{"content": "Hi"}], "role=None is not a string such as 'user'"),
    ([HI[0], {"role": "user"}], "message 2 of 2: message={'role': 'user'} has no content"),
    ([{"role": 3, "content": "Hi"}], "role=3 is not a string such as"),
    ([{"role": "user", "content": None}], "content=None is neither a string nor a list of text parts"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "content part {'type': 'image_url'"),
    ([{"role": "user", "content": ["Hi"]}], "content part 'Hi' is not {'type': 'text', 'text': ...}"),
    ([{"role": "user", "content": "Hi", "x": {1}}], "cannot be given to the chat template"),
    ([{"role": "user", "content": "\ud800"}], "not valid Unicode"),
]


@pytest.mark.parametrize("messages, message", BAD_MESSAGES, ids=[m[:30] for _, m in BAD_MESSAGES])
def test_malformed_messages(llm: LLM, messages: Any, message: str) -> None:
    refuses(lambda: llm.chat(messages), message)


def test_refusals_of_the_template_and_the_context(llm: LLM) -> None:
    odd = [{"role": "assistant", "content": "Hi"}]
    refuses(lambda: llm.chat(odd, chat_template=TEMPLATES["gemma"]), "refuses the messages: Roles must alternate")
    refuses(lambda: llm.chat([HI, odd], chat_template=TEMPLATES["gemma"]), "conversation 2 of 2: the chat template")
    refuses(
        lambda: llm.chat([{"role": "user", "content": "x" * 400}]),
        "the maximum context length is 256 tokens: shorten it",
    )


def test_a_model_without_a_template() -> None:
    llm = LLM("shakespeare")
    for call in (lambda: llm.chat(HI), lambda: llm.apply_chat_template(HI), llm.conversation):
        refuses(call, "model 'shakespeare' has no chat template: give one by chat_template= (--chat-template FILE)")
    assert llm.chat(HI, GREEDY, chat_template="{{ messages[0].content }}")[0].prompt == "Hi"


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    llm = LLM(str(make_folder(tmp_path / "bare", TINY, chars=None)))
    refuses(lambda: llm.chat(HI, chat_template=CHATML), "has no tokenizer")
    refuses(lambda: llm.conversation(chat_template=CHATML), "has no tokenizer")


def test_answers_end_at_each_end_token_of_the_generation_config(folder: Path, tmp_path: Path) -> None:
    ids = LLM(str(folder)).chat(HI, GREEDY)[0].outputs[0].token_ids
    other = chat_folder(tmp_path / "ends")
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, ids[3]]}))
    output = LLM(str(other)).chat(HI, GREEDY)[0].outputs[0]
    assert (output.token_ids, output.finish_reason) == (ids[: ids.index(ids[3]) + 1], "stop")


# Files --------------------------------------------------------------------------------------------------------


def test_places_of_the_template(tmp_path: Path) -> None:
    path = chat_folder(tmp_path / "m", None)
    config = path / "tokenizer_config.json"
    assert load_model(str(path)).chat_template is None
    (path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert load_model(str(path)).chat_template == "json"
    listed = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "listed"}]
    config.write_text(json.dumps({"chat_template": listed}))
    assert load_model(str(path)).chat_template == "listed"
    assert load_model(str(path)).tool_template == "tools"
    config.write_text(json.dumps({"chat_template": "own", "bos_token": "<b>", "unk_token": 3}))
    assert load_model(str(path)).chat_template == "own"
    (path / "chat_template.jinja").write_text("jinja \u00e9")
    (path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<other>", "pad_token": {"content": "<p>"}, "additional_special_tokens": ["x"]})
    )
    loaded = load_model(str(path))
    assert (loaded.chat_template, loaded.tool_template) == ("jinja \u00e9", None)
    assert loaded.special_tokens == {"bos_token": "<b>", "pad_token": "<p>"}


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("tokenizer_config.json", b"{", "cannot be read"),
        ("tokenizer_config.json", b"[" * 100_000, "cannot be read"),
        ("tokenizer_config.json", b"[]", "is not a JSON object"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template is not a string"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "rag", "template": "x"}]}', "(it has: rag)"),
        ("tokenizer_config.json", b'{"chat_template": [3, {"name": [1]}]}', "(it has: none)"),
        ("tokenizer_config.json", b" " * (16 << 20) + b"{}", "the limit for a JSON file is 16777216"),
        ("chat_template.jinja", b"\xff", "is not UTF-8"),
        ("chat_template.jinja", b"x" * (5 << 20), "the limit for a chat template is 4194304"),
        ("special_tokens_map.json", b"3", "is not a JSON object"),
    ],
)
def test_malformed_files_end_chat_alone(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = chat_folder(tmp_path / "m")
    (path / name).write_bytes(content)
    llm = LLM(str(path))
    assert llm.generate("Hi", GREEDY)[0].outputs[0].token_ids
    refuses(lambda: llm.chat(HI), message, "chat_template=")


def test_a_packed_folder_keeps_the_template_and_the_sampling_parameters(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from nanoinfer.cli import app

    folder, out = chat_folder(tmp_path / "tiny"), tmp_path / "packed"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].function.name }}")
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": 3, "top_k": null}')
    made = CliRunner().invoke(app.app, ["pack", str(folder), "--dtype", "float32", "--output", str(out)])
    assert made.exit_code == 0, made.output
    ours, theirs = LLM(str(out)), LLM(str(folder))
    assert ours.chat(HI, GREEDY)[0].outputs == theirs.chat(HI, GREEDY)[0].outputs
    assert ours.decode(ours.apply_chat_template(HI, tools=TWO[:1])) == TWO[0]["function"]["name"]
    assert ours.get_default_sampling_params() == SamplingParams(temperature=0.5)
    assert ours.config.eos_token_ids == theirs.config.eos_token_ids == (3, 2)  # of both files


def test_a_template_of_the_constructor_and_tools_that_it_does_not_show(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    llm = LLM(str(folder), chat_template=template)
    assert llm.decode(llm.apply_chat_template(HI, tools=TWO[:1])) == f"<user>{HI[0]['content']}"
    assert "does not show tool 'add' to the model: describe the tools" in caplog.text
    refuses(lambda: LLM(str(folder), chat_template=""), "chat_template='' is not a Jinja template")


# Conversations ------------------------------------------------------------------------------------------------


class Extends:
    """Counts the tokens that an engine is extended by."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_tokens = 0
        extend = engine.extend

        def counted(batch: StepBatch) -> Any:
            self.num_tokens += sum(batch.num_new)
            return extend(batch)

        monkeypatch.setattr(engine, "extend", counted)

    def take(self) -> int:
        count, self.num_tokens = self.num_tokens, 0
        return count


def say(conversation: Conversation, content: str, params: SamplingParams = GREEDY) -> list[int]:
    text = "".join(conversation.send(content, params))
    assert conversation.messages[-1] == {"role": "assistant", "content": text}
    assert conversation.output is not None
    return conversation.output.outputs[0].token_ids


@pytest.mark.parametrize("engine", [*ENGINES, pytest.param("compiled", marks=pytest.mark.nightly)])
def test_a_turn_processes_its_new_tokens_only(folder: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, fresh = (LLM(str(folder), engine=engine, max_num_seqs=2) for _ in range(2))
    conversation = llm.conversation("Be kind.")
    extends = Extends(llm.engine, monkeypatch)
    before: list[int] = []
    for content in ("Hello there", "again", "\U0001f600 and again"):
        made = say(conversation, content)
        output = conversation.output
        assert output is not None
        prompt = output.prompt_token_ids
        assert prompt[: len(before)] == before
        num_new = len(prompt) - max(0, len(before) - 1)  # the last token of an answer has not been processed
        assert extends.take() == num_new + len(made) - 1
        assert output.num_cached_tokens == len(prompt) - num_new
        assert made == fresh.generate({"prompt_token_ids": prompt}, GREEDY)[0].outputs[0].token_ids
        before = prompt + made
        check(llm.core)
        assert len(llm.engine.handles) == 1
    assert [m["role"] for m in conversation.messages] == ["system", *["user", "assistant"] * 3]
    llm.reset_prefix_cache()
    assert len(llm.engine.handles) == 0


def test_an_answer_that_ends_at_its_end_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(chat_folder(tmp_path / "m")))
    greedy = llm.chat(HI, GREEDY)[0].outputs[0].token_ids
    llm = LLM(str(chat_folder(tmp_path / "m", eos_token_id=[2, greedy[4]])))
    conversation = llm.conversation()
    say(conversation, "Hi")
    assert conversation.output is not None
    assert conversation.output.outputs[0].stop_reason == greedy[4]
    first = conversation.output.prompt_token_ids + greedy[:4]  # the end token is the template's own here: <|im_end|>
    say(conversation, "again")
    assert conversation.output.prompt_token_ids[: len(first)] == first
    assert conversation.output.num_cached_tokens == len(first)


def test_prompts_are_those_of_the_template(llm: LLM) -> None:
    """Where the generated tokens are not those that their text is tokenized to, the prompt has the generated ones."""
    conversation = llm.conversation()
    params = SamplingParams(seed=3, temperature=2.0, max_tokens=30)
    for content in ("Hi", "and", "so"):
        say(conversation, content, params)
        messages = conversation.messages[:-1]
        assert conversation.output is not None
        assert llm.decode(conversation.output.prompt_token_ids) == llm.decode(llm.apply_chat_template(messages))
    assert conversation.output.prompt_token_ids != llm.apply_chat_template(messages)


def test_regenerate_and_reset(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = llm.conversation("Be kind.")
    refuses(lambda: conversation.regenerate(), "there is no answer to generate again")
    first, second = say(conversation, "Hello"), say(conversation, "again")
    prompt = conversation.output.prompt_token_ids  # type: ignore[union-attr]
    extends = Extends(llm.engine, monkeypatch)
    text = "".join(conversation.regenerate(GREEDY))
    output = conversation.output
    assert output is not None
    assert (output.outputs[0].token_ids, output.outputs[0].text, output.prompt_token_ids) == (second, text, prompt)
    assert extends.take() == len(second)  # the last token of the prompt, and all but the last of the answer
    assert len(conversation.messages) == 5
    sampled = "".join(conversation.regenerate(SamplingParams(seed=5, max_tokens=8)))
    assert conversation.messages[-1]["content"] == sampled != text
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be kind."}]
    assert say(conversation, "Hello") == first
    conversation.messages = [*HI, {"role": "assistant", "content": "Yes."}]
    say(conversation, "again")
    assert conversation.output.prompt_token_ids == llm.apply_chat_template(conversation.messages[:-1])  # type: ignore[union-attr]


def test_an_answer_that_is_stopped_keeps_what_was_said(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40)
    conversation = llm.conversation()
    for end in ("close", "drop", "leave"):
        stream = conversation.send("Hello", params)
        said = next(stream) + next(stream)
        if end == "close":
            stream.close()
        elif end == "drop":
            del stream
        answer = conversation.messages[-1]
        assert answer["role"] == "assistant"
        assert answer["content"].startswith(said)
        output = conversation.output
        assert output is not None
        assert output.outputs[0].finish_reason == "abort"
        assert len(output.outputs[0].token_ids) < 20
    again = say(conversation, "again")
    prompt = conversation.output.prompt_token_ids  # type: ignore[union-attr]
    assert conversation.output.num_cached_tokens > len(prompt) - 30  # type: ignore[union-attr]
    assert again == llm.generate(prompt, GREEDY)[0].outputs[0].token_ids


def test_stop_strings(llm: LLM) -> None:
    whole = llm.chat(HI, SamplingParams(temperature=0, max_tokens=30))[0].outputs[0].text
    params = SamplingParams(temperature=0, max_tokens=30, stop=whole[6:8])
    conversation = llm.conversation()
    say(conversation, "Hi", params)
    text = conversation.messages[-1]["content"]
    assert text == whole[: whole.index(whole[6:8])]
    say(conversation, "again")
    output = conversation.output
    assert output is not None
    assert llm.decode(output.prompt_token_ids) == llm.decode(llm.apply_chat_template(conversation.messages[:-1]))


def test_a_turn_that_fails_is_taken_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = llm.conversation(chat_template=TEMPLATES["gemma"])
    say(conversation, "Hi")
    before = conversation.messages
    refuses(lambda: conversation.send("x" * 400, GREEDY), "the maximum context length is 256")
    refuses(lambda: conversation.send(None), "content=None is neither")  # type: ignore[arg-type]
    refuses(lambda: conversation.send("Hi", SamplingParams(n=2)), "a conversation has one answer")
    refuses(lambda: conversation.send("Hi", SamplingParams(prompt_logprobs=1)), "no prompt_logprobs")
    refuses(lambda: conversation.send("Hi", 3), "sampling_params=3")  # type: ignore[arg-type]
    assert conversation.messages == before
    extend = llm.engine.extend
    monkeypatch.setattr(llm.engine, "extend", lambda batch: extend(batch) * float("nan"))
    refuses(lambda: list(conversation.send("again", GREEDY)), "logit is nan")
    assert conversation.messages == before
    monkeypatch.setattr(llm.engine, "extend", extend)
    check(llm.core)
    made = say(conversation, "again")
    assert made == llm.generate(conversation.output.prompt_token_ids, GREEDY)[0].outputs[0].token_ids  # type: ignore[union-attr]
    assert len(conversation.messages) == 4


def test_kept_sequences_give_their_places_to_requests(folder: Path) -> None:
    llm = LLM(str(folder), engine="static", max_num_seqs=3)
    conversations = [llm.conversation() for _ in range(3)]
    for i, c in enumerate(conversations):
        say(c, f"Hello number {i}")
    assert len(llm.engine.handles) == 3
    outputs = llm.generate(["a", "b"], GREEDY)  # closes the two that were used least recently
    check(llm.core)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [8, 8]
    kept = llm.core.scheduler.cache
    found = [kept.find([*c.output.prompt_token_ids, 0], (None, 0))[1] for c in conversations]  # type: ignore[union-attr]
    assert found[2] == len(conversations[2].output.prompt_token_ids)  # type: ignore[union-attr]
    assert found[0] < found[2] > found[1]
    llm.perplexity("the answer")
    llm.generate(["a", "b", "c"], GREEDY)
    for c in conversations:
        made = say(c, "again")
        assert c.output is not None
        llm.reset_prefix_cache()
        assert made == llm.generate(c.output.prompt_token_ids, GREEDY)[0].outputs[0].token_ids
    streams = [c.send("more", GREEDY) for c in conversations]
    assert all(len("".join(s)) for s in streams)
    check(llm.core)


def test_a_conversation_and_little_memory(folder: Path) -> None:
    """The KV cache holds 256 tokens: a conversation of 100 leaves no room for a request of 250."""
    llm = LLM(str(folder), engine="native", max_num_seqs=4)
    llm = LLM(str(folder), engine="native", kv_cache_memory=16 * kv_block_bytes(llm.config, llm.dtype))
    assert llm.engine.limits.max_num_cached_tokens == 256
    conversation = llm.conversation()
    say(conversation, "Hello " * 20)
    (kept,) = llm.engine.handles
    (output,) = llm.generate("Hi", SamplingParams(temperature=0, max_tokens=248, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 248
    assert kept not in llm.engine.handles
    check(llm.core)
    say(conversation, "again")


def test_the_oldest_turns_are_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(str(folder), max_num_seqs=2)
    conversation = llm.conversation("Be kind.")
    with caplog.at_level(logging.WARNING, "nanoinfer"):
        for i in range(12):
            made = say(conversation, f"Hello number {i}")
            output = conversation.output
            assert output is not None
            prompt = output.prompt_token_ids
            assert len(prompt) <= 256 - 8
            assert llm.decode(prompt).startswith(
                "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello number"
            )
            assert made == llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
            if len(conversation.messages) > 3 and not caplog.records:
                assert output.num_cached_tokens > 20
    assert len(conversation.messages) == 25
    assert conversation.num_dropped_messages >= 4
    assert conversation.num_dropped_messages % 2 == 0
    found = [r.getMessage() for r in caplog.records]
    assert 1 <= len(found) <= 4
    assert found[0].startswith("the conversation exceeds the context length of 256 tokens: its oldest ")
    last = llm.apply_chat_template([conversation.messages[0], *conversation.messages[1:][-3:-1]])
    assert llm.decode(prompt).endswith(llm.decode(last)[-30:])


@pytest.mark.parametrize("draft", ["prompt-lookup", "self:1"])
def test_speculation_gives_the_same_tokens(folder: Path, llm: LLM, draft: str) -> None:
    speculating = LLM(str(folder), draft=draft, speculate_k=3, max_num_seqs=2)
    conversations = [llm.conversation(), speculating.conversation()]
    params = SamplingParams(temperature=0, max_tokens=24)
    for content in ("Hello there there there", "again and again", "brief"):
        made = [say(c, content, params) for c in conversations]
        assert made[0] == made[1]
        check(speculating.core)
    for c in conversations:
        c.stop()
        assert c.output is not None
        assert c.output.num_cached_tokens > 60
    assert [list(c.regenerate(params)) != [] for c in conversations] == [True, True]
    assert conversations[0].messages == conversations[1].messages
    drafter = speculating.core.speculator.drafter  # type: ignore[union-attr]
    assert draft == "prompt-lookup" or len(drafter.engine.handles) == 0  # type: ignore[attr-defined]


def test_windows_and_learned_positions(tmp_path: Path) -> None:
    """GPT-2 with a character-level tokenizer, sliding past its context inside an answer."""
    llm = LLM(str(make_folder(tmp_path / "gpt2")), max_num_seqs=2)
    template = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}a: "
    conversation = llm.conversation(chat_template=template)
    params = SamplingParams(temperature=0, max_tokens=40, overflow="slide")
    for content in ("Hi", "So", "Go"):
        made = say(conversation, content, params)
        prompt = conversation.output.prompt_token_ids  # type: ignore[union-attr]
        assert made == llm.generate(prompt, params)[0].outputs[0].token_ids
        check(llm.core)


@pytest.mark.parametrize("num_interrupts", [40, pytest.param(2000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("engine", ["static", "native"])
def test_interrupted_at_any_line(folder: Path, engine: str, num_interrupts: int) -> None:
    llm = LLM(str(folder), engine=engine, max_num_seqs=2)
    tokens = SamplingParams(temperature=0, max_tokens=2)

    def work() -> list[str]:
        conversation = llm.conversation(chat_template=CHATML)
        stream = conversation.send("a", tokens)
        found = [next(stream), *conversation.send("b", tokens), *conversation.regenerate(tokens)]
        found.append(llm.generate("Hi", tokens)[0].outputs[0].text)
        conversation.messages  # noqa: B018
        del conversation, stream
        llm.core.unfinished  # noqa: B018  # closes what was dropped
        return found

    interrupt_everywhere(llm.core, work, num_interrupts)


def test_after_an_interrupt_the_conversation_goes_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = llm.conversation()
    stream = conversation.send("Hello", SamplingParams(temperature=0, max_tokens=40))
    said = next(stream) + next(stream)
    extend = llm.engine.extend

    def interrupted(batch: StepBatch) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "extend", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    monkeypatch.setattr(llm.engine, "extend", extend)
    assert conversation.messages[-1]["content"].startswith(said)
    made = say(conversation, "again")
    assert conversation.output.num_cached_tokens == 0  # type: ignore[union-attr]  # the engine was reset
    assert made == llm.generate(conversation.output.prompt_token_ids, GREEDY)[0].outputs[0].token_ids  # type: ignore[union-attr]


@pytest.fixture(autouse=True)
def _no_sequence_is_lost(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    gc.collect(0)
    if "llm" in request.fixturenames:
        check(request.getfixturevalue("llm").core)


@pytest.mark.parametrize("end", ["token", "length", "abort"])
def test_a_sequence_is_kept_while_a_step_is_in_flight(end: str) -> None:
    """The engine may have a token after the end, which is not kept; another sequence runs beside it."""
    gpt = make_model()
    core = make_core(gpt)
    first, other = prompt(9), submit(core, None, prompt(5, 1), replace(GREEDY, max_tokens=20), 0)
    tokens = naive_greedy(gpt, first, 6)
    stop = (tokens[3],) if end == "token" else ()
    params = replace(GREEDY, max_tokens=20 if end == "abort" else 6, stop_token_ids=stop)
    request = submit(core, None, first, params, 0)
    while not request.finished:
        core.step()
        if end == "abort" and request.sequences[0].num_output_tokens == 3:
            core.abort(request)
    made = request.sequences[0].token_ids
    assert made == first + tokens[: len(made) - len(first)]
    assert core.scheduler.cache.find([*made, 0], (None, 0))[1] in (len(made), len(made) - 1)
    check(core)
    for extra in (4, 7):  # continues the sequence, once during the other's steps and once after them
        longer = made + prompt(extra, 2)
        again = submit(core, None, longer, replace(GREEDY, max_tokens=5), 0)
        while not again.finished:
            core.step()
        assert list(again.sequences[0].output_token_ids) == naive_greedy(gpt, longer, 5)
        assert again.num_cached_tokens >= len(made) - 1
        check(core)
        while not other.finished:
            core.step()
    assert list(other.sequences[0].output_token_ids) == naive_greedy(gpt, prompt(5, 1), 20)
    assert not core.unfinished
