"""Prompts of past turns, tools and system messages. Without an engine."""

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_jax.server.anthropic import decode_messages
from dflash_jax.server.completions import decode_chat
from dflash_jax.server.conversation import parse_messages
from dflash_jax.server.generation import Generation
from dflash_jax.server.prompt import chat_prompt
from dflash_jax.server.protocol import Problem, new_id
from dflash_jax.server.reply import ToolCall
from dflash_jax.server.responses import decode_responses
from dflash_jax.server.tool_turns import ToolTurnCache
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import SYNTAXES
from tests.server.replies import CALL, asked


@pytest.mark.parametrize("thinking", [True, False])
def test_a_past_tool_turn_is_in_the_prompt_as_the_model_wrote_it(
    tokenizer: Tokenizer, thinking: bool
) -> None:
    """The next prompt starts with the last one and its output, so the prefix cache hits."""
    turns, thought = ToolTurnCache(), SYNTAXES["hermes"].thought
    template = {} if thinking else {"enable_thinking": False}
    talk: list[dict] = [{"role": "user", "content": "Read a.txt"}]
    expected: list[int] = []
    for turn in range(4):
        request = asked(messages=parse_messages(talk), template_kwargs=template)
        prompt = chat_prompt(request, tokenizer, turns, thought)
        assert prompt.ids[: len(expected)] == expected
        raw = f" Odd  spacing {turn}:{CALL}"
        ids = tokenizer.encode(raw, specials=False)
        expected = prompt.ids + ids
        call_id = new_id("call_")
        function = {"name": "read_file", "arguments": '{"path":"a.txt"}'}
        call = {"id": call_id, "type": "function", "function": function}
        said = {"role": "assistant", "content": f"Odd  spacing {turn}:", "tool_calls": [call]}
        lead = prompt.lead()
        assert lead is not None
        turns.put(parse_messages([said])[0], [*lead, *ids])
        talk.append(said)
        talk.append({"role": "tool", "tool_call_id": call_id, "content": "hello"})


_CONFIG = SimpleNamespace(eos_token_ids=())
ENDLESS = SimpleNamespace(graph=SimpleNamespace(config=_CONFIG))  # an engine
CHANNELS = """{%- set named = namespace(tool=none) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {%- set named.tool = m.tool_calls[0].function.name %}
        {{- '<|start|>assistant to=functions.' + named.tool }}
        {{- '<|channel|>commentary json<|message|>' }}
        {{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'tool' and named.tool is none %}
        {{- raise_exception('a tool answers, but none was called') }}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""


def test_turns_whose_header_names_a_channel_are_left_to_the_template(tokenizer: Tokenizer) -> None:
    """A turn after the header without a channel cannot follow the header of an answer."""
    harmony, turns = Tokenizer(tokenizer.core, CHANNELS, {}), ToolTurnCache()
    said = called("c")
    for talk in ([], [said, {"role": "tool", "content": "hello"}]):
        request = asked(messages=parse_messages([{"role": "user", "content": "Read a.txt"}, *talk]))
        prompt = chat_prompt(request, harmony, turns, None)
        generation: Any = SimpleNamespace(
            request=request, prompts=[prompt], model=SimpleNamespace(turns=turns, engine=ENDLESS)
        )
        reply: Any = SimpleNamespace(
            index=0,
            ids=[1, 2],
            content="Look:",
            finish_reason="tool_calls",
            calls=[ToolCall("c", "read_file", '{"path": "a.txt", "n": 1}', done=True)],
        )
        Generation._remember(generation, reply)
        assert not turns
    text = harmony.raw(prompt.ids)
    assert text.count("to=functions.read_file") == 1
    assert text.endswith("<|start|>assistant")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[-1].content }}",  # omits past turns
        "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}go",
    ],
)
def test_turns_without_a_header_are_left_to_the_template(
    tokenizer: Tokenizer, template: str
) -> None:
    bare = Tokenizer(tokenizer.core, template, {})
    request = asked(messages=parse_messages([{"role": "user", "content": "Hi"}]))
    assert chat_prompt(request, bare, ToolTurnCache(), None).lead() is None


def test_unknown_calls_are_rendered_by_the_template(tokenizer: Tokenizer) -> None:
    function = {"name": "read_file", "arguments": '{"path": "a.txt"}'}
    talk = [
        {"role": "user", "content": "Read a.txt"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "x", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "hello"}]},
    ]
    request = asked(messages=parse_messages(talk))
    ids = chat_prompt(request, tokenizer, ToolTurnCache(), None).ids
    assert '{"name": "read_file", "arguments": {"path": "a.txt"}}' in tokenizer.showing(
        ["<tool_call>"]
    ).decode(ids)


def test_old_turns_are_forgotten_first() -> None:
    turns = ToolTurnCache(most_ids=10)
    for i in range(4):
        turns.put(called(str(i)), [i] * 4)
    recalled = [turns.lookup(called(str(i))) for i in range(4)]
    assert recalled == [None, None, (2,) * 4, (3,) * 4]


def called(call_id: str, content: str | None = "Look:", **changes: str) -> dict[str, Any]:
    function = {"name": "read_file", "arguments": '{"path": "a.txt", "n": 1}'} | changes
    call = {"id": call_id, "type": "function", "function": function}
    [message] = parse_messages([{"role": "assistant", "content": content, "tool_calls": [call]}])
    return message


def test_a_past_turn_that_the_client_changed_is_not_put_back() -> None:
    turns = ToolTurnCache()
    turns.put(called("c"), [1, 2])
    assert turns.lookup(called("c", arguments='{"n": 1.0,"path": "a.txt"}')) == (1, 2)
    assert turns.lookup(called("c", "Look:\n")) == (1, 2)
    assert turns.lookup(called("c", arguments='{"path": "b.txt", "n": 1}')) is None
    assert turns.lookup(called("c", "Look away:")) is None
    assert turns.lookup(called("c", None)) is None
    assert turns.lookup(called("c", name="write_file")) is None


def test_a_continued_message_ends_the_prompt(tokenizer: Tokenizer) -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, I"}]
    request = asked(messages=parse_messages(talk), continue_final_message=True, tools=[])
    assert tokenizer.decode(chat_prompt(request, tokenizer, ToolTurnCache(), None).ids).endswith(
        "Hello, I"
    )


def test_developer_is_system_and_neighbouring_system_messages_are_one() -> None:
    talk = parse_messages(
        [
            {"role": "developer", "content": "A"},
            {"role": "system", "content": [{"type": "text", "text": "B"}]},
            {"role": "user", "content": "C"},
            {"role": "system", "content": [{"type": "text", "text": text} for text in "DE"]},
            {"role": "system", "content": [{"type": "text", "text": text} for text in "FG"]},
        ]
    )
    said = [(m["role"], m["content"]) for m in talk]
    assert said[:2] == [("system", "A\n\nB"), ("user", "C")]
    assert said[2:] == [("system", ["D", "E\n\nF", "G"])]


def every_message(content: str) -> str:
    return "{% for m in messages %}<{{ " + content + " }}>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "seam"),
    [
        (every_message("m.content if m.content is string"), "\n"),
        (every_message("m.content | trim"), "\n"),
        (every_message("m.content.strip()"), "\n"),
        (every_message("m.content if m.content is string else m.content[0].text"), "\n"),
        (every_message("m.content if m.content is string else m.content | join('', 'text')"), ""),
        (None, ""),
    ],
)
def test_parts_of_a_text_are_joined_as_the_template_does_or_by_newlines(
    tokenizer: Tokenizer, template: str | None, seam: str
) -> None:
    """As in vLLM and llama.cpp. Parts of an assistant message are joined without a separator."""
    if template:
        tokenizer = Tokenizer(tokenizer.core, template, {})
    parts = [{"type": "text", "text": text} for text in "AB"]
    talk = [{"role": role, "content": parts} for role in ("user", "assistant", "user")]
    inputs = [m | {"content": [p | {"type": "input_text"} for p in parts]} for m in talk]
    asks = [
        decode_chat(json.dumps({"messages": talk}).encode()),
        decode_messages(json.dumps({"messages": talk, "max_tokens": 1}).encode()),
        decode_responses(json.dumps({"input": inputs}).encode()),
    ]
    one = [{"role": "user", "content": f"A{seam}B"}, {"role": "assistant", "content": "AB"}]
    wanted = tokenizer.chat([*one, one[0]])
    for request in asks:
        assert chat_prompt(request, tokenizer, ToolTurnCache(), None).ids == wanted
    assert tokenizer.chat(talk[:1]) == tokenizer.chat(one[:1])


GUARDED = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}
{{ raise_exception('System message must be at the beginning.') }}{% endif %}
<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"""


def test_system_messages_lead_where_the_template_takes_them_nowhere_else(
    tokenizer: Tokenizer,
) -> None:
    talk = [
        {"role": "system", "content": "A"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "V"},
        {"role": "developer", "content": "B"},
        {"role": "user", "content": "W"},
    ]
    wrap_handler = Tokenizer(tokenizer.core, GUARDED, {})

    def text(tokenizer: Tokenizer, *talk: dict[str, Any]) -> str:
        request = asked(messages=parse_messages(talk), tools=[])
        return tokenizer.raw(chat_prompt(request, tokenizer, ToolTurnCache(), None).ids)

    lifted = text(wrap_handler, *talk).replace("\n\n", "|").replace("\n", "")
    order = ["system", "user", "assistant", "user"]
    assert re.findall(r"<(\w+)>", lifted) == order
    assert "<system>A|B</system>" in lifted
    placed = text(tokenizer, *talk)
    assert placed.index("V") < placed.index("B") < placed.index("W")
    with pytest.raises(Problem, match="beginning"):
        text(Tokenizer(tokenizer.core, "{{ raise_exception('beginning') }}", {}), *talk)
