import dataclasses
import json

import numpy as np
import pytest
import safetensors.numpy
from gguf_models import NAMES, write_drafter
from weight_files import ORACLE

from dflash_jax.converters import export
from dflash_jax.converters.formats.canonical import Canonical, Origin
from dflash_jax.converters.formats.gguf.file import open_gguf
from dflash_jax.converters.gguf.drafter import canonical, read_config
from dflash_jax.converters.load import load
from dflash_jax.converters.models import open_model
from dflash_jax.converters.taps import read_taps
from dflash_jax.converters.tree_source import TreeSource
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.families.configs import read_drafter_config
from dflash_jax.networks import build_pair
from dflash_jax.testing import folder_params, random_params, tiny_drafter, tiny_target

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
    expected = leaves(folder_params(folder, theirs))
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
    assert "layers [1, 2, 3] (zero-based) or of layers [0, 1, 2] (one-based)" in str(error.value)
    assert "--layer-ids" in str(error.value)
    config, dialect = read_config(open_gguf(path), "one-based")
    assert config.target_layer_ids == (0, 1, 2)
    assert dialect.taps.line().endswith("as chosen")
    assert read_config(open_gguf(path), "zero-based")[0].target_layer_ids == (1, 2, 3)


def test_a_window_of_zero_is_none(tmp_path):
    source = open_gguf(write_drafter(FOLDER, tmp_path / "x.gguf", "upstream"))
    config, _ = read_config(source)
    source.metadata["dflash.attention.sliding_window"] = 0
    assert read_config(source)[0] == config


@pytest.mark.parametrize(
    ("written", "convention", "why"),
    [
        ([1, 16, 31, 46, 61], "one-based", "in the zero-based numbering"),
        ([2, 17, 32, 47, 62], "zero-based", "each one higher"),
    ],
)
def test_well_known_ids_under_the_wrong_convention_are_ambiguous(written, convention, why):
    with pytest.raises(CheckpointError, match=why):
        read_taps(written, source="k", convention=convention, choice="auto", where="f")
    taps = read_taps(written, source="k", convention=convention, choice="one-based", where="f")
    assert taps.ids == tuple(i - 1 for i in written)


@pytest.mark.parametrize(
    ("written", "message"),
    [([], "1 to 64"), ([1, 1], "1 to 64"), ([0, 3], "taps of the embedding")],
)
def test_impossible_taps_are_refused(written, message):
    with pytest.raises(ConfigError, match=message):
        read_taps(written, source="k", convention="one-based", choice="auto", where="f")


def test_an_unknown_choice_is_named():
    with pytest.raises(ConfigError, match="'maybe' is not one of auto, zero-based, one-based"):
        read_taps([1], source="k", convention="zero-based", choice="maybe", where="f")


def test_the_width_of_fc_must_fit_the_taps(tmp_path):
    path = write_drafter(FOLDER, tmp_path / "x.gguf", "upstream", taps=[1, 2])
    with pytest.raises(ConfigError, match="takes 192 features; 2 taps of width 64 make 128"):
        read_config(open_gguf(path))


def test_a_number_gives_the_period_of_full_layers(tmp_path):
    source = open_gguf(write_drafter(FOLDER, tmp_path / "x.gguf", "upstream"))
    source.metadata |= {
        "dflash.attention.sliding_window": 10,
        "dflash.attention.sliding_window_pattern": 2,
    }
    windows = read_config(source)[0].windows
    assert windows == tuple(10 if (i + 1) % 2 else None for i in range(len(windows)))


def test_two_spellings_of_one_tensor_are_refused(tmp_path):
    path = write_drafter(FOLDER, tmp_path / "x.gguf", "upstream")
    source = open_gguf(path)
    config, _ = read_config(source)
    source._tensors["dflash_fc.weight"] = source._tensors["fc.weight"]
    with pytest.raises(CheckpointError, match=r"fc\.weight and dflash_fc\.weight both mean"):
        canonical(source, config)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("dflash.dspark.markov.w1", "DSpark in"), ("dflash.domino.start", "Domino in")],
)
def test_relatives_are_named(tmp_path, name, kind):
    source = open_gguf(write_drafter(FOLDER, tmp_path / "x.gguf", "upstream"))
    source._tensors[name] = source._tensors["fc.weight"]
    with pytest.raises(ConfigError, match=f"so it is {kind}"):
        read_config(source)


@pytest.mark.parametrize("name", ["v2", "v2_sliding"])
def test_a_dflash_2_file_gives_the_parameters_of_its_folder(tmp_path, name):
    folder = ORACLE / "drafters" / name
    path = write_drafter(folder, tmp_path / "x.gguf", "upstream")
    source = open_gguf(path)
    for key, value in (("logit_scale", 0.7), ("final_logit_softcapping", 4.0)):
        if name == "v2_sliding":
            source.metadata[f"dflash.{key}"] = float(np.float32(value))
    config, _ = read_config(source)
    assert config == dataclasses.replace(read_drafter_config(folder), num_target_layers=0)
    params = leaves(load(canonical(source, config), config, "float32", where=str(path)))
    expected = leaves(folder_params(folder, read_drafter_config(folder)))
    assert params.keys() == expected.keys()
    for at, array in params.items():
        np.testing.assert_array_equal(array, expected[at], str(at))


def dspark(folder, **changes):
    """A DSpark drafter in a speculators folder (a reduced vocabulary has no other)."""
    target = tiny_target()
    config = tiny_drafter(target, "dspark", **changes)
    params = random_params(build_pair(target, config))["drafter"]
    if config.draft_vocab_size:
        ids = np.sort(np.random.default_rng(0).permutation(97)[: config.draft_vocab_size])
        params["d2t"] = (ids - np.arange(len(ids))).astype(np.int32)
    weights = export.Weights(config, TreeSource(params, config))
    export.export(weights, folder, layout="speculators", dtype="float32")
    return folder, config, params


DSPARKS = {
    "borrowed": {},
    "own": {"own_embedding": True, "own_head": True},
    "reduced": {"draft_vocab_size": 40, "own_head": True},
    "alone": {"confidence_with_markov": False},
}


@pytest.mark.parametrize("name", DSPARKS)
def test_a_dspark_drafter_keeps_its_heads_through_every_layout(tmp_path, name):
    folder, config, params = dspark(tmp_path / "s", **DSPARKS[name])
    stored = safetensors.numpy.load_file(folder / "model.safetensors")
    if name == "reduced":
        np.testing.assert_array_equal(np.flatnonzero(stored["t2d"]), stored["d2t"] + np.arange(40))
    published = json.loads((folder / "config.json").read_text())
    layers = published["transformer_layer_config"]
    own = {"mask_token_id": config.mask_token_id, "target_layer_ids": [0, 1]}
    flat = layers | {"dflash_config": own, "block_size": 8, "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    safetensors.numpy.save_file(stored, tmp_path / "model.safetensors")
    file = write_drafter(tmp_path, tmp_path / "x.gguf", "upstream")
    expected = leaves(params)
    for path in (folder, file):
        model = open_model(path, role="drafter")
        found = dataclasses.replace(model.config, rope=config.rope)
        assert found == dataclasses.replace(config, num_target_layers=0)
        loaded = leaves(model.load("float32"))
        assert loaded.keys() == expected.keys()
        for at, array in loaded.items():
            np.testing.assert_array_equal(array, expected[at], str(at))


def test_a_head_tied_to_the_drafters_table_is_found(tmp_path):
    source = open_gguf(write_dspark(tmp_path, own_embedding=True))
    config, _ = read_config(source)
    assert config.own_head
    params = load(canonical(source, config), config, "float32", where="x")
    np.testing.assert_array_equal(params["head"], params["embed"])


@pytest.mark.parametrize("ids", [[0, 3, 3], [0, 5, 2], [0, 5, 97], [-1, 2, 3]])
def test_a_reduced_vocabulary_must_list_ascending_tokens(tmp_path, ids):
    _, config, params = dspark(tmp_path / "s", draft_vocab_size=3, own_head=True)
    params["d2t"] = (np.array(ids) - np.arange(3)).astype(np.int32)
    found = Canonical(TreeSource(params, config), {}, {})
    found.origins = {name: Origin(name) for name in found.source.names()}
    with pytest.raises(CheckpointError, match="does not name 3 ascending tokens below 97"):
        load(found, config, "float32", where="x")


def write_dspark(tmp_path, **changes):
    """The drafter as a GGUF file of ours, which the tests above compare with theirs."""
    _, config, params = dspark(tmp_path / "s", **changes)
    weights = export.Weights(config, TreeSource(params, config))
    export.export(weights, tmp_path / "x.gguf", layout="gguf", dtype="float32")
    return tmp_path / "x.gguf"


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
