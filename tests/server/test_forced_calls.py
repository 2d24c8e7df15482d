"""Calls that a request demands, in the forms of clients: how many, and what may come before."""

import json
from typing import Any

import pytest

from dflash_jax.engine.structured.grammars import Grammars
from dflash_jax.server.anthropic import decode_messages
from dflash_jax.server.completions import decode_chat
from dflash_jax.server.output_structure import structure_of
from dflash_jax.server.prompt import EncodedPrompt
from dflash_jax.server.protocol import GenerationRequest
from dflash_jax.server.response_store import ResponseStore
from dflash_jax.server.responses import decode_responses
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import SYNTAXES
from tests.server.conftest import LiveServer

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "adult": {"type": "boolean"}},
    "required": ["age", "adult"],
}
USER: list[Any] = [{"role": "user", "content": "Anna is 31 years old."}]
FUNCTION = {"name": "P", "description": "Correctly extracted person", "parameters": PERSON}
CALL = '<tool_call>\n{"name": "P", "arguments": {"age": 31, "adult": true}}\n</tool_call>'


def chat(**more: Any) -> GenerationRequest:
    tools = [{"type": "function", "function": FUNCTION}]
    return decode_chat(json.dumps({"messages": USER, "tools": tools, **more}).encode())


def response(**more: Any) -> GenerationRequest:
    tools = [{"type": "function", "strict": True, **FUNCTION}]
    body = {"input": "Hi", "tools": tools, **more}
    return decode_responses(json.dumps(body).encode(), ResponseStore())


def message(**more: Any) -> GenerationRequest:
    tools = [{"name": "P", "input_schema": PERSON}]
    return decode_messages(
        json.dumps({"messages": USER, "max_tokens": 9, "tools": tools, **more}).encode()
    )


NAMED = {"type": "function", "function": {"name": "P"}}
STRICT = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, 2048, [2040])


def follows(
    grammars: Grammars, tokenizer: Tokenizer, asked: GenerationRequest, text: str, **prompt: bool
) -> bool:
    """Return whether a whole output may be this text."""
    encoded = EncodedPrompt([], may_think=True, **prompt)
    structure = structure_of(asked, encoded, SYNTAXES["hermes"], tokenizer)
    assert structure is not None
    state = grammars.make(structure)
    state.accept(tokenizer.encode(text, specials=False))
    if state.error is None and not state.finished:
        state.accept([2040])
    return state.error is None


@pytest.mark.parametrize(
    ("asked", "several"),
    [
        pytest.param(chat(tool_choice=NAMED), False, id="openai: named"),
        pytest.param(chat(tool_choice="required"), True, id="openai: required"),
        pytest.param(
            chat(tool_choice="required", parallel_tool_calls=False), False, id="openai: one"
        ),
        pytest.param(chat(tool_choice=ALLOWED), True, id="openai: allowed tools"),
        pytest.param(chat(tool_choice=NAMED, tools=STRICT), False, id="instructor: TOOLS_STRICT"),
        pytest.param(
            chat(tool_choice=NAMED, parallel_tool_calls=False), False, id="langchain: function"
        ),
        pytest.param(
            chat(tool_choice=NAMED, parallel_tool_calls=True), False, id="named, in parallel"
        ),
        pytest.param(
            chat(tool_choice="required", parallel_tool_calls=True), True, id="pydantic-ai: output"
        ),
        pytest.param(response(tool_choice={"type": "function", "name": "P"}), False, id="response"),
        pytest.param(response(tool_choice="required"), True, id="response: required"),
        pytest.param(
            response(tool_choice="required", parallel_tool_calls=False), False, id="response: one"
        ),
        pytest.param(message(tool_choice={"type": "tool", "name": "P"}), False, id="anthropic"),
        pytest.param(message(tool_choice={"type": "any"}), True, id="anthropic: any"),
        pytest.param(
            message(tool_choice={"type": "any", "disable_parallel_tool_use": True}),
            False,
            id="anthropic: one",
        ),
    ],
)
def test_a_demanded_call_is_first_and_a_named_one_is_all(
    grammars: Grammars, tokenizer: Tokenizer, asked: GenerationRequest, several: bool
) -> None:
    assert follows(grammars, tokenizer, asked, CALL)
    assert follows(grammars, tokenizer, asked, f"{CALL}\n{CALL}") == several
    assert asked.takes_one_call != several
    for before in ("Sure.\n", "<think>\nHm.\n</think>\n\n", "<think>", "\n"):
        assert not follows(grammars, tokenizer, asked, before + CALL)
    thought = "Hm.\n</think>\n\n"
    assert follows(grammars, tokenizer, asked, thought + CALL, thinking=True)
    assert not follows(grammars, tokenizer, asked, f"{thought}Sure.\n{CALL}", thinking=True)


def test_a_model_whose_template_knows_no_reasoning_writes_none(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    plain = Tokenizer(tokenizer.core, "{{ messages }} <tool_call>", {})
    form = {"response_format": {"type": "json_object"}}
    for asked in (chat(**form), chat(**form, tools=[])):
        text = "<think>\nHm.\n</think>\n\n{}"
        assert follows(grammars, tokenizer, asked, text)
        assert not follows(grammars, plain, asked, text)
        assert follows(grammars, plain, asked, "{}")


def test_a_named_tool_is_called_once_whatever_the_model_would_say(live: LiveServer) -> None:
    tokenizer = live.engine.tokenizer
    assert tokenizer is not None
    wanted = ("<think>", "<tool_call>", "\n")
    biases = {str(tokenizer.encode(text, specials=False)[0]): 90 for text in wanted}
    biases |= {str(end): -90 for end in live.engine.graph.config.eos_token_ids}
    tools: Any = [{"type": "function", "function": FUNCTION}]
    for choice in (NAMED, "required"):
        more: Any = {"tool_choice": choice, "parallel_tool_calls": choice == NAMED}
        [answer] = live.openai.chat.completions.create(
            model="tiny", tools=tools, max_tokens=200, logit_bias=biases, messages=USER, **more
        ).choices
        assert answer.message.tool_calls is not None
        [call] = answer.message.tool_calls
        assert isinstance(json.loads(call.function.arguments)["adult"], bool)
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content is None
        assert "reasoning_content" not in (answer.message.model_extra or {})
