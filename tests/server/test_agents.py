"""The shipped pair served to agents: real clients, real tool calls."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import dflash_jax as dj
from benchmarks.audit.serve import ABOUT, SCHEMA, TOOLS, work
from dflash_jax.server.run import ServerConfig
from tests.server.conftest import LiveServer, run_server

TURNS = 12


@pytest.fixture(scope="module")
def shipped() -> Iterator[LiveServer]:
    def make() -> dj.Engine:
        engine = dj.load("tiny", plan=dj.Plan(max_length=1024, prefix_cache=2**26))
        engine.measures_drafting = False  # drafts on every machine
        engine.warm_up()
        return engine

    live = run_server(make, ServerConfig(port=0, drain=1))
    yield live
    live.openai.close()
    live.anthropic.close()
    live.stop()


@pytest.mark.exhaustive
def test_an_agent_of_twelve_turns_is_never_left_without_an_answer(shipped: LiveServer) -> None:
    turns = work(shipped.openai, TURNS)
    assert len(turns) == TURNS
    before: list[int] = []
    for number, turn in enumerate(turns):
        assert not turn["empty"]
        assert turn["drafted"] > 0
        assert number == 0 or turn["cached_tokens"] > 0
        prompt = prompt_of(shipped, turn["asked"])
        if turn["asked"][-1]["role"] == "tool":  # past tool turns keep their ids
            assert prompt[: len(before)] == before
        end = shipped.engine.graph.config.eos_token_ids
        before = prompt + [i for i in turn["token_ids"] if i not in end]
    assert sum(len(turn["calls"]) for turn in turns) >= TURNS // 3


def prompt_of(live: LiveServer, talk: list[Any]) -> list[int]:
    body = {"messages": talk, "tools": TOOLS}
    return httpx.post(live.url + "/tokenize", json=body).json()["tokens"]


def test_streamed_calls_are_the_whole_ones(shipped: LiveServer) -> None:
    talk: Any = [{"role": "user", "content": "Check the weather in Paris."}]
    create = shipped.openai.chat.completions.create
    more: Any = {"model": "tiny", "messages": talk, "tools": TOOLS, "max_tokens": 64}
    whole = create(**more).choices[0].message
    with shipped.openai.chat.completions.stream(**more) as stream:
        final = stream.get_final_completion().choices[0].message
    assert (final.content or None) == whole.content
    parts = [[c.function.name, c.function.arguments] for c in final.tool_calls or []]
    assert parts == [[c.function.name, c.function.arguments] for c in whole.tool_calls or []]
    assert parts
    stopped = create(**more, stop=["Paris", "{", "\n"]).choices[0]  # ignored inside calls
    assert stopped.finish_reason == "tool_calls"
    again = [[c.function.name, c.function.arguments] for c in stopped.message.tool_calls]
    assert again == parts

    message = shipped.anthropic.messages.create(
        model="tiny",
        max_tokens=64,
        messages=talk,
        tools=[{**ABOUT, "input_schema": SCHEMA}],
        extra_body={"temperature": 0},  # newer clients do not have the argument
    )
    used = [block.input for block in message.content if block.type == "tool_use"]
    assert used == [json.loads(arguments) for _, arguments in parts]
    assert message.stop_reason == "tool_use"

    response = shipped.openai.responses.create(
        model="tiny",
        input=talk,
        max_output_tokens=64,
        tools=[{"type": "function", **ABOUT, "parameters": SCHEMA, "strict": False}],
    )
    items = [item for item in response.output if item.type == "function_call"]
    assert [json.loads(item.arguments) for item in items] == used


def test_anthropics_tool_runner_sends_the_whole_conversation(shipped: LiveServer) -> None:
    from anthropic import beta_tool

    heard: list[str] = []

    @beta_tool
    def get_weather(city: str) -> str:
        """Get the weather."""
        heard.append(city)
        return "sunny"

    talk: Any = [{"role": "user", "content": "Check the weather in Paris."}]
    runner = shipped.anthropic.beta.messages.tool_runner(
        model="tiny", max_tokens=64, messages=talk, tools=[get_weather], max_iterations=2
    )
    first, second = runner
    assert heard
    assert first.stop_reason == "tool_use"
    sizes = [m.usage.input_tokens + (m.usage.cache_read_input_tokens or 0) for m in (first, second)]
    assert sizes[1] >= sizes[0] + first.usage.output_tokens


READ_AND_BASH = [
    {"name": name, "description": about, "input_schema": {
        "type": "object", "properties": {of: {"type": "string"}}, "required": [of]}}
    for name, about, of in (("Read", "Read a file.", "file_path"), ("Bash", "Run it.", "command"))
]  # fmt: skip
RUN = {"type": "tool_use", "id": "c", "name": "bash", "input": {"command": "python -m pytest -q"}}
STALLED = [  # here the shipped target announces an action, and ends the turn
    {"role": "user", "content": "Fix the bug in notes.py."},
    {"role": "assistant", "content": [
        {"type": "text", "text": "I'll run the tests first:"}, RUN]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c",
         "content": "notes.py: SyntaxError: invalid syntax\n1 failed\n[output truncated]"}]},
]  # fmt: skip
WEATHER = [{"role": "user", "content": "Check the weather in Paris."}]


def ask_messages(live: LiveServer, **fields: Any) -> dict[str, Any]:
    """Return the response of /v1/messages to an agent with the tools Read and Bash."""
    body = {"max_tokens": 96, "temperature": 0, "tools": READ_AND_BASH} | fields
    response = httpx.post(f"{live.url}/v1/messages", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_stalled_answer_calls_a_declared_tool(shipped: LiveServer) -> None:
    """The target was trained on `read_file`, which is not declared here."""
    system = "You are an agent. Use the tools when they help."
    free = ask_messages(shipped, system=system, messages=STALLED, recovery="off")
    assert [block["type"] for block in free["content"]] == ["text"]
    answers = [
        ask_messages(shipped, system=system, messages=STALLED, speculative=drafts, recovery="on")
        for drafts in ({"enabled": False}, *({"block_size": n} for n in (1, 2, 5, 8)))
    ]
    first = answers[0]["content"][1]
    for answer in answers:
        text, call = answer["content"]
        assert text["text"].endswith(":")
        assert (call["type"], call["name"]) == ("tool_use", "Bash")
        assert isinstance(call["input"]["command"], str)
        assert answer["stop_reason"] == "tool_use"
        assert answer["finish_details"] == answers[0]["finish_details"]
        assert answer["finish_details"]["recovery"] == {"tool_prefix": 1}
        assert (text, call["input"]) == (free["content"][0], first["input"])


def test_a_call_of_an_undeclared_tool_reaches_the_agent(shipped: LiveServer) -> None:
    answer = ask_messages(shipped, messages=WEATHER)
    [call] = answer["content"]
    assert (call["type"], call["name"]) == ("tool_use", "get_weather")
    assert answer["stop_reason"] == "tool_use"
    [warning] = answer["warnings"]
    assert "'get_weather', which the request does not declare" in warning
    assert answer["finish_details"]["undeclared_tools"] == ["get_weather"]
    # The agent answers that the tool does not exist, and the model continues.
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "No such tool."}
    again = [*WEATHER, {"role": "assistant", "content": [call]}]
    after = ask_messages(shipped, messages=[*again, {"role": "user", "content": [result]}])
    assert after["content"]

    with shipped.anthropic.messages.stream(
        model="tiny", max_tokens=96, messages=WEATHER, tools=READ_AND_BASH,
        extra_body={"temperature": 0},
    ) as stream:  # fmt: skip
        final = stream.get_final_message()
    assert [(block.name, block.input) for block in final.content] == [(call["name"], call["input"])]
    functions = [
        {"name": t["name"], "description": t["description"], "parameters": t["input_schema"]}
        for t in READ_AND_BASH
    ]
    body = {"messages": WEATHER, "max_tokens": 96}
    body["tools"] = [{"type": "function", "function": function} for function in functions]
    chat = httpx.post(f"{shipped.url}/v1/chat/completions", json=body, timeout=120).json()
    [made] = chat["choices"][0]["message"]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == call["input"]
    assert chat["warnings"] == [warning]
