"""Targets and drafters as GGUF: the files of an independent writer, and round trips."""

import gguf
import numpy as np
import pytest
from gguf_families import write_family
from gguf_models import write_target
from test_gguf_families import NAMES, TARGETS

from dflash_jax.converters.convert import convert
from dflash_jax.converters.models import open_model

FAMILIES = ["llama3", "qwen3", *NAMES]
UNLIKE = {"general.file_type", "general.quantization_version", "general.type"}


def values(reader: gguf.GGUFReader) -> dict:
    return {name: field.contents() for name, field in reader.fields.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_target_is_written_as_by_an_independent_writer(tmp_path, name):
    folder = TARGETS / name
    write = write_target if name in ("llama3", "qwen3") else write_family
    theirs = gguf.GGUFReader(write(folder, tmp_path / "theirs.gguf"))
    convert(open_model(folder), tmp_path / "ours.gguf", to="gguf", dtype="f32")
    ours = gguf.GGUFReader(tmp_path / "ours.gguf")
    expected = {tensor.name: tensor for tensor in theirs.tensors}
    assert {tensor.name for tensor in ours.tensors} == expected.keys()
    for tensor in ours.tensors:
        other = expected[tensor.name]
        assert list(tensor.shape) == list(other.shape), tensor.name
        np.testing.assert_array_equal(tensor.data, other.data, tensor.name)
    keys, found = values(theirs), values(ours)
    missing = {key: keys[key] for key in keys if key not in found}
    assert not missing
