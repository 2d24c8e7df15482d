"""The commands from end to end on the smoke preset."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from dflash_jax import Plan, load
from dflash_jax.cli import main
from dflash_jax.config import check_pair
from dflash_jax.families.configs import read_drafter_config, read_target_config
from dflash_jax.loading import load_target
from dflash_jax.testing import folder_params
from dflash_jax.trainer import data, evaluate, rows, run
from dflash_jax.trainer.data import Usage
from dflash_jax.trainer.recipes import recipe
from recipes.tiny import __main__ as tiny

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("tiny")
    assert tiny.main(["--out", str(out), "--preset", "smoke"]) == 0
    return out


def test_the_result_is_a_pair_that_fits(made):
    target = read_target_config(made / "tiny" / "target")
    drafter = read_drafter_config(made / "tiny" / "drafter")
    check_pair(target, drafter)
    assert drafter.mask_token_id == target.vocab_size - 1
    folder_params(made / "tiny" / "drafter", drafter)


def test_the_card_quotes_the_measured_figures(made):
    card = (made / "tiny" / "README.md").read_text()
    results = json.loads((made / "tiny" / "results.json").read_text())
    assert f"{results['chat']['acceptance_length']:.2f}" in card
    assert "--preset smoke" in card


def test_the_pair_says_the_same_with_and_without_its_drafter(made):
    folder = made / "tiny"
    engine = load(folder / "target", folder / "drafter", plan=Plan(max_length=96))
    drafted, plain = (
        engine.generate("def add(a, b):", max_tokens=32, speculative=on) for on in (True, False)
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.rounds > 0 == plain.stats.rounds


def test_some_measured_answers_are_compared_with_plain_decoding(made):
    results = json.loads((made / "tiny" / "results.json").read_text())
    for kind, compared in ("chat", 4), ("code", 2):
        assert results[kind]["compared"] == results[kind]["equal"] == compared
    assert evaluate.summary(results["code"]).endswith("2 of 2 answers equal to plain decoding's")


def test_a_second_run_does_nothing(made, capsys):
    assert tiny.main(["--out", str(made), "--preset", "smoke"]) == 0
    assert capsys.readouterr().err == ""


def test_a_folder_of_another_preset_is_refused(made, capsys):
    assert tiny.main(["--out", str(made), "--preset", "tiny-cpu"]) == 2
    assert "begun with other settings" in capsys.readouterr().err


def test_answers_are_the_targets_own(made):
    model = load_target(made / "target")
    for part in rows.load(made / "answers.npz"):
        if len(part.tokens):
            best = np.asarray(model.forward(part.tokens[:4]).logits).argmax(axis=-1)
            wanted = part.wanted[:4, 1:] & part.real[:4, 1:]
            assert (best[:, :-1] == part.tokens[:4, 1:])[wanted].mean() > 0.9


def test_mixed_answers_keep_turns_and_continue_texts(made, tmp_path):
    model, chosen, told = load_target(made / "target"), recipe("smoke", ["answers=mixed"]), []
    said = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "It is 12."}]
    chat = data.Example(messages=tuple(said))
    text = data.Example(text="def add(a, b):\n    return a + b\n")
    found = [
        (part.tokens[i, real], part.wanted[i, real])
        for part in run.stored_rows(tmp_path, model, [text, chat], chosen, told.append, Usage(2))
        for i, real in enumerate(part.real)
    ]
    (stood,) = data.as_given([chat], model.tokenizer, model.config.eos_token_ids, 256)
    opening = data.token_ids(text, model.tokenizer)
    found.sort(key=lambda row: len(row[0]) != len(stood.ids))
    (turn, turn_wanted), (continued, wanted) = found
    np.testing.assert_array_equal(turn, stood.ids)
    np.testing.assert_array_equal(turn_wanted, stood.wanted)
    np.testing.assert_array_equal(continued[: len(opening)], opening)
    assert not wanted[: len(opening)].any()
    assert 0 < wanted[len(opening) :].sum() <= chosen.text_tokens
    assert told == ["answers 1/1 groups"]  # of lines that are all used nothing is said


def test_a_run_says_how_many_lines_it_uses_and_why_not_the_others(made, tmp_path):
    def chat(*words: str) -> data.Example:
        roles = ("user", "assistant") * len(words)
        pairs = zip(roles, words, strict=False)
        return data.Example(tuple({"role": role, "content": text} for role, text in pairs))

    silent = data.Example(({"role": "assistant", "content": "Hm."},))
    lines = [*(chat(f"Say {i}.") for i in range(250)), silent, chat("Sums, please. " * 99)]
    lines += [data.Example(text=f"x = {i}\n") for i in range(9)]
    model, told, usage = load_target(made / "target"), [], Usage(len(lines) + 30)
    usage.hold_out(30, 6)
    chosen = recipe("smoke", ["prompts=251", "answer_buckets=256x64"])
    run.stored_rows(tmp_path / "a", model, lines, chosen, told.append, usage)
    assert told[0] == (
        "using 254 of 291 lines: 30 held out to measure on, 1 in 16 by hash, the first 6 of them"
        " (held_out); 1 with nothing for the assistant to answer; 5 more than the recipe continues"
        " (text_prompts=4); 1 longer than 256 tokens with their answers, the longest of"
        " answer_buckets"
    )
    told.clear()
    lines = [chat(f"Add {i}.", "It is 12.") for i in range(25)]
    chosen = recipe("smoke", ["prompts=12", "given=5"])
    run.stored_rows(tmp_path / "b", model, lines, chosen, told.append, Usage(25))
    assert told[0] == (
        "using 17 of 25 lines: 8 more than the recipe asks for (prompts=12, given=5)"
    )
    told.clear()
    chosen = recipe("smoke", ["prompts=12"])
    run.stored_rows(tmp_path / "c", model, lines, chosen, told.append, Usage(25))
    assert told[0] == "using 12 of 25 lines: 13 more than the recipe asks for (prompts=12)"


def test_the_train_command_makes_a_drafter_for_any_folder(made, tmp_path, capsys):
    lines = [{"prompt": f"Say {i}."} for i in range(20)]
    lines += [
        {
            "messages": [
                {"role": "user", "content": f"Add {i}."},
                {"role": "assistant", "content": t},
            ]
        }
        for i, t in enumerate(["The answer is 12, and that is that."] * 20)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    target = str(made / "target")
    command = ["train", "--target", target, "--data", str(data), "--preset", "smoke"]
    command += ["--out", str(tmp_path / "run"), "--set", "answers=given", "--set", "steps=2"]
    command += ["--set", "held_out=0", "--set", "kind=dflash2", "--json"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert err.startswith("mask token ")
    [usage] = [line for line in err.splitlines() if line.startswith("using ")]
    assert re.fullmatch(
        r"using \d+ of 40 lines: \d+ held out to measure on, 1 in 16 by hash, the first 0 of them"
        r" \(held_out\); \d+ without an assistant's turn to learn",
        usage,
    )
    assert sum(map(int, re.findall(r"(?:using|:|;) (\d+)", usage))) == 40
    found = json.loads(out)
    config = read_drafter_config(Path(found["drafter"]))
    check_pair(read_target_config(made / "target"), config)
    assert config.kind == "dflash2"
    params = folder_params(found["drafter"], config)
    assert np.abs(params["predecessor"]).max() > 0
    assert main(command) == 0  # nothing is left to do
    assert main([*command, "--set", "seed=1"]) == 1
    assert "begun with other settings (recipe.seed was 0, is 1)" in capsys.readouterr().err


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_the_train_command_answers_trains_and_measures(made, tmp_path, kind, capsys):
    lines = [{"prompt": f"What is {i} and {i}?"} for i in range(60)]
    lines += [{"text": f"def f{i}(x):\n    return x + {i}\n" * 20} for i in range(30)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["train", "--target", str(made / "target"), "--data", str(data), "--json"]
    command += ["--preset", "smoke", "--out", str(tmp_path / "run"), "--set", f"kind={kind}"]
    assert main(command) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert results["chat"]["acceptance_length"] >= 1


@pytest.mark.soak
def test_a_minute_of_training_foresees_held_out_answers(tmp_path, capsys):
    out = tmp_path / "run"
    settings = (
        "steps=60 rate=5e-3 inner=256 anchors=3 buckets=64x32,160x16 features=cache given=600"
    )
    settings += " prompts=32 new_tokens=48 save_every=60 held_out=12"
    command = ["train", "--preset", "smoke", "--out", str(out), "--json"]
    assert main([*command, *(x for s in settings.split() for x in ("--set", s))]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert results["chat"]["acceptance_length"] > 1.2
    engine = load(drafter=str(out / "drafter"), plan=Plan(max_length=256))
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.chat([{"role": "user", "content": "Which files are here?"}])
    plain = engine.generate(prompt, max_tokens=60, speculative=False)
    drafted = engine.generate(prompt, max_tokens=60)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.rounds < plain.stats.plain_steps
