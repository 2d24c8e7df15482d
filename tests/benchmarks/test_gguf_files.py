"""The benchmark of GGUF files: requests, figures and errors; times are not checked."""

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gguf_files
from benchmarks.gguf_files import OURS, PROMPTS, THEIRS


def figures(speed: float) -> dict[str, Any]:
    """Return the figures of a side."""
    prompts = {f"first token of {tokens}, s": {"median": tokens / speed} for tokens in PROMPTS}
    memory = {"resident": 10.4 * speed, "peak": 20 * speed}
    whole = {"tokens/s": {"median": speed}, "load_s": 1 / speed, "first_answer_s": 2 / speed}
    return whole | prompts | {"memory_mb": memory}


def test_a_request_is_the_same_for_both_sides_and_new_in_every_round() -> None:
    words = [gguf_files.request(5, 3, seed).split() for seed in (1, 1, 2)]
    assert words[0] == words[1] != words[2]
    mode, count, ids, past_end_tokens = words[0]
    assert (mode, count, past_end_tokens) == ("plain", "5", "0")
    assert len(ids.split(",")) == 3


def test_the_table_shows_the_peer_first() -> None:
    heading, _, row = gguf_files.table({"a": {THEIRS: figures(2.0), OURS: figures(4.0)}})
    assert len(heading.split(" | ")) == len(row.split(" | "))
    assert row == (
        "| a | 2.0 / 4.0 | 0.500 / 0.250 | 5.000 / 2.500 | 30.000 / 15.000 | 290.000 / 145.000"
        " | 0.5 / 0.2 | 1.0 / 0.5 | 21 / 42 | 40 / 80 |"
    )


def test_memory_is_that_of_the_process() -> None:
    found = gguf_files.memory_mb(os.getpid())
    assert 10 < found["resident"] <= found["peak"]


def test_a_missing_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gguf_files.main([str(tmp_path / "x.gguf"), "--peer", "python"])
    assert f"{tmp_path}/x.gguf is no file" in capsys.readouterr().err
