"""Requests as agents and frameworks send them, field by field."""

import ast
from pathlib import Path

import httpx

from tests.server.conftest import LiveServer

DOCS = Path(__file__).parents[2] / "docs"

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def test_input_tokens_of_a_response_are_counted_before_it_is_made(live: LiveServer) -> None:
    """LiteLLM's proxy answers Anthropic's count_tokens by this route of OpenAI's API."""
    body = {
        "model": "tiny",
        "input": [{"role": "user", "content": "Check the weather in Paris."}],
        "instructions": "Be brief.",
        "tools": [{"type": "function", "name": "get_weather", "parameters": CITY}],
    }
    made = live.openai.responses.create(**body, max_output_tokens=4)
    counted = httpx.post(live.url + "/v1/responses/input_tokens", json=body)
    assert counted.json() == {
        "object": "response.input_tokens",
        "input_tokens": made.usage.input_tokens,
    }
    follow = {"input": "And in Rome?", "previous_response_id": made.id}
    longer = httpx.post(live.url + "/v1/responses/input_tokens", json=follow).json()
    assert longer["input_tokens"] > 0
    assert httpx.get(live.url + "/v1/responses/" + made.id).status_code == 200
    refused = httpx.post(live.url + "/v1/responses/input_tokens", json={"model": "tiny"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")


def test_programs_for_clients_are_short_and_linked() -> None:
    programs = sorted((DOCS / "clients").iterdir())
    page = (DOCS / "serving.md").read_text(encoding="utf-8")
    assert len(programs) > 10
    for program in programs:
        text = program.read_text(encoding="utf-8")
        assert f"(./clients/{program.name})" in page
        assert text.count("\n") < 30
        if program.suffix == ".py":
            assert ast.get_docstring(ast.parse(text))
