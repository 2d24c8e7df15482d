"""Runs on a random target: resumption, devices, rows without anchors."""

import dataclasses
import functools
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax
from dflash_jax import Plan, load_target
from dflash_jax.converters.models import open_model
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import ComputeError, ConfigError, DFlashError
from dflash_jax.families.configs import read_drafter_config
from dflash_jax.loading import locate, open_pair
from dflash_jax.networks import build_graph, build_pair
from dflash_jax.quant.layouts import dequantise
from dflash_jax.target_model import TargetModel
from dflash_jax.testing import folder_params, planned, random_engine, random_params, tiny_target
from dflash_jax.trainer import data, drafter, evaluate, initial_weights, run, setup, training
from dflash_jax.trainer.files import claim
from dflash_jax.trainer.recipes import RECIPES, SMOKE, Bucket, Schedule, new_drafter, recipe
from dflash_jax.trainer.rows import TokenRows
from dflash_jax.trainer.run import write_huggingface

BUCKETS = (Bucket(length=32, rows=2),)
RECIPE = dataclasses.replace(
    SMOKE,
    kind="dspark",
    loss="mix",
    layers=1,
    features="cache",
    optimizer="adamw",
    average=0.9,
    buckets=BUCKETS,
    schedule=Schedule(steps=6, rate=1e-2, save_every=2),
)


def rows(count: int = 5) -> list[TokenRows]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 96, (count, 32)).astype(np.int32)
    return [TokenRows(tokens, np.ones(tokens.shape, bool), np.ones(tokens.shape, bool))]


def model() -> TargetModel:
    config = tiny_target(num_layers=2)
    params = jax.device_put(random_params(build_pair(config, None))["target"])
    return TargetModel(config, params, "float32")


def fit(out, report=lambda line: None):
    return training.fit(model(), RECIPE, 96, rows(), out, identity="x", report=report).params


def test_the_average_of_weights_is_kept_beside_them_and_is_the_result(tmp_path):
    def fitted(out, average):
        schedule = Schedule(steps=1, rate=1e-2)
        recipe = dataclasses.replace(SMOKE, average=average, schedule=schedule, buckets=BUCKETS)
        return training.fit(model(), recipe, 96, rows(), out, identity="x", report=str)

    plain, both = fitted(tmp_path / "a", 0.0), fitted(tmp_path / "b", 0.5)
    assert plain.average is None
    assert plain.params is plain.last
    assert both.params is both.average
    jax.tree.map(np.testing.assert_array_equal, plain.last, both.last)
    pair = build_pair(model().config, both.config)
    fresh = initial_weights.fresh(pair, 0)
    first, _ = initial_weights.from_target(fresh, model().params, (model().config, both.config))
    expected = jax.tree.map(lambda a, b: 0.1 * a + 0.9 * b, first, both.last)  # a first step
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), both.average, expected)


def test_an_average_forgets_its_first_weights_and_then_decays_as_asked():
    ones, zeros = {"x": jnp.ones(2)}, {"x": jnp.zeros(2)}
    kept = [
        float(drafter.averaged(ones, zeros, 0.995, jnp.int32(number))["x"][0])
        for number in (0, 90, 5000)
    ]
    np.testing.assert_allclose(kept, [0.1, 0.91, 0.995], rtol=1e-6)
    assert drafter.averaged(None, ones, 0.995, jnp.int32(0)) is None


BUDGETED = dataclasses.replace(
    SMOKE, budget=0.01, buckets=BUCKETS, schedule=Schedule(steps=50, rate=1e-2)
)


def test_a_budget_is_as_many_steps_as_fit_which_a_resumed_run_keeps(tmp_path):
    lines: list[str] = []

    def steps(out: Path, seconds: float, passed: float = 0.0) -> int:
        out.mkdir(exist_ok=True)
        left = training.left_for_steps(BUDGETED, passed)
        return training.within_budget(left, out, lambda: seconds, lines.append).schedule.steps

    assert steps(tmp_path / "a", 9.0) == 4  # of 36 s
    assert steps(tmp_path / "a", 1.0) == 4
    assert lines == ["4 of 50 steps fit in 36 s, 9.00 s each"]
    assert steps(tmp_path / "b", 0.1) == 50
    assert steps(tmp_path / "c", 9.0, passed=9.0) == 3
    assert steps(tmp_path / "d", 9.0, passed=99.0) == 1  # a quarter is for steps


@pytest.mark.exhaustive
def test_a_run_with_a_budget_ends_after_the_steps_that_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(training.loop, "seconds_of_step", lambda *_: 9.0)
    trained = training.fit(model(), BUDGETED, 96, rows(), tmp_path, identity="x", report=str)
    assert trained.steps == len((tmp_path / "log.jsonl").read_text().splitlines()) == 4


def test_budgets_are_times():
    assert [recipe("smoke", [f"budget={x}"]).budget for x in ("3h", "90min", "2")] == [3, 1.5, 2]
    with pytest.raises(ConfigError, match="budget is 'soon'; expected a time like 3h or 90min"):
        recipe("smoke", ["budget=soon"])


@pytest.mark.soak
def test_a_stopped_run_resumes_to_the_same_weights(tmp_path):
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


def test_a_device_too_small_is_named_with_the_settings_that_help():
    with (
        pytest.raises(ComputeError, match=r"not fit the device .*set more parts"),
        run.explained_out_of_memory(),
    ):
        jax.numpy.zeros((1 << 24, 1 << 24)).block_until_ready()
    with pytest.raises(ZeroDivisionError), run.explained_out_of_memory():
        raise ZeroDivisionError


def test_rows_in_which_no_block_can_start_are_refused():
    (part,) = rows()
    wanted = np.zeros_like(part.wanted)
    wanted[:, ::2] = True
    with pytest.raises(ConfigError, match="no block can start in any of the 5 rows"):
        training.usable([dataclasses.replace(part, wanted=wanted)], RECIPE, print)


@pytest.mark.exhaustive
def test_rows_and_batches_that_are_not_learnt_are_counted_aloud(tmp_path, monkeypatch):
    (part,) = rows(7)
    part.wanted[3:] = False
    reported = []
    (kept,) = training.usable([part], RECIPE, reported.append)
    assert len(kept.tokens) == 3
    assert reported[0].startswith("using 3 of 7 rows: in the others no two neighbouring tokens")
    few = dataclasses.replace(RECIPE, features="online", schedule=Schedule(steps=2, rate=1e-2))
    monkeypatch.setattr(training.loop, "fit", lambda run, state, *_, **__: state)
    for count, line in (9, "2 steps read 2 of 4 batches: the other rows are not learnt;"), (5, ""):
        reported.clear()
        training.fit(model(), few, 96, rows(count), tmp_path, identity="x", report=reported.append)
        assert reported[-1] == "the drafter starts with what fits of the target's layers 1"
        assert len(reported) == 1 + bool(line)
        assert "".join(reported).startswith(line or "the drafter")


def test_token_ids_that_the_target_does_not_have_are_refused_before_anything_is_made(tmp_path):
    lines = tmp_path / "data.jsonl"
    lines.write_text('{"ids": [1, 2, 3]}\n' * 20 + '{"ids": [1, 2147483647]}\n')
    with pytest.raises(ConfigError, match=r"token 2147483647, but the target knows 0 to 2047;"):
        run.run("tiny", str(lines), tmp_path / "out", SMOKE, report=print)
    assert not (tmp_path / "out").exists()


def test_a_held_out_line_that_cannot_be_asked_is_refused_before_anything_is_made(tmp_path):
    good = [{"messages": [{"role": "user", "content": str(i)}]} for i in range(20)]
    odd = {"messages": [{"role": "wizard", "content": "A."}, {"role": "user", "content": "24"}]}
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [*good, odd]))
    assert [x.held_out for x in data.read(path)].index(True) == len(good)
    with pytest.raises(ConfigError, match=r"unknown role wizard.*begins .*A\."):
        run.run("tiny", str(path), tmp_path / "out", SMOKE, report=print)
    assert not (tmp_path / "out").exists()


def test_a_drafter_that_cannot_be_is_refused_before_anything_is_made(tmp_path):
    many = {"devices": 64, "buckets": (Bucket(length=256, rows=64),)}
    wrongs = ({"taps": (9,)}, r"target layers \[9\]"), ({"kv_heads": 2}, "heads"), (many, "devices")
    for wrong, why in wrongs:
        with pytest.raises(ConfigError, match=why):
            run.run("tiny", "tiny", tmp_path, dataclasses.replace(SMOKE, **wrong), report=print)
    for start, why in ((Path("nowhere"), "no drafter at nowhere"), (Path("tiny"), "another shape")):
        with pytest.raises(DFlashError, match=why):
            run.run("tiny", "tiny", tmp_path, SMOKE, report=print, start=start)
    assert not list(tmp_path.iterdir())


def test_held_out_prompts_may_hold_any_character(tmp_path, monkeypatch):
    texts = ["a\u2028b\x85c", "half of one \ud800"]
    messages = ({"role": "user", "content": text} for text in texts)
    entries = [data.Example(messages=(message,)).entry() for message in messages]
    asked = []

    def read(engine, prompts, **rest):
        asked.extend(e["messages"][0]["content"] for e in evaluate.read_prompts(prompts))
        return {}

    monkeypatch.setattr(evaluate, "engine_of", lambda *given, **rest: None)
    monkeypatch.setattr(evaluate, "evaluate", read)
    run.measured(tmp_path, "tiny", entries, SMOKE, print)
    assert asked == texts


def test_held_out_prompts_too_long_to_measure_are_counted_aloud(tmp_path):
    path, reported = tmp_path / "heldout.jsonl", []
    path.write_text(json.dumps({"kind": "ids", "ids": [5] * 2040}) + "\n")
    engine = evaluate.engine_of("tiny", locate("tiny", "drafter"))
    found = evaluate.evaluate(engine, path, max_tokens=9, report=reported.append)
    assert reported == ["ids: 1 of 1 held-out prompts are too long and were skipped"]
    assert "ids" not in found


@pytest.mark.exhaustive
def test_figures_are_returned_for_the_command_to_print_once(tmp_path):
    path, reported = tmp_path / "heldout.jsonl", []
    path.write_text(json.dumps({"kind": "ids", "ids": [5, 6, 7]}) + "\n")
    engine = evaluate.engine_of("tiny", locate("tiny", "drafter"))
    found = evaluate.evaluate(engine, path, max_tokens=9, report=reported.append)
    assert found["ids"]["acceptance_length"] >= 1
    assert reported == []


def test_few_rows_fill_a_batch():
    (kept,) = training.usable(rows(1), RECIPE, print)
    assert len(kept.tokens) == 2


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(ConfigError, match="there are"):
        training.Placement(64)


def test_a_folder_of_another_run_is_refused(tmp_path):
    claim(tmp_path / "run", "run.json", {"target": "z"})
    replaced = {"target": "a", "recipe": {"seed": 0, "taps": (1, 2)}}
    claim(tmp_path / "run", "run.json", replaced)  # the folder holds only the record
    (tmp_path / "run" / "rows.npz").touch()
    claim(tmp_path / "run", "run.json", replaced)
    why = r'\(recipe\.seed was 0, is 1; target was "a", is "b"\)'
    with pytest.raises(ConfigError, match=f"begun with other settings {why}"):
        claim(tmp_path / "run", "run.json", {"target": "b", "recipe": {"seed": 1, "taps": [1, 2]}})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ConfigError, match="holds other files"):
        claim(tmp_path / "other", "run.json", {"target": "a"})


def test_a_folder_that_cannot_be_made_and_a_damaged_note_are_named(tmp_path):
    (tmp_path / "file").touch()
    for folder, why in ("file", "File exists"), ("file/in", "Not a directory"):
        with pytest.raises(ConfigError, match=rf"{folder} cannot be made .*{why}.*give another"):
            claim(tmp_path / folder, "run.json", {})
    (tmp_path / "rows.npz").touch()
    for text in ('{"target": ', "[]"):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(ConfigError, match=r"run\.json is damaged"):
            claim(tmp_path, "run.json", {"target": "a"})


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "draft_vocab"),
    [(kind, size) for size in (0, 48) for kind in ("dflash", "dflash2", "dspark", "domino")],
)
def test_one_sample_is_learnt_until_the_engine_keeps_whole_blocks(kind, draft_vocab, tmp_path):
    whole, prompt = model(), list(range(20))
    plan = Plan(max_length=64, block=4, chunk=16)
    plain = random_engine(whole.config, None, plan)
    plain.update_params({"target": whole.params})
    said = plain.generate(prompt, max_tokens=40).token_ids
    ids = np.asarray([prompt + said], np.int32)
    sample = [TokenRows(ids, np.arange(60)[None] >= 20, np.ones(ids.shape, bool))]
    recipe = dataclasses.replace(
        RECIPE,
        kind=kind,
        draft_vocab=draft_vocab,
        loss="ce",
        features="online",
        weight_decay=0.0,
        anchors=24,
        buckets=(Bucket(length=60, rows=1),),
        schedule=Schedule(steps=150, rate=1e-2, save_every=150),
    )
    fitted = training.fit(
        whole, recipe, 96, sample, tmp_path, identity="x", report=lambda line: None
    )
    trained = {"target": whole.params, "drafter": jax.device_put(fitted.params)}
    engine = Engine(build_graph(whole.config, fitted.config, plan), trained)
    result = engine.generate(prompt, max_tokens=40)
    assert result.token_ids == said
    assert len(set(said)) > 4
    width = engine.plan.block
    assert set(result.stats.acceptance_lengths[:-1]) == {width}


@pytest.mark.parametrize("kept", ["int8", "int4"])
def test_a_rounded_target_has_the_weights_an_engine_serves(kept):
    model = setup.open_target("tiny", dataclasses.replace(SMOKE, target_weights=kept))
    specs = planned(model.config, None, Plan(weights=kept)).specs
    own = {path.removeprefix("target/"): how for path, how in specs.items()}
    served = open_pair("tiny", None).target.load("float32", specs=own)
    for path in own:
        ours, theirs = model.params, served
        for key in path.split("/"):
            ours, theirs = ours[key], theirs[key]
        weight = dequantise(theirs.arrays, theirs.kind).reshape(theirs.shape)
        np.testing.assert_array_equal(ours, weight)
    assert len(own) > 10


def test_a_drafter_begins_as_one_whose_config_advises_a_number_of_drafts():
    shipped = Path(dflash_jax.__file__).with_name("data") / "smollm2/drafter"
    old: Any = open_model(shipped, role="drafter").config
    assert old.speculative_tokens
    assert "d2t" in setup.read_start(shipped, dataclasses.replace(old, speculative_tokens=0))


def test_a_drafter_begins_as_another_of_its_shape_and_no_other():
    target, shipped = load_target("tiny").config, locate("tiny", "drafter")
    old = read_drafter_config(shipped)
    alike = dataclasses.replace(
        RECIPES["tiny-dflash2"],
        layers=old.num_layers,
        inner=old.intermediate_size,
        taps=old.target_layer_ids,
        block=old.block_size,
    )
    config = new_drafter(alike, target, old.mask_token_id)
    start = setup.read_start(Path("tiny"), config)
    fresh = initial_weights.fresh(build_pair(target, config), 0)
    replaced, _ = initial_weights.replaced(fresh, start)
    assert jax.tree.structure(replaced) == jax.tree.structure(fresh)
    np.testing.assert_array_equal(replaced["fc"], start["fc"])
    np.testing.assert_array_equal(replaced["predecessor"], fresh["predecessor"])
    with pytest.raises(ConfigError, match=r"block_size is 8, expected 4.*change the recipe"):
        setup.read_start(shipped, new_drafter(SMOKE, target, old.mask_token_id))


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark", "domino"])
def test_a_drafter_comes_back_from_its_folder_as_it_was_trained(kind, tmp_path):
    config = new_drafter(dataclasses.replace(RECIPE, kind=kind), tiny_target(num_layers=2), 96)
    params = random_params(build_pair(tiny_target(num_layers=2), config))["drafter"]
    run.write_drafter(tmp_path / "drafter", config, params)
    read = read_drafter_config(tmp_path / "drafter")
    assert read == config
    written = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert written["max_position_embeddings"] == tiny_target().max_length
    rounded = jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), params)
    back = folder_params(tmp_path / "drafter", read, "float32")
    jax.tree.map(np.testing.assert_array_equal, back, rounded)


def test_a_drafter_that_no_published_form_holds_comes_back_from_a_checkpoint(tmp_path):
    recipe = dataclasses.replace(RECIPE, kind="dflash2", draft_vocab=40)
    config = new_drafter(recipe, tiny_target(num_layers=2), 96)
    params = random_params(build_pair(tiny_target(num_layers=2), config))["drafter"]
    for _ in range(2):  # the second one replaces the first
        run.write_drafter(tmp_path / "drafter", config, params)
    stored = open_model(tmp_path / "drafter", role="drafter")
    assert stored.config == config
    rounded = jax.tree.map(
        lambda x: x.astype("bfloat16").astype(x.dtype) if x.dtype == "float32" else x, params
    )
    jax.tree.map(np.testing.assert_array_equal, stored.load("float32"), rounded)


@pytest.mark.soak
def test_a_command_killed_again_and_again_ends_with_the_same_bytes(tmp_path):
    target = tiny_target(num_layers=2)
    own = {"bos_token_id": None, "pad_token_id": 0}
    write_huggingface(tmp_path / "target", target, model().params, **own)
    lines = [{"ids": np.random.default_rng(i).integers(0, 96, 24).tolist()} for i in range(60)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "dflash_jax", "train", "--preset", "smoke", "--mask-id=96"]
    command += ["--target", str(tmp_path / "target"), "--data", str(tmp_path / "data.jsonl")]
    command += ["--set", "steps=60", "--set", "text_prompts=40", "--set", "features=cache"]

    complaints = tmp_path / "stderr"

    def run(name: str) -> subprocess.Popen:
        with complaints.open("w") as stderr:
            return subprocess.Popen([*command, "--out", str(tmp_path / name)], stderr=stderr)

    assert run("straight").wait() == 0, complaints.read_text()
    log, kills, seen = tmp_path / "killed" / "log.jsonl", 0, -1
    while kills < 4:
        going = run("killed")
        replaced, wait = time.monotonic(), random.uniform(0.5, 6)
        while going.poll() is None and time.monotonic() < replaced + 120:
            done = len(log.read_text().splitlines()) if log.is_file() else 0
            if done > seen and time.monotonic() > replaced + wait:
                break
            time.sleep(0.01)
        if going.poll() is not None:
            break
        seen, kills = done, kills + 1
        going.kill()
        going.wait()
    assert run("killed").wait() == 0, complaints.read_text()
    assert kills > 1
    one, two = (
        (tmp_path / n / "drafter/model.safetensors").read_bytes() for n in ("straight", "killed")
    )
    assert one == two


DEVICES = """
import dataclasses, functools, jax, numpy as np
from dflash_jax.networks import build_pair
from dflash_jax.testing import random_params, tiny_drafter, tiny_target
from dflash_jax.trainer import drafter
from dflash_jax.trainer.training import Placement
from dflash_jax.trainer.recipes import SMOKE

target = tiny_target(num_layers=1)
config = tiny_drafter(target, "dflash2", block_size=4, target_layer_ids=(0,), num_layers=1,
                      windows=(None,), causal=(False,))
pair, params = build_pair(target, config), random_params(build_pair(target, config))
recipe = dataclasses.replace(SMOKE, kind="dflash2")
rng = np.random.default_rng(0)
rows = rng.integers(0, 96, (4, 24)).astype(np.int32), rng.random((4, 24)) < 0.8
found = []
for devices in (1, 4):
    place = Placement(devices)
    trees = place.replicated((params["drafter"], params["target"]))
    run = jax.jit(functools.partial(drafter.gradient, pair, recipe), static_argnums=(5,))
    found.append(jax.device_get(run(*trees, place.by_row(rows), None, np.int32(3), 5)))
assert found[0][1]["places"] > 5
assert len(jax.devices()) == 4
jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), *found)
print("equal")
"""


@pytest.mark.exhaustive
def test_loss_and_gradient_are_equal_on_one_and_on_four_devices(monkeypatch):
    flags = os.environ.get("XLA_FLAGS", "")  # compiling faster, in `make test`
    monkeypatch.setenv("XLA_FLAGS", f"{flags} --xla_force_host_platform_device_count=4")
    command = [sys.executable, "-c", DEVICES]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stdout == "equal\n", ended.stderr
