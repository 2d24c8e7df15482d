"""Training data: forms of lines, a stable hold-out, prompts, masks, and errors by line."""

import dataclasses
import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from dflash_jax.errors import ConfigError
from dflash_jax.loading import load_target, locate
from dflash_jax.server.conversation import parse_tool_calls
from dflash_jax.testing import tiny_target
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.trainer import data, evaluate, run, sources
from dflash_jax.trainer.data import Usage
from dflash_jax.trainer.mask_token import mask_token
from dflash_jax.trainer.recipes import SMOKE, recipe, spread_taps
from recipes.tiny import vocabulary

CHAT = {
    "messages": [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
        {"role": "assistant", "content": "Four."},
    ]
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    vocabulary.save(vocabulary.train(["One two three four"] * 4, 300), folder, 4096)
    found = Tokenizer.from_directory(folder)
    assert found is not None
    return found


def written(tmp_path, *lines) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_every_form_of_line_is_read(tmp_path):
    path = written(tmp_path, CHAT, {"prompt": "Hi"}, {"text": "x = 1"}, {"ids": [1, 2]})
    chat, prompt, text, ids = data.read(path)
    assert len(chat.messages) == 4
    assert prompt.messages == ({"role": "user", "content": "Hi"},)
    assert (text.text, ids.ids) == ("x = 1", (1, 2))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"message": []}, "none of the known forms"),
        ({"messages": []}, "none of the known forms"),
        ([1], "none of the known forms"),
        ("x", "none of the known forms"),
        ({"messages": [{"content": "x"}]}, "a message has no role"),
        ({"messages": [{"role": 5}]}, "a role is 5, not a text"),
        (CHAT | {"tools": 5}, "tools are 5, not a list"),
        (CHAT | {"tools": "abc"}, "tools are abc, not a list"),
        (CHAT | {"tools": ["abc"]}, "not a list of objects"),
        (CHAT | {"thinking": "maybe"}, "thinking is maybe, not true or false"),
        ({"ids": [1, -1]}, "-1 is no token id"),
        ({"ids": [1, "2"]}, "2 is no token id"),
        ({"ids": [2**31, 1]}, "2147483648 is no token id"),
        ({"ids": [99999999999999999999, 1]}, "99999999999999999999 is no token id"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, why):
    with pytest.raises(ConfigError, match=rf"data.jsonl:2 cannot be used \(.*{why}.*expected"):
        data.read(written(tmp_path, CHAT, line))


def test_broken_json_and_missing_files_are_named(tmp_path):
    path = tmp_path / "data.jsonl"
    for line in ('{"text": ', "[" * 100_000):
        path.write_text(line)
        with pytest.raises(ConfigError, match=r"data\.jsonl:1"):
            data.read(path)
    with pytest.raises(ConfigError, match="there is no data"):
        data.read(tmp_path / "nowhere")


def test_the_hold_out_depends_on_the_question_alone(tmp_path):
    lines = [{"prompt": f"Question {i}?"} for i in range(400)]
    found = sources.load(str(written(tmp_path, *lines)), SMOKE)
    training, held_out = found.training, found.held_out
    random.Random(0).shuffle(lines)
    again = sources.load(str(written(tmp_path, *lines)), SMOKE).held_out
    assert {e.messages[0]["content"] for e in held_out} == {e.messages[0]["content"] for e in again}
    assert len(training) + len(held_out) == 400
    assert 10 < len(held_out) < 45


def test_the_shipped_corpus_asks_and_holds_nothing_that_is_held_out():
    found = sources.load("tiny", recipe("tiny-cpu"))
    training, held_out = found.training, found.held_out
    asked = {m["content"] for x in training for m in x.messages if m["role"] == "user"}
    opening = [
        next(m["content"] for m in x.messages if m["role"] == "user")
        for x in held_out
        if x.messages
    ]
    texts = [x.text for x in training if x.text]
    assert len(training) > 11_500
    assert len(opening) == 200
    assert not asked & set(opening)
    assert not [x for x in held_out if x.text and any(x.text in text for text in texts)]


def test_each_turn_of_a_conversation_is_a_prompt_that_waits_for_the_assistant(tokenizer, tmp_path):
    examples = data.read(written(tmp_path, CHAT))
    found = {bytes(p.document.ids) for p in data.prompts(examples, tokenizer, SMOKE)}
    expected = [tokenizer.chat(CHAT["messages"][:i]) for i in (1, 3)]
    assert found == {bytes(np.asarray(ids, np.int32)) for ids in expected}


def test_lines_that_ask_nothing_are_refused(tokenizer):
    silent = data.Example(messages=({"role": "assistant", "content": "Hi"},))
    for chosen, example in (
        (SMOKE, silent),
        (dataclasses.replace(SMOKE, prompts=0), data.Example(messages=tuple(CHAT["messages"]))),
        (dataclasses.replace(SMOKE, text_prompts=0), data.Example(ids=(1, 2, 3))),
    ):
        with pytest.raises(ConfigError, match="none of 1 lines gives the target anything"):
            data.prompts([example], tokenizer, chosen)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_alone_asks_nothing(tokenizer, role):
    """Such rows are neither prompts nor held out, all of them or none by one hash."""
    alone = [data.Example(messages=({"role": role, "content": f"Rule {i}."},)) for i in range(40)]
    asking = data.Example(messages=(*alone[0].messages, {"role": "user", "content": "One?"}))
    assert not any(x.held_out or data.assistant_turns(x) for x in alone)
    assert data.assistant_turns(asking) == [2]
    with pytest.raises(ConfigError, match="none of 40 lines gives the target anything"):
        data.prompts(alone, tokenizer, SMOKE)
    if role == "system":  # the template knows it
        assert len(data.prompts([*alone, asking], tokenizer, SMOKE)) == 1


@pytest.mark.parametrize("roles", [("developer",), ("system", "developer"), ("developer",) * 3])
def test_instructions_of_a_developer_are_those_of_the_system(tokenizer, tmp_path, roles):
    rules = [{"role": role, "content": f"Rule {i}."} for i, role in enumerate(roles)]
    talk = [*rules, {"role": "user", "content": "One?"}, {"role": "assistant", "content": "Yes."}]
    [example] = data.read(written(tmp_path, {"messages": talk}))
    merged = {"role": "system", "content": "\n\n".join(rule["content"] for rule in rules)}
    assert example.messages == (merged, *talk[-2:])
    assert list(data.token_ids(example, tokenizer)) == tokenizer.chat([merged, *talk[-2:]])


def test_a_conversation_that_the_template_refuses_is_named(tokenizer):
    odd = data.Example(messages=({"role": "wizard", "content": "Abracadabra"},))
    with pytest.raises(ConfigError, match=r"unknown role wizard.*begins .*Abracadabra"):
        data.prompts([odd], tokenizer, SMOKE)


def test_texts_begin_with_the_start_token_as_prompts_do(tokenizer, tmp_path):
    """Llama and Gemma are only trained on text with a start token."""
    core = tokenizers.Tokenizer.from_str(tokenizer.core.to_str())
    start = core.token_to_id("<|endoftext|>")
    core.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", start)]
    )
    starting, text = Tokenizer(core, tokenizer.template, {}), "one two three four " * 20
    recipe = dataclasses.replace(SMOKE, text_prompt=16, text_prompts=3)
    bare = data.token_ids(data.Example(text=text), tokenizer)
    found = data.prompts([data.Example(text=text)], starting, recipe)
    assert [p.document.ids.tolist() for p in found] == [
        [start, *bare[i : i + 16]] for i in (0, 16, 32)
    ]
    (document,) = data.as_given([data.Example(text=text)], starting, [], 999)
    assert document.ids.tolist() == [start, *bare] == starting.encode(text)
    cut = data.as_given([data.Example(text=text)], starting, [], 33)
    assert [d.ids.tolist() for d in cut] == [
        [start, *bare[i : i + 32]] for i in range(0, len(bare), 32)
    ]
    assert all(d.wanted.all() for d in cut)
    engine = SimpleNamespace(tokenizer=starting)
    assert evaluate.prompt_ids(engine, data.Example(text=text).entry()) == [start, *bare]


def test_given_answers_are_wanted_up_to_their_end(tokenizer, tmp_path):
    ends = [tokenizer.core.token_to_id("<|im_end|>")]
    examples = data.read(written(tmp_path, CHAT))
    (document,) = data.as_given(examples, tokenizer, ends, 999)
    wanted = document.ids[document.wanted].tolist()
    assert (
        tokenizer.core.decode(wanted, skip_special_tokens=False) == "Two.<|im_end|>Four.<|im_end|>"
    )


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("reply", ["Two.", "\n\nTwo.", "", "<think>\nOne.\n</think>\n\nTwo."])
def test_a_given_answer_follows_the_prompt_that_is_served(thinking, reply):
    """Also if a token would span the boundary, and if the template closes the reasoning of an
    opened turn but omits it from earlier turns.
    """
    tokenizer = Tokenizer.from_directory(locate("tiny", "target"))
    asked = {"role": "user", "content": "One?"}
    chat = data.Example((asked, {"role": "assistant", "content": reply}), thinking=thinking)
    ends = [tokenizer.core.token_to_id("<|im_end|>")]
    (document,) = data.as_given([chat], tokenizer, ends, 999)
    served = tokenizer.chat([asked], **({} if thinking else {"enable_thinking": False}))
    assert document.ids[: len(served)].tolist() == served
    assert document.wanted.tolist() == [i >= len(served) for i in range(len(document.ids))]
    written = tokenizer.core.decode(document.ids[len(served) :], skip_special_tokens=False)
    assert written == reply + "<|im_end|>"


RAW = {"raw": "{"}


def test_calls_of_the_openai_api_are_learnt_as_the_server_replays_them(tmp_path):
    """Their arguments are JSON texts, which a template would render differently or reject."""
    for reply, meant in (('{"a":1}', {"a": 1}), ("", {}), ("{", RAW), ({}, {})):
        calls = [{"type": "function", "function": {"name": "f", "arguments": reply}}]
        asked = {"role": "user", "content": "One?"}
        chat = {"messages": [asked, {"role": "assistant", "content": "", "tool_calls": calls}]}
        (example,) = data.read(written(tmp_path, chat))
        replayed = parse_tool_calls(calls, "messages")
        assert example.messages[1]["tool_calls"] == replayed
        assert replayed[0]["function"]["arguments"] == meant
    for odd in (3, ["x"], [{"function": None}], [{"function": {"name": "f"}}]):
        message = {"role": "assistant", "content": "", "tool_calls": odd}
        (example,) = data.read(written(tmp_path, {"messages": [asked, message]}))
        assert example.messages[1] == message


def test_what_is_not_learnt_is_counted_aloud(tmp_path):
    asked, reply = CHAT["messages"][:2]
    long = data.Example((asked, reply | {"content": "Two. " * 300}))
    kept = [data.Example((reply,)), data.Example((asked,)), data.Example((asked, reply)), long]
    whole = data.Example(text="Three four. " * 300)
    chosen, told = dataclasses.replace(SMOKE, answers="given"), []
    lines = [*kept, whole]
    target, usage = load_target("tiny"), Usage(len(lines))
    (rows,) = run.stored_rows(tmp_path, target, lines, chosen, told.append, usage)
    assert told[0] == "using 3 of 5 lines: 2 without an assistant's turn to learn"
    assert told[1:] == [f"1 of {len(rows.tokens)} rows cut to 256 tokens, the longest of buckets"]


def test_a_turn_without_an_end_of_its_own_is_given_whole(tokenizer):
    """Some templates add an end token to user turns only."""
    template = "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}<|im_end|>"
    bare = Tokenizer(tokenizer.core, template + "{% endif %}{% endfor %}", {})
    ends = [tokenizer.core.token_to_id("<|im_end|>")]
    (document,) = data.as_given([data.Example(tuple(CHAT["messages"]))], bare, ends, 999)
    assert bare.raw(document.ids[document.wanted].tolist()) == "Two.Four."


def test_a_text_too_short_for_a_piece_is_a_prompt_as_it_is(tokenizer):
    recipe = dataclasses.replace(SMOKE, text_prompt=512)
    for short in (data.Example(text="One two"), data.Example(ids=(5, 6, 7))):
        (prompt,) = data.prompts([short], tokenizer, recipe)
        assert prompt.document.ids.tolist() == list(data.token_ids(short, tokenizer))


def test_conversations_beyond_those_answered_are_learnt_as_they_stand():
    chats = [data.Example(messages=({"role": "user", "content": str(i)},)) for i in range(9)]
    examples = [*chats, data.Example(text="x = 1")]
    recipe = dataclasses.replace(SMOKE, prompts=4, given=3)
    asked, kept = data.split_by_answers(examples, recipe)
    assert (len(asked), len(kept)) == (5, 3)
    assert examples[-1] in asked
    assert not [x for x in kept if x in asked]
    assert data.split_by_answers(examples, recipe) == (asked, kept)
    assert data.split_by_answers(examples, SMOKE) == (examples, [])
    few = dataclasses.replace(recipe, prompts=20)
    assert len(data.split_by_answers(examples, few)[0]) == len(examples)
    mixed, whole = (dataclasses.replace(recipe, answers=x) for x in ("mixed", "given"))
    assert data.split_by_answers(examples, mixed) == (examples[-1:], chats)
    assert data.split_by_answers(examples, whole) == ([], examples)


def test_turns_that_a_template_rewrites_later_stand_alone(tokenizer, tmp_path, monkeypatch):
    ends = [tokenizer.core.token_to_id("<|im_end|>")]
    render = tokenizer.render
    monkeypatch.setattr(  # it starts with the number of turns
        tokenizer,
        "render",
        lambda messages, **rest: f"{(len(messages) + 1) // 2}{render(messages, **rest)}",
    )
    found = data.as_given(data.read(written(tmp_path, CHAT)), tokenizer, ends, 999)
    assert [tokenizer.core.id_to_token(d.ids[0]) for d in found] == ["1", "2"]
    assert all(d.wanted.sum() > 1 for d in found)


def test_settings_change_a_preset_and_nonsense_is_refused():
    changed = recipe("smoke", ["steps=9", "kind=dflash2", "taps=0,2", "buckets=64x2,128x1"])
    assert (changed.schedule.steps, changed.kind, changed.taps) == (9, "dflash2", (0, 2))
    assert [(b.length, b.rows) for b in changed.buckets] == [(64, 2), (128, 1)]
    together = ["buckets=32x3", "anchors=9", "devices=3"]
    assert not recipe("smoke", ["confidence_head=false"]).confidence_head
    assert recipe("qwen3-8b", together) == recipe("qwen3-8b", together[::-1])
    for bad, why in {
        "stepz=9": "'stepz' is no setting of a recipe; did you mean 'steps'",
        "steps=": "setting 'steps=' has no value; expected NAME=VALUE",
        "steps=many": "steps is 'many'; expected an integer from 1 to 2147483647",
        "rate=nan": "rate is nan; expected a number from 1e-12 to 1000.0",
        "kind=eagle": "expected one of dflash",
        "taps=1,x": "taps is '1,x'; expected layers like 1,9,17",
        "buckets=64": "buckets is '64'; expected buckets like 160x16,448x6",
        "buckets=64x0": "a bucket's rows is 0; expected an integer from 1",
        "confidence_head=1": "confidence_head is '1'; expected true or false",
        "devices=3": "multiple of 3 devices x 1 parts",
    }.items():
        with pytest.raises(ConfigError, match=why):
            recipe("smoke", [bad])
    with pytest.raises(ConfigError, match=r"loss is 'mse'; .*\. steps is 0; .*\. block is 1; "):
        recipe("smoke", ["loss=mse", "steps=0", "block=1"])
    with pytest.raises(ConfigError, match="choose one of smoke"):
        recipe("huge")


@pytest.mark.parametrize(
    ("layers", "count", "taps"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (24, 5, (1, 6, 11, 16, 21)),
        (64, 5, (1, 16, 31, 46, 61)),
        (4, 5, (0, 1, 2)),
        (2, 2, (0,)),
    ],
)
def test_taps_are_spread_as_published_drafters_have_them(layers, count, taps):
    assert spread_taps(layers, count) == taps


def test_the_mask_token_is_the_tokenizers_or_an_unused_row(tokenizer):
    size = tokenizer.size
    assert mask_token(tokenizer, tiny_target(vocab_size=size)) == (
        size - 1,
        "the tokenizer's <|mask|>",
    )
    core = tokenizer.core
    plain = Tokenizer(core.from_str(core.to_str().replace("<|mask|>", "<|other|>")), None, {})
    assert mask_token(plain, tiny_target(vocab_size=size + 10))[0] == size
    words = tokenizers.models.WordLevel({"one": 0, "three": 2}, unk_token="one")  # none has id 1
    sparse = Tokenizer(tokenizers.Tokenizer(words), None, {})
    assert mask_token(sparse, tiny_target(vocab_size=8))[0] == 3
    with pytest.raises(ConfigError, match="--mask-id"):
        mask_token(sparse, tiny_target(vocab_size=3))


def test_without_spare_rows_the_mask_token_is_a_special_token_that_nothing_uses(tokenizer):
    size, text = tokenizer.size, tokenizer.core.to_str().replace("<|mask|>", "<|other|>")
    core, specials = tokenizer.core.from_str(text), {"eos_token": "<|other|>"}
    full = Tokenizer(core, "<think></think><tool_call></tool_call></tool_response>", specials)
    target = tiny_target(vocab_size=size, eos_token_ids=(size - 10, size - 8))
    token, why = mask_token(full, target)
    assert core.id_to_token(token) == "<tool_response>"  # the last but for the two in use
    assert why == "the special token <tool_response>, which neither template nor data use"
    start = core.token_to_id("<|im_start|>")
    for used in data.Example(text="a <tool_response> b"), data.Example(ids=(1, token)):
        assert mask_token(full, target, [used])[0] == start
    with pytest.raises(ConfigError, match="use every special token"):
        mask_token(full, target, [data.Example(ids=(start, token))])


WRONG = """
    steps=0 save_every=0 held_out=-1 prompts=-1 seed=-1 inner=-3 heads=-1 tap_count=0 text_prompt=0
    text_tokens=0 held_out_tokens=-5 new_tokens=0 rate=-1 rate=nan rate=inf decay=0 smoothing=7
    weight_decay=-1 head_weight=nan temperature=-1 anchors=100000 block=999 steps=99999999999
"""


@pytest.mark.parametrize("bad", WRONG.split())
def test_numbers_that_cannot_be_are_refused_by_name(bad: str) -> None:
    name, _, _ = bad.partition("=")
    expected = r"expected (at most|an integer from|a number from) "
    with pytest.raises(ConfigError, match=rf"^{name} is .*; {expected}"):
        recipe("smoke", [bad])


@pytest.mark.parametrize("name", ["buckets", "answer_buckets"])
@pytest.mark.parametrize("bad", ["160x0", "-5x4", "448x4,160x4"])
def test_buckets_that_cannot_be_are_refused_by_name(name: str, bad: str) -> None:
    with pytest.raises(ConfigError, match=r"(a bucket's (rows|length) is|buckets are).*; expected"):
        recipe("smoke", [f"{name}={bad}"])


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "x"}\r\n{"text": "y"}\r\n')
    assert [example.text for example in data.read(path)] == ["x", "y"]


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes('{"text": "café"}\n'.encode("latin-1"))
    with pytest.raises(ConfigError, match="is not UTF-8"):
        data.read(tmp_path / "x.jsonl")


def test_halves_of_characters_do_not_stop_training(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a\\ud800b"}\n')
    [example] = data.read(tmp_path / "x.jsonl")
    assert example.held_out in (True, False)


def test_contents_nested_as_deep_as_json_allows_do_not_stop_training(tmp_path: Path) -> None:
    nested = '{"messages": [{"role": "user", "content": ' + "[" * 600 + "]" * 600 + "}]}"
    (tmp_path / "x.jsonl").write_text(nested)
    assert len(data.fingerprint(data.read(tmp_path / "x.jsonl"))) == 16
