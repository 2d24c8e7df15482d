import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from weight_files import key, raw_gguf, tensor, text

from dflash_jax.converters.formats.gguf.file import open_gguf
from dflash_jax.errors import CheckpointError

U32, STRING, ARRAY = 4, 8, 9
FOUR = [tensor("x", [4], 0, 0)]
DATA = b"\0" * 32


def write(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


def test_a_file_of_the_gguf_package_is_read_back(tmp_path):
    rng = np.random.default_rng(0)
    plain = {
        "a": rng.random((3, 5), np.float32),
        "b": rng.random(7).astype(np.float16),
        "c": rng.integers(0, 9, (2, 3, 4)).astype(np.int32),
    }
    quantised = rng.standard_normal((6, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_uint32("n", 7)
    writer.add_array("words", ["a", "", "é"])
    writer.add_array("flags", [True, False])
    writer.add_float64("pi", 3.14)
    for name, array in plain.items():
        writer.add_tensor(name, array)
    packed = gguf.quants.quantize(quantised, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(tmp_path / "x.gguf")
    assert file.metadata["general.architecture"] == "llama"
    assert (file.metadata["n"], file.metadata["pi"]) == (7, 3.14)
    assert file.metadata["words"].tolist() == ["a", "", "é"]
    assert file.metadata["flags"].tolist() == [True, False]
    for name, array in plain.items():
        assert (file.shape(name), file.dtype(name)) == (array.shape, array.dtype)
        np.testing.assert_array_equal(file.read(name), array)
        assert not file.read(name).flags.owndata
    expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(file.read("q"), expected)
    np.testing.assert_array_equal(file.read_rows("q", np.array([5, 1])), expected[[5, 1]])
    np.testing.assert_array_equal(file.read_rows("b", slice(2, 4))[:, 0], plain["b"][2:4])
    assert (file.kind("q"), file.nbytes("q"), file.notes) == ("Q8_0", 6 * 68, ())


def scaled_file(path: Path, architecture: str, scales: dict[str, int]) -> dict[str, np.ndarray]:
    """Write NVFP4 tensors with scales of these lengths; return the values."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    blocks, found = gguf.GGMLQuantizationType.NVFP4, {}
    for name, shape in {"a.weight": (6, 36), "ffn_down_exps.weight": (3, 4, 36)}.items():
        raw = rng.integers(0, 256, shape, np.uint8)
        writer.add_tensor(name, raw, raw_dtype=blocks)
        found[name] = gguf.quants.dequantize(raw, blocks)
    for name, size in scales.items():
        found[name] = rng.random(size, np.float32) + 1
        writer.add_tensor(name, found[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


@pytest.mark.parametrize("spelling", ["a.scale", "a.weight.scale"])
def test_scales_beside_nvfp4_tensors_multiply_them(tmp_path, spelling):
    scales = {spelling: 1, "ffn_down_exps.scale": 3, "a.input_scale": 1}
    stored = scaled_file(tmp_path / "x.gguf", "qwen3moe", scales)
    file = open_gguf(tmp_path / "x.gguf")
    assert file.names() == ("a.weight", "ffn_down_exps.weight")
    np.testing.assert_array_equal(file.read("a.weight"), stored["a.weight"] * stored[spelling])
    expected = stored["ffn_down_exps.weight"] * stored["ffn_down_exps.scale"][:, None, None]
    np.testing.assert_array_equal(file.read("ffn_down_exps.weight"), expected)
    rows = file.read_rows("ffn_down_exps.weight", np.array([9, 0, 5]))
    np.testing.assert_array_equal(rows, expected.reshape(-1, 64)[[9, 0, 5]])
    assert [note.split()[0] for note in file.notes] == ["2", "1"]  # scaled, not used


def test_a_gemmas_router_keeps_its_scales(tmp_path):
    stored = scaled_file(tmp_path / "x.gguf", "gemma4", {"ffn_down_exps.scale": 3})
    file = open_gguf(tmp_path / "x.gguf")
    assert "ffn_down_exps.scale" in file.names()
    expected = stored["ffn_down_exps.weight"]
    np.testing.assert_array_equal(file.read("ffn_down_exps.weight"), expected)


def test_a_scale_of_another_length_is_refused(tmp_path):
    scaled_file(tmp_path / "x.gguf", "qwen3moe", {"a.scale": 3})
    with pytest.raises(CheckpointError, match=r"a.scale is F32 \[3\] beside a.weight \[6, 64\]"):
        open_gguf(tmp_path / "x.gguf")


def test_the_first_version_is_old_and_not_damaged(tmp_path):
    (tmp_path / "x.gguf").write_bytes(raw_gguf(version=1))
    with pytest.raises(
        CheckpointError, match=r"is GGUF version 1, which is obsolete.*fetch a newer"
    ):
        open_gguf(tmp_path / "x.gguf")


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_are_read(tmp_path, version):
    raw = raw_gguf([], FOUR, struct.pack("<4f", 1, 2, 3, 4), version=version)
    assert open_gguf(write(tmp_path / "x.gguf", raw)).read("x").tolist() == [1, 2, 3, 4]


def test_a_gap_and_a_tail_are_noted(tmp_path):
    two = [tensor("x", [4], 0, 0), tensor("y", [4], 0, 64)]
    file = open_gguf(write(tmp_path / "x.gguf", raw_gguf([], two, b"\0" * 200)))
    assert [note.split(": ")[1] for note in file.notes] == [
        "32 bytes between tensors belong to nothing",
        "120 bytes follow the last tensor",
    ]


U8_ARRAY = struct.pack("<IQ", 0, 2**40)
BAD = {
    "at least 24 bytes": b"GGUF",
    "expected b'GGUF'": b"GGML" + b"\0" * 40,
    "version 1": raw_gguf(version=1),
    "version 4": raw_gguf(version=4),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + DATA,
    "claims 1099511627776 tensors": raw_gguf(counts=(2**40, 0)),
    "1000000 tensors do not fit": raw_gguf(counts=(10**6, 0)),
    "metadata keys, which cannot fit": raw_gguf(counts=(0, 2**40)),
    "keys, which cannot": raw_gguf(counts=(0, 1000)),
    "claims 1152921504606846976 bytes": raw_gguf([key("a", STRING, struct.pack("<Q", 2**60))]),
    "needs 1000 bytes": raw_gguf([key("a", STRING, struct.pack("<Q", 1000))]),
    "claims 1099511627776 elements": raw_gguf([key("a", ARRAY, U8_ARRAY)]),
    "array of type 9": raw_gguf([key("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + DATA)]),
    "ends inside element 1": raw_gguf(
        [key("a", ARRAY, struct.pack("<IQ", STRING, 3) + struct.pack("<Q", 10**9) + DATA)]
    ),
    "strings reach to byte": raw_gguf(
        [key("a", ARRAY, struct.pack("<IQ", STRING, 1) + struct.pack("<Q", 10**9) + DATA)]
    ),
    "unknown value type 13": raw_gguf([key("a", 13, DATA)]),
    "key 'a' appears twice": raw_gguf([key("a", U32, b"\0" * 4)] * 2),
    "key '' is empty": raw_gguf([key("", U32, b"\0" * 4)]),
    "key is not UTF-8": raw_gguf([key(b"\xff", U32, b"\0" * 4)]),
    "general.alignment is 0": raw_gguf([key("general.alignment", U32, struct.pack("<I", 0))]),
    "general.alignment is 3": raw_gguf([key("general.alignment", U32, struct.pack("<I", 3))]),
    "alignment is 2147483648": raw_gguf([key("general.alignment", U32, struct.pack("<I", 2**31))]),
    "general.alignment is 'x'": raw_gguf([key("general.alignment", STRING, text("x"))]),
    "1048576 dimensions": raw_gguf([], [tensor("x", [], 0, 0)]).replace(
        text("x") + struct.pack("<I", 0), text("x") + struct.pack("<I", 2**20)
    )
    + DATA,
    "0 dimensions": raw_gguf([], [tensor("x", [], 0, 0)], DATA),
    "5 dimensions": raw_gguf([], [tensor("x", [1] * 5, 0, 0)], DATA),
    "impossible shape (0, 4)": raw_gguf([], [tensor("x", [4, 0], 0, 0)], DATA),
    "impossible shape (4294967296,": raw_gguf([], [tensor("x", [2**32, 2**32], 0, 0)], DATA),
    "type 999, which is unknown": raw_gguf([], [tensor("x", [4], 999, 0)], DATA),
    "type 4, which was removed": raw_gguf([], [tensor("x", [4], 4, 0)], DATA),
    "rows of 33 weights": raw_gguf([], [tensor("x", [33], 8, 0)], DATA * 2),
    "not a multiple of 32": raw_gguf([], [tensor("x", [4], 0, 8)], DATA),
    "is truncated": raw_gguf([], [tensor("x", [4], 0, 2**64 - 32)], DATA),
    "file has 72; the first tensor past the end is x": raw_gguf([], FOUR, DATA)[:72],
    "y overlaps": raw_gguf([], [*FOUR, tensor("y", [4], 0, 0)], DATA),
    "tensor 'x' appears twice": raw_gguf([], [*FOUR, tensor("x", [4], 0, 32)], DATA * 2),
    "unprintable or a path": raw_gguf([], [tensor("../x", [4], 0, 0)], DATA),
    "'x\\x00' is empty, unprintable": raw_gguf([], [tensor("x\0", [4], 0, 0)], DATA),
    "name is not UTF-8": raw_gguf([], [tensor(b"\xff", [4], 0, 0)], DATA),
    "at most 255": raw_gguf([], [tensor("x" * 256, [4], 0, 0)], DATA),
}


@pytest.mark.parametrize("message", BAD)
def test_a_damaged_header_is_refused_with_its_reason(tmp_path, message):
    path = write(tmp_path / "bad.gguf", BAD[message])
    with pytest.raises(CheckpointError, match=r"bad\.gguf") as error:
        open_gguf(path)
    assert message in str(error.value)


def test_a_string_that_is_not_utf8_is_named_when_read(tmp_path):
    body = struct.pack("<IQ", STRING, 1) + text(b"\xff\xfe")
    file = open_gguf(write(tmp_path / "x.gguf", raw_gguf([key("words", ARRAY, body)], [])))
    with pytest.raises(CheckpointError, match="words: element 0 is not UTF-8"):
        file.metadata["words"].tolist()


def test_a_known_type_that_cannot_be_decoded_is_named_with_the_readable_ones(tmp_path):
    raw = raw_gguf([], [tensor("x", [256], 15, 0)], b"\0" * 292)
    file = open_gguf(write(tmp_path / "x.gguf", raw))
    assert file.kind("x") == "Q8_K"
    with pytest.raises(CheckpointError, match=r"x: the type Q8_K .* IQ2_XXS, .* Q4_K"):
        file.read("x")


def split_set(folder: Path, numbers=(0, 1, 2), total=3, names="abc") -> Path:
    u16, i32 = 2, 5
    for i, number in enumerate(numbers):
        keys = [
            key("split.no", u16, struct.pack("<H", number)),
            key("split.count", u16, struct.pack("<H", 3)),
            key("split.tensors.count", i32, struct.pack("<i", total)),
        ]
        data = struct.pack("<4f", *[i] * 4)
        raw = raw_gguf(keys, [tensor(names[i], [4], 0, 0)], data)
        (folder / f"m-{i + 1:05d}-of-00003.gguf").write_bytes(raw)
    return folder / "m-00001-of-00003.gguf"


def test_a_split_set_is_read_as_one(tmp_path):
    file = open_gguf(split_set(tmp_path))
    assert [file.read(name)[0] for name in file.names()] == [0, 1, 2]
    for path in tmp_path.iterdir():
        path.rename(path.with_name(path.name.upper()))
    file = open_gguf(tmp_path / "M-00001-OF-00003.GGUF")
    assert [file.read(name)[0] for name in file.names()] == [0, 1, 2]


def test_a_broken_split_set_is_refused_with_its_reason(tmp_path):
    first = split_set(tmp_path)
    with pytest.raises(CheckpointError, match=r"give m-00001-of-00003\.gguf"):
        open_gguf(tmp_path / "m-00002-of-00003.gguf")
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"lacks m-00003-of-00003\.gguf"):
        open_gguf(first)
    with pytest.raises(CheckpointError, match="says it is part 2 of 3"):
        open_gguf(split_set(tmp_path, numbers=(0, 2, 1)))
    with pytest.raises(CheckpointError, match="should hold 4 tensors, its files hold 3"):
        open_gguf(split_set(tmp_path, total=4))
    with pytest.raises(CheckpointError, match="tensor 'a' is also in m-00001"):
        open_gguf(split_set(tmp_path, names="aba"))
    renamed = split_set(tmp_path).rename(tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match="rename the set"):
        open_gguf(renamed)


def test_a_large_vocabulary_opens_quickly_and_is_decoded_only_on_request(tmp_path):
    words = b"".join(text(f"word{i}") for i in range(100_000))
    body = struct.pack("<IQ", STRING, 100_000) + words
    path = write(tmp_path / "x.gguf", raw_gguf([key("tokenizer.ggml.tokens", ARRAY, body)], []))
    began = time.perf_counter()
    tokens = open_gguf(path).metadata["tokenizer.ggml.tokens"]
    assert time.perf_counter() - began < 1.0
    assert len(tokens) == 100_000
    assert tokens.tolist()[-1] == "word99999"
