"""User turns that the target writes: the same for one seed, filtered, resumed, errors by name."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest
import tokenizers

from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.networks import build_pair
from dflash_jax.target_model import TargetModel
from dflash_jax.testing import random_params, tiny_target
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.trainer import decoding, setup, sources
from dflash_jax.trainer.data import Example
from dflash_jax.trainer.duplicates import DuplicateFilter, Likeness
from dflash_jax.trainer.recipes import SMOKE, Bucket, Recipe, recipe
from dflash_jax.trainer.self_written import UserHeader, user_header, write_turns
from recipes.tiny import vocabulary

RECIPE = dataclasses.replace(
    SMOKE,
    turn_tokens=40,
    turn_scripts=("any",),
    answer_buckets=(Bucket(length=64, rows=3),),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    """A random target with the tokenizer and the template of the shipped pair."""
    folder = tmp_path_factory.mktemp("tokenizer")
    vocabulary.save(vocabulary.train(["One two three four"] * 4, 300), folder, 4096)
    return target_of(Tokenizer.from_directory(folder), ("<|im_end|>",))


def target_of(tokenizer: Tokenizer | None, ends: tuple[str, ...]) -> TargetModel:
    assert tokenizer is not None
    stops = tuple(tokenizer.core.token_to_id(text) for text in ends)
    target = tiny_target(num_layers=1, vocab_size=tokenizer.size, eos_token_ids=stops)
    params = random_params(build_pair(target, None))["target"]
    return TargetModel(target, jax.device_put(params), "float32", tokenizer=tokenizer)


@pytest.fixture(scope="module")
def talker() -> TargetModel:
    """A random target whose tokens are words, some of which end a turn."""
    words = {f"word{i}": i for i in range(60)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word0"))
    core.add_special_tokens(["<user>", "<end>"])
    template = "<user>{{ messages[0].content }}<end>"
    ends = ("<end>", *(f"word{i}" for i in range(6)))
    return target_of(Tokenizer(core, template, {}), ends)


def turns_of(folder: Path, model: TargetModel, count: int = 12, chosen: Recipe = RECIPE) -> list:
    return texts_of(write_turns(folder, model, count, chosen, lambda line: None))


def texts_of(written: list[Example]) -> list[str]:
    return [turn.messages[0]["content"] for turn in written]


@pytest.mark.exhaustive
def test_a_turn_depends_on_seed_and_number_only(
    tmp_path: Path, talker: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = talker
    monkeypatch.setattr(decoding, "cores", lambda: 1)
    straight = turns_of(tmp_path / "straight", model)
    assert len(set(straight)) == 12
    written = (tmp_path / "straight" / "turns.jsonl").read_bytes()
    report = json.loads((tmp_path / "straight" / "turns.json").read_text())
    assert report["kept"] == 12
    assert report["written"] == 12 + sum(report["dropped"].values())
    # In other company, on more engines, in groups of other sizes.
    monkeypatch.setattr(decoding, "cores", lambda: 3)
    other = dataclasses.replace(RECIPE, answer_buckets=(Bucket(length=64, rows=5),))
    assert turns_of(tmp_path / "other", model, chosen=other) == straight
    # Killed while the second group is written.
    lines = written.splitlines(keepends=True)
    assert len(lines) > 1
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "turns.jsonl").write_bytes(lines[0] + lines[1][:9])
    assert turns_of(tmp_path / "killed", model) == straight
    assert (tmp_path / "killed" / "turns.jsonl").read_bytes() == written


def turn(text: str) -> Example:
    return Example(({"role": "user", "content": text},))


def stored_turns(folder: Path, model: TargetModel, texts: list[str]) -> None:
    """Write the groups of a run that asks for 3 turns, all its tries used up."""
    assert model.tokenizer is not None
    end = model.config.eos_token_ids[0]
    turns = [[[*model.tokenizer.encode(text, specials=False), end], True] for text in texts]
    folder.mkdir()
    (folder / "turns.jsonl").write_text(json.dumps(turns) + "\n")


def test_turns_are_dropped_for_a_reason_and_counted(tmp_path: Path, model: TargetModel) -> None:
    end = model.config.eos_token_ids[0]
    assert model.tokenizer is not None
    think = model.tokenizer.core.token_to_id("<think>")
    texts = ["How do I plant a tree in my own small garden?"]
    texts += ["how do I plant a tree in my own small garden"]
    texts += ["How do I plant a tree in my small garden?"]
    cyrillic = "".join(map(chr, (1055, 1088, 1080, 1074, 1077, 1090, 1076, 1088, 1091, 1075)))
    texts += ["", "Hi", cyrillic, "Broken \ufffd words are here"]
    texts += ["2 + 2 = ?, 12:30 - 14:45", "What is the boiling point of water?"]
    folder = tmp_path / "run"
    stored_turns(folder, model, [*texts, "unended", "special", "not looked at"])
    [turns] = [json.loads(line) for line in (folder / "turns.jsonl").read_text().splitlines()]
    turns[-3][1] = False
    turns[-2][0] = [think, *turns[0][0]]
    turns.insert(7, turns.pop(-3))
    turns.insert(7, turns.pop(-2))
    (folder / "turns.jsonl").write_text(json.dumps(turns) + "\n")
    lines: list[str] = []
    latin = dataclasses.replace(RECIPE, turn_scripts=("latin",))
    found = write_turns(folder, model, 3, latin, lines.append)
    assert texts_of(found) == [texts[0], *texts[7:]]
    report = json.loads((folder / "turns.json").read_text())
    assert report == {
        "written": 11,
        "kept": 3,
        "dropped": {
            "equal to an earlier one": 1,
            "nearly equal to an earlier one": 1,
            "empty or shorter than 8 characters": 2,
            "not in latin letters (turn_scripts)": 1,
            "with special tokens or unreadable characters": 2,
            "not ended within 40 tokens": 1,
        },
    }
    assert lines[-1].startswith("keeping 3 of 11 self-written turns: 2 ")
    assert end in turns[0][0]


def test_turns_that_cannot_be_used_are_named(tmp_path: Path, model: TargetModel) -> None:
    stored_turns(tmp_path / "same", model, ["The same words again"] * 12)
    lines: list[str] = []
    assert len(write_turns(tmp_path / "same", model, 3, RECIPE, lines.append)) == 1
    assert lines == ["keeping 1 instead of 3 of 12 self-written turns: 11 equal to an earlier one"]
    stored_turns(tmp_path / "empty", model, [""] * 12)
    with pytest.raises(ConfigError, match=r"none of the turns .*12 empty or shorter .*--data FILE"):
        write_turns(tmp_path / "empty", model, 3, RECIPE, lines.append)
    (tmp_path / "empty" / "turns.jsonl").write_text("[" + ",".join("3" * 12) + "]\n")
    with pytest.raises(CheckpointError, match=r"turns\.jsonl is damaged"):
        write_turns(tmp_path / "empty", model, 3, RECIPE, lines.append)


def test_a_target_that_cannot_write_turns_is_refused(model: TargetModel, tmp_path: Path) -> None:
    core = model.tokenizer.core  # pyrefly: ignore
    ends = model.config.eos_token_ids

    def with_template(template: str | None) -> TargetModel:
        tokenizer = Tokenizer(core, template, {})
        return TargetModel(model.config, model.params, "float32", tokenizer=tokenizer)

    bare = TargetModel(model.config, model.params, "float32")
    for odd, why in (
        (bare, "no tokenizer; give prompts"),
        (with_template(None), "no template; give prompts"),
        (with_template("{{ messages[0].content }}"), "nothing before the user's words"),
        (with_template("<|im_start|>user"), "nothing before the user's words"),
        (with_template("{{ raise_exception('no users') }}"), "cannot write .*no users"),
    ):
        with pytest.raises(ConfigError, match=why):
            user_header(odd, RECIPE)
    with pytest.raises(ConfigError, match="turn_scripts has 'klingon'; expected any, or first"):
        user_header(model, dataclasses.replace(RECIPE, turn_scripts=("latin", "klingon")))
    words = "<|im_start|>{{ messages[0].content }}"
    other = core.token_to_id("</think>")
    plain = user_header(with_template(words + " [/INST] x"), RECIPE)
    assert plain == UserHeader((core.token_to_id("<|im_start|>"),), ends, "[/INST] x")
    assert user_header(with_template(words + "</think>\n"), RECIPE).stop_ids == (*ends, other)
    assert user_header(with_template(words), RECIPE).stop_ids == ends
    with pytest.raises(ConfigError, match="no tokenizer"):
        setup.check_turns(bare, sources.load("self:3", RECIPE), RECIPE)


def test_nearly_equal_texts_are_found() -> None:
    alike = DuplicateFilter()
    assert alike.add("What is the capital city of France, and why?") is None
    assert alike.add("what is the  capital city of france and why") is Likeness.EQUAL
    assert alike.add("So what is the capital city of France, and why?") is Likeness.NEAR
    assert alike.add("What is the capital city of Spain?") is None
    assert alike.add("!!!") is None
    assert alike.add("???") is None  # texts without words are compared as they are
    assert alike.add("!!!") is Likeness.EQUAL
    every = DuplicateFilter(threshold=1e-9)
    assert every.add("a b c d e") is None
    assert every.add("x d e y") is Likeness.NEAR  # one common pair is enough then


def test_sources_are_mixed_and_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a,b.jsonl"  # a comma in a name of a file that exists
    path.write_text("".join(json.dumps({"prompt": f"Question {i}"}) + "\n" for i in range(40)))
    plain = tmp_path / "c.jsonl"
    plain.write_bytes(path.read_bytes())
    found = sources.load(str(path), SMOKE)
    assert (found.lines, found.self_written, found.separate) == (40, 0, 0)
    mixed = sources.load(f"self:5, {plain} ,tiny", SMOKE)
    assert mixed.self_written == 5
    assert mixed.training[: len(found.training)] == found.training
    assert mixed.separate > 100
    grown = mixed.with_turns([turn(f"Turn {i}") for i in range(60)])
    assert grown.lines == mixed.lines + 60
    assert grown.self_written == 0
    assert len(grown.held_out) > len(mixed.held_out)
    assert sources.load("self:3", SMOKE).self_written == 3
    for wrong, why in (
        ("self", "'self' names no number"),
        ("self:0", "expected self:N, N at least 1"),
        ("self:many", "names no number"),
        ("self:13", r"prompts=12\); give --set prompts=13"),
        (f"{plain},,{plain}", "has no name"),
        (f"{plain},nowhere", "no data at nowhere"),
        (",".join([str(plain)] * 400) + ",nowhere", "no data at nowhere"),  # too long for a path
    ):
        with pytest.raises(ConfigError, match=why):
            sources.load(wrong, SMOKE)
    assert recipe("smoke", ["turn_scripts=Latin, CJK"]).turn_scripts == ("latin", "cjk")
