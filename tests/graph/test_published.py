"""Configs of public models, as published: totals, and what `explain` says, with no weights."""

import dataclasses
import json
import math
import re
import resource
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from dflash_jax import Plan
from dflash_jax.cli import main
from dflash_jax.config import check_pair
from dflash_jax.errors import PlanError
from dflash_jax.families.configs import drafter_config, read_drafter_config, read_target_config
from dflash_jax.graph.keys import Step
from dflash_jax.graph.memory import parameters
from dflash_jax.graph.resolve import resolve
from dflash_jax.graph.roofline import DEVICES, work
from dflash_jax.kernels.caches import RecurrentCache
from dflash_jax.networks import build_pair
from dflash_jax.testing import planned, tiny_target

H200 = DEVICES["H200"]
FOLDER = Path(__file__).parent.parent / "published"
SOAKED = ("Qwen3.5-35B-A3B", "gemma-4-31B-it", "gpt-oss-20b")  # others of their kinds are not
CODER = "Qwen3-Coder-30B-A3B-Instruct"

# target -> its drafter, weights of both, what `explain` says of the pair
PAIRS: dict[str, tuple[str, int, int, tuple[str, ...]]] = {
    "Qwen3-8B": (
        "Qwen3-8B-DFlash-b16",
        8_190_735_360,
        1_048_626_432,
        ("36 layers  full attention  taps 1 9 17 25 33", "queries and keys normed; ends at 151645"),
    ),
    "Qwen3.6-27B": (
        "Qwen3.6-27B-DFlash",
        26_895_998_464,
        1_730_213_120,
        (
            "48 gated delta net, 16 gated attention",
            "64 of 256 dimensions rotated; recurrent states float32",
            "window 2048 on 0-3, full attention on 4  causal on 0-3, bidirectional on 4",
        ),
    ),
    "Qwen3.5-35B-A3B": (
        "none",
        34_660_610_688,
        0,
        (
            "30 gated delta net, 10 gated attention  8 of 256 experts  taps none",
            "norms times 1 + w",
        ),
    ),
    "gemma-4-31B-it": (
        "gemma-4-31B-it-DFlash",
        30_697_345_340,
        1_535_967_488,
        (
            "embedding x73.5 (the target's)  softcap 30",
            "keys as values in full layers; softcap 30.0; text only; ends at 1 106",
        ),
    ),
    "gemma-4-26B-A4B-it": (
        "gemma-4-26B-A4B-it-DFlash",
        25_233_141_790,
        429_689_088,
        ("embedding x53 (the target's)  softcap 30", "8 of 128 experts", "scores unscaled"),
    ),
    "gpt-oss-20b": (
        "gpt-oss-20b-DFlash",
        20_914_757_184,
        784_767_104,
        ("12 window 128, 12 full attention  4 of 32 experts", "attention sinks; experts clamped"),
    ),
    "Qwen2.5-7B-Instruct": (
        "none",
        7_615_616_512,
        0,
        ("28 layers  full attention", "biases of queries, keys and values; ends at 151645"),
    ),
    "Mistral-7B-Instruct-v0.3": ("none", 7_248_023_552, 0, ("32 layers  full attention",)),
    "SmolLM3-3B": ("none", 3_075_098_624, 0, ("9 layers without rotary embedding",)),
    "gemma-3-4b-it": (
        "none",
        3_880_263_168,  # without those of the vision part, 419,816,304
        0,
        ("29 window 1024, 5 full attention", "scores x0.0625; norms times 1 + w; text only"),
    ),
    "OLMo-2-1124-7B-Instruct": (
        "none",
        7_298_617_344,
        0,
        ("queries and keys normed over all heads; norms after attention and MLP",),
    ),
    "granite-3.3-8b-instruct": (
        "none",
        8_170_864_640,
        0,
        ("embedding x12; scores x0.0078125; residuals x0.22; logits / 16",),
    ),
    "GLM-4-9B-0414": (
        "none",
        9_400_279_040,
        0,
        ("norms before and after attention and MLP; 64 of 128 dimensions rotated",),
    ),
    "Ministral-3-8B-Base-2512": (
        "none",
        8_489_553_920,
        0,
        ("34 layers  full attention", "queries grow from position 16,384"),
    ),
    "LFM2.5-1.2B-Instruct": (
        "none",
        1_170_340_608,
        0,
        ("10 convolution over 3, 6 full attention", "queries and keys normed; ends at 7"),
    ),
    "Phi-4-mini-instruct": ("none", 3_836_021_760, 0, ("96 of 128 dimensions rotated",)),
}

LEAST = Plan(max_length=2, block=2, chunk=1, dtype="float32")


def peak_bytes() -> int:
    """The most memory this process ever held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@pytest.mark.sample("Qwen3.6-27B", "gemma-4-26B-A4B-it", "LFM2.5-1.2B-Instruct")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.soak] * (n in SOAKED)) for n in PAIRS]
)
def test_explain_says_what_a_pair_needs_without_allocating(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter, target_weights, drafting, said = PAIRS[name]
    folders = [str(FOLDER / name), drafter if drafter == "none" else str(FOLDER / drafter)]
    options = ["--target", folders[0], "--drafter", folders[1], "--device", "H200"]
    before = jax.live_arrays()
    most = peak_bytes()
    assert main(["explain", *options]) == 0
    assert peak_bytes() - most < 1 << 30
    text = re.sub(r"(?<=[,;])\n {9}|\n {8}(?= )", " ", capsys.readouterr().out)
    for words in said:
        assert words in text
    assert main(["explain", *options, "--json"]) == 0
    assert not {id(array) for array in jax.live_arrays()} - {id(array) for array in before}
    found = json.loads(capsys.readouterr().out)
    counts = {"target": 0, "drafter": 0}
    for path, (shape, _) in found["parameters"].items():
        counts[path.split("/")[0]] += math.prod(shape)
    assert counts == {"target": target_weights, "drafter": drafting}
    wide = sum(path.endswith("a_log") for path in found["parameters"])  # float32, one per head
    heads = found["target"].get("value_heads", 0)
    assert found["budget"]["weights"] == 2 * (target_weights + drafting + wide * heads)
    assert sum(found["budget"].values()) < H200.memory
    rooflines = {p["name"]: p["roofline"] for p in found["programs"] if p["roofline"]}
    assert {"prefill[greedy]", "plain[greedy]"} <= rooflines.keys()
    assert ("speculative[greedy]" in rooflines) == bool(drafting)
    assert all(0 < r["seconds"] < 0.1 for r in rooflines.values())
    assert rooflines["plain[greedy]"]["bound"] == "memory"
    for program in rooflines:
        assert f"\n{program} " in text


@pytest.mark.exhaustive
def test_explain_tells_that_qwen3_coder_next_needs_more_than_one_device(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """80 billion weights, of which the experts are not packed."""
    folder = str(FOLDER / "Qwen3-Coder-Next")
    assert main(["explain", "--target", folder, "--drafter", "none", "--device", "H200"]) == 1
    assert "needs weights 148.4 GiB" in capsys.readouterr().err
    target = read_target_config(FOLDER / "Qwen3-Coder-Next")
    kinds = target.layer_kinds
    assert (kinds.count("gated delta net"), kinds.count("gated attention")) == (36, 12)
    assert (target.num_experts, target.experts_per_token) == (512, 10)
    assert sum(parameters(planned(target, None, LEAST))["target"].values()) == 79_674_391_296


@pytest.mark.sample("Qwen3-4B-DFlash-b16-537427200")
@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("Qwen3-4B-DFlash-b16", 537_427_200),
        ("Qwen3.8-27B-DFlash2", 1_924_404_480),
        ("Muse-Glimmer-30B-DFlash2", 2_772_159_744),
    ],
)
def test_totals_of_drafters_are_the_published_ones(name: str, total: int) -> None:
    drafter = read_drafter_config(FOLDER / name)
    width, vocab = drafter.hidden_size, drafter.vocab_size
    layers = drafter.num_target_layers
    target = tiny_target(hidden_size=width, vocab_size=vocab, num_layers=layers, windows=())
    check_pair(target, drafter)
    one_layer = tiny_target(hidden_size=width, vocab_size=vocab, num_layers=1)
    assert sum(parameters(planned(one_layer, drafter, LEAST))["drafter"].values()) == total


def test_biases_of_a_drafter_are_counted() -> None:
    fields: dict[str, Any] = json.loads((FOLDER / "gpt-oss-20b-DFlash/config.json").read_text())
    drafter = drafter_config(fields)
    assert drafter.attention_bias
    target = tiny_target(hidden_size=2880, vocab_size=201088, num_layers=1)
    counts = parameters(planned(target, drafter, LEAST))["drafter"]
    assert sum(n for p, n in counts.items() if "bias" in p) == 8 * (64 * 64 + 2 * 8 * 64 + 2880)


def test_recurrent_states_are_as_large_as_published_and_are_moved_twice() -> None:
    """Qwen3.6-27B: 144 MiB of states, read and written; caches are read."""
    target = read_target_config(FOLDER / "Qwen3.6-27B")
    plan = Plan(max_length=32768, block=16)
    plan = resolve(plan, build_pair(target, None), platform="gpu", memory=H200.memory)
    state = jax.eval_shape(lambda: planned(target, None, plan).empty_state())
    recurrent = [c for c in state.target if isinstance(c, RecurrentCache)]
    assert sum(c.state.size * c.state.dtype.itemsize for c in recurrent) == 144 << 20
    read = 2 * (PAIRS["Qwen3.6-27B"][1] - target.vocab_size * target.hidden_size)
    arrays = jax.tree.leaves(state.target), jax.tree.leaves(recurrent)
    moved = read + sum(x.size * x.dtype.itemsize for part in arrays for x in part)
    assert work(planned(target, None, plan), Step.PLAIN).bytes == pytest.approx(moved, rel=1e-3)


@pytest.mark.exhaustive
def test_work_counts_only_the_experts_that_are_used() -> None:
    """Qwen3-Coder-30B-A3B: 3.3 billion weights act on a token; the embedding is only looked up."""
    target = read_target_config(FOLDER / CODER)
    plan = resolve(Plan(block=8), build_pair(target, None), platform="gpu", memory=H200.memory)
    one = work(
        planned(target, None, dataclasses.replace(plan, exact=False, plain_width=1)), Step.PLAIN
    )
    block, chunk = (work(planned(target, None, plan), step) for step in (Step.PLAIN, Step.PREFILL))
    expert = 3 * 2048 * 768 * 48  # of one number, in all layers
    assert sum(parameters(planned(target, None, LEAST))["target"].values()) == 30_532_122_624
    rest = 30_532_122_624 - 151936 * 2048 - 128 * expert
    caches = one.bytes - 2 * (rest + 8 * expert)
    assert caches == 2 * 2 * 48 * 4 * 128 * plan.slots
    assert block.bytes == 2 * (rest + 64 * expert) + caches  # 8 tokens, 8 experts each
    assert chunk.bytes == 2 * (rest + 128 * expert) + caches  # no more than there are
    scores = 4 * 32 * 128 * 48 * plan.slots
    assert one.flops == 2 * (rest + 8 * expert) + scores
    assert block.flops == 8 * one.flops


@pytest.mark.exhaustive
def test_qwen36_27b_and_its_drafter_decode_in_24_gb_with_int4_weights() -> None:
    target = read_target_config(FOLDER / "Qwen3.6-27B")
    drafter = read_drafter_config(FOLDER / "Qwen3.6-27B-DFlash")
    plan = Plan(max_length=8192, dtype="bfloat16")
    small = dataclasses.replace(plan, weights="int4", kv_dtype="int8")
    resolve(small, build_pair(target, drafter), platform="gpu", memory=24 * 10**9)
    with pytest.raises(PlanError, match=r"only 22\.4 GiB are allowed"):
        resolve(plan, build_pair(target, drafter), platform="gpu", memory=24 * 10**9)
