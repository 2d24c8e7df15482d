"""The benchmark of GGUF files: requests, figures and errors; times are not checked."""

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gguf_files
from benchmarks.gguf_files import OURS, PROMPTS, THEIRS
from benchmarks.processes import memory_mb


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


def test_tables_show_ours_first() -> None:
    sides = {THEIRS: figures(2.0), OURS: figures(4.0), "over": {"tokens/s": 2.0}}
    heading, _, row = gguf_files.table({"a": sides})
    assert len(heading.split(" | ")) == len(row.split(" | "))
    assert row == (
        "| a | 4.0 / 2.0 | 2.00 | 2.500 / 5.000 | 145.000 / 290.000 | 0.5 / 1.0 | 42 / 21 |"
    )
    apart = {"kl_divergence": 0.01, "greedy_agreement": 0.95, "relative_error": 1e-6}
    near = apart | {"kl_divergence": 0.002}
    found: dict[str, Any] = {"file_mb": 98.4, "forms": {"Q4_K": 7e6, "float32 vectors": 4e5}}
    found["packed"] = {OURS: near, THEIRS: apart}
    short = gguf_files.logits_table({"a": found})[2]
    assert (
        short == "| a | 98 | 0.00200 / 0.01000 | 95.0 / 95.0 |  |  |  | Q4_K 7, float32 vectors 0 |"
    )
    found |= {"from_source": apart, "float32": {THEIRS: apart}}
    assert "| 0.0100 | 95.0 | 1e-06 |" in gguf_files.logits_table({"a": found})[2]
    types = {
        name: {"bits": bits, OURS: {"error": 0.1, "cpu_s": 2}, THEIRS: {"error": 0.2, "cpu_s": 1}}
        for name, bits in (("Q2_K", 2.625), ("Q8_0", 8.5))
    }
    assert gguf_files.encoders_table(types)[2:] == [
        "| Q8_0 | 8.5 | 10.000 / 20.000 | 2.000 / 1.000 |",
        "| Q2_K | 2.625 | 10.000 / 20.000 | 2.000 / 1.000 |",
    ]


def test_memory_is_that_of_the_process() -> None:
    found = memory_mb(os.getpid())
    assert 10 < found["resident"] <= found["peak"]


def test_a_missing_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gguf_files.main([str(tmp_path / "x.gguf"), "--peer", "python"])
    assert f"{tmp_path}/x.gguf is no file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gguf_files.main(["--peer", "python"])
    assert "give files, or --encoders" in capsys.readouterr().err
