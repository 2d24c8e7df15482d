"""Loading models from files, and the errors for missing, damaged and unfit ones."""

import dataclasses
import fnmatch
import json
import os
import shutil
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dflash_jax as dj
from dflash_jax import device
from dflash_jax.cli import parser
from dflash_jax.cli.describe import describe
from dflash_jax.device import free_memory
from dflash_jax.errors import CheckpointError, ConfigError, PlanError, RequestError
from dflash_jax.graph.ngram import NGram
from dflash_jax.loading import locate, open_pair

WEIGHTS = "model.safetensors"


@pytest.fixture
def target(oracle: Path, tmp_path: Path) -> Path:
    """A copy of a target folder that tests may damage."""
    return copy(oracle / "drafters" / "target_qwen3", tmp_path / "target")


@pytest.fixture
def drafter(oracle: Path, tmp_path: Path) -> Path:
    return copy(oracle / "drafters" / "v1_sliding", tmp_path / "drafter")


def copy(source: Path, folder: Path) -> Path:
    folder.mkdir()
    for name in ("config.json", WEIGHTS):
        shutil.copy(source / name, folder)
    return folder


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def shard(folder: Path, parts: int) -> dict[str, str]:
    """Split the weight file and write its index; return the file of each tensor."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    places = {name: f"model-{i % parts}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({n: tensors[n] for n, f in places.items() if f == file}, folder / file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return places


def same_params(a: Any, b: Any) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))


# -- loading --------------------------------------------------------------------------------


def test_a_sharded_index_holds_the_same_model_as_one_file(target: Path) -> None:
    whole = dj.load_target(target).params
    assert len(set(shard(target, 3).values())) == 3
    assert same_params(dj.load_target(target).params, whole)


def test_a_file_that_wins_over_shards_says_so(target: Path, tmp_path: Path) -> None:
    stray = (target / WEIGHTS).read_bytes()
    shard(target, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dj.load_target(target)
    (target / WEIGHTS).write_bytes(stray)
    message = r"model\.safetensors is read, and the 2 shards that .*\.index\.json names are not"
    with pytest.warns(UserWarning, match=message):
        dj.load_target(target)
    with pytest.warns(UserWarning, match=message):
        dj.load(target, None)
    save_file({"model.norm.weight": np.ones(4, np.float32)}, target / WEIGHTS)
    with pytest.raises(CheckpointError, match=message), pytest.warns(UserWarning, match=message):
        dj.load(target, None)


def test_an_index_of_the_single_file_is_no_stray(target: Path) -> None:
    names = load_file(target / WEIGHTS)
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, WEIGHTS)}
    (target / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dj.load_target(target)


def test_tied_heads_have_no_table_of_their_own(oracle: Path) -> None:
    tied = dj.load_target(oracle / "targets" / "qwen3")
    assert "embed" not in tied.params
    assert "embed" in dj.load_target(oracle / "targets" / "llama3").params


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_cast_to_the_asked_dtype_and_logits_stay_float32(
    oracle: Path, dtype: str
) -> None:
    model = dj.load_target(oracle / "drafters" / "target_small", dtype=dtype)
    assert {str(x.dtype) for x in jax.tree.leaves(model.params)} == {dtype}
    if dtype == "bfloat16":
        out = model.forward([[1, 2, 3]])
        assert out.logits.dtype == jnp.float32
        assert out.hidden.dtype == jnp.bfloat16
        assert out.logits.shape == (1, 3, 9)
        assert out.hidden.shape == (6, 1, 3, 64)


def test_a_pair_is_described_without_its_weights(target: Path, drafter: Path) -> None:
    for folder in (target, drafter):
        (folder / WEIGHTS).unlink()
    pair = describe(target, drafter)
    assert (pair.target.config.num_layers, pair.drafter.config.num_layers) == (5, 3)
    assert describe(target, None) == dataclasses.replace(pair, drafter=None)
    assert describe(target, "ngram").drafter == NGram()


def test_names_are_resolved_to_folders(target: Path) -> None:
    assert locate(target, "target") == target
    assert locate(str(target), "target") == target
    assert locate("tiny", "drafter").parts[-3:] == ("data", "tiny", "drafter")
    assert locate("tiny/drafter", "drafter") == locate("tiny", "drafter")


# -- files that are missing or damaged -----------------------------------------------------------


def test_a_missing_folder_is_named_with_what_may_be_given(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no target at .*nowhere; give a directory, .* hub"):
        dj.load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no drafter at nowhere; give a directory"):
        locate("./nowhere", "drafter")


@pytest.mark.parametrize("name", ["x" * 300, "zero\0byte"])
def test_a_name_that_no_file_can_have_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: "):
        locate(name, "target")


def test_only_the_needed_files_of_a_repository_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ["README.md", "config.json", "chat_template.jinja", WEIGHTS, f"original/{WEIGHTS}"]
    fetched = []

    def snapshot_download(
        repository: str, *, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        """Fetch files as the hub does, where `*` also matches slashes."""
        for file in files:
            wanted = any(fnmatch.fnmatch(file, p) for p in allow_patterns)
            if wanted and not any(fnmatch.fnmatch(file, p) for p in ignore_patterns):
                fetched.append(file)
        return str(tmp_path / repository)

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert locate("openai/gpt-oss-20b", "target") == tmp_path / "openai" / "gpt-oss-20b"
    assert fetched == ["config.json", "chat_template.jinja", WEIGHTS]


def test_refusals_of_the_hub_are_reported_with_their_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def snapshot_download(repository: str, **_: object) -> str:
        raise OSError(f"no such\nrepository: {repository}")

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(CheckpointError, match=r"target a/b could not be fetched .* no such repos"):
        locate("a/b", "target")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # not installed
    with pytest.raises(CheckpointError, match=r"install the extra .*: pip install -e '\.\[hub\]'"):
        locate("a/b", "target")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"target": 5}, CheckpointError, "the target is 5; expected a path or a name"),
        ({"drafter": 5}, CheckpointError, "the drafter is 5; expected a path or a name"),
        ({"plan": {"rows": 2}}, PlanError, r"plan is {'rows': 2}; expected None, or a dj.Plan"),
    ],
)
def test_arguments_of_other_kinds_are_named(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        dj.load(**arguments)


def test_a_file_in_place_of_a_folder_is_refused(target: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is a file; give the target's direct"):
        dj.load(target / "config.json")


def test_a_missing_weight_file_is_named(target: Path) -> None:
    (target / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"target holds neither model\.safetensors nor"):
        dj.load(target)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_a_truncated_weight_file_is_named(target: Path, keep: float) -> None:
    data = (target / WEIGHTS).read_bytes()
    length = int(len(data) * keep) if 0 < keep < 1 else int(keep)
    (target / WEIGHTS).write_bytes(data[:length])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*(truncated|fetch|short|ends)"):
        dj.load(target)


def test_a_missing_shard_is_named(target: Path) -> None:
    places = shard(target, 3)
    (target / min(places.values())).unlink()
    with pytest.raises(CheckpointError, match=r"model-0\.safetensors"):
        dj.load_target(target)


def test_an_index_that_is_not_json_is_named(target: Path) -> None:
    shard(target, 2)
    (target / "model.safetensors.index.json").write_text("{")
    with pytest.raises((CheckpointError, ConfigError), match=r"index\.json is not JSON"):
        dj.load_target(target)


def test_every_tensor_that_does_not_fit_is_named_at_once(target: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.norm.weight"] = np.ones(63, np.float32)
        del tensors["model.layers.2.mlp.up_proj.weight"]
        tensors["model.layers.0.mlp.gate_proj.bias"] = np.ones(96, np.float32)

    edit_weights(target, change)
    with pytest.raises(CheckpointError) as caught:
        dj.load(target)
    text = str(caught.value)
    assert str(target) in text
    for part in ("norm.weight", "63", "64", "2.mlp.up_proj", "0.mlp.gate_proj.bias"):
        assert part in text, part


def test_a_damaged_drafter_is_named(target: Path, drafter: Path) -> None:
    edit_weights(drafter, lambda tensors: tensors.pop("fc.weight"))
    with pytest.raises(CheckpointError, match=r"drafter does not match[^\0]*missing: fc\.weight"):
        dj.load(target, drafter)


def test_weights_that_are_not_numbers_are_refused(target: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.norm.weight"][3] = np.nan

    edit_weights(target, change)
    with pytest.raises(CheckpointError, match=r"norm\.weight holds 1 values that are NaN"):
        dj.load(target)


def test_a_tokenizer_that_cannot_be_read_is_refused(target: Path) -> None:
    (target / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"the tokenizer of .* cannot be read .*; fetch"):
        dj.load(target)


# -- models that cannot be run, or do not fit each other -----------------------------------------


def test_an_unknown_model_type_lists_the_known_ones(target: Path) -> None:
    edit(target, model_type="mamba")
    with pytest.raises(ConfigError, match=r"'mamba' is not a target .* runs; it runs .*llama"):
        dj.load(target)


def test_unknown_config_fields_are_refused_by_name(target: Path) -> None:
    edit(target, attn_logit_softcapping=50.0)
    with pytest.raises(ConfigError, match=r"attn_logit_softcapping.* would change the output"):
        dj.load(target)


def test_a_config_that_is_not_json_is_refused(target: Path) -> None:
    (target / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON .*; fetch the file again"):
        dj.load(target)


@pytest.mark.parametrize(
    ("role", "changes", "message"),
    [
        ("target", {"vocab_size": 300}, "vocabulary 256, the target has 300"),
        ("target", {"hidden_size": 128}, "hidden size 64, the target has 128"),
        ("target", {"num_hidden_layers": 4, "layer_types": None}, "made for 5 target layers, this"),
        ("drafter", {"dflash_config": {"mask_token_id": 256, "target_layer_ids": [1]}}, "mask tok"),
        ("drafter", {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [9]}}, r"\[9\]"),
        ("drafter", {"dflash_config": {"mask_token_id": 255}}, "expected the list of target layer"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_before_weights_are_read(
    target: Path, drafter: Path, role: str, changes: dict[str, Any], message: str
) -> None:
    edit({"target": target, "drafter": drafter}[role], **changes)
    with pytest.raises(ConfigError, match=message):
        dj.load(target, drafter)


def test_swapped_target_and_drafter_are_refused(target: Path, drafter: Path) -> None:
    message = "is a drafter; a target is needed here: give the target that the drafter was trained"
    for models in ((drafter, target), (drafter, None), ("tiny/drafter", "tiny/target")):
        with pytest.raises(ConfigError, match=message):
            dj.load(*models)
    with pytest.raises(ConfigError, match=message):
        dj.load_target(drafter)
    with pytest.raises(ConfigError, match="is a target; a drafter is needed here: give a drafter"):
        dj.load(target, target)
    for folder in (target, drafter):
        (folder / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match=message):
        describe(drafter)
    with pytest.raises(ConfigError, match="is a target; a drafter is needed here"):
        describe(target, target)


def test_a_plan_that_does_not_fit_in_memory_is_refused_before_weights_are_read(
    target: Path, drafter: Path
) -> None:
    with pytest.raises(PlanError, match=r"the plan needs weights .*max_length=\d+ would fit"):
        dj.load(target, drafter, plan=dj.Plan(rows=8, memory_limit=12 * 2**20))
    assert free_memory(jax.local_devices()[0]) > 2**20


def test_memory_that_only_caches_files_counts_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 8000 kB\nMemFree:  100 kB\nMemAvailable:   6000 kB\n")
    monkeypatch.setattr(device, "MEMORY", meminfo)
    assert free_memory(jax.local_devices()[0]) == 6000 * 1024


@pytest.mark.parametrize(
    ("limit", "free"), [("5000000", 5000000 - 3000000 + 400000), ("max", 6144000), ("1", 0)]
)
def test_free_memory_respects_the_limit_of_a_container(
    limit: str, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {
        "meminfo": "MemAvailable:   6000 kB\n",
        "memory.max": limit + "\n",
        "memory.current": "3000000\n",
        "memory.stat": "anon 2500000\nfile 500000\ninactive_file 400000\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(device, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(device, "GROUP", tmp_path)
    assert free_memory(jax.local_devices()[0]) == free


def test_free_memory_is_all_memory_where_the_system_does_not_report_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_macos = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}

    def sysconf(name: str) -> int:
        if name not in of_macos:
            raise ValueError("unrecognized configuration name")
        return of_macos[name]

    monkeypatch.setattr(device, "MEMORY", tmp_path / "there is none")
    monkeypatch.setattr(os, "sysconf", sysconf)
    assert free_memory(jax.local_devices()[0]) == 1000 * 4096


def test_a_length_beyond_the_target_is_refused(target: Path) -> None:
    with pytest.raises(PlanError, match="max_length is 2000, but the target was made for 1024"):
        dj.load(target, plan=dj.Plan(max_length=2000))


def test_an_unknown_dtype_is_refused(target: Path) -> None:
    with pytest.raises(ConfigError, match="dtype is 'int4'; expected float32, bfloat16 or float16"):
        dj.load_target(target, dtype="int4")


# -- forward -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[]], r"shape \(1, 0\) .*; expected integers \[B, T\]"),
        ([1, 2], r"shape \(2,\) .*; expected integers \[B, T\]"),
        ([[1.0, 2.0]], "dtype float64; expected integers"),
        ([[1, 9]], "ids run from 1 to 9; the target knows 0 to 8"),
        ([[1, 2], [3]], "ids have rows of different lengths; pad or split them"),
        ([[-1, 2]], "ids run from -1 to 2; the target knows 0 to 8"),
    ],
)
def test_forward_refuses_invalid_token_ids(oracle: Path, ids: Any, message: str) -> None:
    model = dj.load_target(oracle / "drafters" / "target_small")
    with pytest.raises(RequestError, match=message):
        model.forward(ids)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("Unable to initialize backend 'tpu': no libtpu.so"), "Unable to initialize"),
        (AssertionError(), "JAX_PLATFORMS=.* is not installed; unset it, or install it"),
    ],
)
def test_a_missing_platform_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    """JAX ends in an assertion if the only platform that was asked for is CUDA without a plugin."""

    def missing() -> None:
        raise error

    monkeypatch.setattr(jax, "local_devices", missing)
    for load in (dj.load, dj.load_target):
        with pytest.raises(PlanError, match=f"no device to run on: {message}"):
            load("tiny")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 9876543\n"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "x.gguf"])
def test_a_pointer_of_git_lfs_is_named_as_such(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "target"
    shutil.copytree(locate("tiny", "target"), folder)
    (folder / name).write_text(POINTER)
    source = folder / name if name == "x.gguf" else folder
    with pytest.raises(CheckpointError, match=f"{name} is a pointer of Git LFS, not the file"):
        dj.load(source, None)


def test_a_shard_that_is_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((locate("tiny", "target") / "config.json").read_text())
    weight_map = {"model.norm.weight": "model-00001-of-00001.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "model-00001-of-00001.safetensors").write_text(POINTER)
    with pytest.raises(CheckpointError, match=r"00001\.safetensors is a pointer of Git LFS"):
        dj.load(tmp_path, None)


def test_a_template_without_the_users_messages_is_named_when_it_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(locate("tiny", "target"), folder)
    template = "{% for m in messages %}<{{ m.role }}>{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    with pytest.warns(UserWarning, match=r"target leaves out the user's messages; use another"):
        open_pair(folder, None)
    (folder / "chat_template.jinja").write_text(template.replace("m.role", "m.content[0].text"))
    assert open_pair(folder, None).tokenizer


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "verify", "explain", "bench"])
def test_every_command_knows_the_names_of_drafters_that_are_no_files(command: str) -> None:
    words = ["a"] if command == "generate" else []
    for name in ("ngram", "none", "auto", "own"):
        options = parser().parse_args([command, *words, "--drafter", name])
        options.check(options)
    options = parser().parse_args([command, *words, "--drafter", "ngrm"])
    with pytest.raises(CheckpointError, match="there is no drafter at ngrm"):
        options.check(options)
