"""The official clients against a real server: every API, streamed and not."""

import asyncio
import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from dflash_jax.server import app
from dflash_jax.server.prompt import EncodedPrompt, prepare
from dflash_jax.server.protocol import GenerationRequest
from dflash_jax.server.served_models import ServedModel
from tests.server.conftest import CONTEXT, LiveServer

Nothing = SimpleNamespace(content=())
ASK: Any = [{"role": "user", "content": "Hello"}]


def test_a_chat_completion_says_what_the_engine_says(live: LiveServer) -> None:
    answer = live.openai.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=20, extra_body={"return_token_ids": True}
    )
    prompt = live.engine.chat_ids(ASK)
    [choice] = answer.choices
    assert choice.finish_reason == "length"
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(choice.token_ids) == 20
    assert choice.message.role == "assistant"
    assert answer.model == "tiny"
    assert answer.prompt_token_ids == prompt
    assert choice.stop_reason is None
    assert live.is_idle()
    assert choice.token_ids == live.engine.generate(prompt, max_tokens=20).token_ids


def test_a_streamed_chat_is_the_whole_one_in_pieces(live: LiveServer) -> None:
    whole = live.openai.chat.completions.create(model="tiny", messages=ASK, max_tokens=30)
    stream = live.openai.chat.completions.create(
        model="tiny",
        messages=ASK,
        max_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert len(chunks) > 4
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({c.id for c in chunks}) == 1


def test_without_stream_options_no_chunk_has_usage(live: LiveServer) -> None:
    stream = live.openai.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=5, stream=True
    )
    assert all(chunk.usage is None and chunk.choices for chunk in stream)


def test_the_async_client_and_several_outputs_at_once(live: LiveServer) -> None:
    import openai

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="x") as client:
            asks = [
                client.chat.completions.create(
                    model="any", messages=ASK, max_tokens=12, seed=seed, temperature=1.0, n=2
                )
                for seed in (1, 2, 1)
            ]
            answers = await asyncio.gather(*asks)
            return [json.dumps([c.message.content for c in a.choices]) for a in answers]

    first, second, again = asyncio.run(main())
    assert first == again != second
    assert len(set(json.loads(first))) == 2


def test_completions_take_texts_and_ids_and_echo(live: LiveServer) -> None:
    create = live.openai.completions.create
    ids = live.engine.tokenizer.encode("def add(")
    texts = create(model="tiny", prompt=["def add(", "b"], max_tokens=8, echo=True)
    assert [c.index for c in texts.choices] == [0, 1]
    assert texts.choices[0].text.startswith("def add(")
    one = create(model="tiny", prompt=ids, max_tokens=8)
    assert "def add(" + one.choices[0].text == texts.choices[0].text
    chunks = list(create(model="tiny", prompt=ids, max_tokens=8, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == one.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_stop_string_ends_the_output_before_it(live: LiveServer) -> None:
    create = live.openai.completions.create
    whole = create(model="tiny", prompt="abc", max_tokens=24).choices[0].text
    stop = whole[len(whole) // 2 :][:3]
    cut = create(model="tiny", prompt="abc", max_tokens=24, stop=[stop]).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.finish_details["stop_sequence"] == cut.stop_reason == stop
    more: Any = {"stop": [stop], "extra_body": {"include_stop_str_in_output": True}}
    kept = create(model="tiny", prompt="abc", max_tokens=24, **more).choices[0]
    assert kept.text == cut.text + stop
    chunks = create(model="tiny", prompt="abc", max_tokens=24, stream=True, **more)
    assert "".join(chunk.choices[0].text for chunk in chunks) == kept.text


def test_what_other_servers_tell_of_a_choice_is_told(live: LiveServer) -> None:
    ask: dict[str, Any] = {"model": "tiny", "prompt": "abc"}
    body: dict[str, Any] = {"return_token_ids": True, "ignore_eos": True}
    [whole] = live.openai.completions.create(**ask, extra_body=body).choices
    assert len(whole.token_ids) == 16  # OpenAI's default
    assert whole.prompt_token_ids == live.engine.tokenizer.encode("abc")
    body["stop_token_ids"] = [whole.token_ids[3]]
    for path in ("completions", "chat.completions"):
        create = live.openai.completions.create
        more: dict[str, Any] = dict(ask)
        if path != "completions":
            create, more = live.openai.chat.completions.create, {"model": "tiny", "messages": ASK}
        *_, last = create(**more, max_tokens=30, stream=True, extra_body=body)
        [choice] = last.choices
        stopped = choice.finish_reason == "stop"
        assert choice.stop_reason == (body["stop_token_ids"][0] if stopped else None)
        assert 0 < len(choice.token_ids) <= 30
        assert stopped or path != "completions"


def test_responses_whole_and_streamed(live: LiveServer) -> None:
    create = live.openai.responses.create
    more = {"model": "tiny", "store": False, "include": [], "parallel_tool_calls": True}
    whole = create(input="Hello", instructions="Be brief.", max_output_tokens=20, **more)
    assert whole.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.output_text
    events = list(
        create(
            input=[{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
            instructions="Be brief.",
            max_output_tokens=20,
            stream=True,
            **more,
        )
    )
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.incomplete"
    assert [e.sequence_number for e in events] == list(range(len(events)))
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens == 20


def test_responses_are_given_again_until_they_are_deleted(live: LiveServer) -> None:
    import openai

    responses, more = live.openai.responses, {"model": "tiny", "max_output_tokens": 4}
    made = responses.create(input="Hello", **more)
    [*_, ended] = responses.create(input="Hello", stream=True, **more)
    for kept in (made, ended.response):
        assert responses.retrieve(kept.id) == kept
        with pytest.raises(openai.BadRequestError, match="not streamed"):
            responses.retrieve(kept.id, stream=True)
        responses.delete(kept.id)
        for gone in (responses.retrieve, responses.delete):
            with pytest.raises(openai.NotFoundError, match="not kept here"):
                gone(kept.id)
    with pytest.raises(openai.BadRequestError, match="not kept here"):
        responses.create(input="Hello", previous_response_id=made.id, **more)
    unstored = responses.create(input="Hello", store=False, **more)
    with pytest.raises(openai.NotFoundError, match="not kept here"):
        responses.retrieve(unstored.id)


def test_anthropic_messages_whole_and_streamed(live: LiveServer) -> None:
    create = live.anthropic.messages.create
    ask = {"model": "tiny", "max_tokens": 20, "messages": ASK, "system": "Be brief."}
    whole = create(**ask)
    assert whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 20
    with live.anthropic.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "".join(b.text for b in whole.content if b.type == "text")
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 20
    count = live.anthropic.messages.count_tokens(model="tiny", messages=ASK, system="Be brief.")
    assert count.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_max_tokens_beyond_the_context_are_cut_for_anthropic_and_refused_by_openai(
    live: LiveServer,
) -> None:
    import openai

    whole = live.anthropic.messages.create(
        model="tiny", max_tokens=8_000, messages=[{"role": "user", "content": "x" * 100}]
    )
    used = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert whole.stop_reason == "end_turn" or used + whole.usage.output_tokens == CONTEXT
    with pytest.raises(openai.BadRequestError, match="context length is 512 tokens") as caught:
        live.openai.chat.completions.create(model="tiny", messages=ASK, max_tokens=CONTEXT)
    assert caught.value.code == "context_length_exceeded"


def test_a_prompt_that_is_too_long_is_refused_in_words_that_agents_know(live: LiveServer) -> None:
    import anthropic
    import openai

    long: Any = [{"role": "user", "content": "x y " * CONTEXT}]
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens"):
        live.openai.chat.completions.create(model="tiny", messages=long)
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 511"):
        live.anthropic.messages.create(model="tiny", max_tokens=5, messages=long)


def test_answers_and_events_are_what_the_clients_declare(live: LiveServer) -> None:
    import anthropic.types
    import openai.types.chat
    import openai.types.responses
    import pydantic

    chat, responses = openai.types.chat, openai.types.responses
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    shapes: Any = {
        "/v1/chat/completions": (chat.ChatCompletion, chat.ChatCompletionChunk, {"messages": ASK}),
        "/v1/responses": (
            responses.Response,
            responses.ResponseStreamEvent,
            {"input": "Hello", "max_output_tokens": 4, "tools": [tool]},
        ),
        "/v1/messages": (
            anthropic.types.Message,
            anthropic.types.RawMessageStreamEvent,
            {"messages": ASK},
        ),
    }
    for path, (whole, event, body) in shapes.items():
        more = body if "input" in body else body | {"max_tokens": 4}
        answer = httpx.post(live.url + path, json=more, timeout=60)
        whole.model_validate_json(answer.content, strict=True)
        stream = httpx.post(live.url + path, json=more | {"stream": True}, timeout=60)
        lines = [line[6:] for line in stream.text.splitlines() if line.startswith("data: {")]
        assert len(lines) > 3
        declared = pydantic.TypeAdapter(event)
        for line in lines:
            declared.validate_json(line, strict=True)


def test_figures_come_in_the_shapes_of_other_engines(live: LiveServer) -> None:
    body = {"timings_per_token": True}
    answer = live.openai.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=16, extra_body=body
    )
    accepted = answer.timings["accepted_per_round"]
    assert answer.timings["drafted_per_round"] == [3] * len(accepted)
    assert answer.timings["draft_n"] == 3 * len(accepted) > 0
    assert answer.timings["draft_n_accepted"] == sum(accepted)
    assert answer.timings["predicted_n"] == 16
    assert answer.usage.timings["decode_ms"] == round(answer.timings["predicted_ms"], 1)
    assert answer.usage.accept_rate == sum(accepted) / answer.timings["draft_n"]
    plain = live.openai.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=16,
        extra_body=body | {"speculative": {"enabled": False}},
    )  # fmt: skip
    assert plain.timings["draft_n"] == 0
    assert plain.choices[0].message.content == answer.choices[0].message.content
    assert not hasattr(
        live.openai.chat.completions.create(model="tiny", messages=ASK, max_tokens=2), "timings"
    )


# -- sampling, penalties, grammars and log probabilities -----------------------------------------


def test_log_probabilities_come_with_every_token_and_their_alternatives(live: LiveServer) -> None:
    create = live.openai.chat.completions.create
    more: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 6, "logprobs": True}
    whole = create(**more, top_logprobs=2).choices[0].logprobs.content
    assert len(whole) == 6
    for entry in whole:
        assert [x.logprob for x in entry.top_logprobs] == sorted(
            (x.logprob for x in entry.top_logprobs), reverse=True
        )
        assert entry.logprob == entry.top_logprobs[0].logprob < 0  # greedy: the argmax
    chunks = list(create(**more, stream=True))
    streamed = [e for c in chunks for e in (c.choices[0].logprobs or Nothing).content]
    assert [e.token for e in streamed] == [e.token for e in whole]
    text = live.openai.completions.create(model="tiny", prompt="ab", max_tokens=3, logprobs=1)
    found = text.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == 3
    assert "".join(found.tokens).startswith(text.choices[0].text)


def test_completions_say_how_likely_an_echoed_prompt_is(live: LiveServer) -> None:
    """Requests as lm-evaluation-harness sends them, with prompts given as ids."""
    import openai

    create = live.openai.completions.create
    prompts = [live.engine.tokenizer.encode(text) for text in ("def add(a, b):", "hello")]
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 1, "temperature": 0, "seed": 1234}
    choices = create(prompt=prompts, logprobs=1, echo=True, **options).choices
    for prompt, choice in zip(prompts, choices, strict=True):
        found = choice.logprobs
        assert len(found.tokens) == len(found.text_offset) == len(prompt) + 1
        assert "".join(found.tokens[:-1]) == choice.text[: found.text_offset[-1]]
        assert found.token_logprobs[0] is None is found.top_logprobs[0]
        for token, value, top in zip(
            found.tokens[1:], found.token_logprobs[1:], found.top_logprobs[1:], strict=True
        ):
            assert value == top[token] <= max(top.values()) < 0
        direct = live.engine.generate(prompt, max_tokens=1, prompt_logprobs=1)
        assert found.token_logprobs[1:-1] == [x.logprob for x in direct.prompt_logprobs[1:]]
    with pytest.raises(openai.BadRequestError, match="no stream has log probabilities"):
        create(prompt="ab", logprobs=1, echo=True, stream=True, **options)
    nothing = create(prompt=prompts, logprobs=1, echo=True, **options | {"max_tokens": 0})
    assert nothing.usage.completion_tokens == 0
    for prompt, choice, longer in zip(prompts, nothing.choices, choices, strict=True):
        assert choice.text == live.engine.tokenizer.decode(prompt)
        assert choice.logprobs.token_logprobs == longer.logprobs.token_logprobs[:-1]
        assert (choice.finish_reason, choice.finish_details["total_tokens"]) == ("length", 0)
    with pytest.raises(openai.BadRequestError, match="max_tokens is 0; expected"):
        create(prompt="ab", **options | {"max_tokens": 0})


def test_every_prompt_may_be_scored_in_vllms_words(live: LiveServer) -> None:
    import openai

    talk: Any = [{"role": "user", "content": "Hi"}]
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "extra_body": {}}
    asked = options | {"extra_body": {"prompt_logprobs": 2}}
    chat = live.openai.chat.completions.create(messages=talk, **asked)
    [text] = live.openai.completions.create(prompt="hello", **asked).choices
    assert text.logprobs is None
    for found, prompt in (
        (chat.prompt_logprobs, live.engine.chat_ids(talk)),
        (text.prompt_logprobs, live.engine.tokenizer.encode("hello")),
    ):
        direct = live.engine.generate(prompt, max_tokens=1, prompt_logprobs=2).prompt_logprobs
        assert found[0] is None
        for entry, known in zip(found[1:], direct[1:], strict=True):
            ranks = {str(token): at for at, (token, _) in enumerate(known.top, 1)}
            assert entry.keys() == ranks.keys() | {str(known.token_id)}
            assert entry[str(known.token_id)]["logprob"] == known.logprob
            assert all(entry[token]["rank"] == ranks.get(token) for token in entry)
    with pytest.raises(openai.BadRequestError, match="no stream has log probabilities"):
        live.openai.chat.completions.create(messages=talk, stream=True, **asked)


def test_penalties_and_biases_change_what_is_said_and_seeds_repeat_it(live: LiveServer) -> None:
    create = live.openai.chat.completions.create
    more: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 8}
    seen = {"return_token_ids": True}
    [free] = create(**more, extra_body=seen).choices
    banned = {str(i): -100 for i in set(free.token_ids)}
    [biased] = create(**more, logit_bias=banned, extra_body=seen).choices
    assert not set(biased.token_ids) & set(free.token_ids)
    body = seen | {"min_p": 0.01, "top_k": 50, "repetition_penalty": 1.3}
    more |= {"temperature": 1.5, "presence_penalty": 1.0, "frequency_penalty": 1.0}
    texts = [create(**more, seed=s, extra_body=body).choices[0].token_ids for s in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]


def test_responses_have_log_probabilities_of_their_text(live: LiveServer) -> None:
    create = live.openai.responses.create
    more: dict[str, Any] = {"model": "tiny", "input": "Hello", "max_output_tokens": 6}
    [item] = create(**more, top_logprobs=2, include=["message.output_text.logprobs"]).output
    [part] = item.content
    assert len(part.logprobs) == 6
    assert part.text.startswith(part.logprobs[0].token)
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    events = list(create(**more, top_logprobs=2, stream=True))
    given = [x for e in events if e.type == "response.output_text.delta" for x in e.logprobs]
    assert [x.logprob for x in given] == [x.logprob for x in part.logprobs]
    [done] = [e for e in events if e.type == "response.output_text.done"]
    assert [x.token for x in done.logprobs] == [x.token for x in part.logprobs]
    assert not create(**more).output[0].content[0].logprobs


def test_an_output_is_as_long_as_it_has_to_be_at_least(live: LiveServer) -> None:
    create = live.openai.chat.completions.create
    more: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 20}
    [free] = create(**more, extra_body={"return_token_ids": True}).choices
    stop = free.token_ids[3]
    body = {"return_token_ids": True, "stop_token_ids": [stop]}
    assert len(create(**more, extra_body=body).choices[0].token_ids) <= 4
    [found] = create(**more, extra_body=body | {"min_tokens": 8}).choices
    banned = {str(stop): -100}
    [other] = create(
        **more | {"max_tokens": 8}, logit_bias=banned, extra_body={"return_token_ids": True}
    ).choices
    assert found.token_ids[:8] == other.token_ids
    assert found.finish_details["recovery"]["min_tokens"] >= 1


def test_figures_and_warnings_come_in_every_api(live: LiveServer) -> None:
    body = {"timings_per_token": True, "return_token_ids": True, "frobnicate": 1}
    response: Any = live.openai.responses.create(
        model="tiny", input="Hello", max_output_tokens=5, extra_body=body
    )
    message: Any = live.anthropic.messages.create(
        model="tiny", max_tokens=5, messages=ASK, extra_body=body
    )
    for answer in (response, message):
        assert len(answer.token_ids) == 5
        assert answer.timings["accepted_per_round"]
        assert "frobnicate" in answer.warnings[0]


def test_usage_comes_with_every_chunk_where_it_is_asked_for(live: LiveServer) -> None:
    wanted: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        live.openai.chat.completions.create(
            model="tiny", messages=ASK, max_tokens=12, stream=True, stream_options=wanted
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 12)
    assert len(set(counts)) > 2


MOOD = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}, "fits": {"type": "boolean"}},
    "required": ["mood", "fits"],
    "additionalProperties": False,
}


def test_an_output_follows_the_schema_that_was_given(live: LiveServer) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "mood", "schema": MOOD}}
    answer = live.openai.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=100, response_format=form
    )
    found = json.loads(answer.choices[0].message.content)
    assert found["mood"] in ("good", "bad")
    assert isinstance(found["fits"], bool)
    assert answer.choices[0].finish_reason == "stop"
    response = live.openai.responses.create(
        model="tiny",
        input="Hello",
        max_output_tokens=100,
        text={"format": {"type": "json_schema", "name": "mood", "schema": MOOD}},
    )
    assert json.loads(response.output_text) == found
    choice = live.openai.completions.create(
        model="tiny", prompt="a", extra_body={"guided_choice": ["red", "blue"]}
    )
    assert choice.choices[0].text in ("red", "blue")


def test_a_schema_is_followed_behind_a_thought_that_the_prompt_opened(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def opened(model: ServedModel, ask: GenerationRequest) -> list[EncodedPrompt]:
        [prompt] = await prepare(model, ask)
        return [dataclasses.replace(prompt, thinking=True)]

    monkeypatch.setattr(app, "prepare", opened)
    tokenizer = live.engine.tokenizer
    assert tokenizer is not None
    [closing] = tokenizer.encode("</think>", specials=False)
    form: Any = {"type": "json_schema", "json_schema": {"name": "mood", "schema": MOOD}}
    answer = live.openai.chat.completions.create(
        model="tiny",
        messages=ASK,
        max_tokens=100,
        response_format=form,
        logit_bias={str(closing): 100},
    )
    assert json.loads(answer.choices[0].message.content)["mood"] in ("good", "bad")


def test_where_tools_are_offered_an_answer_with_a_schema_may_be_a_call(live: LiveServer) -> None:
    tokenizer = live.engine.tokenizer
    assert tokenizer is not None
    tags = [tokenizer.encode(tag, specials=False)[0] for tag in ("<tool_call>", "<think>")]
    ask: dict[str, Any] = {
        "model": "tiny",
        "messages": ASK,
        "max_tokens": 100,
        "response_format": {"type": "json_schema", "json_schema": {"name": "m", "schema": MOOD}},
        "tools": [{"type": "function", "function": {"name": "set_mood", "parameters": MOOD}}],
        "parallel_tool_calls": False,
    }
    for bias in (100, -100):
        logit_biases = {str(tags[0]): bias, str(tags[1]): -100}
        [choice] = live.openai.chat.completions.create(**ask, logit_bias=logit_biases).choices
        called = choice.message.tool_calls
        said = called[0].function.arguments if called else choice.message.content
        assert json.loads(said)["mood"] in ("good", "bad")
        assert choice.finish_reason == ("tool_calls" if bias > 0 else "stop")


def test_a_demanded_call_is_made_whatever_the_model_would_say(live: LiveServer) -> None:
    about: dict[str, Any] = {"name": "set_mood", "parameters": MOOD}
    other = {"name": "stop", "parameters": {"type": "object", "additionalProperties": False}}
    tools: Any = [{"type": "function", "function": f} for f in (other, about)]
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    for choice in ({"type": "function", "function": {"name": "set_mood"}}, "required"):
        answer = live.openai.chat.completions.create(
            model="tiny",
            messages=ASK,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=False,
            response_format={"type": "json_schema", "json_schema": {"name": "m", "schema": MOOD}},
            max_tokens=100,
            extra_body=quiet,
        )
        [call] = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
        assert choice == "required" or call.function.name == "set_mood"
        assert call.function.name == "stop" or json.loads(call.function.arguments)["mood"]
    message = live.anthropic.messages.create(
        model="tiny",
        max_tokens=100,
        messages=ASK,
        tools=[{"name": "set_mood", "input_schema": MOOD}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        extra_body=quiet,
    )
    [block] = message.content
    assert block.input["mood"] in ("good", "bad")
    assert message.stop_reason == "tool_use"


def test_a_prompt_that_was_seen_is_counted_as_cached(live: LiveServer) -> None:
    ask = [{"role": "user", "content": "A question with many words. " * 12}]
    create = live.openai.chat.completions.create
    first, second = (create(model="tiny", messages=ask, max_tokens=4) for _ in range(2))
    assert second.choices[0].message.content == first.choices[0].message.content
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert 0 < cached < second.usage.prompt_tokens
    assert cached % live.engine.plan.chunk == 0
    message = live.anthropic.messages.create(model="tiny", max_tokens=4, messages=ask)
    assert message.usage.cache_read_input_tokens == cached
    assert message.usage.input_tokens == second.usage.prompt_tokens - cached
    more: Any = {"model": "tiny", "max_tokens": 4, "messages": ask, "stream": True}
    events = list(live.anthropic.messages.create(**more))
    begun, ended = events[0].message.usage, events[-2].usage
    for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"):
        assert getattr(begun, name) == getattr(ended, name) == getattr(message.usage, name)


def test_loops_and_long_thoughts_are_ended_and_said_so(live: LiveServer) -> None:
    create = live.openai.chat.completions.create
    tokenizer = live.engine.tokenizer
    assert tokenizer is not None

    def always(text: str) -> dict[str, int]:
        [token] = tokenizer.encode(text, specials=False)
        return {str(token): 100}

    answer = create(
        model="tiny",
        messages=ASK,
        max_tokens=100,
        logit_bias=always("a"),
        extra_body={"recovery": {"repeat_limit": 8}},
    )
    assert answer.choices[0].finish_reason == "length"
    details = answer.choices[0].finish_details
    assert (details["degenerate_decode"], details["degenerate_kind"]) == (True, "repeat")
    assert answer.usage.completion_tokens < 20

    answer = create(
        model="tiny",
        messages=ASK,
        max_tokens=20,
        logit_bias=always("<think>"),
        extra_body={"thinking_token_budget": 6},
    )
    assert answer.choices[0].finish_details["close_kind"] == "hard"
    assert answer.usage.completion_tokens_details.reasoning_tokens >= 6
    plain = create(
        model="tiny", messages=ASK, max_tokens=100, extra_body={"recovery": {"loop_tokens": 9}}
    )
    assert plain.choices[0].finish_details["reason"]


def test_every_answer_has_an_id_in_its_headers_and_errors_in_their_bodies(live: LiveServer) -> None:
    import anthropic
    import openai

    message = live.anthropic.messages.create(model="tiny", max_tokens=2, messages=ASK)
    answer = live.openai.chat.completions.create(model="tiny", max_tokens=2, messages=ASK)
    assert str(message._request_id).startswith("req_")
    assert str(answer._request_id).startswith("req_")
    assert message._request_id != answer._request_id
    with pytest.raises(anthropic.NotFoundError) as lost:
        live.anthropic.messages.create(model="none", max_tokens=2, messages=ASK)
    body: Any = lost.value.body
    assert body["request_id"] == lost.value.request_id is not None
    with pytest.raises(openai.NotFoundError) as missing:
        live.openai.fine_tuning.jobs.list()
    assert missing.value.request_id is not None


def test_both_kinds_of_clients_list_the_models(live: LiveServer) -> None:
    [entry] = live.anthropic.models.list()
    assert (entry.id, entry.type, entry.display_name) == ("tiny", "model", "tiny")
    assert entry.created_at.timestamp() == next(iter(live.openai.models.list())).created
    assert live.anthropic.models.retrieve("tiny").max_input_tokens == CONTEXT
    codex = httpx.get(live.url + "/v1/models", params={"client_version": "0.145.0"}).json()
    assert (codex["models"], codex["data"][0]["id"]) == ([], "tiny")
