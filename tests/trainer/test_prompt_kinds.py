"""Kinds of prompts: different openings, shares, follow-up turns, none of the evaluation sets."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers

from dflash_jax.errors import ConfigError
from dflash_jax.networks import build_pair
from dflash_jax.target_model import TargetModel
from dflash_jax.testing import random_params, tiny_target
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.trainer import blocks, data, prompt_kinds, setup
from dflash_jax.trainer.data import Example
from dflash_jax.trainer.duplicates import DuplicateFilter
from dflash_jax.trainer.prompt_kinds import FOLLOW_UP, KINDS
from dflash_jax.trainer.recipes import SMOKE, Bucket, recipe
from dflash_jax.trainer.rows import Document, one_per_row
from dflash_jax.trainer.sources import TrainingData
from dflash_jax.trainer.training import block_counts, startable
from recipes.smollm2.__main__ import source

BEGUN = [kind for kind in KINDS if kind != FOLLOW_UP]
MIXED = dataclasses.replace(
    SMOKE,
    turn_tokens=40,
    turn_scripts=("any",),
    mixture=("chat:2", "arithmetic:1"),
    follow_ups=0.6,
    temperature=0.7,
    greedy_share=0.5,
    new_tokens=24,
    answer_buckets=(Bucket(length=320, rows=3),),
)


@pytest.mark.exhaustive
def test_openings_are_many_and_different() -> None:
    for kind in BEGUN:
        found = [prompt_kinds.opening(kind, 0, i) for i in range(8000)]
        assert len({opening.text for opening in found}) > 2000, kind
        assert not any(re.search("[{}…]", opening.text) for opening in found), kind
        assert found[:50] == [prompt_kinds.opening(kind, 0, i) for i in range(50)]
        assert found[:50] != [prompt_kinds.opening(kind, 1, i) for i in range(50)]
    assert all(prompt_kinds.opening(FOLLOW_UP, 0, str(i)) for i in range(200))


def test_slots_with_a_label_have_one_value(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"who": [f"name{i}" for i in range(99)], "pair": ["{who.a} and {2-9}"]}
    monkeypatch.setattr(prompt_kinds, "WORDS", words)
    monkeypatch.setitem(KINDS, "test", ["{who.a}, {pair}, {who.b}, {10-12.n} {10-12.n}…"])
    for i in range(30):
        opening = prompt_kinds.opening("test", 0, i)
        found = re.fullmatch(r"(\w+), \1 and [2-9], (\w+), (1[0-2]) \3", opening.text)
        assert found, opening
        assert opening.continued


def test_no_opening_resembles_a_prompt_of_the_evaluation() -> None:
    avoided = source(recipe("smollm2-mixture")).avoided
    assert len(avoided) > 160
    assert source(recipe("smollm2")).avoided == ()
    alike = DuplicateFilter(avoided)
    for kind in KINDS:
        for i in range(1500):
            text = prompt_kinds.opening(kind, 0, i).text
            assert not alike.find(text), text
            if len(text.split()) > 5:
                assert not any(text in other for other in avoided), text


def test_mixtures_are_checked_and_shared_out() -> None:
    assert prompt_kinds.counts((), 7) == {"": 7}
    assert prompt_kinds.counts(("chat:4", "code:5", "lists:2"), 100) == {
        "chat": 36,
        "code": 46,
        "lists": 18,
    }
    assert recipe("smoke", ["mixture=chat:1,code:2"]).mixture == ("chat:1", "code:2")
    for wrong in ("talk:1", "chat", "chat:0", "chat:1,code:x", "chat:1,chat:2", "follow-up:1"):
        with pytest.raises(ConfigError, match="expected KIND:SHARE like chat:2,code:3"):
            recipe("smoke", [f"mixture={wrong}"])


@pytest.fixture(scope="module")
def talker() -> TargetModel:
    """A random target whose tokens are words, some of which end a turn."""
    words = {f"word{i}": i for i in range(60)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word9"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # pyrefly: ignore
    core.add_special_tokens(["<user>", "<model>", "<end>"])
    template = (
        "{% for m in messages %}{{ '<user>' if m.role == 'user' else '<model>' }}"
        "{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<model>{% endif %}"
    )
    tokenizer = Tokenizer(core, template, {})
    ends = ("<end>", *(f"word{i}" for i in range(6)))
    stops = tuple(core.token_to_id(text) for text in ends)
    target = tiny_target(num_layers=1, vocab_size=tokenizer.size, eos_token_ids=stops)
    params = random_params(build_pair(target, None))["target"]
    return TargetModel(target, jax.device_put(params), "float32", tokenizer=tokenizer)


@pytest.mark.exhaustive
def test_a_mixture_has_its_shares_and_goes_on_with_the_same_bytes(
    tmp_path: Path, talker: TargetModel
) -> None:
    asked = TrainingData(self_written=18)

    def conversations(folder: Path) -> list[Example]:
        found = setup.with_self_written(folder, talker, asked, MIXED, lambda line: None)
        return [*found.training, *found.held_out]

    straight = conversations(tmp_path / "straight")
    files = {path.name: path.read_bytes() for path in (tmp_path / "straight").iterdir()}
    lines = ("turns.arithmetic.jsonl", "turns.chat.jsonl", "turns.follow-up.jsonl")
    assert {*lines, "turns.json", "turns.follow-up.json"} == files.keys()
    figures = json.loads(files["turns.json"])
    assert [figures[kind]["kept"] for kind in ("chat", "arithmetic")] == [12, 6]
    followed = [x for x in straight if x.kind == FOLLOW_UP]
    assert {x.kind for x in straight} == {"chat", "arithmetic", FOLLOW_UP}
    assert len(followed) == json.loads(files["turns.follow-up.json"])["kept"]
    for one in followed:
        assert [m["role"] for m in one.messages] == ["user", "assistant", "user"]
    # Killed while a file was written, of the first kind and of follow-ups in turn.
    for name in lines[::2]:
        folder = tmp_path / name
        folder.mkdir()
        for other in lines[: lines.index(name)]:
            (folder / other).write_bytes(files[other])
        (folder / name).write_bytes(files[name][: len(files[name]) * 2 // 3])
        assert conversations(folder) == straight
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_prompts_of_a_kind_have_their_own_temperatures_and_learn_earlier_answers(
    talker: TargetModel,
) -> None:
    tokenizer = talker.tokenizer
    assert tokenizer is not None
    turn = {"role": "user", "content": "word7 word8"}
    more = {"role": "assistant", "content": "word20 word21"}, {"role": "user", "content": "word30"}
    two = Example((turn, *more), kind=FOLLOW_UP)
    (prompt,) = data.prompts([two], tokenizer, MIXED, talker.config.eos_token_ids)
    words = tokenizer.core.decode(prompt.document.ids[prompt.document.wanted].tolist(), False)
    assert words.split() == ["word20", "word21", "<end>"]
    assert two.entry()["kind"] == FOLLOW_UP
    examples = [
        dataclasses.replace(two, messages=({"role": "user", "content": f"word{i} word{j}"},))
        for i in range(20)
        for j in range(20)
    ]
    chosen = dataclasses.replace(MIXED, prompts=400, long_share=0.25, long_tokens=50)
    found = data.prompts(examples, tokenizer, chosen)
    assert {x.temperature for x in found} == {0.0, 0.7}
    assert 140 < sum(x.temperature == 0 for x in found) < 260
    assert 60 < sum(x.new_tokens == 50 for x in found) < 140
    assert len({x.seed for x in found}) == 400
    plain = data.prompts(examples, tokenizer, dataclasses.replace(chosen, greedy_share=0.0))
    assert {x.temperature for x in plain} == {None}


def test_every_kind_is_held_out_by_hash() -> None:
    kinds = ("chat", "code", FOLLOW_UP)
    turns = [
        Example(({"role": "user", "content": f"Question {i}"},), kind=kinds[i % 3])
        for i in range(600)
    ]
    found = TrainingData(self_written=600).with_turns(turns)
    assert found.self_written == 0
    first = [example.kind for example in found.held_out[:30]]
    assert min(first.count(kind) for kind in kinds) >= 3
    assert all(turn.held_out for turn in found.held_out)


def test_without_a_number_of_anchors_a_block_starts_wherever_one_can() -> None:
    wanted = np.zeros(40, bool)
    wanted[5:30] = True
    documents = [Document(np.arange(40), wanted), Document(np.arange(12), np.ones(12, bool))]
    (rows,) = one_per_row(documents, [Bucket(length=64, rows=2)], fill=0)
    assert block_counts(recipe("smoke"), [0], [rows]) == [4]
    (count,) = block_counts(recipe("smoke", ["anchors=0"]), [0], [rows])
    assert count == 32  # 24 positions, rounded up
    places, alive = blocks.sample(jax.random.key(0), blocks.startable(rows.wanted), count)
    for row in range(2):
        every = 1 + np.flatnonzero(startable(rows)[row])
        np.testing.assert_array_equal(np.asarray(places)[row][np.asarray(alive)[row]], every)
