"""The GPU suite end to end with tiny models on a CPU; times are not checked."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu_suite import FULL, STEPS, main


def run(tmp_path: Path, *options: str) -> dict:
    out = tmp_path / "result.json"
    assert main(["--smoke", "--json", str(out), *options]) == 0
    return json.loads(out.read_text())


@pytest.mark.soak
def test_bitwise_logits_and_steps_of_one_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = ("--models", "qwen3-8b", "--stages", "bitwise,steps", "--steps", "plain,fused")
    found = run(tmp_path, *only)
    assert found["left_out"] == []
    bitwise, *steps = found["measurements"]
    assert bitwise["equal"] == bitwise["compared"] > 20
    assert [m["step"] for m in steps] == ["plain", "fused"]
    assert all(m["roofline_ms"] > 0 and len(m["samples"]) == 5 for m in steps)
    assert steps[0]["plan"]["rows"] == 2
    assert "qwen3-8b" in capsys.readouterr().out.splitlines()[-2]


@pytest.mark.soak
def test_every_stage_of_every_model(tmp_path: Path) -> None:
    found = run(tmp_path, "--budget", "100000")
    assert found["left_out"] == []
    names = {m["name"] for m in found["measurements"]}
    assert {"copy", "gemm", "bitwise", "step", "plain_decoding", "forced"} <= names
    steps = [m for m in found["measurements"] if m["name"] == "step"]
    assert {m["step"] for m in steps} == set(STEPS)
    assert {m["model"] for m in steps} == set(FULL)
    assert {m["weights"] for m in steps} == {"float", "int8", "int4"}
    assert all(m["same_tokens"] for m in found["measurements"] if m["name"] == "forced")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stages", "bitwise,x"], "unknown stages ['x']; known: ceilings, bitwise"),
        (["--models", "qwen"], "unknown models ['qwen']; known: qwen3-8b"),
        ([], "there is no GPU here; --smoke"),
    ],
)
def test_impossible_options_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(options)
    assert message in capsys.readouterr().err
