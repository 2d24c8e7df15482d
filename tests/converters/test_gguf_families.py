"""Every family's GGUF files, written by the gguf package, give the parameters of their folders."""

import dataclasses
import json

import gguf
import numpy as np
import pytest
import safetensors.numpy
from gguf_families import log_scale, quantise_k, write_family
from gguf_models import Q
from weight_files import ORACLE

from dflash_jax.config import RopeConfig
from dflash_jax.converters.compare import Difference, ModelComparison, compare, lines
from dflash_jax.converters.convert import convert, inventory
from dflash_jax.converters.error_limits import between
from dflash_jax.converters.formats.gguf.file import open_gguf
from dflash_jax.converters.gguf.target import canonical, read_config
from dflash_jax.converters.models import StoredModel, open_model
from dflash_jax.errors import CheckpointError, ConfigError

TARGETS = ORACLE / "targets"
NAMES = ["qwen3_moe", "qwen3_5", "qwen3_5_moe", "gpt_oss"]
NAMES += ["qwen2", "smollm3", "gemma3", "olmo2", "granite", "glm4", "phi3"]
NAMES += ["ministral3", "qwen3_next", "lfm2"]
NAMES += ["gemma4", "gemma4_moe", "gemma4_ple", "gemma4_unified"]


def leaves(node, path=()):
    if isinstance(node, dict):
        return {k: v for key, child in node.items() for k, v in leaves(child, (*path, key)).items()}
    return {"/".join(path): node}


def comparable(config):
    """Return a config without the fields that GGUF files cannot hold, or write differently."""
    rope = dataclasses.replace(config.rope, original_length=0)
    changes = {"rope": rope, "eos_token_ids": (), "dtype": "float32"}
    if hasattr(config, "full_rope"):
        full = config.full_rope
        assert isinstance(full, RopeConfig)
        changes |= {"model_type": "gemma4_text", "intermediate_size": config.intermediate_size}
    return dataclasses.replace(config, **changes)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_gives_the_configuration_and_parameters_of_its_folder(tmp_path, name):
    ours = open_model(write_family(TARGETS / name, tmp_path / "x.gguf"), role="target")
    theirs = open_model(TARGETS / name)
    assert comparable(ours.config) == comparable(theirs.config)
    params, expected = (leaves(model.load("float32")) for model in (ours, theirs))
    assert params.keys() == expected.keys()
    for path, array in params.items():
        if "norm" in path or path.endswith("a_log"):  # through 1 + w, or an exponential
            np.testing.assert_allclose(array, expected[path], atol=3e-7, rtol=0, err_msg=path)
        else:
            np.testing.assert_array_equal(array, expected[path], path)
    assert compare(theirs, ours).agree
    report = inventory(ours, "float32")
    assert report["stored_tensors"] == report["used_tensors"] + len(report["ignored"])


def joined(found, *, parts, name, axis):
    """Return tensors with parts of each layer concatenated."""
    made = dict(found)
    for first in [n for n in found if parts[0] in n]:
        pieces = [made.pop(first.replace(parts[0], part)) for part in parts]
        made[first.replace(parts[0], name)] = np.concatenate(pieces, axis=axis)
    return made


@pytest.mark.parametrize("kind", [Q.F32, Q.Q8_0], ids=lambda k: k.name)
def test_gates_and_ups_may_be_fused(tmp_path, kind):
    parts = {"parts": ("ffn_gate_exps", "ffn_up_exps"), "name": "ffn_gate_up_exps", "axis": 1}
    folder = TARGETS / "gpt_oss"
    separate = open_model(write_family(folder, tmp_path / "a.gguf", kind))
    fused = write_family(folder, tmp_path / "b.gguf", kind, form=lambda x: joined(x, **parts))
    together = open_model(fused)
    assert comparable(together.config) == comparable(separate.config)
    expected = leaves(separate.load("float32"))
    for path, array in leaves(together.load("float32")).items():
        np.testing.assert_array_equal(array, expected[path], path)


def test_gated_queries_may_be_fused(tmp_path):
    """In full layers; in recurrent layers, the name means another tensor."""
    folder = TARGETS / "qwen3_5"
    parts = {"parts": ("attn_q.", "attn_k.", "attn_v."), "name": "attn_qkv.", "axis": 0}
    model = open_model(write_family(folder, tmp_path / "x.gguf", form=lambda x: joined(x, **parts)))
    model.check()
    assert "from fused qkv" in changes(model)
    expected = leaves(open_model(folder).load("float32"))
    for path, array in leaves(model.load("float32")).items():
        np.testing.assert_allclose(array, expected[path], atol=3e-7, rtol=0, err_msg=path)


def test_gates_and_ups_of_gemma_may_lie_apart(tmp_path):
    def separate(found):
        made = dict(found)
        for name in [n for n in found if "ffn_gate_up_exps" in n]:
            for i, half in enumerate(np.split(made.pop(name), 2, axis=1)):
                made[name.replace("gate_up", ("gate", "up")[i])] = half
        return made

    folder = TARGETS / "gemma4_moe"
    model = open_model(write_family(folder, tmp_path / "x.gguf", form=separate))
    model.check()
    expected = leaves(open_model(folder).load("float32"))
    for path, array in leaves(model.load("float32")).items():
        np.testing.assert_array_equal(array, expected[path], path)
    rows = model.tensors.read_rows("layers.0.experts.gate_up_proj", np.array([5, 0, 3]))
    whole = model.tensors.read("layers.0.experts.gate_up_proj")
    np.testing.assert_array_equal(rows, whole.reshape(-1, whole.shape[-1])[[5, 0, 3]])


def test_biases_of_a_mixture_may_lie_in_fused_tensors(tmp_path):
    def biased(found):
        parts = {"parts": ("attn_q.", "attn_k.", "attn_v."), "name": "attn_qkv.", "axis": 0}
        made = joined(found, **parts)
        for name in [n for n in made if "attn_qkv" in n or "attn_output" in n]:
            made[name.replace("weight", "bias")] = made[name][:, 0].copy()
        return made

    model = open_model(write_family(TARGETS / "qwen3_moe", tmp_path / "x.gguf", form=biased))
    model.check()
    assert model.config.attention_bias


def changes(model: StoredModel) -> set[str]:
    return {origin.change for origin in model.tensors.origins.values()} - {""}


def test_changes_of_tensors_are_listed(tmp_path):
    notes = {}
    for name in ("qwen3_moe", "qwen3_5", "gpt_oss"):
        notes[name] = changes(open_model(write_family(TARGETS / name, tmp_path / f"{name}.gguf")))
    assert notes["qwen3_moe"] == {"one of stacked experts"}
    assert notes["qwen3_5"] == {
        "norm: 1 subtracted",
        "value heads: tiled to grouped",
        "columns of value heads: tiled to grouped",
        "log of the negated decay; value heads: tiled to grouped",
    }
    assert notes["gpt_oss"] == {
        "stacked experts: gates and ups alternate, inputs first",
        "stacked experts: gates and ups alternate",
        "stacked experts: inputs first",
    }


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.MXFP4], ids=lambda k: k.name)
@pytest.mark.parametrize("name", ["qwen3_5_moe", "gpt_oss"])
def test_quantised_files_differ_by_the_error_of_their_types(tmp_path, name, kind):
    quantised = open_model(write_family(TARGETS / name, tmp_path / "x.gguf", kind))
    found = compare(open_model(TARGETS / name), quantised)
    assert found.agree, found.tensors[0]
    assert kind.name in {d.kinds[1] for d in found.tensors}


def test_prediction_layers_are_ignored(tmp_path):
    def extra(writer):
        writer.kv_data[0].pop("qwen35.block_count")
        writer.add_block_count(6)
        writer.add_uint32("qwen35.nextn_predict_layers", 1)
        writer.add_tensor("blk.5.nextn.eh_proj.weight", np.zeros((64, 128), np.float32))
        writer.add_tensor("blk.5.attn_norm.weight", np.zeros(64, np.float32))

    model = open_model(write_family(TARGETS / "qwen3_5", tmp_path / "x.gguf", extra=extra))
    model.check()
    assert model.config.num_layers == 5
    assert set(model.tensors.ignored.values()) == {"multi-token prediction: not run"}


def test_keys_of_layers_that_share_them_are_ignored(tmp_path):
    def extra(writer):
        for name in ("attn_k", "attn_v"):
            writer.add_tensor(f"blk.4.{name}.weight", np.zeros((64, 64), np.float32))

    model = open_model(write_family(TARGETS / "gemma4_ple", tmp_path / "x.gguf", extra=extra))
    model.check()
    assert model.tensors.ignored["blk.4.attn_k.weight"] == "layer 4 reads the keys of layer 1"


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("qwen3_moe", "qwen3moe.expert_gating_func", 2, "expert_gating_func is 2"),
        ("qwen3_moe", "qwen3moe.attention.causal", False, "causal is false"),
        ("qwen3_moe", "qwen3moe.rope.scale_linear", 4.0, "does not apply"),
        ("qwen3_moe", "qwen3moe.rope.scaling.factor", 4.0, "does not apply"),
        ("qwen3_moe", "qwen3moe.expert_count", 5000, "expert_count is 5000"),
        ("qwen3_moe", "qwen3moe.expert_weights_scale", 2.5, "does not apply"),
        ("qwen3_5", "qwen35.nextn_predict_layers", 5, "nextn_predict_layers is 5"),
        ("qwen3_5", "qwen35.ssm.inner_size", 97, "97 channels for 4 value heads"),
        ("qwen3_5", "qwen35.rope.scaling.type", "linear", "rotary scaling"),
        ("gemma4", "gemma4.attention.sliding_window_pattern", 3, "the last one full"),
        ("gemma4", "gemma4.logit_scale", 2.0, "does not apply"),
        ("gpt_oss", "gpt-oss.rope.scaling.type", "none", "no yarn rotary scaling"),
        ("gpt_oss", "gpt-oss.attention.sliding_window_pattern", 3, "does not apply"),
    ],
)
def test_metadata_that_would_change_the_output_is_refused(tmp_path, name, key, value, message):
    source = open_gguf(write_family(TARGETS / name, tmp_path / "x.gguf"))
    source.metadata[key] = value
    with pytest.raises(ConfigError, match=message):
        read_config(source)


def test_rotary_divisors_of_gemma_must_make_sense(tmp_path):
    source = open_gguf(write_family(TARGETS / "gemma4", tmp_path / "x.gguf"))
    del source._tensors["rope_freqs.weight"]
    with pytest.raises(ConfigError, match=r"has no rope_freqs\.weight"):
        read_config(source)


def test_a_stack_of_another_height_is_not_taken_for_the_experts(tmp_path):
    source = open_gguf(write_family(TARGETS / "qwen3_moe", tmp_path / "x.gguf"))
    config = dataclasses.replace(read_config(source), num_experts=4)
    found = StoredModel(source.path, "target", "GGUF", config, canonical(source, config), ())
    with pytest.raises(CheckpointError, match=r"left over: blk\.0\.ffn_gate_exps\.weight"):
        found.check()


WIDE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A Qwen3 whose rows hold whole super-blocks, with weights of uneven size."""
    folder, rng = tmp_path_factory.mktemp("wide"), np.random.default_rng(0)
    tensors = {"model.embed_tokens.weight": log_scale(rng, 256, 256)}
    tensors["model.norm.weight"] = np.ones(256, np.float32)
    for i in range(WIDE["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for x in "qkvo":
            tensors[f"{at}self_attn.{x}_proj.weight"] = log_scale(rng, 256, 256)
        for x, shape in (("gate", (512, 256)), ("up", (512, 256)), ("down", (256, 512))):
            tensors[f"{at}mlp.{x}_proj.weight"] = log_scale(rng, *shape)
        for x in ("self_attn.q_norm", "self_attn.k_norm"):
            tensors[f"{at}{x}.weight"] = np.ones(64, np.float32)
        for x in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{x}.weight"] = np.ones(256, np.float32)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(WIDE))
    return folder


@pytest.mark.sample("Q6_K")
@pytest.mark.parametrize("kind", [Q.Q4_K, Q.Q6_K], ids=lambda k: k.name)
def test_k_types_compute_what_compare_predicts(tmp_path, wide, kind, monkeypatch):
    from dflash_jax.target_model import TargetModel

    plain = gguf.quants.quantize

    def quantize(array, wanted):
        return quantise_k(array, wanted) if wanted in (Q.Q4_K, Q.Q6_K) else plain(array, wanted)

    monkeypatch.setattr(gguf.quants, "quantize", quantize)
    exact, coarse = open_model(wide), open_model(write_family(wide, tmp_path / "x.gguf", kind))
    found = compare(exact, coarse)
    assert found.agree, found.tensors[0]
    ids = np.arange(40).reshape(2, 20) * 5 % 256
    model = TargetModel(exact.config, exact.load("float32"), "float32")
    expected = np.asarray(model.forward(ids).logits)
    model.params = coarse.load("float32")
    difference = np.asarray(model.forward(ids).logits) - expected
    error = np.linalg.norm(difference) / np.linalg.norm(expected)
    assert 0 < error < 2 * np.linalg.norm([d.rms for d in found.tensors])


def test_an_error_that_a_type_allows_may_still_make_a_model_unusable():
    def comparison(kind, error):
        rest = {"shape": (64, 64), "largest": 1.0, "cosine": 0.6, "not_finite": 0}
        limits, kinds = between("F32", kind), ("F32", kind)
        one = Difference("w", kinds, rms=error, limits=limits, verdict="ok", **rest)
        return ModelComparison((one,), (), (), (), ())

    found = comparison("TQ1_0", 0.807)
    assert found.agree
    assert found.unusable == ("F32/TQ1_0",)
    assert "within the error that F32/TQ1_0 allows; at that error a model is" in found.outcome
    assert found.to_json()["outcome"] == lines(found, 0)[-1]
    usable = comparison("Q4_0", 0.09)
    assert (usable.unusable, usable.outcome) == ((), "the same model")


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe_vl"])
def test_norms_that_files_hold_with_1_added_are_compared_within_its_rounding(tmp_path, name):
    model, path = open_model(TARGETS / name), tmp_path / "x.gguf"
    convert(model, path, to="gguf", dtype="f32")
    found = compare(model, open_model(path))
    assert found.agree, found.tensors[0]
    shown = lines(found, 5)
    assert not any("0.000% (limit 0.000%)" in line for line in shown)
    assert all(d.verdict == "ok" for d in found.tensors), shown
