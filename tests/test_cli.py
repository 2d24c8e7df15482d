"""The command line: output, exit codes and errors."""

import argparse
import dataclasses
import fcntl
import io
import json
import os
import re
import shutil
import signal
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from dflash_jax import Plan, loading
from dflash_jax.bench import compare
from dflash_jax.cli import main, parser, probe, terminal, verify
from dflash_jax.cli.generate import statistics
from dflash_jax.cli.options import chosen_plan, open_pair, prompt_ids
from dflash_jax.engine.core import EngineCore
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.result import Result, Stats
from dflash_jax.graph.build import CompiledPrograms
from dflash_jax.networks import build_pair
from dflash_jax.testing import random_params, tiny_drafter, tiny_target
from dflash_jax.trainer.run import write_huggingface
from dflash_jax.utils.command import INTERRUPTED, PIPE_CLOSED

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module", autouse=True)
def cache_inside_the_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Store compiled programs in a temporary folder, with the native kernels of other tests."""
    names = [
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    ]
    before = {name: jax.config.values[name] for name in names}
    folder = tmp_path_factory.mktemp("cache")
    kernels = Path(os.environ["XDG_CACHE_HOME"], "dflash_jax", "native")
    if kernels.exists():
        shutil.copytree(kernels, folder / "dflash_jax" / "native")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command; return exit code, standard output and standard error."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call


@pytest.fixture(scope="module")
def pair(oracle: Path) -> list[object]:
    folder = oracle / "drafters"
    models = ["--target", folder / "target_qwen3", "--drafter", folder / "v1_trained"]
    return [*models, "--max-length", 96, "--chunk", 16]


@pytest.fixture(scope="module")
def official(oracle: Path) -> dict[str, list[int]]:
    """Prompt and greedy continuation."""
    v = load_file(oracle / "drafters" / "v1_trained" / "vectors.safetensors")
    prompt = v["prompt_ids"][0].tolist()
    return {"prompt": prompt, "output": v["spec.output_ids"][0, len(prompt) :].tolist()}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """Random models with few layers, which compile fast, for tests that ignore the tokens."""
    folder = tmp_path_factory.mktemp("small")
    target = tiny_target(num_layers=2, vocab_size=256)
    one = {"num_layers": 1, "windows": (None,), "causal": (False,)}
    drafter = tiny_drafter(target, target_layer_ids=(0,), **one)
    params = random_params(build_pair(target, drafter))
    write_huggingface(
        folder / "target", target, params["target"], bos_token_id=None, pad_token_id=0
    )
    own = {"max_position_embeddings": 1000, "tie_word_embeddings": False}
    write_huggingface(folder / "drafter", drafter, params["drafter"], **own)
    models = ["--target", folder / "target", "--drafter", folder / "drafter"]
    return [*models, "--max-length", 96, "--chunk", 16]


@pytest.fixture(scope="module")
def asked(small: list[object], official: dict[str, list[int]]) -> list[object]:
    ids = ",".join(map(str, official["prompt"]))
    return [*small, "--prompt-ids", ids, "-n", 20, "--ignore-eos"]


@pytest.fixture(scope="module")
def said(small: list[object], official: dict[str, list[int]]) -> list[int]:
    """Return the small target's answer to `asked`."""
    engine = loading.load(small[1], small[3], plan=Plan(max_length=96, chunk=16))
    result = engine.generate(official["prompt"], max_tokens=20, ignore_eos=True, speculative=False)
    return result.token_ids


@pytest.fixture(scope="module")
def request_(pair: list[object], official: dict[str, list[int]]) -> list[object]:
    ids = ",".join(map(str, official["prompt"]))
    return [*pair, "--prompt-ids", ids, "-n", 20, "--ignore-eos"]


# -- generate ----------------------------------------------------------------------------------


def test_the_command_line_reaches_every_choice_of_a_plan() -> None:
    without_flag = {"lookahead", "stored", "stop_slots", "queue", "prefix_folder", "prefix_disk"}
    flags = """--rows 2 --steps-per-call 3 --max-length 64 --block 4 --chunk 16 --dtype float16
        --weights int8 --kv-dtype int8 --kernels xla --plain-width 1
        --inexact --no-rings --report-drafts --report-top 5 --activations float
        --no-report-tool-call-margin --taps-at late --confidence-threshold 0.5 --ngram 5
        --draft-window 9
            --memory-limit 9 --prefix-cache 8
        --mesh 2x2"""
    plan = chosen_plan(parser().parse_args(["explain", *flags.split()]))
    default = {"devices"}  # cannot be combined with a mesh
    same = {f.name for f in dataclasses.fields(Plan) if getattr(plan, f.name) == f.default}
    assert same == without_flag | default
    assert chosen_plan(parser().parse_args(["explain", "--drafter-device", "1"])).devices == (0, 1)


def test_a_plan_may_come_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    written = Plan(rows=3, max_length=64, exact=False, mesh=(3, 1), lookahead=0, ngram=5)
    path.write_text(json.dumps(written.to_json()))
    for command in ("generate", "chat", "serve", "verify", "bench", "explain", "replay"):
        more = [str(path)] if command == "replay" else []
        read = parser().parse_args([command, "--plan", str(path), *more])
        assert chosen_plan(read) == written, command
    for order in (["--plan", str(path), "--rows", "6"], ["--rows", "6", "--plan", str(path)]):
        assert chosen_plan(parser().parse_args(["explain", *order])).rows == 6
    for order in (["--plan", str(path), "--rows", "1"], ["--rows", "1", "--plan", str(path)]):
        given = parser().parse_args(["explain", "--mesh", "1x1", *order])
        assert chosen_plan(given).rows == 1  # also what is the default without a file
    path.write_text('{"block": 4, "devices": [0, 1]}')
    read = parser().parse_args(["explain", "--max-length", "32", "--plan", str(path)])
    assert chosen_plan(read) == Plan(block=4, max_length=32, devices=(0, 1))
    for text, says in (
        ("[]", "expected one JSON object"),
        ('{"row": 2}', "'row' is no field of a plan; did you mean 'rows'?"),
        ('{"rows": 0, "block": 1}', "rows is 0; expected an integer of at least 1. block is 1; "),
        ('{"drafter": 5}', "drafter is 5; expected a text"),
        ("[" * 100_000, "the plan is not JSON"),
        ("\x80", "the plan is not JSON"),
    ):
        path.write_text(text)
        with pytest.raises(SystemExit, match="2"):
            main(["explain", "--plan", str(path)])
        assert says in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "--plan", str(tmp_path)])
    assert "Is a directory" in capsys.readouterr().err


def test_a_block_past_the_drafters_own_is_warned_of_on_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for block, says in (
        ("8", ""),
        ("9", "dflash-jax: block 9 is wider than the 8 the drafter was"),
    ):
        open_pair(parser().parse_args(["generate", "Hello!", "--block", block]))
        out, err = capsys.readouterr()
        assert out == ""
        assert len(err.splitlines()) == bool(says)
        assert err.startswith(says)


def test_generate_prints_the_output_alone_and_statistics_on_standard_error(
    run: Run, asked: list[object], said: list[int]
) -> None:
    code, out, err = run("generate", *asked)
    assert code == 0
    [tokens] = out.splitlines()
    assert [int(i) for i in tokens.split()] == said
    assert err.startswith("[20 tokens (length) | ")
    assert err.endswith(" s]\n")
    for part in (" tok/s | first token ", "acceptance length ", "per position ", "compile "):
        assert part in err
    assert all(len(line) <= 80 for line in err.splitlines())


@pytest.mark.exhaustive
def test_generate_without_drafting_prints_the_same_tokens(
    run: Run, asked: list[object], said: list[int]
) -> None:
    _, out, err = run("generate", *asked, "--plain")
    [tokens] = out.splitlines()
    assert [int(i) for i in tokens.split()] == said
    assert "plain decoding" in err
    assert "acceptance" not in err
    assert run("generate", *asked, "--quiet", "--steps-per-call", 2) == (0, tokens + "\n", "")


def test_generate_marks_drafts_if_asked_to(run: Run, asked: list[object], said: list[int]) -> None:
    code, out, err = run("generate", *asked, "--show-drafts")
    assert code == 0
    tokens, legend = out.splitlines()
    assert "[-" in tokens
    kept = re.sub(r"\[-[^]]*\]", "", tokens)
    assert [int(i) for i in re.sub(r"[][+!]", " ", kept).split()] == said
    assert legend.startswith("[+accepted draft], target's own token")
    assert "acceptance length" in legend
    assert err.startswith("[20 tokens (length) | ")
    code, _, err = run("generate", *asked, "--show-drafts", "--compare")
    assert code == 1
    assert "drop it or --show-drafts" in err


def test_colours_are_for_terminals_unless_they_are_turned_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert not terminal.has_colours()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert terminal.has_colours()
    monkeypatch.setenv("TERM", "dumb")
    assert not terminal.has_colours()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not terminal.has_colours()


@pytest.mark.parametrize("width", [80, 40, 20])
def test_statistics_fit_the_terminal_whatever_the_block(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for places in (1, 7, 15):
        stats = Stats(
            output_tokens=4096,
            rounds=1000,
            acceptance_lengths=[4] * 1000,
            accepted_per_position=[999] * places,
            first_token_s=12.345,
            decode_s=1.0,
        )
        text = statistics(Result([7], None, "length", stats), 123.4)
        lines = text.splitlines()
        assert max(map(len, lines)) <= width
        if (width, places) == (80, 7):  # full lines, broken between statistics
            assert lines == [
                "[4096 tokens (length) | 4095.0 tok/s | first token 12345 ms |",
                " acceptance length 4.00 | per position 1.00 1.00 1.00 1.00 1.00 1.00 1.00 |",
                " compile 123.4 s]",
            ]
        joined = " ".join(line.strip() for line in lines)
        assert joined.count("1.00") == places
        assert joined.startswith("[4096 tokens (length) | ")
        assert joined.endswith(" | compile 123.4 s]")


def test_the_width_of_output_is_its_terminals_and_80_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    ours, theirs = os.openpty()
    try:
        with open(theirs, "w", closefd=False) as screen:
            for given, used in ((40, 40), (132, 132), (3, 20), (0, 80)):
                fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, given, 0, 0))
                assert terminal.columns(screen) == used
        with (tmp_path / "file").open("w") as file:
            assert terminal.columns(file) == 80
            monkeypatch.setenv("COLUMNS", "50")
            assert terminal.columns(file) == 50
    finally:
        os.close(ours)
        os.close(theirs)


def test_generate_json_is_one_object(
    run: Run, request_: list[object], official: dict[str, list[int]]
) -> None:
    code, out, _ = run("generate", *request_, "--json")
    found = json.loads(out)
    assert code == 0
    assert set(found) == {"token_ids", "text", "finish_reason", "stats"}
    assert found["token_ids"] == official["output"][:20]
    assert (found["text"], found["finish_reason"]) == (None, "length")
    stats = found["stats"]
    assert stats["prompt_tokens"] == len(official["prompt"])
    assert stats["output_tokens"] == 20
    assert 1 + sum(stats["acceptance_lengths"]) + stats["plain_steps"] == 20
    for name in ("rounds", "drafted", "accepted", "prefill_s", "decode_s", "tokens_per_s"):
        assert stats[name] > 0
    for name in ("compile_s", "accepted_per_position", "fallbacks", "recovery"):
        assert name in stats


@pytest.mark.parametrize(("raw", "read"), [(False, "Hello"), (True, "Hello\n")])
def test_a_prompt_from_standard_input_has_no_line_break_at_its_end_unless_it_is_raw(
    monkeypatch: pytest.MonkeyPatch, raw: bool, read: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    options = argparse.Namespace(prompt_ids=None, prompt="-", raw=raw)
    tokenizer = SimpleNamespace(template=None, encode=lambda text: text)
    assert prompt_ids(options, tokenizer) == read


@pytest.mark.exhaustive
def test_compare_times_the_modes_and_says_that_tokens_are_equal(
    run: Run, asked: list[object], said: list[int]
) -> None:
    code, out, _ = run("generate", *asked, "--compare", "--json")
    found = json.loads(out)
    assert (code, found["equal"]) == (0, True)
    assert found["token_ids"] == said
    assert set(found["tokens_per_s"]) == {"speculative", "plain", "plain1"}
    assert found["baseline"] in ("plain", "plain1")
    assert found["speedup"] > 0
    assert found["precision"] == "float32"
    code, out, err = run("generate", *asked, "--compare")
    assert code == 0
    tokens, *table = out.splitlines()
    assert [int(i) for i in tokens.split()] == said
    labels = [" ".join(row.split()[:-2]) for row in table[:-1]]
    assert labels in (
        ["speculative", "plain, block-wide", "plain, one token"],
        ["speculative", "plain", "plain, no drafter"],  # a token alike at any width
    )
    assert re.fullmatch(r"tokens equal; speculative is \S+x as fast as '(.+)', float32", table[-1])
    assert table[-1].split("'")[1] in labels[1:]
    assert err.startswith("[20 tokens (length) | acceptance length ")  # the table has the speeds


def interrupted_after(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during the nth step of the engine."""
    step, seen = EngineCore.step, []

    def pressed(self: EngineCore) -> None:
        seen.append(1)
        if len(seen) == calls:
            raise KeyboardInterrupt
        step(self)

    monkeypatch.setattr(EngineCore, "step", pressed)


def test_an_interrupt_ends_with_the_text_so_far(
    run: Run,
    asked: list[object],
    said: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupted_after(6, monkeypatch)
    code, out, err = run("generate", *asked, "--steps-per-call", 2)
    [tokens] = out.splitlines()
    received = [int(i) for i in tokens.split()]
    assert code == INTERRUPTED == 130
    assert 0 < len(received) < 20
    assert received == said[: len(received)]
    assert f"[{len(received)} tokens (cancelled)" in err
    interrupted_after(6, monkeypatch)
    code, out, _ = run("generate", *asked, "--steps-per-call", 2, "--json")
    found = json.loads(out)
    assert (code, found["finish_reason"]) == (130, "cancelled")
    received = found["token_ids"]  # a call runs one step or two, depending on timing
    assert 0 < len(received) < 20
    assert received == said[: len(received)]


def test_an_interrupt_before_there_is_text_says_so(
    run: Run, request_: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "open_pair", pressed)
    code, out, err = run("generate", *request_)
    assert (code, out, err.strip()) == (130, "", "dflash-jax: interrupted")


# -- explain -----------------------------------------------------------------------------------


def test_explain_reports_a_pair_without_compiling(
    run: Run, pair: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("dflash_jax.graph.build._compile")
    code, out, err = run("explain", *pair, "--device", "H200", "--params")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "target   qwen3  5 layers" in out
    assert "drafter  dflash v1  3 layers" in out
    assert "device   H200" in out
    assert "bfloat16" in out
    assert "speculative[sampled]" in out
    times = re.findall(r"(\S+) ms [mc]", out)
    assert len(times) == 6
    assert all(0 < float(time) < 1 for time in times)  # columns do not overlap
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if "/" in line}
    assert rows["target/embed"] == ["bfloat16", "64x256"]
    assert rows["drafter/fc"] == ["bfloat16", "128x64"]


def test_explain_json_is_one_object(run: Run, pair: list[object]) -> None:
    code, out, _ = run("explain", *pair, "--json", "--server")
    served = json.loads(out)
    assert served["plan"]["prefix_cache"] == served["budget"]["prefixes"] == 2**28
    assert served["plan"]["max_length"] == 96
    assert served["budget"]["process"] > sum(
        served["budget"][part] for part in ("weights", "caches", "temporaries", "prefixes")
    )
    code, out, _ = run("explain", *pair, "--json", "--block", 4, "--rows", 2)
    found = json.loads(out)
    assert code == 0
    assert (found["plan"]["block"], found["plan"]["rows"], found["plan"]["exact"]) == (4, 2, True)
    assert found["plan"]["dtype"] == "float32"
    steps = {p["name"].partition("[")[0] for p in found["programs"]}
    assert steps >= {"prefill", "plain", "speculative", "clear_rows"}
    _, out, _ = run("explain", *pair, "--json", "--inexact", "--steps-per-call", 3)
    assert json.loads(out)["plan"]["steps_per_call"] == 3
    single, wide = (
        next(p["work"] for p in report["programs"] if p["name"].startswith("plain["))
        for report in (json.loads(out), found)
    )
    assert single["flops"] < wide["flops"]


def test_explain_prints_a_program(
    run: Run, pair: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.delattr("dflash_jax.graph.build._compile")
        assert "func.func public @main" in run("explain", *pair, "--stablehlo", "clear_rows")[1]
    assert run("explain", *pair, "--hlo", "clear_rows")[1].startswith("HloModule")


@pytest.mark.exhaustive
def test_explain_compiles_when_it_is_told_to(run: Run, small: list[object]) -> None:
    options = ["explain", "--target", small[1], "--max-length", 32, "--chunk", 8, "--compile"]
    code, out, _ = run(*options, "--json")
    programs = json.loads(out)["programs"]
    assert code == 0
    assert programs
    assert all(program["compile_s"] > 0 for program in programs)
    assert all(program["aliased_bytes"] >= 0 for program in programs)


# -- verify ------------------------------------------------------------------------------------


def test_verify_returns_zero_when_all_tokens_are_equal(run: Run, asked: list[object]) -> None:
    options = [o for o in asked if o != "--ignore-eos"]
    code, out, _ = run("verify", *options)
    assert code == 0
    assert "equal" in out.splitlines()[0]
    assert out.splitlines()[-1].endswith("float32: speculative equals plain")
    code, out, _ = run("verify", *options, "--json")
    found = json.loads(out)
    assert (code, found["prompts"], found["different"]) == (0, 1, 0)
    assert found["first_differences"] == [None]
    assert found["plan"]["block"] == 8


@pytest.mark.exhaustive
def test_verify_compares_sampled_tokens_too(run: Run, asked: list[object]) -> None:
    options = [o for o in asked if o != "--ignore-eos"]
    code, out, _ = run("verify", *options, "--temperature", 1.5, "--top-p", 0.9, "--json")
    found = json.loads(out)
    assert (code, found["different"]) == (0, 0)
    assert found["tokens"] > 0


@pytest.mark.exhaustive
def test_drafts_from_the_text_need_no_drafter(run: Run, asked: list[object]) -> None:
    options = [o for o in asked if o != "--ignore-eos"]
    options[options.index("--drafter") + 1] = "ngram"
    code, out, _ = run("verify", *options)
    assert code == 0
    assert out.splitlines()[-1].endswith("float32: speculative equals plain")


def test_verify_claims_no_acceptance_length_without_a_round() -> None:
    one = Result([7], None, "length", Stats(output_tokens=1))
    assert verify.line(compare.LosslessCheck((1,), one, one)).endswith(
        "acceptance length    -  equal"
    )


def test_a_line_of_verify_fits_80_columns() -> None:
    long = [Result([*range(9999), last], None, "length", Stats(rounds=9)) for last in (1, 2)]
    for result in long:
        result.stats.acceptance_lengths.append(64)
    shown = verify.line(compare.LosslessCheck((1,) * 99999, *long))
    assert shown.endswith("DIFFER at token 9999")
    assert len(shown) <= 80


def test_verify_returns_one_when_a_token_differs(
    run: Run, asked: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = compare.check

    def wrong(engine: Engine, prompt: list[int], **options: Any) -> compare.LosslessCheck:
        checked = right(engine, prompt, **options)
        checked.plain.token_ids[3] += 1
        return checked

    monkeypatch.setattr(compare, "check", wrong)
    options = [o for o in asked if o != "--ignore-eos"]
    code, out, _ = run("verify", *options)
    assert code == 1
    assert "DIFFER at token 3" in out
    assert "1 prompts DIFFER" in out
    code, out, _ = run("verify", *options, "--json")
    assert (code, json.loads(out)["first_differences"]) == (1, [3])


# -- replay ------------------------------------------------------------------------------------


def test_replay_reports_every_kind_in_80_columns(
    run: Run, small: list[object], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    turns: list[dict[str, Any]] = [{"prompt_ids": [n], "max_tokens": 4} for n in range(3)]
    turns[1] |= {"kind": "a-kind-of-turns", "expected": "bounded length", "id": "a turn"}
    turns[2] |= {"expected": "tool call"}
    trace.write_text("\n".join(map(json.dumps, turns)))
    code, out, err = run("replay", *small, trace)
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[0] == "recovery off"
    named = ["turns", "empty", "tool", "call", "prose", "bounded", "equal", "as", "expected"]
    assert lines[1].split() == ["kind", *named]
    assert [line.split() for line in lines[2:5]] == [
        ["turn", "2", "0", "0", "0", "2", "2", "1"],
        ["a-kind-of-turns", "1", "0", "0", "0", "1", "1", "1"],
        ["total", "3", "0", "0", "0", "3", "3", "2"],
    ]
    assert lines[5] == "  not as expected: line 3"
    assert lines[6] == "recovery on"


def test_replay_names_a_turn_that_cannot_be_answered_before_it_compiles_anything(
    run: Run, small: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(CompiledPrograms, "compile")
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt_ids": [1], "max_tokens": 4}\n{"prompt_ids": [256]}\n')
    code, out, err = run("replay", *small, trace)
    assert (code, out) == (1, "")
    assert err.startswith("dflash-jax: RequestError: the turn 'line 2': token ids [256] are out")


# -- probe -------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_probe_writes_logits_and_hidden_states(
    run: Run, oracle: Path, tmp_path: Path, suffix: str
) -> None:
    folder = oracle / "targets" / "qwen3"
    v = load_file(folder / "vectors.safetensors")
    ids = v["input_ids"][0].tolist()
    out = tmp_path / f"probe.{suffix}"
    command = ["probe", "--target", folder, "--prompt-ids", ",".join(map(str, ids)), "--out", out]
    code, said, _ = run(*command, "--top", 2)
    assert code == 0
    assert said.splitlines()[0] == "48 tokens, logits (48, 256), hidden states (4, 48, 64)"
    assert len(said.splitlines()) == 4
    read = dict(np.load(out)) if suffix == "npz" else load_file(out)
    assert read["token_ids"].tolist() == ids
    np.testing.assert_allclose(read["logits"], v["logits"][0], atol=2e-4)
    for i, hidden in enumerate(read["hidden"]):
        np.testing.assert_allclose(hidden, v[f"hidden.{i}"][0], atol=2e-4)
    content = out.read_bytes()
    code, _, err = run(*command)
    assert code == 1
    assert err.startswith("dflash-jax: RequestError: ")
    assert "exists; choose another name or add --overwrite" in err
    assert out.read_bytes() == content
    code, said, _ = run(*command, "--overwrite", "--json")
    best = json.loads(said)["top"]
    assert code == 0
    assert best[0]["id"] == int(v["logits"][0, -1].argmax())
    assert 0 < best[1]["probability"] <= best[0]["probability"] < 1
    assert [p.name for p in tmp_path.iterdir()] == [out.name]  # no partial file


def test_probe_leaves_nothing_behind_when_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(file: Any, **arrays: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", pressed)
    with pytest.raises(KeyboardInterrupt):
        probe._write_arrays(tmp_path / "probe.npz", {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_probe_names_a_file_it_cannot_write(
    run: Run, oracle: Path, tmp_path: Path, suffix: str
) -> None:
    out = tmp_path / "absent" / f"probe.{suffix}"
    folder = oracle / "drafters" / "target_small"
    code, _, err = run("probe", "--target", folder, "--prompt-ids", "1,2,3", "--out", out)
    assert code == 1
    assert err.startswith(f"dflash-jax: RequestError: {out} could not be written: ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["hello", "--recovery"], "--recovery takes no prompt and no --out; leave them out"),
        (["--recovery", "--cases", "0"], "--cases is 0; expected at least 1"),
        (["--recovery", "--chat-template", "no.jinja"], "no.jinja is no file; give a .jinja file"),
        (["hello", "--chat-template", "a"], "--chat-template has an effect with --recovery only"),
    ],
)
def test_probe_checks_the_options_of_recovery(run: Run, arguments: list[str], says: str) -> None:
    code, _, err = run("probe", *arguments)
    assert code == 1
    assert says in err


def test_probe_shows_how_recovery_judges_ends(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("probe", "--recovery", "--cases", "1", "--json")
    found = json.loads(out)
    assert (code, found["syntax"], found["stalls"], found["answers"]) == (0, "hermes", 1, 1)
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}", encoding="utf-8")
    code, out, _ = run("probe", "--recovery", "--cases", "1", "--chat-template", template)
    assert code == 0
    assert "no tool syntax" in out
    assert "0 of   1 acted on" in out


# -- wrong arguments ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompt-ids", ""], "RequestError: the prompt is empty; give at least one token"),
        (["--prompt-ids", "1,x"], "RequestError: --prompt-ids is '1,x'; expected integers like"),
        (["--prompt-ids", "1,256"], "RequestError: token ids [256] are out of range; the target"),
        (["--prompt-ids", "1", "hello"], "RequestError: both a prompt and --prompt-ids were given"),
        ([], "RequestError: no prompt; give a text, --prompt-ids 1,2,3, or"),
        (["hello"], "RequestError: this model ships no tokenizer; give --prompt-ids instead"),
        (["  "], "RequestError: the prompt is empty; give at least one character"),
        (["--prompt-ids", "1", "-n", "0"], "RequestError: max_tokens is 0; expected"),
        (["--prompt-ids", "1", "-n", "96"], "RequestError: the prompt has 1 tokens and max_token"),
        (["--prompt-ids", "1", "--top-p", "2"], "RequestError: top_p is 2.0; expected"),
        (["--prompt-ids", "1", "--temperature", "-1"], "RequestError: temperature is -1.0; exp"),
        (["--prompt-ids", "1", "--block", "1"], "PlanError: block is 1; expected an integer of"),
        (["--prompt-ids", "1", "--dtype", "int4"], "PlanError: dtype is 'int4'; expected one of"),
        (["--prompt-ids", "1", "--max-length", "5000"], "PlanError: max_length is 5000, but the"),
        (["--prompt-ids", "1", "--memory-limit", "9"], "PlanError: the plan needs weights"),
        (["--prompt-ids", "1", "--target", "./no"], "CheckpointError: there is no target at no"),
        (["--prompt-ids", "1", "--target", "d/no.gguf"], "CheckpointError: there is no target at"),
        (["--prompt-ids", "1", "--target", "a" * 300], "CheckpointError: the target aaa"),
        (["--prompt-ids", "1", "--target", "~nobody-here/x"], "CheckpointError: the target ~nob"),
        (["--prompt-ids", "1", "--temperature", "1e300"], "RequestError: temperature is 1e+300; e"),
        (["--prompt-ids", "1", "--compare", "--drafter", "none"], "RequestError: --compare needs"),
    ],
)
def test_generate_names_what_is_wrong_and_returns_one(
    run: Run,
    small: list[object],
    arguments: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And before anything is compiled."""
    monkeypatch.delattr(CompiledPrograms, "compile")
    code, out, err = run("generate", *small, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith(f"dflash-jax: {says}")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["explain", "--device", "Abacus"], "RequestError: device 'Abacus' is unknown; known: H2"),
        (["explain", "--stablehlo", "train"], "RequestError: no program 'train'; this plan has fo"),
        (["verify", "--drafter", "none", "--prompt-ids", "1"], "RequestError: there is no drafter"),
        (["verify", "--prompts", "absent.txt"], "RequestError: absent.txt cannot be read: "),
        (["verify"], "RequestError: this model ships no tokenizer; give --prompt-ids 1,2,3"),
        (["verify", "--prompts", "x", "--prompt-ids", "1"], "RequestError: --prompts and a prompt"),
    ],
)
def test_other_commands_name_what_is_wrong_and_return_one(
    run: Run, small: list[object], arguments: list[str], says: str
) -> None:
    command, *rest = arguments
    code, out, err = run(command, *small, *rest)
    assert (code, out) == (1, "")
    assert err.startswith(f"dflash-jax: {says}")


def test_probe_refuses_an_unknown_kind_of_file_before_it_loads_anything(
    run: Run, tmp_path: Path
) -> None:
    code, _, err = run("probe", "--target", "./absent", "--out", tmp_path / "probe.txt")
    assert code == 1
    assert "probe.txt must end in .safetensors or .npz" in err


@pytest.mark.parametrize(
    ("arguments", "usage"),
    [
        ([], "dflash-jax [-h]"),
        (["fly"], "dflash-jax [-h]"),
        (["generate", "--wings"], "dflash-jax generate [-h]"),
        (["generate", "-n", "x"], "dflash-jax generate [-h]"),
        (["convert", "a", "b", "--wings"], "dflash-jax convert [-h]"),
    ],
)
def test_wrong_arguments_show_the_usage_of_the_command(
    arguments: list[str], usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"usage: {usage}")


def test_every_command_has_help_and_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["--version"], ["generate", "--help"], ["convert", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        assert "dflash-jax" in capsys.readouterr().out


@pytest.mark.sample("generate")
@pytest.mark.parametrize("command", ["generate", "explain"])
def test_output_that_nobody_reads_ends_the_command_and_not_the_process(
    command: str,
    asked: list[object],
    small: list[object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same for a library that writes to a closed socket while the command runs."""
    before = signal.getsignal(signal.SIGPIPE)
    read, write = os.pipe()
    os.close(read)
    arguments = asked if command == "generate" else [*small, "--params"]
    with open(write, "w") as unread:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", unread)
        assert main([command, *map(str, arguments)]) == PIPE_CLOSED == 141
    assert capsys.readouterr().err == ""
    assert signal.getsignal(signal.SIGPIPE) == before == signal.SIG_IGN


def test_compiled_programs_are_kept_privately_in_the_cache_folder_of_the_user(
    run: Run, small: list[object], cache_inside_the_test: Path
) -> None:
    jax.config.update("jax_compilation_cache_dir", None)
    assert run("explain", *small, "--hlo", "clear_rows")[0] == 0
    kept = cache_inside_the_test / "dflash_jax" / "xla"
    assert jax.config.values["jax_compilation_cache_dir"] == str(kept)
    assert kept.stat().st_mode & 0o777 == 0o700
