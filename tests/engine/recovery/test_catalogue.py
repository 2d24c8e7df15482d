"""The catalogue of recovery cases: every id is a test's, or stands here with whose it is."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
CATALOGUE = {"E": 22, "S": 38, "T": 24, "G": 19, "R": 21, "C": 21, "V": 7, "L": 6, "P": 38, "K": 12}

SERVER = "the server's: what its APIs say and how it watches its callers"
PARSER = "the server's: calls read out of a stream"
NO_TREES = "there are no draft trees here"
ELSEWHERE = {
    **dict.fromkeys(("S35", "K10", "K11"), NO_TREES),
    **dict.fromkeys(("T19", "T20", "T21", "T22", "T23"), PARSER),
    "T24": "drafts are not hinted here: the drafter alone proposes",
    **dict.fromkeys(("G9", "G16", "G17", "G18"), SERVER),
    **dict.fromkeys(("C14", "C20", "P24"), SERVER),
    "V7": "no rollback threshold: a commit selects exact states, whatever was accepted",
    "K9": "tests/engine/test_lossless_drafters.py: drafts unlikely to survive are not verified",
    "K12": "tests/decode/test_sampling.py: the distribution of what is said",
    "P17": "there is no engine without rows: every plan has some, tests/engine/test_lossless.py",
}


def named() -> set[str]:
    """Ids in the names and parameters of tests."""
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
def test_no_case_is_forgotten(letter: str) -> None:
    wanted = {f"{letter}{i}" for i in range(1, CATALOGUE[letter] + 1)}
    known = named() | ELSEWHERE.keys()
    assert not wanted - known


def test_what_stands_elsewhere_is_short_and_real() -> None:
    every = {f"{letter}{i}" for letter, n in CATALOGUE.items() for i in range(1, n + 1)}
    assert len(every) == 208
    assert ELSEWHERE.keys() <= every
    for reason in ELSEWHERE.values():
        for file in re.findall(r"tests/[\w/]+\.py", reason):
            assert (TESTS.parent / file).exists(), file
