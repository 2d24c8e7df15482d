"""Configs from published files: both spellings, and fields that must be refused."""

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_jax.config import DrafterConfig, TargetConfig, check_pair
from dflash_jax.config.fields import take_quantization
from dflash_jax.converters.names import published
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.families.configs import (
    drafter_config,
    read_drafter_config,
    read_target_config,
    target_config,
)
from dflash_jax.testing import tiny_drafter, tiny_target

PUBLISHED = Path(__file__).parent / "published"
TARGETS = ("targets/llama3", "targets/qwen3", "drafters/target_qwen3", "drafters/target_small")


def fields(oracle: Path, where: str) -> dict[str, Any]:
    return json.loads((oracle / where).read_text())


@pytest.mark.parametrize("name", TARGETS)
def test_both_spellings_describe_the_same_target(oracle: Path, name: str) -> None:
    saved, other = (fields(oracle, f"{name}/{f}") for f in ("config.json", "config.hub.json"))
    assert saved != other
    assert target_config(saved) == target_config(other)


def test_a_llama_config_is_understood(oracle: Path) -> None:
    config = target_config(fields(oracle, "targets/llama3/config.hub.json"))
    assert config.model_type == "llama"
    assert not config.qk_norm
    assert not config.tie_embeddings
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert config.rms_norm_eps == 1e-5
    assert config.eos_token_ids == (2,)
    rope = config.rope
    assert (rope.kind, rope.theta, rope.factor, rope.original_length) == ("llama3", 5e4, 8.0, 64)


def test_a_qwen3_config_is_understood(oracle: Path) -> None:
    config = target_config(fields(oracle, "targets/qwen3/config.hub.json"))
    assert config.qk_norm
    assert config.tie_embeddings
    assert config.head_dim == 32 != config.hidden_size // config.num_heads
    assert config.windows == (None, None, None)


def test_the_window_of_qwen3_counts_only_when_it_is_switched_on(oracle: Path) -> None:
    base = fields(oracle, "targets/qwen3/config.hub.json") | {"sliding_window": 7}
    base.pop("layer_types", None)
    switched = base | {"use_sliding_window": True, "max_window_layers": 1}
    assert target_config(base | {"use_sliding_window": False}).windows == (None, None, None)
    assert target_config(switched).windows == (None, 7, 7)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert target_config(switched | {"layer_types": kinds}).windows == (7, None, 7)


@pytest.mark.parametrize(
    ("name", "causal", "windows"),
    [
        ("v1_full", (False, False, False), (None, None, None)),
        ("v1_full_causal", (True, True, True), (None, None, None)),
        ("v1_sliding", (True, True, False), (10, 10, None)),
        ("v1_sliding_bidirectional", (False, False, False), (10, 10, None)),
    ],
)
def test_causality_of_a_drafter_follows_its_layers_unless_it_is_stated(
    oracle: Path, name: str, causal: tuple[bool, ...], windows: tuple[int | None, ...]
) -> None:
    config = read_drafter_config(oracle / "drafters" / name)
    assert (config.causal, config.windows) == (causal, windows)
    assert (config.block_size, config.mask_token_id) == (8, 255)


def test_what_qwen3_leaves_out_is_what_transformers_assumes(oracle: Path) -> None:
    base = fields(oracle, "targets/qwen3/config.hub.json")
    base = {k: v for k, v in base.items() if k not in ("layer_types", "sliding_window", "head_dim")}
    base |= {"num_hidden_layers": 30, "use_sliding_window": True, "max_window_layers": None}
    config = target_config(base)
    assert (config.windows, config.head_dim) == ((None,) * 28 + (4096,) * 2, 128)
    assert target_config(base | {"sliding_window": None}).windows == (None,) * 30
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    drafting = fields(oracle, "drafters/v1_full/config.json") | {"use_sliding_window": True}
    drafting = {k: v for k, v in drafting.items() if k != "sliding_window"}
    assert drafter_config(drafting | {"layer_types": kinds}).windows == (4096, 4096, None)


def test_a_drafter_that_names_no_model_is_a_qwen3(oracle: Path) -> None:
    base = fields(oracle, "drafters/v1_sliding/config.json")
    base = {k: v for k, v in base.items() if k not in ("head_dim", "use_sliding_window")}
    named, unnamed = (
        drafter_config({k: v for k, v in base.items() if k != left_out})
        for left_out in ("", "model_type")
    )
    assert unnamed == named
    assert (named.head_dim, named.windows, named.causal) == (128, (None,) * 3, (True, True, False))


def test_of_two_rotary_scalings_the_older_spelling_counts(oracle: Path) -> None:
    base = fields(oracle, "targets/qwen3/config.hub.json") | {
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
    }
    rope = target_config(base).rope
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 4.0, base["rope_theta"])


@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_rotary_embeddings_may_be_given_for_each_type_of_layers(oracle: Path, name: str) -> None:
    """As transformers 5 writes them; types that no layer has do not count."""
    base = fields(oracle, f"targets/{name}/config.hub.json")
    layers, full, sliding = base["num_hidden_layers"], "full_attention", "sliding_attention"
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}
    yarn["original_max_position_embeddings"] = 64
    plain = {"rope_type": "default", "rope_theta": 1e4}
    base = {k: v for k, v in base.items() if k not in ("rope_scaling", "rope_theta")}
    flat = target_config(base | {"rope_parameters": yarn})
    both = {"rope_parameters": {full: yarn, sliding: plain}}
    assert target_config(base | {"layer_types": [full] * layers} | both).rope == flat.rope
    assert target_config(base | {"rope_parameters": {full: yarn, sliding: yarn}}).rope == flat.rope
    mixed = {"layer_types": [sliding] + [full] * (layers - 1)}
    mixed |= {"use_sliding_window": True, "sliding_window": 8}
    with pytest.raises(ConfigError, match=r"full_attention.* and .*sliding_attention.* differ"):
        target_config(base | mixed | both)
    with pytest.raises(ConfigError, match="rope_theta"):  # neither form
        target_config(base | {"rope_parameters": {full: yarn, "rope_theta": 7.0}})


def test_what_gpt_oss_leaves_out_is_what_transformers_assumes(oracle: Path) -> None:
    base = fields(oracle, "targets/gpt_oss/config.hub.json")
    left = {k: v for k, v in base.items() if k not in ("rms_norm_eps", "rope_theta", "head_dim")}
    config = target_config(left)
    assert (config.rms_norm_eps, config.rope.theta, config.head_dim) == (1e-5, 150000.0, 64)


def test_gpt_oss_without_a_rotary_embedding_has_the_published_one(oracle: Path) -> None:
    base = fields(oracle, "targets/gpt_oss/config.hub.json")
    for none in ({"rope_scaling": None}, {"rope_scaling": None, "rope_parameters": None}):
        rope = target_config(base | none | {"initial_context_length": 4096}).rope
        assert (rope.kind, rope.factor, rope.original_length) == ("yarn", 32.0, 4096)
        assert (rope.theta, rope.truncate) == (150000.0, False)
    plain = base | {"rope_scaling": {"rope_type": "default"}, "sliding_window": 12}
    kinds = ["full_attention", "full_attention", "sliding_attention"]
    config = target_config(plain | {"layer_types": kinds, "attention_bias": False})
    assert (config.rope.kind, config.windows) == ("default", (None, None, 12))
    assert not config.attention_bias


def test_a_switched_on_window_of_qwen3_moe_is_that_of_all_layers(oracle: Path) -> None:
    """Transformers ignores `max_window_layers` and `layer_types` there."""
    base = fields(oracle, "targets/qwen3_moe/config.hub.json") | {"sliding_window": 7}
    kinds = {"layer_types": ["full_attention"] * 3, "max_window_layers": 2}
    assert target_config(base | {"use_sliding_window": False}).windows == (None,) * 3
    assert target_config(base | kinds | {"use_sliding_window": True}).windows == (7,) * 3
    del base["sliding_window"]
    assert target_config(base | {"use_sliding_window": True}).windows == (4096,) * 3


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("gpt_oss", {"num_key_value_heads": 8, "sliding_window": 128, "num_local_experts": 128}),
        ("qwen3", {"num_key_value_heads": 32, "head_dim": 128}),
        ("qwen3_moe", {"num_experts_per_tok": 8, "num_experts": 128, "moe_intermediate_size": 768}),
        ("qwen3_5", {"head_dim": 256, "linear_key_head_dim": 128, "linear_num_value_heads": 32}),
        ("qwen3_5_moe", {"num_key_value_heads": 2, "shared_expert_intermediate_size": 512}),
        ("qwen3_next", {"num_experts_per_tok": 10, "num_experts": 512, "head_dim": 256}),
        ("ministral3", {"num_key_value_heads": 8, "head_dim": 128}),
        ("gemma4_ple", {"num_key_value_heads": 4, "hidden_size_per_layer_input": 256}),
        ("gemma4_unified", {"sliding_window": 1024, "head_dim": 256}),
    ],
)
def test_what_a_target_leaves_out_is_what_transformers_assumes(
    oracle: Path, name: str, left_out: dict[str, int]
) -> None:
    base = fields(oracle, f"targets/{name}/config.hub.json") | {"num_attention_heads": 32}
    base |= {"experts_per_token": None}
    left = {key: value for key, value in base.items() if key not in left_out}
    assert target_config(left) == target_config(base | left_out)


@pytest.mark.parametrize(("name", "length"), [("llama3", 2048), ("qwen3", 32768)])
def test_positions_that_a_target_leaves_out_are_its_familys(
    oracle: Path, name: str, length: int
) -> None:
    base = fields(oracle, f"targets/{name}/config.hub.json")
    del base["max_position_embeddings"]
    assert target_config(base).max_length == length
    yarn = target_config(base | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}).rope
    assert yarn.original_length == length


def test_metadata_and_another_name_of_silu_change_nothing(oracle: Path) -> None:
    base = fields(oracle, "targets/qwen3/config.hub.json")
    notes = {"_attn_implementation_autoset": True, "num_labels": 2, "model_max_length": 9}
    assert target_config(base | notes | {"hidden_act": "swish"}) == target_config(base)


def test_a_whole_number_may_be_written_as_a_fraction(oracle: Path) -> None:
    for name in ("llama3", "gpt_oss", "qwen3_5_moe", "gemma4_moe"):
        base = fields(oracle, f"targets/{name}/config.hub.json")
        as_float = {k: float(v) if type(v) is int else v for k, v in base.items()}
        assert target_config(as_float) == target_config(base)
    with pytest.raises(ConfigError, match=r"head_dim is 8\.5; expected a 32-bit integer"):
        target_config(base | {"head_dim": 8.5})


def test_rotary_embeddings_that_follow_the_length_end_where_they_would_change(oracle: Path) -> None:
    base = fields(oracle, "targets/llama3/config.hub.json")
    dynamic = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert target_config(base | dynamic).max_length == base["max_position_embeddings"]
    factors = {"short_factor": [1] * 8, "long_factor": [2] * 8}
    longrope = {"type": "longrope", "original_max_position_embeddings": 64} | factors
    assert target_config(base | {"rope_scaling": longrope}).max_length == 64
    with pytest.raises(ConfigError, match=r"short_factor is \[1\]; expected 8 positive numbers"):
        target_config(base | {"rope_scaling": longrope | {"short_factor": [1]}})
    drafter = fields(oracle, "drafters/v1_full/config.json")
    with pytest.raises(ConfigError, match="rope type 'dynamic' is not supported in a drafter"):
        drafter_config(drafter | dynamic)


def test_a_window_of_all_layers_outranks_their_types(oracle: Path) -> None:
    """As ModelOpt writes it."""
    base = fields(oracle, "drafters/v1_full/config.json")
    plain = drafter_config(base)
    extra = {"use_swa": True, "swa_window_size": 9, "causal": False, "has_embed_tokens": False}
    config = drafter_config(base | {"dflash_config": base["dflash_config"] | extra})
    assert config == dataclasses.replace(plain, windows=(9, 9, 9), causal=(False,) * 3)
    extra = {"use_swa": False, "swa_window_size": 9, "rope_is_neox_style": True}
    assert drafter_config(base | {"dflash_config": base["dflash_config"] | extra}) == plain
    for wrong in ({"use_swa": True}, {"rope_is_neox_style": False}, {"attention_value_scale": 0.6}):
        with pytest.raises(ConfigError, match=next(reversed(wrong)).replace("use_", "")):
            drafter_config(base | wrong)


@pytest.mark.parametrize("name", ["is_causal", "attention_bias", "use_sliding_window"])
def test_what_is_true_or_false_is_not_a_text(oracle: Path, name: str) -> None:
    """The text "false" would count as true."""
    base = fields(oracle, "drafters/v1_sliding/config.json")
    with pytest.raises(ConfigError, match=f"{name} is 'false'; expected true or false"):
        drafter_config(base | {name: "false"})


def test_a_drafters_two_block_sizes_agree(oracle: Path) -> None:
    base = fields(oracle, "drafters/v1_full/config.json")
    inner = base["dflash_config"] | {"block_size": 4}
    with pytest.raises(ConfigError, match="block_size is 8, and 4 in dflash_config"):
        drafter_config(base | {"dflash_config": inner})
    assert drafter_config(base | {"block_size": 4, "dflash_config": inner}).block_size == 4


@pytest.mark.parametrize("size", [0, -3])
def test_a_drafters_block_has_a_place(oracle: Path, size: int) -> None:
    base = fields(oracle, "drafters/v1_full/config.json") | {"block_size": size}
    with pytest.raises(ConfigError, match=f"block_size is {size}; it must be at least 1"):
        drafter_config(base)


def test_a_neutral_share_of_rotation_is_accepted(oracle: Path) -> None:
    base = fields(oracle, "targets/llama3/config.hub.json")
    assert target_config(base | {"partial_rotary_factor": 1.0}) == target_config(base)
    with pytest.raises(ConfigError, match=r"is 0\.5; with llama3 scaling only 1\.0"):
        target_config(base | {"partial_rotary_factor": 0.5})
    plain = base | {"rope_scaling": None}
    assert target_config(plain | {"partial_rotary_factor": 0.5}) == target_config(plain)


def test_drafter_fields_are_looked_up_inside_first_then_at_the_top(oracle: Path) -> None:
    base = fields(oracle, "drafters/v1_sliding_bidirectional/config.json")
    config = drafter_config(base)
    assert (config.input_embedding_scale, config.output_multiplier) == (4.0, 0.5)
    assert config.final_logit_softcapping == 2.0
    flat = {k: v for k, v in base.items() if k != "dflash_config"} | base["dflash_config"]
    assert drafter_config(flat) == config
    assert drafter_config(base | {"output_multiplier": 9.0, "mask_token_id": 3}) == config
    assert drafter_config({k: v for k, v in base.items() if k != "block_size"}).block_size == 16


def test_end_tokens_are_completed_from_the_generation_config(oracle: Path, tmp_path: Path) -> None:
    config = fields(oracle, "targets/qwen3/config.json")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_target_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2, 9]}))
    assert read_target_config(tmp_path).eos_token_ids == (2, 5, 9)


def test_end_tokens_that_mean_none_are_left_out(oracle: Path) -> None:
    """Some files write -1 or 2^32 - 1 for none; neither is a valid id."""
    config = fields(oracle, "targets/qwen3/config.json")
    ids = [-1, 0, config["vocab_size"] - 1, 2**32 - 1]
    assert target_config(config | {"eos_token_id": ids}).eos_token_ids == tuple(ids[1:3])


@pytest.mark.parametrize("name", ["llama3", "gemma3", "gemma4_vl", "qwen3_5_moe_vl", "lfm2"])
def test_special_ids_are_kept_for_folders_that_are_written(oracle: Path, name: str) -> None:
    """Defaults of transformers may lie outside a small vocabulary, so null is written, too."""
    base = fields(oracle, f"targets/{name}/config.json")
    inner = base.get("text_config", base)
    for bos, pad, kept in ((5, 3, (5, 3)), ([7, 8], -1, (7, None)), (None, 10**6, (None, None))):
        inner |= {"bos_token_id": bos, "pad_token_id": pad}
        config = target_config(base)
        written = published.fields(config, "float32")
        assert (config.bos_token_id, config.pad_token_id) == kept
        assert (written["bos_token_id"], written["pad_token_id"]) == kept
    inner |= {"bos_token_id": "x"}
    with pytest.raises(ConfigError, match="token ids are 'x'"):
        target_config(base)


def test_gemmas_root_is_written_as_the_integer_that_transformers_wants(oracle: Path) -> None:
    config = target_config(fields(oracle, "targets/gemma3/config.json"))
    for scalar, written in (256.0, 256), (168, 168), (24.5, 24.5):
        other = dataclasses.replace(config, score_scale=scalar**-0.5)
        found = published.fields(other, "float32")["query_pre_attn_scalar"]
        assert (type(found), found) == (type(written), pytest.approx(written))


@pytest.mark.parametrize("wrong", [256, 151645, -2, 2**31])
def test_an_end_token_out_of_range_is_named(oracle: Path, tmp_path: Path, wrong: int) -> None:
    """Otherwise no answer would end."""
    config = fields(oracle, "targets/qwen3/config.json")
    assert config["vocab_size"] == 256
    message = f"the end token {wrong} is not one of the 256 tokens; correct eos_token_id"
    with pytest.raises(ConfigError, match=message):
        target_config(config | {"eos_token_id": [2, wrong]})
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
    with pytest.raises(ConfigError, match=message):
        read_target_config(tmp_path)


def test_yarn_brings_its_attention_factor(oracle: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    base = fields(oracle, "targets/llama3/config.hub.json")
    rope = target_config(base | {"rope_scaling": scaling | {"truncate": False}}).rope
    assert (rope.kind, rope.beta_fast, rope.beta_slow, rope.truncate) == ("yarn", 32.0, 1.0, False)
    assert math.isclose(rope.attention_factor, 1.3466, abs_tol=1e-4)
    assert (
        target_config(base | {"rope_scaling": scaling | {"factor": 0.5}}).rope.attention_factor == 1
    )


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, 1.2772589 / 1.1386294),
        ({"mscale": 2.0}, 1.2772589),  # ignored without the other
        ({"mscale": 1.0, "mscale_all_dim": 0}, 1.2772589),
        ({"mscale": 1.0, "mscale_all_dim": 0.5, "attention_factor": 0.7}, 0.7),
        ({"mscale": 1.0, "mscale_all_dim": 0.5, "factor": 0.5}, 1.0),
    ],
)
def test_scales_of_yarn_make_its_attention_factor(
    oracle: Path, scales: dict[str, float], expected: float
) -> None:
    """As transformers computes it; relatives of Kimi and DeepSeek use it."""
    base = fields(oracle, "drafters/v1_full/config.json")
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}
    config = drafter_config(base | {"rope_scaling": yarn | scales})
    assert config.rope.attention_factor == pytest.approx(expected, rel=1e-6)


def test_null_is_no_truncation_of_yarn_and_a_factor_taken_from_two_lengths(oracle: Path) -> None:
    base = fields(oracle, "targets/qwen3/config.hub.json")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for given, truncate in ({}, True), ({"truncate": None}, False):
        assert target_config(base | {"rope_scaling": yarn | given}).rope.truncate is truncate
    null = target_config(base | {"rope_scaling": yarn | {"factor": None}})
    assert null.rope.factor == base["max_position_embeddings"] / 64
    for scaling in ({"rope_type": "yarn"}, {"type": "linear"}, {"type": "linear", "factor": None}):
        with pytest.raises(ConfigError, match=r"rope_scaling lacks the 'factor' of (yarn|linear)"):
            target_config(base | {"rope_scaling": scaling})


def test_llama_ignores_windows_of_its_config(oracle: Path) -> None:
    base = fields(oracle, "targets/llama3/config.hub.json")
    named = {"sliding_window": 8, "max_window_layers": 1}
    assert target_config(base | named) == target_config(base)
    kinds = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 8}
    assert target_config(base | kinds) == target_config(base)


@pytest.mark.parametrize("config", [tiny_target(windows=(4, None, 9)), tiny_drafter(tiny_target())])
def test_a_config_survives_json(config: TargetConfig | DrafterConfig) -> None:
    stored = json.loads(json.dumps(config.to_json()))
    assert type(config).from_json(stored) == config
    with pytest.raises(ConfigError, match=r"unknown \w+ fields \['colour'\]; known are"):
        type(config).from_json(stored | {"colour": 1})


# -- published files, and fields that nobody knows -----------------------------------------------


def test_published_configs_are_read_without_a_word() -> None:
    """With the warnings of unknown fields as errors; `targets.json` names the sources."""
    listed = json.loads((PUBLISHED / "targets.json").read_text())
    configs = {name: entry["config"] for name, entry in listed["models"].items()}
    configs |= {name: fields(PUBLISHED, f"{name}/config.json") for name in listed["folders"]}
    assert len(configs) > 60
    read = {}
    for name, config in configs.items():
        take_quantization(config)
        read[name] = target_config(config, name)
    assert {config.model_type for config in read.values()} > {"llama", "qwen2", "gemma4_text"}
    assert read["HuggingFaceTB/SmolLM2-135M-Instruct"].rope.theta == 100000
    assert read["Qwen/Qwen3.5-9B"].layer_kinds.count("gated delta net") == 24
    assert read["mistralai/Devstral-Small-2-24B-Instruct-2512"].query_growth == 0.1
    assert read["microsoft/Phi-3-mini-4k-instruct"].windows == (2047,) * 32


@pytest.mark.parametrize("value", [False, None, 0, 1.0, "", [], {}, {"a": None}])
def test_a_neutral_field_is_ignored_silently(oracle: Path, value: Any) -> None:
    base = fields(oracle, "targets/llama3/config.hub.json")
    assert target_config(base | {"a_new_idea": value, "clip_qkv": value}) == target_config(base)


def test_fields_of_training_and_packaging_are_ignored_silently(oracle: Path) -> None:
    names = (
        "neftune_noise_alpha",
        "embd_pdrop",
        "z_loss_weight",
        "init_std",
        "_flash_attn_2",
        "x_version",
    )
    base = fields(oracle, "targets/llama3/config.hub.json")
    assert target_config(base | dict.fromkeys(names, 5.0)) == target_config(base)


@pytest.mark.parametrize("name", ["llama3", "qwen3_next", "ministral3", "gemma4_vl", "qwen3_5_vl"])
def test_a_field_that_nobody_knows_is_named_in_one_warning(oracle: Path, name: str) -> None:
    base = fields(oracle, f"targets/{name}/config.json")
    inner = base.get("text_config", base)
    inner |= {"a_new_idea": 5, "another": True}
    with pytest.warns(UserWarning, match="does not know and ignores: a_new_idea, another;") as seen:
        target_config(base)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama3", {"rope_interleaved": True}),
        ("llama3", {"residual_multiplier": 0.22}),
        ("llama3", {"final_logit_softcapping": 30.0}),
        ("llama3", {"position_embedding_type": "alibi"}),
        ("llama3", {"num_local_experts": 8}),
        ("llama3", {"quantization_config": {"quant_method": "fp8"}}),
        ("llama3", {"quantization": {"group_size": 64, "bits": 4}}),
        ("qwen2", {"use_qk_norm": True}),
        ("qwen3", {"use_qk_norm": False}),
        ("qwen3_5", {"output_gate_type": "sigmoid"}),
        ("qwen3", {"swiglu_alpha": 1.7}),
    ],
)
def test_a_field_that_another_family_applies_is_refused(
    oracle: Path, name: str, change: dict[str, Any]
) -> None:
    base = fields(oracle, f"targets/{name}/config.json")
    with pytest.raises(ConfigError, match=next(iter(change))):
        target_config(base | change)


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not a target this version runs; it runs"),
        ({"model_type": None}, "model_type None is not a target"),
        ({"clip_qkv": 8.0, "alibi": True}, "does not apply to .*: alibi True, clip_qkv 8.0. It"),
        ({"hidden_size": None}, "lacks 'hidden_size'; add it as an integer"),
        ({"hidden_size": "64"}, "hidden_size is '64'; expected a 32-bit integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; expected 1 to 10,000"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads"),
        ({"head_dim": 15}, "head_dim is 15; rotary embedding needs an even number"),
        ({"head_dim": 10**9}, "head_dim is 1000000000; rotary embedding needs an even number, up"),
        ({"eos_token_id": {"a": 1}}, "token ids are .* expected an integer or a list of integers"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; expected a finite number"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu', 'swish' is supported"),
        ({"mlp_bias": "yes"}, "mlp_bias is 'yes'; expected true or false"),
        ({"rope_scaling": {"rope_type": "ntk"}}, "rope type 'ntk' is not supported; default,"),
        ({"rope_scaling": {"rope_type": "yarn", "scale": 2}}, "does not understand: scale"),
        ({"rope_scaling": "llama3"}, "rope_scaling is 'llama3'; expected an object"),
        ({"rope_scaling": {"type": "yarn"}, "max_position_embeddings": 0}, "yarn rotary scal"),
        ({"rope_scaling": {"rope_type": "yarn", "beta_slow": -1}}, "is impossible; original_max_p"),
        ({"rope_scaling": {"rope_type": "yarn", "rope_theta": 1.0}}, "the base 1.0 by"),
        ({"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 4}}, "llama3 rotary scaling"),
        ({"layer_types": ["full_attention"]}, "expected 3 entries of 'full_attention' or 'sliding"),
        ({"sliding_window": -4}, "sliding_window is -4; expected a positive integer"),
        ({"vocab_size": 0}, "vocab_size is 0; it must be at least 1"),
        ({"intermediate_size": -1}, "intermediate_size is -1; it must be at least 0"),
    ],
)
def test_a_target_config_that_cannot_be_run_is_refused_by_name(
    oracle: Path, change: dict[str, Any], message: str
) -> None:
    base = fields(oracle, "targets/llama3/config.hub.json")
    with pytest.raises(ConfigError, match=message):
        target_config(base | change, "here/config.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 2**30}, "num_hidden_layers is 1073741824; expected 1 to 10,000"),
        ({"per_layer_config": {"2": {"num_key_value_heads": 0}}}, "cannot share 0 key/value heads"),
        ({"per_layer_config": {"2": {"head_dim": -2}}}, "of width -2 in full layers"),
    ],
)
def test_sizes_of_gemma_layers_that_cannot_be_are_refused(
    oracle: Path, change: dict[str, Any], message: str
) -> None:
    base = fields(oracle, "targets/gemma4_moe/config.json")
    with pytest.raises(ConfigError, match=message):
        target_config(base | change)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("gemma4_ple", "hidden_size_per_layer_input"),
        ("qwen3_5_moe", "shared_expert_intermediate_size"),
    ],
)
def test_sizes_of_a_familys_own_are_not_negative(oracle: Path, name: str, size: str) -> None:
    base = fields(oracle, f"targets/{name}/config.json")
    with pytest.raises(ConfigError, match="is -1; it must be at least 0"):
        target_config(base | {size: -1})


def test_an_unknown_model_type_lists_the_known_ones(oracle: Path) -> None:
    base = fields(oracle, "targets/llama3/config.json") | {"model_type": "mamba"}
    with pytest.raises(ConfigError, match=r"^here: .* it runs .*llama.*qwen3"):
        target_config(base, "here")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_layer_ids": None}, "target_layer_ids is None; expected the list of target lay"),
        ({"target_layer_ids": []}, r"target_layer_ids is \[\]; expected the list"),
        ({"target_layer_ids": [1, "2"]}, "expected the list of target layers whose outputs"),
        ({"mask_token_id": None}, "lacks 'mask_token_id'; add it as an integer"),
        ({"output_multiplier": "half"}, "output_multiplier is 'half'; expected a finite number"),
        ({"markov_rank": 4}, "dflash_config asks for what .* does not apply .*: markov_rank 4"),
    ],
)
def test_a_drafter_config_that_cannot_be_run_is_refused_by_name(
    oracle: Path, change: dict[str, Any], message: str
) -> None:
    base = fields(oracle, "drafters/v1_full/config.json")
    base["dflash_config"] |= change
    with pytest.raises(ConfigError, match=message):
        drafter_config(base)


def test_another_kind_of_drafter_is_refused(oracle: Path) -> None:
    base = fields(oracle, "drafters/v1_full/config.json")
    with pytest.raises(ConfigError, match=r"architectures is \['Eagle3'\]; expected"):
        drafter_config(base | {"architectures": ["Eagle3"]})
    with pytest.raises(ConfigError, match="model_type is 'llama'; only 'qwen3' is supported"):
        drafter_config(base | {"model_type": "llama"})


PARSERS: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("targets/llama3/config.json", target_config),
    ("targets/llama3/config.hub.json", target_config),
    ("targets/qwen3/config.hub.json", target_config),
    ("targets/gemma4/config.json", target_config),
    ("targets/gemma4_moe/config.json", target_config),
    ("targets/gpt_oss/config.json", target_config),
    ("targets/qwen3_5_moe/config.json", target_config),
    ("drafters/v1_sliding_bidirectional/config.json", drafter_config),
]
ODD = ["x", "", -1, 0, 1, 1.5, [], [1], ["a"], [None], {}, {"a": 1}, True, 1e400, "full_attention"]
ODD += [[["x"]], [{}]]  # entries that have no hash


@pytest.mark.parametrize(("where", "parse"), PARSERS)
def test_any_field_of_any_kind_is_understood_or_refused_as_a_config_error(
    oracle: Path, where: str, parse: Callable[[dict[str, Any]], Any]
) -> None:
    """No TypeError, no ZeroDivisionError: one field at a time holds one odd value."""

    def paths(value: Any, *before: str) -> Iterator[tuple[str, ...]]:
        for name, inner in value.items() if isinstance(value, dict) else ():
            yield (*before, name)
            yield from paths(inner, *before, name)

    base = fields(oracle, where)
    parse(base)
    refused = 0
    for path in paths(base):
        for odd in ODD:
            changed = copy.deepcopy(base)
            parent = changed
            for name in path[:-1]:
                parent = parent[name]
            parent[path[-1]] = odd
            try:
                parse(changed)
            except ConfigError:
                refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "hidden size 64, the target has 32"),
        ({"vocab_size": 98}, "vocabulary 98, the target has 97"),
        ({"num_target_layers": 4}, "made for 4 target layers, this one has 3"),
        ({"target_layer_ids": (0, 3)}, r"reads target layers \[3\], the target has layers 0 to 2"),
        ({"target_layer_ids": (-1,)}, r"reads target layers \[-1\], the target has layers 0 to 2"),
        ({"target_layer_ids": (0, 2)}, r"reads the last target layer \(2\), which is ambiguous"),
        ({"mask_token_id": 97}, "mask token 97 is outside the target's vocabulary of 97"),
        ({"mask_token_id": -1}, "mask token -1 is outside the target's vocabulary of 97"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_with_a_remedy(
    change: dict[str, Any], message: str
) -> None:
    target = tiny_target()
    check_pair(target, tiny_drafter(target))
    with pytest.raises(ConfigError, match=message) as caught:
        check_pair(target, tiny_drafter(target, **change))
    assert "the drafter does not fit the target" in str(caught.value)
    assert "Load the drafter that was trained for this target" in str(caught.value)


def test_all_misfits_are_named_at_once() -> None:
    target = tiny_target()
    misfit = dataclasses.replace(tiny_drafter(target), hidden_size=48, vocab_size=5)
    with pytest.raises(ConfigError, match=r"hidden size 48.*vocabulary 5"):
        check_pair(target, misfit)


@pytest.mark.parametrize(
    "text", ["{", "not json", '{"a": 1,}', "\x00", "[" * 100_000, f'{{"a": {"9" * 5000}}}']
)
def test_a_config_that_is_not_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json is not JSON .*; fetch the file again"):
        read_target_config(tmp_path)


def test_a_config_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{\x00}\x00")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_target_config(tmp_path)


@pytest.mark.parametrize("value", [[], [{}], 3, "text", None])
def test_json_that_is_no_object_is_refused(tmp_path: Path, value: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(value))
    with pytest.raises(ConfigError, match="expected a JSON object"):
        read_drafter_config(tmp_path)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not exist; give a folder that holds config"):
        read_target_config(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"rope": 0},
        {"rope": {"theta": "x"}},
        {"windows": [[1], None, None]},
        {"windows": 3},
        {"windows": [None]},
        {"num_layers": 3.0},
        {"num_layers": 10**9, "windows": []},
        {"rms_norm_eps": math.nan},
        {"tie_embeddings": 1},
    ],
)
def test_a_damaged_config_of_ours_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"{next(iter(change))}|theta"):
        TargetConfig.from_json(tiny_target().to_json() | change)
