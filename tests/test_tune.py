"""The command `tune`: its search, its file, and going on after an interruption."""

import json

import pytest

from dflash_jax.bench import tune
from dflash_jax.cli import main, parser

SHORT = ["--count", "1", "--max-tokens", "8", "--rounds", "1"]


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch):
    monkeypatch.setattr(tune, "BLOCKS", (4,))
    monkeypatch.setattr(tune, "NGRAM_BLOCKS", (4,))
    monkeypatch.setattr(tune, "STEPS", (1,))


@pytest.mark.exhaustive
def test_tune_goes_on_after_an_interruption_and_writes_a_plan(tmp_path, monkeypatch, capsys):
    out = tmp_path / "plan.json"
    keep, kept = tune.Tuning._keep, []

    def interrupted(self):
        keep(self)
        kept.append(len(self.measured))
        if len(kept) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(tune.Tuning, "_keep", interrupted)
    assert main(["tune", "--out", str(out), *SHORT]) == 130
    assert not out.exists()
    before = json.loads((tmp_path / "plan.json.measured").read_text())["measured"]
    assert len(before) == 2
    capsys.readouterr()
    assert main(["tune", "--out", str(out), "--json", *SHORT]) == 0
    printed = capsys.readouterr()
    assert "going on after 2 candidates" in printed.err
    found = json.loads(printed.out)
    assert found["measured"][:2] == before
    assert found["plan"] == json.loads(out.read_text())
    assert not (tmp_path / "plan.json.measured").exists()
    read = parser().parse_args(["generate", "--plan", str(out), "hello"])
    for name, value in found["plan"].items():
        assert getattr(read, name) == value


def test_a_plan_without_a_drafter_turns_it_off_unless_an_option_names_one(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(tune.plan_file(tune.Candidate(tune.NONE), {"rows": 2}))
    for command in ("generate", "serve", "verify"):
        read = parser().parse_args([command, "--plan", str(path)])
        assert (read.drafter, read.rows) == ("none", 2)
    read = parser().parse_args(["serve", "--plan", str(path), "--drafter", "ngram"])
    assert read.drafter == "ngram"


def test_measurements_of_another_search_are_refused(tmp_path, capsys):
    kept = tmp_path / "plan.json.measured"
    for text, expected in (
        ("{}", "cannot be read"),
        ('{"about": [], "measured": []}', "with other"),
    ):
        kept.write_text(text)
        assert main(["tune", "--out", str(tmp_path / "plan.json"), *SHORT]) == 1
        assert expected in capsys.readouterr().err
        assert kept.read_text() == text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--count", "0"], "--count is 0"),
        (["--rounds", "0"], "--rounds is 0"),
        (["--out", "/nowhere/plan.json"], "a folder that exists"),
        (["--out", __file__], "add --overwrite"),
    ],
)
def test_wrong_options_are_refused_by_name(words, expected, capsys):
    assert main(["tune", *words]) == 1
    assert expected in capsys.readouterr().err
