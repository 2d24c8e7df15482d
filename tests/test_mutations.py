"""Damaged folders are read or refused by name; `tests/soak/mutations.py` has many more."""

import warnings
from pathlib import Path

import pytest

from tests.soak import mutations
from tests.soak.mutations import Damaging, loaded

COUNT = 12  # seeds of each
KINDS = sorted(mutations.KINDS.keys() - {"prefix"})  # test_prefix_damage.py damages every byte


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_folder_is_read_or_refused_by_name(kind: str, tmp_path: Path) -> None:
    damaging = Damaging(kind, tmp_path, loaded)
    for seed in range(1000, 1000 + COUNT):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = damaging.try_one(seed)
        assert not found["outcome"].startswith("FAULT"), (seed, found["what"], found["error"])
