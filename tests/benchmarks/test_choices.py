"""Groups of `benchmarks.choices` that a machine cannot run are named, and the others run."""

from pathlib import Path

import pytest

from benchmarks import choices
from dflash_jax.kernels.native.build import Library


def test_groups_of_native_kernels_are_named_where_there_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "library", lambda: Library(None, "the processor has no avx2"))
    measured = {"ms": {"only": {"median": 1.0}}, "ratio": {}}
    monkeypatch.setattr(choices, "decoding", lambda *_, **__: measured)
    monkeypatch.setattr("sys.argv", ["choices", "--only", "shipped pair"])
    assert choices.main() == 0
    output = capsys.readouterr().out
    assert "skipped, since there are no native kernels (the processor has no avx2):" in output
    assert "\n  kernels, shipped pair, a plain token\n" in output
    assert "\nlookahead, shipped pair, a token\n" in output
