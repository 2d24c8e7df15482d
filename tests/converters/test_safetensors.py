import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from weight_files import entry, pages_in_memory, raw_safetensors

from dflash_jax.converters.formats.safetensors import DTYPES, open_safetensors
from dflash_jax.converters.formats.source import map_file, trim_mapped_memory
from dflash_jax.converters.hf import open_directory
from dflash_jax.errors import CheckpointError


def write(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


def test_tensors_written_by_the_safetensors_package_are_read_bit_for_bit(tmp_path):
    rng = np.random.default_rng(0)
    dtypes = ["f4", "f2", "f8", "i1", "u1", "i2", "i4", "i8", "?", ml_dtypes.bfloat16]
    arrays = {
        f"t{i}": rng.integers(0, 2 if d == "?" else 100, (3, i + 1)).astype(d)
        for i, d in enumerate(dtypes)
    }
    arrays["scalar"], arrays["empty"] = np.array(3.0, np.float32), np.zeros((0, 4), np.float32)
    arrays["flat"] = np.zeros((4, 0), np.float32)
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors", {"who": "test"})
    file = open_safetensors(tmp_path / "x.safetensors")
    assert file.metadata == {"who": "test"}
    assert set(file.names()) == set(arrays)
    for name, array in arrays.items():
        assert file.shape(name) == array.shape
        assert file.dtype(name) == array.dtype
        assert file.nbytes(name) == array.nbytes
        np.testing.assert_array_equal(file.read(name), array)
    assert file.read_rows("flat", slice(1)).size == 0
    rows = file.read_rows("t0", np.array([2, 0]))
    np.testing.assert_array_equal(rows, arrays["t0"][[2, 0]])


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_every_float8_code_is_read(tmp_path, kind):
    codes = bytes(range(256))
    raw = raw_safetensors({"x": entry(kind, [16, 16], 0, 256)}, codes)
    file = open_safetensors(write(tmp_path / "x.safetensors", raw))
    assert file.read("x").dtype == DTYPES[kind]
    assert file.read("x").tobytes() == codes


def test_reading_copies_nothing(tmp_path):
    raw = raw_safetensors({"x": entry("F32", [4], 0, 16)}, b"\0" * 16)
    file = open_safetensors(write(tmp_path / "x.safetensors", raw))
    assert not file.read("x").flags.owndata
    assert not file.read("x").flags.writeable


GOOD = entry("F32", [4], 0, 16)
BAD_HEADERS = {
    "claims a header": (10**9).to_bytes(8, "little") + b"{}",
    "is empty": b"",
    "starts with 8 bytes": b"\1\2",
    "does not start with": raw_safetensors(b"[1, 2]"),
    "not valid JSON": raw_safetensors(b'{"x": '),
    "appears twice": raw_safetensors(
        b'{"x":' + json.dumps(GOOD).encode() + b', "x":' + json.dumps(GOOD).encode() + b"}",
        b"\0" * 16,
    ),
    "recursion": raw_safetensors(b'{"x":' * 100_000),
    "not a JSON number": raw_safetensors(b'{"x": NaN}'),
    "has the dtype 'F4'": raw_safetensors({"x": entry("F4", [4], 0, 2)}, b"\0\0"),
    "has the shape": raw_safetensors({"x": entry("F32", [-4], 0, 16)}, b"\0" * 16),
    "has the shape [True]": raw_safetensors({"x": entry("U8", [True], 0, 1)}, b"\0"),
    "expected up to 8": raw_safetensors({"x": entry("U8", [1] * 9, 0, 1)}, b"\0"),
    "[0, 4611686018427387904]": raw_safetensors({"x": entry("F32", [0, 2**62], 0, 0)}),
    "9223372036854775808": raw_safetensors({"x": entry("U8", [2**63], 0, 1)}, b"\0"),
    "needs 16 bytes": raw_safetensors({"x": entry("F32", [4], 0, 15)}, b"\0" * 15),
    "is truncated": raw_safetensors({"x": GOOD}, b"\0" * 12),
    "overlaps": raw_safetensors({"x": GOOD, "y": entry("F32", [4], 8, 24)}, b"\0" * 24),
    "leaves a gap": raw_safetensors({"x": GOOD, "y": entry("F32", [4], 20, 36)}, b"\0" * 36),
    "belong to nothing": raw_safetensors({"x": GOOD}, b"\0" * 20),
    "'\\x1b[2J' is unprintable": raw_safetensors({"\x1b[2J": GOOD}, b"\0" * 16),
    "'\\ud800' is unprintable": raw_safetensors({"\ud800": GOOD}, b"\0" * 16),
    "must map printable strings": raw_safetensors({"__metadata__": {"\x1b[2J": ""}}),
    "exactly dtype, shape": raw_safetensors({"x": {"dtype": "F32"}}),
    "strings to strings": raw_safetensors({"__metadata__": {"a": 1}}),
}


@pytest.mark.parametrize("message", BAD_HEADERS)
def test_a_damaged_file_is_refused_with_its_reason(tmp_path, message):
    path = write(tmp_path / "bad.safetensors", BAD_HEADERS[message])
    with pytest.raises(CheckpointError, match=r"bad\.safetensors") as error:
        open_safetensors(path)
    assert message in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"absent\.safetensors cannot be read"):
        open_safetensors(tmp_path / "absent.safetensors")


def shards(folder: Path, weight_map: dict[str, str] | None = None) -> Path:
    one, two = {"a": np.ones((2, 2), np.float32)}, {"b": np.zeros(3, np.float32)}
    safetensors.numpy.save_file(one, folder / "1.safetensors")
    safetensors.numpy.save_file(two, folder / "2.safetensors")
    weight_map = weight_map or {"a": "1.safetensors", "b": "2.safetensors"}
    index = {"metadata": {"total_size": 28}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_shards_are_read_as_one(tmp_path):
    source = open_directory(shards(tmp_path))
    assert source.names() == ("a", "b")
    assert source.read("a").sum() == 4
    assert source.read_rows("b", slice(1, 3)).shape == (2, 1)
    with pytest.raises(CheckpointError, match="no shard"):
        source.read("c")


def test_a_whole_file_outranks_an_index_that_was_left_behind(tmp_path):
    """As in transformers."""
    safetensors.numpy.save_file(
        {"c": np.ones(1, np.float32)}, shards(tmp_path) / "model.safetensors"
    )
    assert open_directory(tmp_path).names() == ("c",)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../1.safetensors"}, "plain file name"),
        ({"a": "/etc/passwd"}, "plain file name"),
        ({"a": ".."}, "plain file name"),
        ({"a": "3.safetensors"}, r"lacks the shard 3\.safetensors"),
        ({"a": "9" * 999}, "lacks the shard 999"),
        ({"a": "1.safetensors", "c": "2.safetensors"}, "b: index says nothing"),
        ({"a": "2.safetensors", "b": "2.safetensors"}, "disagree on 1"),
        ({"a": 3}, "weight_map"),
    ],
)
def test_an_inconsistent_index_is_refused(tmp_path, weight_map, message):
    with pytest.raises(CheckpointError, match=message):
        open_directory(shards(tmp_path, weight_map))


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    shards(tmp_path)
    safetensors.numpy.save_file({"a": np.ones(2, np.float32)}, tmp_path / "2.safetensors")
    with pytest.raises(CheckpointError, match=r"'a' is in 1\.safetensors and in 2\.safetensors"):
        open_directory(tmp_path)


@pytest.mark.parametrize(
    ("files", "remedy"),
    [
        ([], "fetch one of them, or give the folder that does"),
        (["consolidated.safetensors", "x.bin"], "rename consolidated.safetensors if it holds all"),
        (["adapter_config.json", "adapter_model.safetensors"], "give its base model"),
    ],
)
def test_the_error_for_a_folder_without_weights_has_a_remedy(tmp_path, files, remedy):
    for file in files:
        (tmp_path / file).touch()
    with pytest.raises(CheckpointError, match=remedy):
        open_directory(tmp_path)


def test_the_error_for_a_folder_without_weights_lists_its_files(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle"):
        open_directory(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        open_directory(tmp_path / "nothing")


@pytest.mark.skipif(sys.platform != "linux", reason="the system tells what a mapping holds there")
def test_pages_of_a_mapped_file_that_were_read_are_released(tmp_path: Path) -> None:
    path = tmp_path / "mapped.bin"
    path.write_bytes(bytes(range(256)) * 2**15)
    buffer = map_file(path)
    view = np.frombuffer(buffer, np.uint8)
    total = int(view.sum())
    assert pages_in_memory(path) == len(buffer)
    half = len(view) // 2
    trim_mapped_memory(view[half:])
    assert pages_in_memory(path) == half
    trim_mapped_memory(view)
    assert pages_in_memory(path) == 0
    assert int(view.sum()) == total
