import dataclasses
import json

import numpy as np
import pytest
import safetensors.numpy
from gguf_models import write_drafter, write_target
from weight_files import ORACLE

from dflash_jax.cli.describe import describe
from dflash_jax.converters.cli import main
from dflash_jax.converters.hf import open_directory
from dflash_jax.converters.models import open_model
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.families.configs import read_drafter_config, read_target_config
from dflash_jax.graph.programs import declare
from dflash_jax.graph.resolve import resolve_here
from dflash_jax.networks import build_pair
from dflash_jax.plan import Plan
from dflash_jax.testing import planned
from dflash_jax.utils.sources import locate

DRAFTER = ORACLE / "drafters" / "v1_sliding"


def speculators_folder(path, **changes):
    """The oracle drafter as the speculators package saves it."""
    config = json.loads((DRAFTER / "config.json").read_text())
    own = config["dflash_config"]
    layers = {
        key: config[key]
        for key in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "max_position_embeddings",
            "layer_types",
            "sliding_window",
            "use_sliding_window",
            "max_window_layers",
        )
    }
    written = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "transformer_layer_config": layers,
        "draft_vocab_size": config["vocab_size"],
        "block_size": config["block_size"],
        "aux_hidden_state_layer_ids": [i + 1 for i in own["target_layer_ids"]],
        "mask_token_id": own["mask_token_id"],
    }
    (path / "config.json").write_text(json.dumps(written | changes))
    tensors = safetensors.numpy.load_file(DRAFTER / "model.safetensors")
    nothing = np.full((config["vocab_size"], config["hidden_size"]), np.nan, np.float32)
    borrowed = {"embed_tokens.weight": nothing, "lm_head.weight": nothing}
    safetensors.numpy.save_file(tensors | borrowed, path / "model.safetensors")
    return path


def test_a_speculators_folder_is_the_published_drafter(tmp_path):
    model = open_model(speculators_folder(tmp_path))
    theirs = read_drafter_config(DRAFTER)
    assert model.config == dataclasses.replace(theirs, num_target_layers=0)
    assert (model.role, model.layout) == ("drafter", "speculators")
    assert "read as one-based" in model.notes[0]
    ours, expected = model.load("float32"), open_model(DRAFTER).load("float32")
    np.testing.assert_array_equal(ours["fc"], expected["fc"])
    assert set(model.tensors.ignored.values()) == {"borrowed from the target"}


@pytest.mark.parametrize("vocabulary", [None, 40])
def test_a_speculators_drafter_is_described_by_its_config_alone(tmp_path, vocabulary):
    folder = speculators_folder(tmp_path, draft_vocab_size=vocabulary)
    (folder / "model.safetensors").unlink()
    pair = describe(ORACLE / "drafters" / "target_qwen3", folder)
    target, drafter = pair.target.config, pair.drafter.config
    assert (drafter.draft_vocab_size, drafter.own_head) == (vocabulary or 0, bool(vocabulary))
    plan = resolve_here(Plan(max_length=64), build_pair(target, drafter))
    assert declare(planned(target, drafter, plan))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "eagle3"}, "'eagle3' is none of"),
        ({"target_hidden_size": 65}, "a target of width 65"),
        ({"aux_hidden_state_layer_ids": None}, "expected the list of layers"),
        ({"transformer_layer_config": None}, "transformer_layer_config is missing"),
        ({"mask_token_id": None}, "mask_token_id"),
    ],
)
def test_speculators_variants_that_would_be_misread_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        open_model(speculators_folder(tmp_path, **changes))


@pytest.mark.parametrize("name", ["sha256-0f3a", "MODEL.GGUF", "model.q8_0", "model.gguf"])
def test_gguf_files_are_recognised_by_their_first_bytes(tmp_path, name, capsys):
    """As Ollama, download caches and some shells name them."""
    path = write_target(ORACLE / "targets" / "qwen3", tmp_path / "made").rename(tmp_path / name)
    assert locate(path, "target") == path
    assert open_model(path).layout == "GGUF, architecture qwen3"
    assert describe(path, None).target.config == open_model(path).config
    for read in (open_model, open_directory, read_target_config):
        with pytest.raises(CheckpointError, match=f"holds GGUF files; give one of them: {name}"):
            read(tmp_path)
    for command in (["inspect"], ["convert", "--json"], ["compare"]):
        others = [str(tmp_path / "folder")] if command != ["inspect"] else []
        assert main([*command, str(path), *others]) == 0
    with pytest.raises(ConfigError, match=f"{name} is a target; a drafter is needed here"):
        open_model(path, role="drafter")
    capsys.readouterr()
    (tmp_path / "text").write_text("GGU")
    with pytest.raises(CheckpointError, match="text is a file; give the target's directory or a"):
        locate(tmp_path / "text", "target")


def test_every_layout_is_recognised(tmp_path):
    target = write_target(ORACLE / "targets" / "qwen3", tmp_path / "t.gguf")
    drafter = write_drafter(DRAFTER, tmp_path / "d.gguf", "lucebox")
    found = {str(p): open_model(p) for p in (target, drafter, ORACLE / "targets/qwen3", DRAFTER)}
    assert [m.role for m in found.values()] == ["target", "drafter", "target", "drafter"]
    assert [m.layout for m in found.values()] == [
        "GGUF, architecture qwen3",
        "GGUF, architecture qwen35-dflash-draft (lucebox)",
        "Hugging Face",
        "Hugging Face (z-lab)",
    ]
    for model in found.values():
        model.check()


def test_a_model_of_the_wrong_kind_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is a drafter; a target is needed"):
        open_model(DRAFTER, role="target")
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        open_model(tmp_path)
    (tmp_path / "x.gguf").touch()
    with pytest.raises(CheckpointError, match=r"give one of them: x\.gguf"):
        open_model(tmp_path)
    with pytest.raises(CheckpointError, match="give the folder it lies in"):
        open_model(DRAFTER / "model.safetensors")


def test_end_tokens_are_completed_from_generation_config(tmp_path):
    folder = ORACLE / "targets" / "qwen3"
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert open_model(tmp_path).config == read_target_config(tmp_path)
    assert open_model(tmp_path).config.eos_token_ids == (2, 7)


def test_the_encoder_may_be_spelt_otherwise(tmp_path):
    tensors = safetensors.numpy.load_file(DRAFTER / "model.safetensors")
    tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
    tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((DRAFTER / "config.json").read_text())
    np.testing.assert_array_equal(
        open_model(tmp_path).load("float32")["fc"], open_model(DRAFTER).load("float32")["fc"]
    )
