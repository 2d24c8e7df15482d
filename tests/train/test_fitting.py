"""A run on a random target: resumption, devices, rows that teach nothing."""

import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from dflash_jax.errors import ConfigError
from dflash_jax.loading import TargetModel
from dflash_jax.testing import random_params, tiny_target
from dflash_jax.train import fitting
from dflash_jax.train.recipe import SMOKE, Bucket, Schedule
from dflash_jax.train.rows import Rows

RECIPE = dataclasses.replace(
    SMOKE,
    kind="dspark",
    loss="mix",
    layers=1,
    features="cache",
    optimizer="adamw",
    buckets=(Bucket(length=32, rows=2),),
    schedule=Schedule(steps=6, rate=1e-2, save_every=2),
)


def rows(count: int = 5) -> list[Rows]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 96, (count, 32)).astype(np.int32)
    return [Rows(tokens, np.ones(tokens.shape, bool), np.ones(tokens.shape, bool))]


def model() -> TargetModel:
    config = tiny_target(num_layers=2)
    params = jax.device_put(random_params(config, None)["target"])
    return TargetModel(config, params, "float32")


def fit(out, tell=lambda line: None):
    return fitting.fit(model(), RECIPE, 96, rows(), out, identity="x", tell=tell)[1]


def test_a_stopped_run_goes_on_to_the_same_weights(tmp_path):
    class Full(Exception):
        pass

    def stop(line):
        if line.startswith("drafter 4/"):
            raise Full

    with pytest.raises(Full):
        fit(tmp_path / "a", stop)
    resumed, straight = fit(tmp_path / "a"), fit(tmp_path / "b")
    jax.tree.map(np.testing.assert_array_equal, resumed, straight)
    lines = [json.loads(line) for line in (tmp_path / "a/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert {"loss", "simulated", "accuracy", "head", "gradient"} <= lines[0].keys()


def test_rows_in_which_no_block_can_start_are_refused():
    (part,) = rows()
    wanted = np.zeros_like(part.wanted)
    wanted[:, ::2] = True
    with pytest.raises(ConfigError, match="no block can start in any of the 5 rows"):
        fitting.usable([dataclasses.replace(part, wanted=wanted)], RECIPE)


def test_few_rows_fill_a_batch():
    (kept,) = fitting.usable(rows(1), RECIPE)
    assert len(kept.tokens) == 2


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(ConfigError, match="there are"):
        fitting.Placement(64)


def test_a_folder_of_another_run_is_refused(tmp_path):
    fitting.claim(tmp_path / "run", {"target": "a", "data": "b"})
    with pytest.raises(ConfigError, match=r"begun with other settings \(data differ\)"):
        fitting.claim(tmp_path / "run", {"target": "a", "data": "c"})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ConfigError, match="holds other things"):
        fitting.claim(tmp_path / "other", {"target": "a"})


DEVICES = """
import dataclasses, functools, jax, numpy as np
from dflash_jax.compiler.programs import build_pair
from dflash_jax.testing import random_params, tiny_drafter, tiny_target
from dflash_jax.train import drafter
from dflash_jax.train.fitting import Placement
from dflash_jax.train.recipe import SMOKE

target = tiny_target(num_layers=1)
config = tiny_drafter(target, "dflash2", block_size=4, target_layer_ids=(0,), num_layers=1,
                      windows=(None,), causal=(False,))
pair, params = build_pair(target, config), random_params(target, config)
recipe = dataclasses.replace(SMOKE, kind="dflash2")
rng = np.random.default_rng(0)
rows = rng.integers(0, 96, (4, 24)).astype(np.int32), rng.random((4, 24)) < 0.8
found = []
for devices in (1, 4):
    place = Placement(devices)
    trees = place.everywhere((params["drafter"], params["target"]))
    run = jax.jit(functools.partial(drafter.gradient, pair, recipe), static_argnums=(5,))
    found.append(jax.device_get(run(*trees, place.by_row(rows), None, np.int32(3), 5)))
assert found[0][1]["places"] > 5
assert len(jax.devices()) == 4
jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), *found)
print("equal")
"""


def test_loss_and_gradient_are_equal_on_one_and_on_four_devices(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    command = [sys.executable, "-c", DEVICES]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stdout == "equal\n", ended.stderr
