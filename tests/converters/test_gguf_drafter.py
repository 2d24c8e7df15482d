import dataclasses

import numpy as np
import pytest
from gguf_models import NAMES, write_drafter
from weight_files import ORACLE

from converters.gguf import open_gguf
from converters.gguf.drafter import canonical, read_config
from converters.load import load, load_drafter
from converters.taps import read_taps
from dflash_jax.config import read_drafter_config
from dflash_jax.errors import CheckpointError, ConfigError

FOLDER = ORACLE / "drafters" / "v1_full"


def leaves(node, path=()):
    if isinstance(node, dict):
        return {k: v for key, child in node.items() for k, v in leaves(child, (*path, key)).items()}
    return {path: node}


@pytest.mark.parametrize("dialect", NAMES)
@pytest.mark.parametrize("name", ["v1_full", "v1_sliding"])
def test_every_dialect_gives_the_parameters_of_the_published_folder(tmp_path, dialect, name):
    folder = ORACLE / "drafters" / name
    path = write_drafter(folder, tmp_path / "x.gguf", dialect)
    source = open_gguf(path)
    config, read = read_config(source)
    theirs = read_drafter_config(folder)
    assert config == dataclasses.replace(theirs, num_target_layers=0)
    assert str(list(theirs.target_layer_ids)) in read.taps.line()
    params = leaves(load(canonical(source, config), config, "float32", where=str(path)))
    expected = leaves(load_drafter(folder, theirs))
    assert params.keys() == expected.keys()
    for at, array in params.items():
        np.testing.assert_array_equal(array, expected[at], str(at))


def test_an_early_file_is_refused_with_both_readings(tmp_path):
    spelt = NAMES["upstream"] | {"taps": ("dflash.target_layer_ids", 0)}
    NAMES["early"] = spelt
    path = write_drafter(FOLDER, tmp_path / "x.gguf", "early", taps=[1, 2, 3])
    del NAMES["early"]
    with pytest.raises(CheckpointError, match="writers of this key disagree") as error:
        read_config(open_gguf(path))
    assert "layers [1, 2, 3] (raw) or of layers [0, 1, 2] (plus1)" in str(error.value)
    assert "--target-layer-shift" in str(error.value)
    config, dialect = read_config(open_gguf(path), "plus1")
    assert config.target_layer_ids == (0, 1, 2)
    assert dialect.taps.line().endswith("as chosen")
    assert read_config(open_gguf(path), "raw")[0].target_layer_ids == (1, 2, 3)


@pytest.mark.parametrize(
    ("written", "convention", "why"),
    [
        ([1, 16, 31, 46, 61], "plus1", "in the raw numbering"),
        ([2, 17, 32, 47, 62], "raw", "each one higher"),
    ],
)
def test_well_known_ids_under_the_wrong_convention_are_ambiguous(written, convention, why):
    with pytest.raises(CheckpointError, match=why):
        read_taps(written, source="k", convention=convention, choice="auto", where="f")
    taps = read_taps(written, source="k", convention=convention, choice="plus1", where="f")
    assert taps.ids == tuple(i - 1 for i in written)


@pytest.mark.parametrize(
    ("written", "message"),
    [([], "1 to 64"), ([1, 1], "1 to 64"), ([0, 3], "taps of the embedding")],
)
def test_impossible_taps_are_refused(written, message):
    with pytest.raises(ConfigError, match=message):
        read_taps(written, source="k", convention="plus1", choice="auto", where="f")


def test_an_unknown_choice_is_named():
    with pytest.raises(ConfigError, match="'maybe' is not one of auto, raw, plus1"):
        read_taps([1], source="k", convention="raw", choice="maybe", where="f")


def test_the_width_of_fc_must_fit_the_taps(tmp_path):
    path = write_drafter(FOLDER, tmp_path / "x.gguf", "upstream", taps=[1, 2])
    with pytest.raises(ConfigError, match="takes 192 features; 2 taps of width 64 make 128"):
        read_config(open_gguf(path))


def test_two_spellings_of_one_tensor_are_refused(tmp_path):
    path = write_drafter(FOLDER, tmp_path / "x.gguf", "upstream")
    source = open_gguf(path)
    config, _ = read_config(source)
    source._tensors["dflash_fc.weight"] = source._tensors["fc.weight"]
    with pytest.raises(CheckpointError, match=r"fc\.weight and dflash_fc\.weight both mean"):
        canonical(source, config)


@pytest.mark.parametrize(
    ("name", "kind"), [("selector_hidden.weight", "DFlash 2"), ("markov_w1.weight", "DSpark")]
)
def test_relatives_are_named(tmp_path, name, kind):
    source = open_gguf(write_drafter(FOLDER, tmp_path / "x.gguf", "upstream"))
    source._tensors[name] = source._tensors["fc.weight"]
    with pytest.raises(ConfigError, match=f"so it is {kind}"):
        read_config(source)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("dflash.target_layers", "does not say which target layers"),
        ("tokenizer.ggml.mask_token_id", "must name one mask token"),
        ("dflash.block_size", "block_size is None"),
        ("dflash.vocab_size", "vocab_size is None"),
    ],
)
def test_settings_are_never_guessed(tmp_path, key, message):
    source = open_gguf(write_drafter(FOLDER, tmp_path / "x.gguf", "upstream"))
    del source.metadata[key]
    with pytest.raises(ConfigError, match=message):
        read_config(source)
