"""`explain`: from configs alone, as text and as JSON, with published totals."""

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_jax import Plan, loading
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.graph.explain import Explanation, explain
from dflash_jax.graph.keys import Step
from dflash_jax.graph.resolve import resolve, wide_block
from dflash_jax.graph.roofline import DEVICES, StepWork, find_device, roofline, work
from dflash_jax.kernels.native.build import Library
from dflash_jax.networks import build_drafter, build_pair
from dflash_jax.testing import AMPLE, planned, tiny_drafter, tiny_target

H200 = DEVICES["H200"]


def qwen3(hidden: int, layers: int, heads: int, inner: int) -> TargetConfig:
    return TargetConfig(
        model_type="qwen3",
        qk_norm=True,
        vocab_size=151936,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=inner,
        windows=(None,) * layers,
        max_length=40960,
    )


def dflash(target: TargetConfig, inner: int, **changes: object) -> DrafterConfig:
    fields = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "num_layers": 5,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "intermediate_size": inner,
        "block_size": 16,
        "mask_token_id": 151669,
        "target_layer_ids": (1, 9, 17, 25, 33),
        "num_target_layers": 36,
        "windows": (None,) * 5,
        "causal": (False,) * 5,
    }
    return DrafterConfig(**fields | changes)


QWEN3_8B = qwen3(4096, 36, 32, 12288)
DFLASH_8B = dflash(QWEN3_8B, 12288)
STEPS = ("prefill", "plain", "speculative")
HELPERS = {"forced_tokens", "prompt_logprobs", "clear_rows", "copy_row"}
NAMES = {f"{step}[{variant}]" for step in STEPS for variant in ("greedy", "sampled")} | HELPERS


@pytest.fixture(scope="module")
def large() -> Explanation:
    """Qwen3-8B with its drafter on an H200: nothing is compiled, no weight exists."""
    plan = resolve(
        Plan(rows=4), build_pair(QWEN3_8B, DFLASH_8B), platform="gpu", memory=H200.memory
    )
    return explain(planned(QWEN3_8B, DFLASH_8B, plan), H200, compile=False)


def unbroken(text: object) -> list[str]:
    """Lines as they are before they are broken to fit a terminal."""
    return re.sub(r"(?<=[,;])\n {9}|\n {8}(?= )", " ", str(text)).splitlines()


def test_the_text_says_models_plan_memory_device_and_programs(large: Explanation) -> None:
    lines = unbroken(large)
    assert lines[0] == "target   qwen3  36 layers  full attention  taps 1 9 17 25 33"
    assert "dflash v1  5 layers  full attention  bidirectional  block 16  mask 151669" in lines[1]
    assert "rows 4  max length 8192" in lines[2]
    assert "bfloat16  exact" in lines[2]
    assert lines[3].startswith("memory   weights 17.2 GiB, caches ")
    assert lines[4].startswith("weights  bfloat16 matrices 17.2 GiB  bfloat16 vectors ")
    assert lines[5].startswith("device   H200: 4,300 GB/s, 790.0 TFLOP/s bfloat16")
    table = {line.split()[0]: line for line in lines if line and line.split()[0] in NAMES}
    assert table.keys() == NAMES
    assert table["speculative[greedy]"].split()[-2:] == ["ms", "m"]  # bound by memory
    assert table["forced_tokens"].split()[-3:] == ["-"] * 3
    assert not large.compiled
    assert "aliased" not in str(large)


def test_json_holds_the_same(large: Explanation) -> None:
    found = json.loads(json.dumps(large.to_json()))
    assert found["plan"]["rows"] == 4
    assert found["target"]["hidden_size"] == 4096
    assert found["drafter"]["target_layer_ids"] == [1, 9, 17, 25, 33]
    assert found["budget"]["weights"] == 2 * (8_190_735_360 + 1_048_626_432)
    assert found["device"]["name"] == "H200"
    assert {p["name"] for p in found["programs"]} == NAMES
    assert all(p["aliased_bytes"] is None for p in found["programs"])
    counted = {p["name"]: p["work"]["bytes"] for p in found["programs"] if p["work"]}
    assert counted["plain[greedy]"] < counted["speculative[greedy]"]
    assert sum(found["forms"].values()) == found["budget"]["weights"]
    shape, dtype = found["parameters"]["target/embed"]
    assert (shape, dtype) == ([4096, 151936], "bfloat16")
    assert "jax" in found["versions"]


def test_only_prompts_and_decode_steps_have_a_roofline(large: Explanation) -> None:
    timed = {program.name for program in large.programs if program.roofline}
    assert timed == NAMES - HELPERS


@pytest.mark.exhaustive
def test_compiled_figures_appear_when_asked_for() -> None:
    target = tiny_target(num_layers=1)
    plan = Plan(max_length=64, block=4, chunk=8)
    plan = resolve(plan, build_pair(target, None), platform="cpu", memory=AMPLE)
    found = explain(planned(target, None, plan), find_device("cpu"), compile=True)
    for program in found.programs:
        assert program.aliased_bytes == 2 * 2 * 8 * plan.slots * 4 + 8
        assert program.argument_bytes > program.aliased_bytes
        assert program.temporary_bytes is not None
        assert program.compile_s > 0
        assert len(program.stablehlo) == 8
    head, *rows = str(found).splitlines()[-len(found.programs) - 1 :]
    assert head.split() == ["compiled", "arguments", "aliased", "temporary", "StableHLO", "took"]
    assert [row.split()[0] for row in rows] == [program.name for program in found.programs]
    assert all(row.endswith(" s") for row in rows)
    assert all(len(line) <= 80 for line in str(found).splitlines())


def test_the_text_fits_a_terminal_of_eighty_columns() -> None:
    windows = tuple(1000 + i if i % 3 else None for i in range(21))
    target = tiny_target(num_layers=21, windows=windows, eos_token_ids=tuple(range(30)))
    drafter = tiny_drafter(target, block_size=4, target_layer_ids=tuple(range(20)))
    plan = Plan(
        rows=64, block=8, weights="int4", kv_dtype="int8", confidence_threshold=0, dtype="bfloat16"
    )
    plan = resolve(plan, build_pair(target, drafter), platform="gpu", memory=AMPLE)
    lines = str(explain(planned(target, drafter, plan), H200)).splitlines()
    assert max(map(len, lines)) <= 80
    head = lines[: lines.index("")]
    labels = {"target", "drafter", "plan", "memory", "weights", "device", "family", "note", ""}
    assert {line[:9].strip() for line in head} == labels
    assert any(line.endswith("causal on 0,") for line in head)
    (note,) = (line for line in head if line.startswith("note     "))
    assert note.startswith("note     block 8 is wider than the 4 the drafter was trained for")
    assert " ".join(line.strip() for line in head).count(" 1 window 10") == 14


def test_windows_and_causality_are_told_by_layer() -> None:
    target = tiny_target(windows=(10, None, 24))
    drafter = tiny_drafter(target, block_size=4)
    plan = resolve(Plan(block=8), build_pair(target, drafter), platform="cpu", memory=AMPLE)
    text = str(explain(planned(target, drafter, plan), DEVICES["CPU"]))
    lines = unbroken(text)
    assert "window 10 on 0, full attention on 1, window 24 on 2" in lines[0]
    assert "window 12 on 0, full attention on 1  causal on 0, bidirectional on 1" in lines[1]
    assert f"note {wide_block(8, build_drafter(drafter).trained_block)}" in " ".join(text.split())


def test_a_block_wider_than_the_drafters_own_is_warned_of() -> None:
    drafter = tiny_drafter(tiny_target(), block_size=4)
    assert wide_block(4, 4) is None is wide_block(0, 4) is wide_block(9, None)
    note = wide_block(5, build_drafter(drafter).trained_block)
    assert note is not None
    assert note.startswith("block 5 is wider than the 4 the drafter was trained for")
    assert note.endswith("give at most 4, or 0 for its own size")
    leading = dataclasses.replace(drafter, sample_from_anchor=True)  # the anchor predicts, too
    assert wide_block(5, build_drafter(leading).trained_block) is None
    with pytest.warns(UserWarning, match="block 9 is wider than the 8 the drafter was") as told:
        loading.load(plan=Plan(block=9, max_length=64))
    assert [warning.filename for warning in told] == [__file__]


def test_work_counts_every_weight_once() -> None:
    plan = resolve(Plan(), build_pair(QWEN3_8B, DFLASH_8B), platform="gpu", memory=H200.memory)
    layers = 8_190_735_360 - 151936 * 4096  # of the embeddings only rows are read
    caches = 2 * 36 * 8 * 128 * plan.slots * 2
    counted = work(planned(QWEN3_8B, None, plan), Step.PLAIN)
    assert counted.bytes == 2 * layers + caches
    assert counted.flops > 2 * layers * plan.block
    narrow = work(
        planned(QWEN3_8B, None, dataclasses.replace(plan, exact=False, plain_width=1)),
        Step.PLAIN,
    )
    assert counted.bytes == narrow.bytes
    assert counted.flops == plan.block * narrow.flops


def test_a_roofline_is_the_slower_of_memory_and_compute() -> None:
    moving = roofline(StepWork(bytes=int(4.3e12), flops=1), H200, "bfloat16")
    assert (moving.seconds, moving.bound) == (1.0, "memory")
    computing = roofline(StepWork(bytes=1, flops=int(790e12)), H200, "bfloat16")
    assert (computing.seconds, computing.bound) == (1.0, "compute")


def test_devices_are_found_by_what_jax_calls_them() -> None:
    assert find_device("NVIDIA H200").name == "H200"
    assert find_device("NVIDIA GeForce RTX 4090").name == "RTX 4090"
    assert find_device("something else").name == "CPU"
    kinds = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite"}
    assert {name: find_device(kind).name for name, kind in kinds.items()} == {x: x for x in kinds}


@pytest.mark.parametrize("name", ["v5e", "v5p", "v6e", "B200"])
def test_published_rates_are_shown_with_their_source(name: str) -> None:
    device = DEVICES[name]
    pair = build_pair(QWEN3_8B, DFLASH_8B)
    plan = resolve(Plan(max_length=512), pair, platform=device.platform, memory=AMPLE)
    assert (plan.dtype, plan.kernels, plan.steps_per_call) == ("bfloat16", "auto", 1)
    text = str(explain(planned(QWEN3_8B, DFLASH_8B, plan), device)).replace("\n" + " " * 9, " ")
    assert f"{name}: {device.bytes_per_s / 1e9:,.0f} GB/s" in text
    assert device.source in text
    assert ("docs.cloud.google.com" in device.source) == (device.platform == "tpu")


def test_a_cpu_without_native_kernels_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def notes(**fields: Any) -> str:
        plan, target = Plan(max_length=64, **fields), tiny_target()
        plan = resolve(plan, build_pair(target, None), platform="cpu", memory=AMPLE)
        return " ".join(explain(planned(target, None, plan), DEVICES["CPU"]).notes)

    absent = Library(None, "there is no C++ compiler")
    for name in ("graph.resolve", "graph.explain"):
        monkeypatch.setattr(sys.modules[f"dflash_jax.{name}"], "library", lambda: absent)
    assert "no native kernels" in notes()
    assert "there is no C++ compiler" in notes(weights="int8")
    assert not notes(kernels="xla")
    here = Library(Path("made.so"))
    for name in ("graph.resolve", "graph.explain"):
        monkeypatch.setattr(sys.modules[f"dflash_jax.{name}"], "library", lambda: here)
    assert notes(exact=False) == "native kernels"
    several = "native kernels, int8 weights by activations in int8, several tokens by AMX"
    assert several in notes(weights="int8")
    assert "in float" in notes(weights="int8", activations="float")
    assert "AMX" not in notes(weights="int8", activations="float")
    here = Library(Path("made.so"), no_amx="the processor has none")
    assert "in int8, without AMX: the processor has none" in notes(weights="int8")
