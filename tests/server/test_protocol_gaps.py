"""What other servers answer: names, conversations, suffixes, media, reasoning before JSON."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import tokenizers

from dflash_jax.engine.engine import Engine
from dflash_jax.server.completions import decode_chat, decode_completion
from dflash_jax.server.conversation_store import ConversationStore, new_items
from dflash_jax.server.output_structure import grammar_around
from dflash_jax.server.prompt import (
    INFILL_TOKENS,
    EncodedPrompt,
    chat_prompt,
    infill_ids,
    text_prompts,
)
from dflash_jax.server.protocol import Problem, new_id
from dflash_jax.server.response_store import ResponseStore
from dflash_jax.server.responses import decode_responses
from dflash_jax.server.run import ServerConfig
from dflash_jax.server.tool_turns import ToolTurnCache
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import SYNTAXES
from tests.server.conftest import LiveServer, run_server, twin

ASK: Any = [{"role": "user", "content": "Hello"}]
JSON: Any = {"type": "json_object"}


@pytest.fixture(scope="module")
def tokenizer(random_tiny: Engine) -> Tokenizer:
    assert random_tiny.tokenizer is not None
    return random_tiny.tokenizer


@pytest.fixture(scope="module")
def named(random_tiny: Engine) -> Iterator[LiveServer]:
    """A server that answers to any name."""
    listening = ServerConfig(port=0, drain=2, alias=("claude-sonnet=tiny",), serve_any_name=True)
    running = run_server(lambda: twin(random_tiny), listening)
    yield running
    running.openai.close()
    running.anthropic.close()
    running.stop()


# -- names -------------------------------------------------------------------------------------


def test_every_api_repeats_the_name_that_was_asked_for(named: LiveServer) -> None:
    for name in ("claude-sonnet", "gpt-of-any-name"):
        limit: dict[str, Any] = {"model": name, "max_tokens": 2}
        chat, completions = named.openai.chat.completions, named.openai.completions
        assert chat.create(messages=ASK, **limit).model == name
        assert {c.model for c in chat.create(messages=ASK, stream=True, **limit)} == {name}
        assert completions.create(prompt="a", **limit).model == name
        response = named.openai.responses.create(input="a", model=name, max_output_tokens=2)
        assert response.model == name
        assert named.anthropic.messages.create(messages=ASK, **limit).model == name
        assert named.anthropic.messages.count_tokens(model=name, messages=ASK).input_tokens
        assert named.openai.models.retrieve(name).id == name
    assert [entry.id for entry in named.openai.models.list()] == ["tiny", "claude-sonnet"]
    assert chat.create(model="any", messages=ASK, max_tokens=2).model == "tiny"


# -- conversations -----------------------------------------------------------------------------


def test_a_conversation_grows_by_its_responses(live: LiveServer) -> None:
    import openai

    conversations, responses = live.openai.conversations, live.openai.responses
    first: Any = {"type": "message", "role": "user", "content": "I am Ada."}
    made = conversations.create(items=[first], metadata={"topic": "names"})
    assert conversations.retrieve(made.id) == made
    more: dict[str, Any] = {"model": "tiny", "max_output_tokens": 4}
    alone = responses.create(input="Who am I?", **more)
    answer = responses.create(input="Who am I?", conversation=made.id, store=False, **more)
    assert answer.conversation is not None
    assert answer.conversation.id == made.id
    assert answer.usage is not None
    assert alone.usage is not None
    assert answer.usage.input_tokens > alone.usage.input_tokens
    [*_, ended] = responses.create(
        input="And now?", conversation={"id": made.id}, stream=True, **more
    )
    items = list(conversations.items.list(made.id, order="asc"))
    assert [item.role for item in items if item.type == "message"][:3] == [
        "user",
        "user",
        "assistant",
    ]
    assert items[-1].id == ended.response.output[-1].id
    conversations.items.create(made.id, items=[first])
    assert len(list(conversations.items.list(made.id))) == len(items) + 1
    conversations.delete(made.id)
    for call in (conversations.retrieve, conversations.delete):
        with pytest.raises(openai.NotFoundError, match="not kept here"):
            call(made.id)
    with pytest.raises(openai.NotFoundError, match="not kept here"):
        responses.create(input="Who am I?", conversation=made.id, **more)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"conversation": 5}, "expected an id"),
        ({"conversation": {}}, "expected an id"),
        ({"conversation": ""}, "expected an id"),
        ({"conversation": "c", "previous_response_id": "r"}, "give one of them"),
        ({"conversation": "c"}, "not kept here"),
    ],
)
def test_a_conversation_that_cannot_be_continued_is_named(
    fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(Problem, match=says) as caught:
        decode_responses(json.dumps({"input": "a"} | fields).encode())
    assert caught.value.param == "conversation"
    request = decode_responses(b'{"input": "a", "conversation": null, "store": false}')
    assert request.store is None
    assert request.echoed_fields["conversation"] is None


def test_the_oldest_conversations_are_dropped_first() -> None:
    store = ConversationStore(max_bytes=1500)
    ids = [store.create([{"role": "user", "content": "a" * 300}], None)["id"] for _ in range(3)]
    store.extend(ids[0], [{"role": "user", "content": "b" * 300}])
    assert [len(store.items(i)) for i in (ids[0], ids[2])] == [2, 1]
    with pytest.raises(Problem, match="not kept here"):
        store.items(ids[1])
    store.append(ids[1], new_items([{"role": "user", "content": "late"}]))  # of a late response
    for i in (ids[0], ids[2]):
        store.delete(i)
    assert store.size == 0
    assert new_id("conv_") != ids[0]


def test_items_without_text_are_refused_where_they_stand(live: LiveServer) -> None:
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "http://a"}]}
    answer = httpx.post(live.url + "/v1/conversations", json={"items": [*ASK, image]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "items[1].content[0]"


def test_conversations_that_are_kept_nowhere_do_not_keep_the_response() -> None:
    store = ResponseStore()
    made = store.conversations.create([], None)["id"]
    body = {"input": "a", "conversation": made, "store": False}
    record = decode_responses(json.dumps(body).encode(), store).store
    assert record is not None
    record({"id": "resp_1", "output": [{"id": "msg_1", "type": "message"}]})
    assert [item_id for item_id, _ in store.conversations.items(made)][1] == "msg_1"
    with pytest.raises(Problem, match="not kept here"):
        store.get("resp_1")


# -- suffixes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", INFILL_TOKENS)
def test_a_suffix_is_put_between_the_tokens_of_the_family(
    tokenizer: Tokenizer, family: tuple[str, str, str]
) -> None:
    core = tokenizers.Tokenizer.from_str(tokenizer.core.to_str())
    core.add_special_tokens(list(family))
    infills = Tokenizer(core, None, {})
    before, after, middle = map(core.token_to_id, family)
    head, tail = (infills.encode(text, specials=False) for text in ("def f(", "    return x\n"))
    request = decode_completion(
        json.dumps({"prompt": ["def f(", head], "suffix": "    return x\n"}).encode()
    )
    expected = [before, *head, after, *tail, middle]
    for prompt in text_prompts(request, infills, 512):
        assert prompt.ids == expected


def test_the_start_token_stays_in_front_of_a_suffix(tokenizer: Tokenizer) -> None:
    core = tokenizers.Tokenizer.from_str(tokenizer.core.to_str())
    core.add_special_tokens([*INFILL_TOKENS[0], "<s>"])
    start = core.token_to_id("<s>")
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", start)]
    )
    ids = infill_ids(Tokenizer(core, None, {}), "a", "b")
    assert ids[:2] == [start, core.token_to_id(INFILL_TOKENS[0][0])]
    assert ids.count(start) == 1


def test_a_suffix_without_tokens_for_it_is_refused(live: LiveServer) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="fill-in-the-middle") as caught:
        live.openai.completions.create(model="tiny", prompt="a", suffix="b")
    assert caught.value.param == "suffix"


# -- media -------------------------------------------------------------------------------------

WORDS = "is not supported: this server reads and writes text only"


@pytest.mark.parametrize(
    "path", ["embeddings", "images/generations", "audio/speech", "audio/transcriptions", "videos"]
)
def test_paths_of_other_media_are_refused_by_name(live: LiveServer, path: str) -> None:
    answer = httpx.post(f"{live.url}/v1/{path}", json={"model": "tiny", "input": "a"})
    body = answer.json()
    assert answer.status_code == 400
    assert body["type"] == "error"  # as in Anthropic's API
    assert body["error"]["message"] == f"/v1/{path} {WORDS}"
    assert (body["error"]["type"], body["error"]["code"]) == ("invalid_request_error", "text_only")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat/completions", {"type": "image_url"}, "messages[0].content[1]"),
        ("chat/completions", {"type": "input_audio"}, "messages[0].content[1]"),
        ("messages", {"type": "image"}, "messages[0].content[1]"),
        ("responses", {"type": "input_image"}, "input[0].content[1]"),
        ("responses", {"type": "input_audio"}, "input[0].content[1]"),
    ],
)
def test_parts_of_other_media_are_refused_in_the_same_words(
    live: LiveServer, path: str, fields: dict[str, Any], param: str
) -> None:
    content = [{"type": "text", "text": "See:"}, fields]
    talk = [{"role": "user", "content": content}]
    body = {"model": "tiny", "max_tokens": 4, "messages": talk}
    if path == "responses":
        body = {"model": "tiny", "input": talk}
    answer = httpx.post(f"{live.url}/v1/{path}", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["message"] == f"a content part of type {fields['type']!r} {WORDS}"
    assert error["param"] == param


@pytest.mark.parametrize("field", [{"modalities": ["text", "audio"]}, {"audio": {"voice": "a"}}])
def test_spoken_answers_are_refused_in_the_same_words(field: dict[str, Any]) -> None:
    with pytest.raises(Problem) as caught:
        decode_chat(json.dumps({"messages": ASK} | field).encode())
    [name] = field
    assert (caught.value.message, caught.value.param) == (f"{name} {WORDS}", name)


# -- reasoning before an answer with a grammar -------------------------------------------------


def encoded(tokenizer: Tokenizer, **fields: Any) -> tuple[Any, EncodedPrompt]:
    """Return a request for JSON and its prompt."""
    body = {"messages": ASK, "response_format": JSON} | fields
    request = decode_chat(json.dumps(body).encode())
    thought = SYNTAXES["hermes"].thought
    return request, chat_prompt(request, tokenizer, ToolTurnCache(), thought)


def test_reasoning_may_come_before_an_answer_with_a_grammar(tokenizer: Tokenizer) -> None:
    hermes = SYNTAXES["hermes"]
    around = grammar_around(*encoded(tokenizer), hermes, tokenizer)
    assert around is not None
    assert around.splitlines()[0] == "start: (<think> TEXT </think> BLANK)? @answer"
    request, prompt = encoded(tokenizer)
    opened = dataclasses.replace(prompt, thinking=True)
    inside = grammar_around(request, opened, hermes, tokenizer) or ""
    assert inside.startswith("start: TEXT </think> BLANK @answer")
    for quiet in ({"enable_thinking": False}, {"reasoning_effort": "none"}):
        silent = grammar_around(*encoded(tokenizer, **quiet), hermes, tokenizer) or ""
        assert silent.startswith("start:  @answer")
    completion = decode_completion(b'{"prompt": "a", "response_format": {"type": "json_object"}}')
    assert grammar_around(completion, EncodedPrompt([1]), hermes, tokenizer) is None


@pytest.mark.parametrize("form", ["json_object", "json_schema"])
def test_a_model_that_thinks_first_answers_in_json(live: LiveServer, form: str) -> None:
    """The bias makes the random model open and close a thought."""
    pytest.importorskip("llguidance", reason="the extra `structured` is not installed")
    tokenizer = live.engine.tokenizer
    assert tokenizer is not None
    opening, closing = (tokenizer.encode(tag, specials=False)[0] for tag in ("<think>", "</think>"))
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    formats = {
        "json_object": {"type": "json_object", "schema": schema},
        "json_schema": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    }
    ask: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 60}
    ask |= {"response_format": formats[form], "extra_body": {"return_token_ids": True}}
    biases = {str(opening): 100, str(closing): 90}
    [choice] = live.openai.chat.completions.create(**ask, logit_bias=biases).choices
    assert isinstance(json.loads(choice.message.content)["a"], bool)
    assert choice.finish_reason == "stop"
    assert choice.token_ids[:2] == [opening, closing]
