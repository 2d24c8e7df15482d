"""`dj.train`: for targets in memory, on meshes of virtual devices, and like the command."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import dflash_jax as dj
from dflash_jax.cli import main
from dflash_jax.converters import live
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.loading import open_pair
from dflash_jax.networks import build_pair
from dflash_jax.testing import random_engine, random_params, tiny_target
from dflash_jax.trainer import in_process
from dflash_jax.trainer.run import write_huggingface

TARGET = tiny_target(num_layers=2, qk_norm=False, model_type="llama")
PROMPTS = [np.random.default_rng(i).integers(0, 95, 12).tolist() for i in range(12)]
RECIPE = dj.recipe(
    "smoke",
    ["steps=4", "save_every=2", "buckets=32x4", "answer_buckets=32x4", "text_prompts=8",
     "text_prompt=12", "text_tokens=12", "held_out=1", "held_out_tokens=8"],
)  # fmt: skip
PLAN = dj.Plan(max_length=64, chunk=16, block=4)
ORACLE = Path(__file__).parents[1] / "oracle" / "drafters" / "target_qwen3"


def quiet(line: str) -> None:
    pass


def train(target: Any, prompts: Any = PROMPTS, recipe: Any = RECIPE, **more: Any) -> Any:
    options: dict[str, Any] = {"mask_id": 96, "on_progress": quiet}
    return dj.train(target, prompts, recipe, **options | more)


def model() -> dj.TargetModel:
    """Return a random target from arrays of another library, on the host."""
    params = random_params(build_pair(TARGET, None))["target"]
    arrays = live.to_arrays(params, TARGET, naming="huggingface")
    return dj.TargetModel(TARGET, live.from_arrays(arrays, TARGET), "float32")


@pytest.fixture(scope="module")
def trained() -> dj.TrainedDrafter:
    return train(model())


def assert_lossless(engine: dj.Engine, plain: list[int]) -> None:
    engine.measures_drafting = False
    drafted = engine.generate(PROMPTS[0], max_tokens=24)
    assert drafted.token_ids == plain
    assert drafted.stats.drafted


@pytest.mark.exhaustive
def test_a_drafter_of_a_target_in_memory_decodes_losslessly_from_memory_and_from_folders(
    trained: dj.TrainedDrafter, tmp_path: Path
) -> None:
    engine = trained.engine(PLAN)
    plain = engine.generate(PROMPTS[0], max_tokens=24, speculative=False).token_ids
    assert len(set(plain)) > 3
    assert_lossless(engine, plain)
    assert trained.results["ids"]["equal"] == trained.results["ids"]["compared"] == 1
    own = {"bos_token_id": None, "pad_token_id": 0}
    write_huggingface(tmp_path / "target", TARGET, trained.target.params, **own)
    for layout in ("huggingface", "speculators"):
        trained.save(tmp_path / layout, layout=layout)
        pair = open_pair(tmp_path / "target", tmp_path / layout)
        assert pair.drafter is not None
        found = dataclasses.replace(pair.drafter.config, num_target_layers=TARGET.num_layers)
        assert found == trained.config
        jax.tree.map(np.testing.assert_array_equal, pair.drafter.load("bfloat16"), trained.params)
        loaded = pair.engine(PLAN)
        plain = loaded.generate(PROMPTS[0], max_tokens=24, speculative=False).token_ids
        assert_lossless(loaded, plain)
    with pytest.raises(CheckpointError, match="exists"):
        trained.save(tmp_path / "speculators")
    with pytest.raises(ConfigError, match="layout 'zip' is not one of"):
        trained.save(tmp_path / "other", layout="zip")


@pytest.mark.exhaustive
def test_an_engine_is_a_target_on_a_mesh_too(trained: dj.TrainedDrafter) -> None:
    engine = random_engine(TARGET, None, PLAN)
    engine.update_params({"target": trained.target.params})
    again = train(engine, mesh=Mesh(np.asarray(jax.devices()[:1]), ("data",)))
    assert again.target.mesh is not None
    jax.tree.map(np.testing.assert_array_equal, again.params, trained.params)
    graph = dj.Graph(build_pair(TARGET, again.config), PLAN)
    drafting = dj.Engine(graph, {"target": again.target.params, "drafter": again.params})
    drafting.update_params({"drafter": trained.params})


@pytest.mark.soak
def test_the_command_makes_the_same_drafter(tmp_path: Path) -> None:
    lines = [{"prompt": f"List {i} colours."} for i in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = ["steps=2", "save_every=2", "new_tokens=8", "held_out=0", "buckets=64x4"]
    words = [word for setting in settings for word in ("--set", setting)]
    command = ["train", "--preset", "smoke", "--data", str(tmp_path / "data.jsonl"), *words]
    kept = tmp_path / "features"
    settings.append(f"features={kept}")
    command += ["--set", settings[-1]]
    assert main([*command, "--out", str(tmp_path / "command")]) == 0
    prompts = [line["prompt"] for line in lines]
    parts = sorted(kept.rglob("*.np?"))
    assert parts
    recipe = dj.recipe("smoke", settings)
    found = train("tiny", prompts, recipe, mask_id=None, out=tmp_path / "run")
    assert sorted(kept.rglob("*.np?")) == parts
    files = [
        (tmp_path / name / "drafter" / "model.safetensors").read_bytes()
        for name in ("command", "run")
    ]
    assert files[0] == files[1]
    assert found.target.tokenizer is not None


@pytest.mark.exhaustive
def test_a_run_that_is_interrupted_goes_on_to_the_same_weights(
    trained: dj.TrainedDrafter, tmp_path: Path
) -> None:
    def interrupt(line: str) -> None:
        if line.startswith("drafter 2/"):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match=r"step 2 of 4; state saved; the same call goes on"):
        train(model(), out=tmp_path / "run", on_progress=interrupt)
    with pytest.raises(KeyboardInterrupt, match="without out=, nothing is kept"):
        train(model(), on_progress=interrupt)
    lines: list[str] = []
    found = train(model(), out=tmp_path / "run", on_progress=lines.append)
    assert not [line for line in lines if line.startswith("drafter 2/")]
    jax.tree.map(np.testing.assert_array_equal, found.params, trained.params)
    other = model()
    other.params["norm"] = np.asarray(other.params["norm"]) * 2
    with pytest.raises(ConfigError, match=r'begun with other settings .*target was "in memory, '):
        train(other, out=tmp_path / "run")


@pytest.mark.exhaustive
def test_a_drafter_starts_from_another_in_memory(trained: dj.TrainedDrafter) -> None:
    recipe = dataclasses.replace(
        RECIPE, schedule=dataclasses.replace(RECIPE.schedule, steps=1, rate=1e-12), weight_decay=0.0
    )
    found = train(trained.target, recipe=recipe, start=trained)
    jax.tree.map(np.testing.assert_array_equal, found.params, trained.params)
    with pytest.raises(ConfigError, match=r"drafter in memory.* another shape: block_size is 4"):
        train(trained.target, recipe=dataclasses.replace(RECIPE, block=6), start=trained)


def test_a_target_by_its_path_is_read_in_the_dtype_of_the_recipe() -> None:
    found = in_process.in_memory(ORACLE, dataclasses.replace(RECIPE, dtype="bfloat16"))
    assert (found.config.model_type, found.dtype) == ("qwen3", "bfloat16")
    assert found.params["norm"].dtype == jax.numpy.bfloat16


def packed() -> dj.Engine:
    return random_engine(tiny_target(), None, dj.Plan(max_length=64, weights="int8"))


def misfit() -> dj.TargetModel:
    found = model()
    found.params["norm"] = found.params["norm"][1:]
    return found


@pytest.mark.parametrize(
    ("make", "more", "error"),
    [
        (model, {"prompts": []}, "ConfigError: prompts is empty; expected a list"),
        (model, {"prompts": {"prompt": "a"}}, "ConfigError: prompts is .*expected a list"),
        (model, {"prompts": [[1, 2], []]}, "ConfigError: prompt 1 cannot be used"),
        (model, {"prompts": [object()]}, "ConfigError: prompt 0 cannot be used"),
        (model, {"prompts": ["Hello"] * 20}, "ConfigError: the target ships no tokenizer"),
        (model, {"prompts": [[1, 2000]] * 20}, "ConfigError: the data holds token 2000"),
        (model, {"prompts": "none.jsonl"}, "ConfigError: there is no data at none.jsonl"),
        (model, {"prompts": "self:9"}, "ConfigError: self-written turns need a chat template"),
        (model, {"mask_id": None}, "ConfigError: no mask token is known.*mask_id"),
        (model, {"recipe": "none"}, "ConfigError: preset 'none' is not known"),
        (model, {"recipe": {"steps": 3}}, "ConfigError: recipe is .*expected a preset's name"),
        (
            model,
            {"recipe": dataclasses.replace(RECIPE, taps=(9,))},
            r"ConfigError: .*target layers \[9\]",
        ),
        (misfit, {}, "CheckpointError: the parameters do not fit [^!]*norm is of shape"),
        (packed, {}, "ConfigError: the engine's target has packed matrices"),
        (lambda: {"norm": 1}, {}, "ConfigError: target is a dict; expected an engine"),
        (lambda: "nowhere", {}, "CheckpointError: .*nowhere"),
        (model, {"mesh": (1, 1)}, r"PlanError: mesh is \(1, 1\); expected a jax"),
        (model, {"start": "nowhere"}, "CheckpointError: .*no drafter at nowhere"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(
    make: Callable[[], Any], more: dict[str, Any], error: str, tmp_path: Path
) -> None:
    kind, _, text = error.partition(": ")
    with pytest.raises(getattr(dj, kind), match=text):
        train(make(), out=tmp_path / "run", **more)
    assert not list(tmp_path.iterdir())


def test_prompts_have_the_forms_of_the_command() -> None:
    turns = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "It is 12."}]
    given = ["Add.", turns, {"messages": turns}, {"text": "A tale."}, [1, 2], np.arange(3)]
    found = in_process.training_data(iter(given))
    assert not isinstance(found, str)
    examples = [*found.training, *found.held_out]
    assert len(examples) == len(given)
    assert {x.ids for x in examples if x.ids} == {(1, 2), (0, 1, 2)}
    assert [len(x.messages) for x in examples if x.messages].count(2) == 2
    assert in_process.training_data(Path("a.jsonl")) == "a.jsonl"


@pytest.mark.exhaustive
@pytest.mark.parametrize("more", [[], pytest.param(["--more"], marks=pytest.mark.soak)])
def test_a_mesh_trains_what_one_device_trains_and_splits_the_target(more: list[str]) -> None:
    """Losses of steps, answers, and drafted output on mesh (2, 2), and on more of them."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("mesh_case.py")), *more],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    alone, meshes = found["none"], {"2x2", "4x1"} & found.keys()
    for name in meshes:
        on_mesh = found[name]
        assert on_mesh["rows"] == alone["rows"]
        assert on_mesh["loss"] == pytest.approx(alone["loss"], rel=1e-4), name
        assert on_mesh["drafts"] == pytest.approx(alone["drafts"], rel=1e-3)
        assert on_mesh["results"] == alone["results"]
    for name in ("none", *meshes):
        assert found[name]["lossless"]
        assert found[name]["devices"]
    assert found["2x2"]["share"] < 0.7  # of the target, on one device
    assert not more or found["4x1"]["share"] > 0.7
    assert found["2x2"]["whole"] == []
    expected = (
        r"PlanError: mesh has the axes {'fsdp': 2, 'tp': 2}; expected 'data'",
        "ConfigError: buckets have [4] rows in a batch; every number must be a multiple of 3",
        "PlanError: mesh has 3 devices along 'model' for 4 kv heads; expected a divisor",
        "PlanError: mesh has 4 devices along 'data', but answer_buckets decode [6] answers",
        "PlanError: target_weights is 'int8', which cannot be split",
        "PlanError: mesh is '2x2'; expected a jax.sharding.Mesh",
    )
    for error, start in zip(found["refused"], expected, strict=True):
        assert error.startswith(start)
