"""Features recorded while the target answers, and those of a separate pass."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dflash_jax.config import TargetConfig
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.networks import build_pair
from dflash_jax.plan import Weights
from dflash_jax.target_model import TargetModel
from dflash_jax.testing import random_params, tiny_drafter, tiny_hybrid, tiny_target
from dflash_jax.trainer import features, training
from dflash_jax.trainer.feature_store import FeatureOrigin, FeatureStore
from dflash_jax.trainer.groups import StageProgress
from dflash_jax.trainer.recipes import SMOKE, Bucket, Schedule, recipe
from dflash_jax.trainer.recorder import Recorder
from dflash_jax.trainer.regenerate import AnswerPrompt, Recording, answer, local_decoder
from dflash_jax.trainer.rows import Document, TokenRows, one_per_row
from dflash_jax.trainer.setup import rounded
from dflash_jax.utils.progress import time_left

BUCKET = Bucket(length=48, rows=3)
LAYERS = (0, 1, 2)


def test_a_cache_holds_two_taps_of_a_target() -> None:
    asked: list[tuple[object, ...]] = []
    Recorder(taps=LAYERS, width=32).empty(lambda *sizes: asked.append(sizes))  # type: ignore[arg-type]
    assert asked == [(1, 32, None)] * 2  # heads, width, window


def store_in(folder: Path, weights: Weights = "float") -> FeatureStore:
    return FeatureStore(
        folder,
        FeatureOrigin(
            target="", weights=weights, taps=LAYERS, final=False, width=32, dtype="float32"
        ),
    )


def target(config: TargetConfig) -> TargetModel:
    return TargetModel(
        config, jax.device_put(random_params(build_pair(config, None))["target"]), "float32"
    )


def prompts(count: int) -> list[AnswerPrompt]:
    rng = np.random.default_rng(0)
    given = [rng.integers(0, 97, 5 + 3 * i % 29).astype(np.int32) for i in range(count)]
    return [AnswerPrompt(Document(ids, np.zeros(len(ids), bool)), 12) for ids in given]


def passed(
    store: FeatureStore, model: TargetModel, rows: list[TokenRows], together: int = 3
) -> features.FeatureCache:
    drafter = tiny_drafter(model.config, target_layer_ids=LAYERS)
    return features.fill_cache(
        store,
        build_pair(model.config, drafter),
        model,
        rows,
        chosen=[np.arange(len(part.tokens)) for part in rows],
        together=[together] * len(rows),
        dtype="float32",
        report=lambda line: None,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("weights", "tolerance"), [("float", 1e-3), pytest.param("int8", 0.05, marks=pytest.mark.soak)]
)
def test_features_recorded_while_decoding_are_those_of_a_second_pass(
    tmp_path: Path, weights: Weights, tolerance: float
) -> None:
    """The recorded features are those of the steps that decoded the answers.

    A second pass calls the target with other numbers of tokens, by which a processor may choose
    other kernels of a float product, whose last bits differ. An activation on the edge between two
    int8 codes then changes by one code, 1/127 of the largest activation. The features of another
    place differ by about their own length.
    """
    exact = target(tiny_hybrid(num_layers=4, recurrent=(True, False) * 2))
    model = rounded(exact, weights)
    store = store_in(tmp_path / "decoded", weights)
    recording = Recording(store, LAYERS, 30)  # some rows are cut
    plain = answer(
        tmp_path / "a",
        local_decoder(model, weights=weights),
        prompts(14),
        [BUCKET],
        report=lambda line: None,
    )
    found = answer(
        tmp_path / "b",
        local_decoder(model, recording, weights=weights),
        prompts(14),
        [BUCKET],
        report=lambda line: None,
    )
    assert [x.ids.tolist() for x in found] == [x.ids.tolist() for x in plain]
    rows = one_per_row(found, [Bucket(length=20, rows=1), Bucket(length=30, rows=1)], fill=0)
    again = passed(store_in(tmp_path / "passed", weights), model, rows)
    cache = passed(store, model, rows)
    assert not list(store.folder.glob(f"{features.PASS}*"))  # nothing was computed again
    for bucket, part in enumerate(rows):
        numbers = np.arange(len(part.tokens))
        ours, theirs = cache.at(bucket, numbers), again.at(bucket, numbers)
        places = part.real.copy()
        places[np.arange(len(places)), part.real.sum(axis=1) - 1] = False  # the last has no taps
        for one, other in zip(ours.taps, theirs.taps, strict=True):
            one, other = one[places].astype(np.float32), other[places].astype(np.float32)
            error = np.linalg.norm(one - other, axis=-1)
            assert (error <= tolerance * np.linalg.norm(other, axis=-1)).all()
        decided = part.wanted[:, 1:] & part.real[:, 1:]
        best = np.asarray(ours.best)[:, :-1][decided]
        np.testing.assert_array_equal(best, part.tokens[:, 1:][decided])  # as decoding decided
        if weights == "float":
            np.testing.assert_array_equal(best, np.asarray(theirs.best)[:, :-1][decided])


def test_quantised_features_of_a_step_are_those_of_the_cache(tmp_path: Path) -> None:
    model = rounded(target(tiny_target(num_layers=4)), "int8")
    tokens = np.random.default_rng(1).integers(0, 97, (6, 24)).astype(np.int32)
    everything = np.ones(tokens.shape, bool)
    rows = [TokenRows(tokens, everything, everything)]
    pair = build_pair(model.config, tiny_drafter(model.config, target_layer_ids=LAYERS))
    how = {"dtype": "float32", "keep": False}
    assert features.quantised_reader(pair, model, rows, weights="float", **how) is None
    read = features.quantised_reader(pair, model, rows, weights="int8", **how)
    if read is None:
        pytest.skip("there are no native kernels on this processor")
    cached = passed(store_in(tmp_path / "features", "int8"), model, rows)
    chosen = np.asarray([4, 1])
    found, expected = read.at(0, chosen), cached.at(0, chosen)
    np.testing.assert_array_equal(found.best, expected.best)
    for tap, other in zip(found.taps, expected.taps, strict=True):
        np.testing.assert_array_equal(tap, other)


@pytest.mark.exhaustive
def test_recorded_features_survive_a_kill_at_every_point(tmp_path: Path) -> None:
    model, asked = target(tiny_target(num_layers=4)), prompts(26)

    def run(name: str) -> dict[str, bytes]:
        store = store_in(tmp_path / name)
        recording = Recording(store, LAYERS, 48)
        answer(
            tmp_path / f"{name}.jsonl",
            local_decoder(model, recording),
            asked,
            [BUCKET],
            report=lambda line: None,
        )
        return {path.name: path.read_bytes() for path in sorted(store.folder.iterdir())}

    whole = run("whole")
    assert len(whole) == 1 + 2 * 3
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    # Killed after the part and before the answers, and between the two files of a part.
    for number, lost in enumerate((".npz.nothing", ".npz")):
        folder = store_in(tmp_path / f"killed{number}").folder
        for name, content in whole.items():
            killed = "000001" in name and name.endswith(lost)
            if "000002" not in name and not killed:
                (folder / name).write_bytes(content)
        (tmp_path / f"killed{number}.jsonl").write_text(lines[0] + lines[1][:5])
        found = run(f"killed{number}")
        assert {n: x for n, x in found.items() if not n.endswith("npz")} == {
            n: x for n, x in whole.items() if not n.endswith("npz")
        }
        assert found.keys() == whole.keys()


@pytest.mark.soak
def test_a_second_pass_resumes_and_computes_no_part_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = target(tiny_target(num_layers=4))
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 97, (9, 16)).astype(np.int32)
    tokens[8] = tokens[0]  # an equal row has equal features
    real = np.arange(16)[None] < rng.integers(4, 16, (9, 1))
    rows = [TokenRows(tokens, real, real)]
    monkeypatch.setattr(features, "PART_TOKENS", 32)
    straight = passed(store_in(tmp_path / "straight"), model, rows, 2).at(0, np.arange(9))
    add, left = FeatureStore.add, [2]

    def full(self: FeatureStore, *arguments: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise CheckpointError("full")
        add(self, *arguments)  # pyrefly: ignore

    with monkeypatch.context() as patch:
        patch.setattr(FeatureStore, "add", full)
        with pytest.raises(CheckpointError, match="full"):
            passed(store_in(tmp_path / "cut"), model, rows, 2)
    parts = {path: path.stat().st_mtime_ns for path in (tmp_path / "cut").glob("*/*.np*")}
    assert len(parts) == 4
    resumed = passed(store_in(tmp_path / "cut"), model, rows, 2).at(0, np.arange(9))
    jax.tree.map(np.testing.assert_array_equal, resumed, straight)
    assert {path: path.stat().st_mtime_ns for path in parts} == parts


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"loss": "kl"}, marks=pytest.mark.exhaustive),
        pytest.param({"drafter_dtype": "bfloat16"}, marks=pytest.mark.exhaustive),
        pytest.param({"parts": 2}, marks=pytest.mark.exhaustive),
        pytest.param({"target_weights": "int8"}, marks=pytest.mark.exhaustive),
    ],
)
def test_training_from_kept_features_has_the_bits_of_training_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Epochs whose batches have other rows together."""
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 96, (6, 24)).astype(np.int32)
    real = np.arange(24)[None] < rng.integers(12, 24, (6, 1))
    rows = [TokenRows(tokens, real, real)]
    base = dataclasses.replace(
        SMOKE,
        taps=(0, 1),
        anchors=4,
        optimizer="adamw",
        buckets=(Bucket(length=24, rows=4),),
        schedule=Schedule(steps=6, rate=1e-2, save_every=6),
        **settings,
    )
    model = rounded(target(tiny_target(num_layers=2)), base.target_weights)

    def fitted(name: str, place: str) -> tuple[Any, list[tuple[float, float]]]:
        out = tmp_path / name
        chosen = dataclasses.replace(base, features=place)
        found = training.fit(model, chosen, 96, rows, out, identity="", report=str)
        log = map(json.loads, (out / "log.jsonl").read_text().splitlines())
        return found.params, [(line["loss"], line["gradient"]) for line in log]

    expected, losses = fitted("without", "online")
    monkeypatch.setattr(features, "PART_TOKENS", 64)
    for name in "first", "second":
        params, found = fitted(name, str(tmp_path / "features"))
        assert found == losses
        jax.tree.map(np.testing.assert_array_equal, params, expected)
        monkeypatch.setattr(features, "target_features", None)  # the second reads what is there
    [folder] = (tmp_path / "features").iterdir()
    assert [*folder.glob("pass.*.npy")]


def test_a_folder_of_features_is_absolute_and_no_part_of_a_runs_identity() -> None:
    chosen = recipe("smoke", ["features=./kept"])
    assert Path(chosen.features) == Path("kept").absolute()
    assert chosen.settings == recipe("smoke").settings
    assert recipe("smoke", ["features=cache"]).settings["features"] == "cache"
    with pytest.raises(ConfigError, match="features is 'chache'; expected online, cache or a fold"):
        recipe("smoke", ["features=chache"])


def test_only_rows_that_were_not_kept_are_computed(tmp_path: Path) -> None:
    model = target(tiny_target(num_layers=4))
    tokens = np.random.default_rng(1).integers(0, 97, (5, 16)).astype(np.int32)
    every = np.ones(tokens.shape, bool)
    store = store_in(tmp_path)
    for count in 2, 5:
        passed(store, model, [TokenRows(tokens[:count], every[:count], every[:count])])
    sizes = [len(np.load(path)["sizes"]) for path in store.folder.glob("*.npz")]
    assert sorted(sizes) == [2, 3]


def test_progress_lines_have_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*map(time_left, (7.2, 600.0, 12_000.0))] == [
        "7 s left",
        "10 min left",
        "3 h 20 min left",
    ]
    now, lines = [0.0], []
    monkeypatch.setattr("dflash_jax.trainer.groups.time.monotonic", lambda: now[0])
    progress = StageProgress("answers", 40, "groups", lines.append, done=10)
    for seconds, count in (4.0, 2), (20.0, 8):
        now[0] = seconds
        progress(count)
    assert lines == ["answers 20/40 groups, 40 s left"]  # 2 s each, those of this call only
