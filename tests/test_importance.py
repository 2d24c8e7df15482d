"""Importance matrices that are measured over a text."""

import json
import types
from typing import Any

import numpy as np
import pytest

from dflash_jax import load_target
from dflash_jax.cli import main
from dflash_jax.converters.gguf.importance import read_importance
from dflash_jax.converters.imatrix import Text, by_stored_name
from dflash_jax.importance import chunks_of, measure
from dflash_jax.networks import build_pair
from dflash_jax.target_model import TargetModel
from dflash_jax.testing import random_params, tiny_target

TEXT = "Write a short story about two ships that meet at night, and keep it calm. " * 8
CHUNKS = [list(range(3, 19)), list(range(40, 56))]


def normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return weight * x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps)


def test_inputs_are_those_of_every_token_of_every_chunk():
    config = tiny_target()
    model = TargetModel(config, random_params(build_pair(config, None))["target"], "float32")
    found = measure(model, CHUNKS)
    first = np.asarray(model.forward(CHUNKS).hidden[0], np.float64)  # [2, 16, D]
    layer = model.params["layers_0"]
    inputs = normed(first, np.asarray(layer["input_norm"]), config.rms_norm_eps)
    squares, tokens = found["layers_0/attention/qkv"]
    np.testing.assert_allclose(squares, np.square(inputs).sum(axis=(0, 1)), 1e-5)
    assert tokens == 32
    assert not any("head" in path or "embed" in path or "norm" in path for path in found)


def test_experts_have_the_inputs_of_tokens_that_chose_them(oracle):
    model = load_target(oracle / "targets" / "qwen3_moe")
    config = model.config
    found = measure(model, CHUNKS)
    path = next(path for path in found if path.endswith("experts_gate_up"))
    squares, tokens = found[path]
    assert squares.shape == (config.num_experts, config.hidden_size)
    assert tokens.sum() == config.experts_per_token * 32
    down = found[path.replace("gate_up", "down")]
    assert down.squares.shape == (config.num_experts, config.expert_size)
    np.testing.assert_array_equal(down.tokens, tokens)
    measured = by_stored_name(config, found, Text("a", 2, 16))
    stack = next(name for name in measured.sums if name.endswith("ffn_up_exps.weight"))
    np.testing.assert_allclose(measured.sums[stack], squares, 1e-6)
    np.testing.assert_array_equal(measured.counts[stack][:, 0], tokens)


def test_every_chunk_begins_with_the_start_token():
    def encode(text, specials=True):
        start = [1] if specials else []
        return start + [ord(c) for c in text]

    tokenizer: Any = types.SimpleNamespace(encode=encode)
    a, b, c, d, e = encode("abcde", specials=False)
    assert chunks_of(tokenizer, "abcde", 3) == [[1, a, b], [1, c, d]]
    assert chunks_of(tokenizer, "a", 3) == []
    tokenizer.encode = lambda text, specials=True: encode(text, specials=False)
    assert chunks_of(tokenizer, "abcde", 5) == [[a, b, c, d, e]]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("suffix", ["gguf", "dat"])
def test_the_command_writes_what_convert_reads(tmp_path, capsys, text, suffix):
    out = tmp_path / f"m.{suffix}"
    words = [str(text), str(out), "--chunk", "16", "--chunks", "2", "--json"]
    assert main(["imatrix", *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["tokens"], report["chunks"], report["matrices"]) == (32, 2, 42)
    found = read_importance(out)
    assert (found.text, found.chunks, len(found.means)) == ("text.txt", 2, 42)
    model = load_target("tiny")
    ids = model.tokenizer.encode(TEXT)
    expected = measure(model, [ids[:16], ids[16:32]])["layers_0/mlp/down"]
    means = found.means["blk.0.ffn_down.weight"].reshape(-1)
    np.testing.assert_allclose(means, expected.squares / 32, 1e-4)
    command = ["convert", "tiny", str(tmp_path / "x.gguf"), "--type", "q4_k_m"]
    assert main([*command, "--imatrix", str(out)]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent.txt", "m.gguf"], "absent.txt is no file"),
        (["{text}", "m.txt"], "must end in .gguf or .dat"),
        (["{text}", "m.gguf", "--chunk", "0"], "--chunk is 0; expected at least 16"),
        (["{text}", "m.gguf", "--chunks", "0"], "--chunks is 0; expected at least 1"),
        (["{text}", "m.gguf", "--chunk", "4096"], "fewer tokens than a chunk of 4096"),
        (["{text}", "m.gguf", "--chunk", "4097"], "tiny has contexts of at most 4096 tokens"),
        (["{bytes}", "m.gguf"], "is not UTF-8"),
        (["{text}", "absent/m.gguf"], "is not a folder; create it first"),
        (["{text}", "kept.gguf"], "kept.gguf"),
    ],
)
def test_bad_input_is_named_and_leaves_no_file(tmp_path, capsys, monkeypatch, text, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xfd" * 99)
    (tmp_path / "kept.gguf").write_bytes(b"GGUF")
    before = sorted(tmp_path.iterdir())
    words = [word.format(text=text, bytes=tmp_path / "bytes") for word in words]
    assert main(["imatrix", *words]) == 1
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
