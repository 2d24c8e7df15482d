"""The command from end to end on the smoke preset: a stopped run equals a straight one."""

import json

import numpy as np
import pytest

from converters.load import load_drafter, load_target
from dflash_jax.config import check_pair, read_drafter_config, read_target_config
from dflash_jax.train import loop, tiny
from dflash_jax.train.files import remove


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("tiny")
    assert tiny.main(["--out", str(out), "--preset", "smoke"]) == 0
    return out


def test_the_result_is_a_pair_that_fits(made):
    target = read_target_config(made / "tiny" / "target")
    drafter = read_drafter_config(made / "tiny" / "drafter")
    check_pair(target, drafter)
    assert drafter.mask_token_id == target.vocab_size - 1
    load_target(made / "tiny" / "target", target)
    load_drafter(made / "tiny" / "drafter", drafter)


def test_the_card_quotes_the_measured_figures(made):
    card = (made / "tiny" / "README.md").read_text()
    results = json.loads((made / "tiny" / "results.json").read_text())
    assert f"{results['chat']['acceptance_length']:.2f}" in card
    assert "--preset smoke" in card


def test_a_second_run_does_nothing(made, capsys):
    assert tiny.main(["--out", str(made), "--preset", "smoke"]) == 0
    assert capsys.readouterr().err == ""


def test_a_folder_of_another_preset_is_refused(made, capsys):
    assert tiny.main(["--out", str(made), "--preset", "tiny-cpu"]) == 2
    assert "begun with other settings" in capsys.readouterr().err


def test_a_stopped_drafter_run_ends_with_the_same_weights(made, monkeypatch):
    weights = made / "tiny" / "drafter" / "model.safetensors"
    before = weights.read_bytes()
    loop_store = loop.store

    class Full(Exception):
        pass

    def store_and_stop(run, step, state):
        loop_store(run, step, state)
        if step == 3:
            raise Full

    for name in ("drafter", "drafter.state.safetensors", "results.json", "tiny"):
        remove(made / name)
    monkeypatch.setattr(loop, "store", store_and_stop)
    with pytest.raises(Full):
        tiny.main(["--out", str(made), "--preset", "smoke", "--stage", "drafter"])
    monkeypatch.undo()
    assert tiny.main(["--out", str(made), "--preset", "smoke", "--stage", "drafter"]) == 0
    after = (made / "drafter" / "model.safetensors").read_bytes()
    assert np.array_equal(np.frombuffer(before, np.uint8), np.frombuffer(after, np.uint8))
