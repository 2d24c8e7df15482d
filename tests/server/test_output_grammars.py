"""Structures and tools that no grammar can follow, in every API; prefills; a stalled engine."""

import json
import re
import threading
from typing import Any

import httpx
import pytest

from benchmarks.audit.serve import ASK, CHAT, COMPLETIONS, MESSAGES, RESPONSES
from dflash_jax.engine.structured.grammars import Grammars
from dflash_jax.errors import StructureError
from dflash_jax.server import served_models
from dflash_jax.server.anthropic import decode_messages
from dflash_jax.server.completions import decode_chat
from dflash_jax.server.output_structure import structure_of, structure_problem, usable_tools
from dflash_jax.server.prompt import EncodedPrompt
from dflash_jax.server.protocol import GenerationRequest, Problem
from dflash_jax.server.response_store import ResponseStore
from dflash_jax.server.responses import decode_responses
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import SYNTAXES
from tests.server.conftest import LiveServer
from tests.server.test_compiling import soon

pytest.importorskip("llguidance", reason="the extra `structured` is not installed")

SELF = {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}
BIG = {"const": 2**53 + 1}
USER = [{"role": "user", "content": "Hi"}]


def with_schema(path: str, schema: Any) -> tuple[dict[str, Any], str]:
    """Return a request for output that follows a schema, and the field that contains it."""
    inner = {"type": "json_schema", "name": "x", "schema": schema}
    return {
        CHAT: (ASK | {"response_format": {"type": "json_schema", "json_schema": inner}},
               "response_format"),
        COMPLETIONS: ({"prompt": "Hi", "max_tokens": 4, "guided_json": schema}, "guided_json"),
        RESPONSES: ({"input": "Hi", "max_output_tokens": 16, "text": {"format": inner}},
                    "text.format"),
        MESSAGES: (ASK | {"output_config": {"format": inner}}, "output_config.format"),
    }[path]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (SELF, "no finite value fits the JSON schema, because of #/$defs/n"),
        (BIG, "the number 9007199254740993 at #/const"),
        ({"properties": {"a": {"type": "string", "pattern": "^(?!x)"}}},
         "not supported at #/properties/a: its pattern looks ahead or behind"),
        ({"items": {"oneOf": [{"type": "integer"}, {"minimum": 3}]}},
         "not supported at #/items: the alternatives of its oneOf overlap"),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}}, "the reference #/$defs/x points to nothing"),
    ],
)  # fmt: skip
def test_schemas_are_refused_with_path_and_field(
    live: LiveServer, path: str, schema: Any, message: str
) -> None:
    body, field = with_schema(path, schema)
    answer = httpx.post(live.url + path, json=body, timeout=60)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("guided_regex", r"[^\s\S]", "no text matches the structure"),
        ("guided_regex", "a(?=b)", "the regular expression is not understood: look-around"),
        ("guided_grammar", "start: start", "no text matches the structure"),
        ("guided_grammar", 'root ::= "yes" | "no"', "is in EBNF (GBNF), with '::='"),
        ("guided_grammar", 'start: "a" x', "is not understood in line 1, column"),
        ("guided_grammar", 'start: %json {"const": 9007199254740993}', "number 9007199254740993"),
        ("guided_grammar", f"start: %json {json.dumps(SELF)}", "no finite value"),
    ],
)
def test_other_structures_are_refused_and_the_next_request_is_served(
    live: LiveServer, field: str, value: str, message: str
) -> None:
    answer = httpx.post(live.url + CHAT, json=ASK | {field: value}, timeout=60)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == field
    assert httpx.post(live.url + CHAT, json=ASK, timeout=60).status_code == 200


# -- tools ----------------------------------------------------------------------------------------

EMAIL = {
    "type": "object",
    "properties": {
        "to": {"type": "array", "items": {"type": "string", "pattern": "^(?!x).+@.+$"}},
        "about": {"type": "string", "pattern": "^[a-z]+$"},
    },
    "required": ["to"],
}


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, 2048, [2040])


def with_tools(
    api: str, schema: Any, *, strict: bool = False, choice: str = "required", **more: Any
) -> GenerationRequest:
    """Return a request of an API that has to call one of two tools."""
    other = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"name": "weather", "parameters": other}, {"name": "mail", "parameters": schema}]
    if strict:
        tools[1]["strict"] = True
    if api == "messages":
        for tool in tools:
            tool["input_schema"] = tool.pop("parameters")
        kind = {"type": {"required": "any"}.get(choice, choice)}
        body = {"messages": USER, "max_tokens": 9, "tools": tools, "tool_choice": kind}
        return decode_messages(json.dumps(body | more).encode())
    if api == "responses":
        functions = [{"type": "function"} | tool for tool in tools]
        body = {"input": "Hi", "tools": functions, "tool_choice": choice}
        return decode_responses(json.dumps(body | more).encode(), ResponseStore())
    functions = [{"type": "function", "function": tool} for tool in tools]
    body = {"messages": USER, "tools": functions, "tool_choice": choice}
    return decode_chat(json.dumps(body | more).encode())


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_tools_lose_values_that_no_grammar_supports_with_a_warning(
    tokenizer: Tokenizer, grammars: Grammars, api: str
) -> None:
    request = usable_tools(with_tools(api, EMAIL), grammars)
    [warning] = request.warnings
    assert warning.startswith("the tool 'mail': pattern at #/properties/to/items was ignored")
    [_, mail] = request.declared_tools
    assert mail.parameters["properties"] == {
        "to": {"type": "array", "items": {"type": "string"}},
        "about": {"type": "string", "pattern": "^[a-z]+$"},
    }
    structure = structure_of(request, EncodedPrompt([]), SYNTAXES["hermes"], tokenizer)
    assert structure is not None
    grammars.make(structure)


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_strict_tools_are_refused_with_their_name_and_path(grammars: Grammars, api: str) -> None:
    with pytest.raises(Problem, match=r"'mail': .* strict tool .* #/properties/to/items/pattern"):
        usable_tools(with_tools(api, EMAIL, strict=True), grammars)


def of_a(schema: Any, **more: Any) -> dict[str, Any]:
    """Return the schema of a tool with one required parameter."""
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], **more}


CONTRADICTIONS = [
    (of_a({"type": "integer", "enum": ["1", "2"]}), "enum at #/properties/a"),
    (of_a({"type": "array", "items": {}, "enum": ["x"]}), "enum at #/properties/a"),
    (of_a({"type": "string", "enum": []}), "enum at #/properties/a"),
    (of_a({"type": "boolean", "const": "true"}), "const at #/properties/a"),
    (of_a({"type": "integer", "minimum": 3, "maximum": 2}), "minimum at #/properties/a"),
    (of_a({"type": "string", "pattern": "^a$", "minLength": 2}), "pattern at #/properties/a"),
    (of_a(BIG), "const at #/properties/a"),
    (of_a({"$ref": "#"}), "$ref at #/properties/a"),
    (of_a(SELF, **{"$defs": SELF["$defs"]}), "$ref at #/$defs/n"),
    (of_a({}) | {"required": ["a", "zz"], "additionalProperties": False}, "required at #"),
    (of_a({"allOf": [{"type": "string"}, {"type": "null"}]}), "allOf at #/properties/a"),
]


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize(("schema", "cause"), CONTRADICTIONS)
def test_tools_lose_keywords_that_contradict_others_with_a_warning(
    tokenizer: Tokenizer, grammars: Grammars, schema: Any, cause: str, choice: str
) -> None:
    more = {"response_format": {"type": "json_object"}} if choice == "auto" else {}
    request = usable_tools(with_tools("chat", schema, choice=choice, **more), grammars)
    [warning] = request.warnings
    assert warning.startswith(f"the tool 'mail': {cause} was ignored: ")
    assert len(request.declared_tools) == 2
    for syntax in SYNTAXES.values():
        structure = structure_of(request, EncodedPrompt([]), syntax, tokenizer)
        assert structure is not None
        grammars.make(structure)
    with pytest.raises(Problem, match=r"'mail': .* strict tool"):
        usable_tools(with_tools("chat", schema, strict=True, choice=choice, **more), grammars)


def test_levels_too_deep_for_a_grammar_are_ignored_unless_the_tool_is_strict(
    grammars: Grammars,
) -> None:
    deep: dict[str, Any] = {}
    for _ in range(150):
        deep = {"type": "array", "items": deep}
    request = usable_tools(with_tools("chat", of_a(deep)), grammars)
    assert [tool.name for tool in request.declared_tools] == ["weather", "mail"]
    assert request.warnings
    for warning in request.warnings:
        assert re.match(r"the tool 'mail': (items|type) at #/properties/a/.* was ignored", warning)
    with pytest.raises(Problem, match=r"the tool 'mail': ") as raised:
        usable_tools(with_tools("chat", of_a(deep), strict=True), grammars)
    assert raised.value.param == "tools"
    assert raised.value.status == 400


def test_a_parameter_without_a_value_is_left_out_where_it_is_optional(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    schema = of_a({"type": "integer"})
    schema["properties"]["b"] = {"type": "integer", "enum": ["1"]}
    request = usable_tools(with_tools("chat", schema), grammars)
    assert request.warnings == ()
    for syntax in SYNTAXES.values():
        structure = structure_of(request, EncodedPrompt([]), syntax, tokenizer)
        assert structure is not None
        grammars.make(structure)


def test_tools_that_need_no_grammar_are_left_alone(grammars: Grammars) -> None:
    for choice in ("auto", "none"):
        request = with_tools("chat", EMAIL, strict=True, choice=choice)
        assert usable_tools(request, grammars) is request
    named = {"type": "function", "function": {"name": "weather"}}
    request = with_tools("chat", EMAIL, strict=True, tool_choice=named)
    assert usable_tools(request, grammars).declared_tools == request.declared_tools


# -- prefills -------------------------------------------------------------------------------------

COUNT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
COUNT["additionalProperties"] = False


def prefilled(
    tokenizer: Tokenizer, grammars: Grammars, prefix: str, text: str, **body: Any
) -> bool:
    """Return whether an output may begin with a text after a prefill."""
    request = decode_chat(json.dumps({"messages": USER} | body).encode())
    prompt = EncodedPrompt([], prefix=prefix)
    structure = structure_of(request, prompt, SYNTAXES["hermes"], tokenizer)
    assert structure is not None
    grammar = grammars.make(structure)
    grammar.accept(tokenizer.encode(text, specials=False))
    return grammar.error is None


@pytest.mark.parametrize("thought", ["", "<think>\nHm.\n</think>\n\n"])
def test_a_grammar_starts_inside_a_prefill(
    tokenizer: Tokenizer, grammars: Grammars, thought: str
) -> None:
    json_mode = {"guided_json": COUNT}
    for prefix, text, fits in (
        ("{", '"a": 1}', True),
        ("{", '{"a": 1}', False),
        ('{"a": 4', "2}", True),
        ("\n{", '"a": 1}', True),
        ('{"a": 42}', "}", False),
    ):
        assert prefilled(tokenizer, grammars, thought + prefix, text, **json_mode) == fits
    assert prefilled(tokenizer, grammars, thought + "re", "d", guided_choice=["red", "blue"])
    assert not prefilled(tokenizer, grammars, thought + "re", "red", guided_choice=["red"])
    assert prefilled(tokenizer, grammars, "a", "ab", guided_regex="a{2}b")
    thinking = {"prefix": "<think>\nHm", "text": ".</think>\n\nred"}
    assert prefilled(tokenizer, grammars, **thinking, guided_choice=["red"])


def test_a_prefill_that_contradicts_its_structure_is_refused(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    request = decode_messages(json.dumps(with_schema(MESSAGES, COUNT)[0]).encode())
    prompt = EncodedPrompt([], prefix="Sure: {")
    structure = structure_of(request, prompt, SYNTAXES["hermes"], tokenizer)
    assert structure is not None
    with pytest.raises(StructureError, match=r"'Sure: \{', is not the beginning") as raised:
        grammars.make(structure)
    problem = structure_problem(raised.value, request)
    assert (problem.status, problem.param) == (400, "messages")


# -- health ---------------------------------------------------------------------------------------


def test_health_fails_while_the_engine_is_stuck_in_a_step(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_models, "STALLED_S", 0.05)
    assert httpx.get(live.url + "/health").status_code == 200  # it waits for work
    [model] = live.running.server.models
    opened = threading.Event()
    model.engine_thread._commands.put(lambda: opened.wait(60))
    try:
        for path in ("/health", "/ready"):
            assert soon(lambda path=path: httpx.get(live.url + path).status_code == 503)
            answer = httpx.get(live.url + path).json()["error"]
            assert answer["code"] == "engine_stalled"
            assert "restart the server" in answer["message"]
    finally:
        opened.set()
    assert soon(lambda: httpx.get(live.url + "/health").status_code == 200)
