"""The command that runs the tests."""

from pathlib import Path

import pytest

from tests import run

TESTS = Path(run.__file__).parent


def test_every_test_file_belongs_to_one_batch() -> None:
    folders = [folder for batch in run.FOLDERS.values() for folder in batch]
    assert len(folders) == len(set(folders))
    assert {run.batch_of(file) for file in TESTS.rglob("test_*.py")} == {*run.FOLDERS}


def test_tiers_do_not_overlap_and_only_the_last_has_the_tests_of_hours() -> None:
    for tier in ("test", "rest", "all"):
        batches = run.planned_batches([TESTS], tier)
        assert [batch.name for batch in batches] == [
            *(name for name in run.FOLDERS if name != "soak"),
            run.OPTIMISED,
        ]
        assert all("not soak" in batch.options[1] for batch in batches)
    soak = run.planned_batches([TESTS], "soak")
    assert [batch.name for batch in soak] == [*run.FOLDERS]
    assert not any("--quick-compile" in batch.options for batch in soak)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("6012 passed, 26 skipped in 12.5s", "6012 passed, 0 failed, 26 skipped"),
        (
            "= 1 failed, 2 passed, 3 deselected, 2 errors in 61.00s (0:01:01) =",
            "2 passed, 3 failed, 0 skipped",
        ),
        ("no tests ran in 0.01s", "0 passed, 0 failed, 0 skipped"),
    ],
)
def test_counts_are_those_of_the_report(line: str, words: str) -> None:
    assert run.in_words(run.counts_of(["7 passed over there", line, ""])) == words


def test_a_path_that_does_not_exist_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run.main(["tests/nothing_here.py"])
    assert stopped.value.code == 2
    assert "tests/nothing_here.py does not exist" in capsys.readouterr().err
