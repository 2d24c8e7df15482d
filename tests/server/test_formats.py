"""Requests of the APIs: the same fields mean the same. Without an engine."""

import json
from typing import Any

import pytest

from dflash_jax.engine.state_machine import OFF
from dflash_jax.server.anthropic import MessagesRequest, decode_messages
from dflash_jax.server.completions import (
    ChatRequest,
    CompletionRequest,
    decode_chat,
    decode_completion,
)
from dflash_jax.server.protocol import Problem
from dflash_jax.server.responses import ResponsesRequest, decode_responses
from dflash_jax.server.unsupported import UNSUPPORTED
from tests.server.replies import TOOLS


def test_the_apis_ask_for_the_same() -> None:
    schema = TOOLS[0]["function"]["parameters"]
    function = {"name": "read_file", "arguments": '{"path": "x"}'}
    chat = {
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "U"},
            {"role": "assistant", "content": None,
             "tool_calls": [{"id": "1", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "1", "content": "T"},
        ],
        "tools": TOOLS,
        "temperature": 0.5,
        "max_tokens": 9,
    }  # fmt: skip
    anthropic = {
        "system": "S",
        "messages": [
            {"role": "user", "content": "U"},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "1", "name": "read_file", "input": {"path": "x"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1",
                 "content": [{"type": "text", "text": "T"}]}]},
        ],
        "tools": [{"name": "read_file", "input_schema": schema}],
        "temperature": 0.5,
        "max_tokens": 9,
    }  # fmt: skip
    responses = {
        "instructions": "S",
        "input": [
            {"role": "user", "content": "U"},
            {"type": "function_call", "call_id": "1"} | function,
            {"type": "function_call_output", "call_id": "1", "output": "T"},
        ],
        "tools": [{"type": "function", "name": "read_file", "parameters": schema}],
        "temperature": 0.5,
        "max_output_tokens": 9,
    }
    asks = [
        decode_chat(json.dumps(chat).encode()),
        decode_messages(json.dumps(anthropic).encode()),
        decode_responses(json.dumps(responses).encode()),
    ]
    talks = [[(m["role"], m["content"] or "") for m in request.messages or ()] for request in asks]
    assert talks[0] == talks[1] == talks[2]
    calls = [request.messages[2]["tool_calls"][0] for request in asks]  # type: ignore[index]
    assert calls[0] == calls[1] == calls[2]
    assert calls[0]["function"]["arguments"] == {"path": "x"}
    assert asks[0].declared_tools == asks[1].declared_tools == asks[2].declared_tools
    assert [a.options for a in asks] == [{"temperature": 0.5}] * 3
    assert [a.max_tokens for a in asks] == [9] * 3


EVERYWHERE = {  # fields of every API, and their values in the request
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "seed": 3,
    "stop_token_ids": [7],
    "ignore_eos": True,
    "min_tokens": 2,
}
BODIES = {
    decode_chat: {"messages": [{"role": "user", "content": "U"}], "max_tokens": 9},
    decode_completion: {"prompt": "U", "max_tokens": 9},
    decode_responses: {"input": "U", "max_output_tokens": 9},
    decode_messages: {"messages": [{"role": "user", "content": "U"}], "max_tokens": 9},
}


@pytest.mark.parametrize("read", BODIES)
def test_extensions_mean_the_same_in_every_api(read: Any) -> None:
    more = {
        "logit_bias": {"5": 1.5},
        "speculative": {"block_size": 2},
        "stop": ["X"],
        "structured_outputs": {"regex": "a+", "disable_any_whitespace": False},
        "return_token_ids": True,
        "timings_per_token": True,
        "timeout": 5,
        "thinking_token_budget": 50,
        "recovery": False,
        "store": True,
        "metadata": {"a": "b"},
    }
    request = read(json.dumps(BODIES[read] | EVERYWHERE | more).encode())
    assert request.options == EVERYWHERE | {"logit_bias": {"5": 1.5}, "block_size": 2}
    assert request.max_tokens == 9
    assert request.stop == ("X",)
    assert request.grammar == ("regex", "a+")
    assert request.return_token_ids
    assert request.timings_per_token
    assert request.timeout == 5
    assert request.thinking_budget == 50
    assert request.recovery == OFF
    assert request.warnings == ()
    for off in ({"enabled": False}, {"mode": "off"}):
        request = read(json.dumps(BODIES[read] | {"speculative": off}).encode())
        assert request.options == {"speculative": False}


@pytest.mark.parametrize("read", BODIES)
def test_what_would_change_an_answer_and_is_not_served_is_refused(read: Any) -> None:
    for name, neutral in UNSUPPORTED.items():
        if name in read_fields(read):
            continue
        with pytest.raises(Problem, match=f"{name} is not supported") as caught:
            read(json.dumps(BODIES[read] | {name: "something"}).encode())
        assert (caught.value.status, caught.value.param) == (400, name)
        for value in (None, *neutral):
            request = read(json.dumps(BODIES[read] | {name: value}).encode())
            assert name in request.warnings[0]


def read_fields(read: Any) -> tuple[str, ...]:
    kinds = {
        decode_chat: ChatRequest,
        decode_completion: CompletionRequest,
        decode_responses: ResponsesRequest,
        decode_messages: MessagesRequest,
    }
    return kinds[read].__struct_fields__


def test_formats_and_efforts_are_found_where_each_api_has_them() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    flat = {"type": "json_schema", "name": "x", "schema": schema}
    config = {"format": flat, "effort": "low"}
    more: dict[Any, dict[str, Any]] = {
        decode_chat: {"response_format": form, "reasoning_effort": "low"},
        decode_responses: {"text": {"format": flat}, "reasoning": {"effort": "low"}},
        decode_messages: {"output_config": config},
    }
    for read, fields in more.items():
        request = read(json.dumps(BODIES[read] | fields).encode())
        assert request.grammar == ("json", schema)
        assert request.template_kwargs == {"reasoning_effort": "low", "enable_thinking": True}
    wrong = {
        "reasoning.effort": {"reasoning": {"effort": 3}},
        "text.format": {"text": {"format": {"type": "yaml"}}},
        "conversation": {"conversation": "conv_1"},
        "prompt": {"prompt": {"id": "pmpt_1"}},
        "previous_response_id": {"previous_response_id": "resp_1"},
    }
    for param, fields in wrong.items():
        with pytest.raises(Problem) as caught:
            decode_responses(json.dumps(BODIES[decode_responses] | fields).encode())
        assert caught.value.param == param
    long = {"truncation": "auto", "text": {"verbosity": "low"}}
    request = decode_responses(json.dumps(BODIES[decode_responses] | long).encode())
    assert len(request.warnings) == 2


def test_tool_choice_none_offers_no_tools_and_names_have_to_be_declared() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
    request = decode_chat(json.dumps(body | {"tool_choice": "none"}).encode())
    assert not request.tools
    assert not request.declared_tools
    named = {"type": "function", "function": {"name": "other"}}
    with pytest.raises(Problem, match="read_file"):
        decode_chat(json.dumps(body | {"tool_choice": named}).encode())
