"""Nested JSON values in every field of every route: never a 500."""

import concurrent.futures
import itertools
from collections.abc import Iterator

import httpx
import pytest

from benchmarks.audit.serve import CHAT, COMPLETIONS, MESSAGES, PATHS, RESPONSES, is_error
from dflash_jax.server.anthropic import MessagesRequest, _input
from dflash_jax.server.completions import ChatRequest, CompletionRequest, decode_chat
from dflash_jax.server.conversation import parse_tool_calls
from dflash_jax.server.protocol import Problem
from dflash_jax.server.responses import ResponsesRequest
from dflash_jax.server.token_routes import DetokenizeRequest, TokenizeRequest
from dflash_jax.tool_parsers.tool_schema import MOST_DEPTH, parse_json
from tests.server.conftest import LiveServer

BODIES = {
    CHAT: ChatRequest,
    COMPLETIONS: CompletionRequest,
    RESPONSES: ResponsesRequest,
    MESSAGES: MessagesRequest,
    MESSAGES + "/count_tokens": MessagesRequest,
    RESPONSES + "/input_tokens": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
LEAST = {
    "messages": '[{"role":"user","content":"x"}]',
    "prompt": '"x"',
    "input": '"x"',
    "tokens": "[1]",
    "max_tokens": "2",
    "max_output_tokens": "2",
}
HOLE = "HOLE"
USER = '{"role":"user","content":"x"}'
CALL = '{"id":"c","type":"function","function":{"name":"f","arguments":HOLE}}'
AS_TEXT = CALL.replace(HOLE, '"TEXT"')
CALLED = '{"role":"assistant","tool_calls":[%s]},{"role":"tool","tool_call_id":"c","content":"x"}'
FUNCTION = '[{"type":"function","function":{"name":"f","parameters":HOLE}}]'
INSIDE = [  # places inside fields that accept values of any depth
    (CHAT, {"tools": FUNCTION}),
    (CHAT, {"tools": FUNCTION, "tool_choice": '"required"'}),
    (CHAT, {"tools": FUNCTION, "response_format": '{"type":"json_object"}'}),
    (CHAT, {"tools": '[{"type":"function","function":{"name":"f"},"more":HOLE}]'}),
    (CHAT, {"messages": f'[{{"role":"user","content":[HOLE]}},{USER}]'}),
    (CHAT, {"messages": '[{"role":"user","content":"x","more":HOLE}]'}),
    (CHAT, {"messages": f"[{USER},{CALLED % CALL}]"}),
    (CHAT, {"messages": f"[{USER},{CALLED % AS_TEXT}]"}),
    (CHAT, {"response_format": '{"type":"json_object","schema":HOLE}'}),
    (CHAT, {"response_format": '{"type":"json_schema","json_schema":{"schema":HOLE}}'}),
    (CHAT, {"guided_json": '"TEXT"'}),
    (CHAT, {"guided_grammar": '"start: %json TEXT"'}),
    (CHAT, {"structured_outputs": '{"json":HOLE}'}),
    (CHAT, {"chat_template_kwargs": '{"a":HOLE}'}),
    (COMPLETIONS, {"response_format": '{"type":"json_object","schema":HOLE}'}),
    (RESPONSES, {"tools": '[{"type":"function","name":"f","parameters":HOLE}]'}),
    (
        RESPONSES,
        {
            "tools": '[{"type":"function","name":"f","parameters":HOLE}]',
            "tool_choice": '"required"',
        },
    ),
    (RESPONSES, {"input": f'[{USER},{{"type":"reasoning","summary":[HOLE]}}]'}),
    (RESPONSES, {"input": '[{"role":"user","content":[HOLE]}]'}),
    (
        RESPONSES,
        {"input": f'[{USER},{{"type":"function_call_output","call_id":"c","output":HOLE}}]'},
    ),
    (RESPONSES, {"text": '{"format":{"type":"json_schema","schema":HOLE}}'}),
    (MESSAGES, {"tools": '[{"name":"f","input_schema":HOLE}]'}),
    (MESSAGES, {"tools": '[{"name":"f","input_schema":HOLE}]', "tool_choice": '{"type":"any"}'}),
    (
        MESSAGES,
        {
            "messages": f'[{USER},{{"role":"assistant","content":[{{"type":"tool_use","id":"c",'
            '"name":"f","input":HOLE}]},{"role":"user","content":[{"type":"tool_result",'
            '"tool_use_id":"c","content":"x"}]}]'
        },
    ),
    (MESSAGES, {"system": "[HOLE]"}),
    ("/tokenize", {"messages": f"[{USER}]", "tools": FUNCTION}),
]
DEPTHS = (MOST_DEPTH - 10, *range(900, 1000, 40), 2_000, 100_000)  # json fails at about 950
KINDS = (("[", "]"), ('{"items":', "}"))


def body(path: str, fields: dict[str, str]) -> str:
    """Return a valid body for this path, with these fields replaced."""
    least = {name: LEAST[name] for name in PATHS[path]} | fields
    return "{" + ",".join(f'"{name}":{value}' for name, value in least.items()) + "}"


def nested() -> Iterator[tuple[str, str, str]]:
    """Return paths, fields, and bodies with a hole for nested values."""
    fields = [(p, {name: HOLE}) for p, kind in BODIES.items() for name in kind.__struct_fields__]
    for path, given in fields + INSIDE:
        name = " ".join(given)
        for (opening, closing), depth in itertools.product(KINDS, DEPTHS):
            value = opening * depth + "1" + closing * depth
            text = value.replace('"', r"\"")
            yield path, name, body(path, given).replace(HOLE, value).replace("TEXT", text)


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", BODIES)
def test_no_depth_of_a_value_is_an_internal_error(live: LiveServer, path: str) -> None:
    cases = [(name, text) for at, name, text in nested() if at == path]
    with (
        httpx.Client(base_url=live.url, timeout=60) as client,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        answers = list(pool.map(lambda case: client.post(path, content=case[1]), cases))
    failed = [
        (*case, answer.text)
        for case, answer in zip(cases, answers, strict=True)
        if answer.status_code not in (200, 400, 413, 503)
        or (answer.is_error and not is_error(answer))
    ]
    assert not failed, (len(failed), [[text[:200] for text in case] for case in failed[:5]])
    assert live.is_idle()


@pytest.mark.parametrize("depth", [MOST_DEPTH, 100_000])
def test_values_that_are_nested_too_deeply_are_refused_by_name(depth: int) -> None:
    text = body(CHAT, {"metadata": "[" * depth + "]" * depth})
    with pytest.raises(Problem, match=f"nested more than {MOST_DEPTH} levels deep; send") as told:
        decode_chat(text.encode())
    assert told.value.status == 400
    assert told.value.param == ("metadata" if depth == MOST_DEPTH else None)
    assert decode_chat(
        body(CHAT, {"metadata": "[" * (MOST_DEPTH - 1) + "]" * (MOST_DEPTH - 1)}).encode()
    )


def test_deep_arguments_are_texts() -> None:
    text = '{"a":' * 300 + "1" + "}" * 300
    assert parse_json(text, "otherwise") == "otherwise"
    assert _input(text) == {"raw": text}
    call = {"function": {"name": "f", "arguments": text}}
    [past] = parse_tool_calls([call], "messages[0]")
    assert past["function"]["arguments"] == _input(text)  # as the client got it
