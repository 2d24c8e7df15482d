"""The benchmarks beside llama.cpp: options, files, workers and figures; times are not checked.

LLAMA_CPP names the folder in which llama.cpp was built, for the test of all of it.
"""

import argparse
import json
import os
import shutil
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from benchmarks import accuracy
from benchmarks.llama_cpp import __main__ as command
from benchmarks.llama_cpp.build import llama_worker
from benchmarks.llama_cpp.files import RANDOM, shipped_blocks, write_pair
from benchmarks.llama_cpp.settings import Setting, cycle, merge
from benchmarks.llama_cpp.worker import Worker, WorkerError
from dflash_jax.config import check_pair
from dflash_jax.converters.models import open_model
from dflash_jax.testing import stored

BUILD = os.environ.get("LLAMA_CPP", "")
needs_taskset = pytest.mark.skipif(
    not shutil.which("taskset"), reason="workers are pinned by taskset, which is Linux only"
)


@pytest.mark.parametrize("length", [1, 2, 4, 7, 8])
def test_forced_acceptance_has_the_mean_that_was_asked_for(length: int) -> None:
    accepted = cycle(length, 8)
    assert sum(n + 1 for n in accepted) == length * len(accepted)
    assert all(0 <= n <= 7 for n in accepted)


def test_forced_acceptance_varies_from_round_to_round() -> None:
    assert cycle(4, 8) == (3, 0, 6, 3)


@pytest.mark.parametrize("length", [0.5, 4.5, 9])
def test_impossible_acceptance_is_refused(length: float) -> None:
    with pytest.raises(ValueError, match="expected a whole number from 1 to 8"):
        cycle(length, 8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--models", "tiny,7b"], "--models has ['7b']; known: tiny, smollm2"),
        (["--types", "q9"], "--types has ['q9']; known: f32"),
        (["--cores", "0"], "--cores has ['0']; known: 1, 2"),
        (["--only", "speed"], "--only has ['speed']; known: decode, prefill"),
        (["--rounds", "1"], "--rounds is 1; expected at least 2"),
        (["--acceptance", "9"], "--acceptance is 9.0; expected a whole number from 1 to 8"),
        ([], "it has no CMakeCache.txt. It is the folder in which llama.cpp was built"),
    ],
)
def test_impossible_options_are_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(["--llama-cpp", str(tmp_path), *words])
    assert message in capsys.readouterr().err


def test_an_incomplete_build_is_refused_by_the_file_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "CMakeCache.txt").write_text("CMAKE_HOME_DIRECTORY:INTERNAL=/nowhere\n")
    with pytest.raises(WorkerError, match=r"it has no .*libllama-common\.a"):
        llama_worker(tmp_path, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_requests_of_both_sides_are_the_same_words() -> None:
    setting = Setting("60m", "q8_0", 1, *(Path(),) * 3, accepted=(3, 0))
    assert setting.request("packed drafted", 8, [5, 6]) == "drafted 8 5,6 3,0"
    assert setting.request("llama.cpp plain", 8, [5]) == "plain 8 5 0"
    assert setting.request("packed plain one token", 8, [5]) == "plain 8 5 0"
    real = Setting("tiny", "q8_0", 1, *(Path(),) * 3, accepted=())
    assert real.request("packed drafted", 8, [5]) == "drafted 8 5"


def test_the_shipped_drafter_of_smollm2_drafts_by_itself() -> None:
    setting = Setting("smollm2-shipped", "q4_1", 1, *(Path(),) * 3, (), *shipped_blocks())
    words = setting.llama(256, drafted=True)
    assert words[words.index("--spec-draft-n-max") + 1] == "5"  # a whole block
    assert setting.advised == 3
    assert "--forced" not in setting.ours({}, drafted=True)
    assert len(set(command.first_turns())) == 8  # one of each category


def test_a_run_in_parts_adds_to_the_results(tmp_path: Path) -> None:
    path = tmp_path / "llama_cpp.json"
    for key, stage, value in (("a", "decode", 1), ("a", "start", 2), ("b", "decode", 3)):
        merge(path, key, stage, {"value": value})
    merge(path, "a", "decode", {"value": 4})
    kept = json.loads(path.read_text())
    assert kept["suite"] == "llama_cpp"
    assert kept["cases"] == {
        "a": {"decode": {"value": 4}, "start": {"value": 2}},
        "b": {"decode": {"value": 3}},
    }
    assert [*tmp_path.iterdir()] == [path]


def test_random_pairs_match_and_are_written_once(tmp_path: Path) -> None:
    pair = write_pair("2m", "q8_0", tmp_path)
    target, drafter = open_model(pair.target), open_model(pair.drafter)
    check_pair(target.config, drafter.config)  # pyrefly: ignore
    assert target.config.hidden_size == RANDOM["2m"].width
    assert set(stored(target)) >= {"layers_0/mlp/down", "head"}
    written = pair.target.stat().st_mtime_ns
    assert write_pair("2m", "q8_0", tmp_path) == pair
    assert pair.target.stat().st_mtime_ns == written


def test_scores_of_known_logits() -> None:
    windows = np.array([[0, 1, 2, 3]])
    uniform = np.zeros((1, 4, 8), np.float32)
    peaked = uniform.copy()
    peaked[0, :, 0] = 2.0
    same = accuracy.scores(peaked, peaked, windows)
    assert (same.max_error, same.relative_error, same.kl_divergence) == (0, 0, 0)
    assert same.greedy_agreement == 1
    found = accuracy.scores(uniform, peaked, windows)
    assert found.max_error == 2
    assert found.relative_error == pytest.approx(1)
    p = np.exp(2) / (np.exp(2) + 7)
    rest = (1 - p) / 7
    kl = p * np.log(p * 8) + 7 * rest * np.log(rest * 8)
    assert found.kl_divergence == pytest.approx(kl)
    assert found.perplexity == pytest.approx(8)


@needs_taskset
def test_a_worker_answers_line_by_line_and_its_own_output_is_skipped() -> None:
    code = "import sys\nprint('noise'); print('{\"ready\": true}', flush=True)\n"
    code += "for line in sys.stdin: print('{\"said\": \"' + line.strip() + '\"}', flush=True)"
    with Worker([sys.executable, "-c", code], 1) as worker:
        assert worker.first == {"ready": True}
        assert worker.ask("plain 1 2") == {"said": "plain 1 2"}


@needs_taskset
def test_a_worker_that_ends_is_reported_with_its_last_words() -> None:
    code = "import sys; sys.exit('there is no such model')"
    with pytest.raises(WorkerError, match="code 1:\nthere is no such model"):
        Worker([sys.executable, "-c", code], 1)
    with pytest.raises(WorkerError, match="were asked for"):
        Worker([sys.executable], 10_000)


@pytest.mark.soak
def test_our_worker_accepts_as_many_drafts_as_requests_say(tmp_path: Path) -> None:
    from benchmarks.llama_cpp.ours import JaxWorker

    pair = write_pair("2m", "q8_0", tmp_path)
    plan = json.dumps({"weights": "packed", "max_length": 256})
    options = argparse.Namespace(
        target=str(pair.target), drafter=str(pair.drafter), plan=plan, forced=True, warm_up=True
    )
    with warnings.catch_warnings(action="ignore"):
        worker = JaxWorker(options)
    plain = worker.answer("plain 33 5,6,7 0")
    drafted = worker.answer("drafted 33 5,6,7 3,0,6,3")
    assert drafted["tokens"] == plain["tokens"]
    assert (plain["rounds"], drafted["rounds"]) == (32, 8)
    out = tmp_path / "logits"
    assert worker.answer(f"logits {out} 5,6,7") == {"rows": 3}
    logits = np.fromfile(out, np.float32).reshape(3, RANDOM["2m"].vocabulary)
    assert logits[-1].argmax() == plain["tokens"][0]


@pytest.mark.soak
@pytest.mark.skipif(not BUILD, reason="needs llama.cpp: name the folder it was built in, LLAMA_CPP")
def test_all_stages_of_a_small_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--llama-cpp", BUILD, "--models", "2m", "--types", "q8_0", "--cores", "1"]
    common += ["--rounds", "2", "--cache", str(tmp_path)]
    results = tmp_path / "results.json"
    assert command.main([*common, "--json", str(results)]) == 0
    case = json.loads(results.read_text())["cases"]["2m/q8_0/1"]
    assert set(case) == {"decode", "prefill"}
    lengths = {name: s["acceptance_length"] for name, s in case["decode"]["series"].items()}
    assert lengths["llama.cpp drafted"] == pytest.approx(lengths["packed drafted"])
    assert "2m/q8_0/1 prefill" in capsys.readouterr().out
