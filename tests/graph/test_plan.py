"""The plan as a value, uses of its declaration, its completion, and the memory budget."""

import argparse
import dataclasses
import mmap
import re
import sys
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflash_jax as dj
from dflash_jax import Plan
from dflash_jax.cli import parser
from dflash_jax.cli.options import WITHOUT_FLAG
from dflash_jax.config import DrafterConfig, RopeConfig, TargetConfig
from dflash_jax.declared import Scope
from dflash_jax.errors import ConfigError, PlanError
from dflash_jax.graph.abstract import init_params
from dflash_jax.graph.explain import stablehlo
from dflash_jax.graph.keys import Step, Variant
from dflash_jax.graph.memory import budget
from dflash_jax.graph.placement import place_empty_state
from dflash_jax.graph.programs import declare
from dflash_jax.graph.resolve import AUTOMATIC, resolve
from dflash_jax.kernels.native.build import Library
from dflash_jax.networks import build_pair
from dflash_jax.nn import decoder
from dflash_jax.nn.attention import attend
from dflash_jax.plan import LEAST
from dflash_jax.testing import AMPLE, planned, random_params, tiny_drafter, tiny_target

FIELDS = Plan.fields()
TARGET = tiny_target(num_layers=2)
DRAFTER = tiny_drafter(TARGET, target_layer_ids=(0,))


def complete(plan: Plan, *, platform: str = "cpu", memory: int = AMPLE) -> Plan:
    return resolve(plan, build_pair(TARGET, DRAFTER), platform=platform, memory=memory)


def test_a_plan_is_frozen_and_hashable() -> None:
    plan = Plan(block=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.block = 8  # type: ignore[misc]
    assert {plan: "here"}[Plan(block=4)] == "here"
    assert plan != Plan(block=5)


def test_every_field_that_a_plan_may_leave_open_has_a_choice() -> None:
    automatic = {name for name, field in FIELDS.items() if field.automatic}
    assert {name for name, _ in AUTOMATIC} == automatic | {"kernels"}  # "auto" may stay


def test_a_folder_may_be_given_as_a_path() -> None:
    plan = Plan(prefix_cache=1, prefix_folder=Path("a/b"))
    assert Plan.parse(plan.to_json()) == plan == Plan(prefix_cache=1, prefix_folder="a/b")


def test_numbers_may_be_numpys() -> None:
    numbers = {
        "rows": np.int64(2),
        "mesh": (np.int32(2), 1),
        "confidence_threshold": np.float32(0.5),
    }
    plan = Plan(**numbers, lookahead=np.int8(0))
    assert plan == Plan(rows=2, mesh=(2, 1), confidence_threshold=0.5, lookahead=0)
    assert Plan.parse(plan.to_json()) == plan


@settings(max_examples=50, deadline=None)
@given(
    st.builds(
        Plan,
        rows=st.integers(1, 64),
        max_length=st.one_of(st.just(0), st.integers(2, 10**6)),
        block=st.one_of(st.just(0), st.integers(2, 64)),
        chunk=st.integers(0, 4096),
        dtype=st.sampled_from(["auto", "float32", "bfloat16", "float16"]),
        exact=st.booleans(),
        rings=st.booleans(),
        lookahead=st.integers(0, 1),
        stop_slots=st.integers(1, 32),
        memory_limit=st.integers(0, 2**50),
    )
)
def test_a_plan_survives_json(plan: Plan) -> None:
    assert Plan.parse(plan.to_json()) == plan
    assert set(plan.to_json()) == {f.name for f in dataclasses.fields(Plan)}


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("rows", 0, "expected an integer of at least 1$"),
        ("rows", "two", "expected an integer of at least 1"),
        ("rows", True, "expected an integer of at least 1"),
        ("max_length", 1, "expected an integer of at least 2, or 0 for the default$"),
        ("steps_per_call", -1, "expected an integer of at least 1, or 0 for the default$"),
        ("max_length", -5, "expected an integer of at least 2"),
        ("block", 1, "expected an integer of at least 2"),
        ("block", 2.5, "expected an integer of at least 2"),
        ("chunk", -1, "expected an integer of at least 1"),
        ("stop_slots", 0, "expected an integer of at least 1"),
        ("memory_limit", -1, "expected an integer of at least 1"),
        ("lookahead", 2, "expected 0 or 1"),
        ("lookahead", True, "expected 0 or 1"),
        ("exact", "no", "expected true or false"),
        ("rings", 1, "expected true or false"),
        ("dtype", "int8", "expected one of auto, float32, bfloat16, float16"),
    ],
)
def test_an_invalid_field_is_named(field: str, value: Any, expected: str) -> None:
    with pytest.raises(PlanError, match=f"{field} is {re.escape(repr(value))}; {expected}"):
        Plan(**{field: value})


def test_everything_wrong_in_a_stored_plan_is_named() -> None:
    stored = Plan().to_json() | {"blocks": 4, "rows": 0, "mesh": [1], "colour": 1, "chunk": "8"}
    with pytest.raises(PlanError) as caught:
        Plan.parse(stored, where="a.json")
    assert str(caught.value).startswith(
        "a.json: 'blocks' is no field of a plan; did you mean 'block'? 'colour' is no field of a"
        " plan; known are rows, max_length, "
    )
    assert str(caught.value).endswith(
        ". rows is 0; expected an integer of at least 1. mesh is (1,); expected two integers"
        " (data, model), such as [1, 4]"
    )
    with pytest.raises(PlanError, match=r"^rows is 0; .* 1\. exact is 1; expected true or false$"):
        Plan(rows=0, exact=1)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(PlanError, match=r"^a.json: mesh is \(2, 1\) for 1 rows; "):
        Plan.parse({"mesh": "2x1"}, where="a.json")
    with pytest.raises(PlanError, match=r"^got 3; expected an object with fields by name$"):
        Plan.parse(3)  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("blocks", "'blocks' is no field of a plan; did you mean 'block'"),
        ("max_lenght", "'max_lenght' is no field of a plan; did you mean 'max_length'"),
        ("kv_cache_dtype", "did you mean 'kv_dtype'"),
        ("colour", "'colour' is no field of a plan; known are rows, max_length, "),
    ],
)
def test_misspelt_fields_are_named_with_the_nearest_one(name: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Plan(**{name: 3})
    with pytest.raises(PlanError, match=words):
        dataclasses.replace(Plan(), **{name: 3})
    with pytest.raises(PlanError, match=r"got \(4,\) without names; expected fields by name"):
        Plan(4)  # pyrefly: ignore[bad-argument-count]


def test_misspelt_options_of_recovery_and_of_requests_are_named_too() -> None:
    with pytest.raises(ConfigError, match=r"'flor' is no field of a dj\.Recovery; .* 'floor'"):
        dj.Recovery(flor=1)  # pyrefly: ignore[unexpected-keyword]
    with pytest.raises(TypeError, match="'top_kk' is no argument of a request; did you mean 'top"):
        dj.SamplingParams(top_kk=1)  # pyrefly: ignore[unexpected-keyword]


# Another valid value of every field, and what else has to be chosen with it.
OTHERS: dict[str, dict[str, Any]] = {
    "rows": {"rows": 2},
    "max_length": {"max_length": 128},
    "block": {"block": 3},
    "chunk": {"chunk": 8},
    "dtype": {"dtype": "bfloat16"},
    "weights": {"weights": "int8"},
    "stored": {"stored": (("target/head", (1, (("Q8_0", 64),))),)},
    "kv_dtype": {"kv_dtype": "int8"},
    "activations": {"activations": "float"},
    "kernels": {"kernels": "xla"},
    "plain_width": {"plain_width": 2},
    "exact": {"exact": False},
    "rings": {"rings": False},
    "taps_at": {"taps_at": "early"},
    "lookahead": {"lookahead": 0},
    "steps_per_call": {"steps_per_call": 3},
    "prefix_cache": {"prefix_cache": 1 << 20},
    "prefix_folder": {"prefix_folder": "folder", "prefix_cache": 1},
    "prefix_disk": {"prefix_disk": 1 << 20},
    "mesh": {"mesh": (2, 1), "rows": 2},
    "devices": {"devices": (0, 1)},
    "queue": {"queue": 3},
    "stop_slots": {"stop_slots": 3},
    "report_tool_call_margin": {"report_tool_call_margin": False},
    "confidence_threshold": {"confidence_threshold": 0.5},
    "draft_window": {"draft_window": 64},
    "ngram": {"ngram": 5},
    "report_drafts": {"report_drafts": True},
    "report_top": {"report_top": 5},
    "memory_limit": {"memory_limit": AMPLE - 1},
}


def test_every_field_is_declared_with_its_scope_and_documented() -> None:
    assert list(FIELDS) == [f.name for f in dataclasses.fields(Plan)]
    assert set(OTHERS) == set(FIELDS)
    assert {info.scope for info in FIELDS.values()} == set(get_args(Scope))
    shown = " ".join((Plan.__doc__ or "").split())
    for name, info in FIELDS.items():
        assert f" {name}: {info.help}." in shown, name
        assert info.details in shown, name


@pytest.mark.parametrize("name", OTHERS)
def test_fields_are_part_of_the_keys_that_their_scope_names(name: str) -> None:
    base = Plan(**{key: value for key, value in OTHERS[name].items() if key != name})
    other, scope = Plan(**OTHERS[name]), FIELDS[name].scope
    assert other != base
    enabled = name == "prefix_cache"  # whether there is a prefix cache decides what is compiled
    assert (other.shape != base.shape) == (scope != "host" or enabled)
    assert (other.cache_key != base.cache_key) == (scope == "cache")
    assert {name for name, _ in base.cache_key} < {name for name, _ in base.shape}
    hash(other.shape), hash(other.cache_key)


@pytest.mark.exhaustive
def test_plans_of_the_same_shape_lower_to_identical_programs() -> None:
    small = Plan(rows=2, max_length=64, block=4, chunk=8)
    base = complete(dataclasses.replace(small, prefix_cache=1))
    host = {name: OTHERS[name][name] for name, info in FIELDS.items() if info.scope == "host"}
    other = dataclasses.replace(base, **host)
    assert other.shape == base.shape
    assert not any(getattr(other, name) == getattr(base, name) for name in host)
    few = {"variants": (Variant.GREEDY, Variant.CONSTRAINED)}
    lowered, again, without = (
        {key: stablehlo(p) for key, p in declare(planned(TARGET, DRAFTER, plan), **few).items()}
        for plan in (base, other, complete(small))
    )
    assert lowered == again
    segments = {Step.TAKE_SEGMENT, Step.PUT_SEGMENT}
    assert without == {key: text for key, text in lowered.items() if key.step not in segments}


def test_every_field_has_a_flag_with_its_help_text_or_a_reason_to_have_none() -> None:
    [commands] = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    actions = [*commands.choices["generate"]._actions, *commands.choices["serve"]._actions]
    found = {action.dest: action for action in actions if action.help != argparse.SUPPRESS}
    split = {"devices": ("target_device", "drafter_device")}
    for name, info in FIELDS.items():
        if name in ("stored", "lookahead", "stop_slots", "queue"):
            assert WITHOUT_FLAG[name], name
            continue
        for dest in split.get(name, (name,)):
            action = found.pop(dest)
            assert info.help in str(action.help), name
            other = ("mesh", "devices", "prefix_cache", "report_drafts")  # the last two in `serve`
            if name not in other:
                assert action.default == getattr(Plan, name), name
    assert set(WITHOUT_FLAG) < set(FIELDS)


@pytest.mark.parametrize(
    ("platform", "dtype", "chunk", "length"),
    [("cpu", "float32", 64, 1024), ("gpu", "bfloat16", 256, 4096)],
)
def test_open_choices_are_made_for_the_platform_and_the_drafter(
    platform: str, dtype: str, chunk: int, length: int
) -> None:
    plan = complete(Plan(kernels="xla"), platform=platform)
    assert (plan.dtype, plan.chunk, plan.max_length) == (dtype, chunk, length)
    assert plan.block == DRAFTER.block_size == 8
    assert plan.memory_limit == AMPLE
    assert complete(plan, platform="gpu") == plan  # nothing is left to resolve


def test_a_drafter_of_single_places_drafts_one_token_a_step() -> None:
    """Its config has blocks of 1, for the anchor alone."""
    single = dataclasses.replace(DRAFTER, block_size=1)
    plan = resolve(Plan(max_length=64), build_pair(TARGET, single), platform="cpu", memory=AMPLE)
    assert plan.block == 2


@pytest.mark.parametrize(("advised", "block"), [(0, 8), (3, 4), (1, 2), (7, 8), (30, 8)])
def test_a_step_has_the_drafts_that_the_drafter_advises(advised: int, block: int) -> None:
    """At most those of a trained block."""
    drafter = dataclasses.replace(DRAFTER, speculative_tokens=advised)
    plan = resolve(Plan(max_length=64), build_pair(TARGET, drafter), platform="cpu", memory=AMPLE)
    assert plan.block == block


def test_calls_make_more_than_one_step_on_a_single_cpu_device_only() -> None:
    assert complete(Plan()).steps_per_call > 1
    assert complete(Plan(), platform="gpu").steps_per_call == 1
    assert complete(Plan(rows=2, mesh=(2, 1))).steps_per_call == 1
    assert complete(Plan(devices=(0, 1))).steps_per_call == 1


def test_made_choices_stay() -> None:
    shape = {
        "rows": 2,
        "max_length": 77,
        "block": 5,
        "plain_width": 5,
        "chunk": 9,
        "steps_per_call": 3,
    }
    chosen: dict[str, Any] = {"dtype": "float16", "activations": "float", "weights": "float"}
    plan = Plan(memory_limit=10**9, kernels="xla", **chosen, **shape)
    assert complete(plan, memory=1).to_json() == plan.to_json()


def test_activations_are_quantised_where_native_kernels_multiply_quantised_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def chosen(platform: str = "cpu", **fields: Any) -> tuple[str, str]:
        plan = resolve(
            Plan(**fields), build_pair(tiny_target(), None), platform=platform, memory=AMPLE
        )
        return plan.kernels, plan.activations

    module = sys.modules["dflash_jax.graph.resolve"]
    monkeypatch.setattr(module, "library", lambda: Library(Path("made.so")))
    assert chosen() == chosen(activations="float") == ("native", "float")
    assert chosen(weights="int8") == chosen(weights="int4") == ("native", "int8")
    assert chosen(weights="int8", activations="float") == ("native", "float")
    assert chosen(weights="int4", activations="float") == ("auto", "float")  # kernels of XLA
    assert chosen(weights="int8", platform="gpu") == ("auto", "float")
    for fields in ({"weights": "int8", "kernels": "xla"}, {"weights": "float"}):
        with pytest.raises(PlanError, match="activations='int8' is for quantised weights with"):
            chosen(activations="int8", **fields)
    with pytest.raises(PlanError, match="weights 'int4' by activations in int8 only; use"):
        chosen(weights="int4", activations="float", kernels="native")


def test_native_kernels_are_chosen_where_they_can_be_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def chosen(platform: str = "cpu", **fields: Any) -> str:
        pair = build_pair(tiny_target(), None)
        return resolve(Plan(**fields), pair, platform=platform, memory=AMPLE).kernels

    module = sys.modules["dflash_jax.graph.resolve"]
    monkeypatch.setattr(module, "library", lambda: Library(Path("made.so")))
    for weights in ("float", "int8", "int4"):
        assert chosen(weights=weights) == "native"
        assert chosen(weights=weights, kernels="xla") == "xla"
        assert chosen(weights=weights, platform="gpu") == "auto"
    assert chosen(dtype="bfloat16") == chosen(kernels="native") == "native"
    for wrong, message in (
        ({"mesh": (1, 2)}, "for a single CPU device, not for cpu or several"),
        ({"platform": "gpu"}, "for a single CPU device, not for gpu or several"),
    ):
        with pytest.raises(PlanError, match=f"kernels='native' cannot be used: .*{message}"):
            chosen(kernels="native", **wrong)
    monkeypatch.setattr(module, "library", lambda: Library(None, "there is no compiler"))
    assert chosen(weights="int8") == chosen(weights="float") == "auto"
    with pytest.raises(PlanError, match="'native' cannot be used: there is no compiler; leave it"):
        chosen(weights="int8", kernels="native")


def test_more_positions_than_the_target_has_are_refused() -> None:
    text = "max_length is 5000, but the target was made for 4096 positions; ask for at most 4096"
    with pytest.raises(PlanError, match=text):
        complete(Plan(max_length=5000))
    rope = RopeConfig(kind="dynamic", factor=2.0, original_length=4096)
    text = r"made for 4096 positions \(beyond them its dynamic rotary embedding turns cached keys"
    with pytest.raises(PlanError, match=text):
        resolve(
            Plan(max_length=5000),
            build_pair(dataclasses.replace(TARGET, rope=rope), None),
            platform="cpu",
            memory=AMPLE,
        )


@pytest.mark.parametrize("drafter", [None, DRAFTER])
@pytest.mark.parametrize(
    "target", [TARGET, tiny_target(windows=(10, None, 24), attention_bias=True)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_budget_is_the_bytes_of_real_parameters_and_caches(
    target: TargetConfig, drafter: DrafterConfig | None, dtype: str
) -> None:
    plan = Plan(rows=3, max_length=200, block=8, chunk=16, dtype=dtype)
    need = budget(planned(target, drafter, plan))
    params = random_params(build_pair(target, drafter), dtype=dtype)
    assert need.weights == sum(x.nbytes for x in jax.tree.leaves(params))
    state = planned(target, drafter, plan).empty_state()
    held = sum(x.nbytes for x in jax.tree.leaves((state.target, state.drafter)))
    assert 0 <= need.caches - held <= 2 * 4 * plan.rows  # position and anchor may be counted
    assert need.total == need.weights + need.caches + need.temporaries
    if target.windows[0]:
        slots = planned(target, drafter, plan).plan.slots
        assert state.target[0].k.shape[2] < state.target[1].k.shape[2] == slots


def test_layers_that_are_alike_are_traced_once_for_their_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six layers of two windows; tracing all of a model took half of the time of loading it."""
    traced: list[Any] = []

    def counted_attend(*arguments: Any, **options: Any) -> Any:
        traced.append(arguments)
        return attend(*arguments, **options)

    target = tiny_target(num_layers=6, windows=(10, None) * 3, hidden_size=40)
    real = jax.eval_shape(lambda: init_params(build_pair(target, None), jax.random.key(0)))
    monkeypatch.setattr(decoder, "attend", counted_attend)
    model = planned(target, None, Plan())
    assert model.params == real
    assert len(traced) == 2
    assert len(model.declared) == 2 * 6 + 2 + 6 * 2  # two in attention and two in the MLP


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_caches_take_memory_only_where_positions_are_written() -> None:
    """A row of the longest length that a model allows is seldom filled."""
    pages = Path("/proc/self/statm")
    before = int(pages.read_text().split()[1]) * mmap.PAGESIZE
    state = place_empty_state(planned(TARGET, None, Plan(max_length=2_000_000)))
    after = int(pages.read_text().split()[1]) * mmap.PAGESIZE
    caches = jax.tree.leaves(state.target)
    size = sum(x.nbytes for x in caches)
    assert size > 200_000_000
    assert after - before < size / 10
    assert not np.asarray(caches[0][:, :, :100]).any()
    assert not np.asarray(caches[-1][:, :, -100:]).any()


def test_caches_hold_the_longest_sequence_and_the_widest_call() -> None:
    plan = dataclasses.replace(LEAST, max_length=100, block=8, chunk=16, rings=True)
    assert plan.slots >= 100 + 16
    assert plan.ring_slots(10) >= 10 + 16
    assert plan.ring_slots(None) is None
    assert plan.ring_slots(1000) is None  # a ring would be no smaller
    assert dataclasses.replace(plan, rings=False).ring_slots(10) is None


@pytest.mark.parametrize("share", [0.9, 0.6, 0.4])
def test_a_plan_that_does_not_fit_names_the_longest_length_that_would(share: float) -> None:
    plan = Plan(rows=4, max_length=4000, block=8, chunk=16)
    total = budget(planned(TARGET, DRAFTER, complete(plan))).total
    limit = int(total * share)
    with pytest.raises(PlanError) as caught:
        complete(plan, memory=limit)
    text = str(caught.value)
    assert re.search(r"the plan needs weights .* caches .* temporaries .* total .*, but only", text)
    named = int(re.search(r"max_length=(\d+) would fit", text)[1])
    assert 16 < named < 4000
    assert complete(dataclasses.replace(plan, max_length=named), memory=limit)
    with pytest.raises(PlanError):
        complete(dataclasses.replace(plan, max_length=named + 16), memory=limit)


def test_a_model_that_never_fits_says_so() -> None:
    with pytest.raises(PlanError, match="even a short max_length does not; use fewer rows"):
        complete(Plan(), memory=1000)


def test_memory_limit_of_the_plan_goes_before_that_of_the_device() -> None:
    with pytest.raises(PlanError, match=r"but only 2\.0 KiB are allowed"):
        complete(Plan(memory_limit=2048))
    assert np.isfinite(complete(Plan(memory_limit=AMPLE), memory=1).memory_limit)
