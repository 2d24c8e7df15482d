"""The catalogue of recovery cases: each id is in a test's name, or listed here with the reason."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
CATALOGUE = {"E": 22, "S": 38, "T": 24, "G": 19, "R": 21, "C": 21, "V": 7, "L": 6, "P": 38, "K": 12}

SERVER = "of the server: its APIs, and how it detects disconnects"
PARSER = "of the server: calls parsed from a stream"
NO_TREES = "there are no draft trees here"
BY_TEXT = "a stall is judged by the text at the end, not by the ids there"
BY_KIND = "tests/engine/state_machine/test_loops.py: loops end by their length and kind of text"
ELSEWHERE = {
    **dict.fromkeys(("S35", "K10", "K11"), NO_TREES),
    **dict.fromkeys(("T19", "T20", "T21", "T22", "T23"), PARSER),
    **dict.fromkeys(("S2", "S3", "S5", "S6"), BY_TEXT),
    "S7": "the state machine receives output tokens only",
    "S38": "the floor is for outputs without text, and a call was forced: it may end",
    **dict.fromkeys(("G4", "G5", "G6", "G7"), BY_KIND),
    **dict.fromkeys(("G11", "G12", "G13", "G14", "G19"), BY_KIND),
    "T24": "drafts are not hinted here: the drafter alone proposes",
    **dict.fromkeys(("G9", "G16", "G17", "G18"), SERVER),
    **dict.fromkeys(("C14", "C20", "P24"), SERVER),
    **dict.fromkeys(("C3", "C4"), "tests/engine/test_turns.py: a cell acts where a turn begins"),
    "V7": "no rollback threshold: a commit selects exact states for any number of accepted drafts",
    "K9": "tests/engine/test_lossless_drafters.py: drafts unlikely to survive are not verified",
    "K12": "tests/graph/test_sampling.py: the distribution of sampled tokens",
    "P17": "every plan has rows: tests/engine/test_lossless.py",
}


def named() -> set[str]:
    """Return the ids in names and parameters of tests."""
    found: set[str] = set()
    folders = ("engine/**", "tool_parsers", "server")
    for path in (p for folder in folders for p in TESTS.glob(f"{folder}/test_*.py")):
        if path.name == Path(__file__).name:
            continue
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"def (test_\w+)|id=f?\"([\w-]+)", text):
            found |= set(re.findall(r"(?:^|_)([ESTGRCVLPKp]\d+)(?=_|$|-)", "".join(name)))
    return {name.upper() for name in found}


@pytest.mark.parametrize("letter", CATALOGUE)
def test_every_case_id_has_a_test(letter: str) -> None:
    expected = {f"{letter}{i}" for i in range(1, CATALOGUE[letter] + 1)}
    known = named() | ELSEWHERE.keys()
    assert not expected - known


def test_cases_tested_elsewhere_name_existing_files() -> None:
    all_ids = {f"{letter}{i}" for letter, n in CATALOGUE.items() for i in range(1, n + 1)}
    assert len(all_ids) == 208
    assert ELSEWHERE.keys() <= all_ids
    for reason in ELSEWHERE.values():
        for file in re.findall(r"tests/[\w/]+\.py", reason):
            assert (TESTS.parent / file).exists(), file
