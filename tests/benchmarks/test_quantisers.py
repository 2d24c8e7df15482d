"""The benchmark of quantisers: errors, types and the table; llama.cpp itself is not run."""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import quantisers
from benchmarks.gguf_files import OURS, THEIRS
from benchmarks.llama_cpp.quantiser import SWITCHES, Parameters, listed
from dflash_jax.converters.convert import convert
from dflash_jax.converters.models import open_model


def side(embedding: str, down: dict[str, int], error: float) -> dict[str, Any]:
    """Return the figures of a side, as they are measured."""
    tensors = {
        "embed_tokens": {"error": 0.01, "types": {embedding: 1}},
        "self_attn.q_proj": {"error": error, "types": {"Q4_K": 2}},
        "mlp.up_proj": {"error": 2 * error, "types": {"Q4_K": 2}},
        "mlp.down_proj": {"error": error, "types": down},
    }
    whole = {"file_mb": 100 * error, "cpu_s": 3.2, "kl_divergence": error / 10}
    return whole | {"greedy_agreement": 0.9, "tensors": tensors}


def test_the_table_shows_ours_first_and_types_that_differ() -> None:
    sides = {
        OURS: side("Q8_0", {"Q6_K": 2}, 0.1),
        THEIRS: side("Q8_0", {"Q6_K": 1, "Q4_K": 1}, 0.2),
    }
    heading, _, row = quantisers.table({"a": {"q4_k_m": sides}})
    assert len(heading.split(" | ")) == len(row.split(" | "))
    assert row == (
        "| a | q4_k_m | 10 / 20 | 1.00 / 1.00 | 10.00 / 20.00 | 15.00 / 30.00 | 0.0100 / 0.0200"
        " | 90.0 / 90.0 | 3 / 3 | 1 Q6_K for Q4_K |"
    )


def test_errors_are_those_of_the_matrices_of_every_layer(oracle: Path, tmp_path: Path) -> None:
    source = open_model(oracle / "targets" / "llama3")
    convert(source, tmp_path / "x.gguf", to="gguf", dtype="q8_0")
    found = quantisers.errors_of(source, open_model(tmp_path / "x.gguf"))
    assert found["self_attn.q_proj"]["types"] == {"Q8_0": source.config.num_layers}
    assert all(0.001 < each["error"] < 0.012 for each in found.values())
    assert not any("norm" in name for name in found)


def test_parameters_have_llama_cpps_layout() -> None:
    places = [Parameters.file_type.offset, Parameters.dry_run.offset, Parameters.importance.offset]
    assert places == [4, 21, 24]
    assert getattr(Parameters, SWITCHES[0]).offset == 16
    means = {"blk.0.ffn_up.weight": np.arange(3, dtype=np.float32)}
    entries = listed(means)
    assert [entry.name for entry in entries] == [b"blk.0.ffn_up.weight", None]
    assert entries[0].values[: entries[0].count] == [0.0, 1.0, 2.0]
    assert ctypes.sizeof(entries) == 2 * 24


def test_wrong_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"")
    for words, message in (
        ([str(tmp_path / "y.gguf")], "y.gguf is no file"),
        ([str(file), "--types", "q9"], "'q9' is none of f32"),
    ):
        with pytest.raises(SystemExit):
            quantisers.main([*words, "--peer", "python", "--library", str(file)])
        assert message in capsys.readouterr().err
