"""C5, C6 and R1 on the compiled programs: which there are, and what they copy."""

import dataclasses
import re
import time
import types
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Plan
from dflash_jax.graph import build as build_module
from dflash_jax.graph.build import Executable, compile_programs
from dflash_jax.graph.keys import ProgramKey, Step, Variant
from dflash_jax.graph.memory import budget
from dflash_jax.graph.programs import Program, declare
from dflash_jax.graph.resolve import resolve
from dflash_jax.graph.state import DecodeState, idle_rules, read_output
from dflash_jax.graph.steps import decoding as steps
from dflash_jax.graph.steps.inputs import ForcedTokensInputs, PrefillInputs
from dflash_jax.graph.steps.pair import forward
from dflash_jax.kernels.native.build import library
from dflash_jax.networks import build_pair
from dflash_jax.plan import ResolvedPlan
from dflash_jax.testing import AMPLE, planned, random_params, tiny_drafter, tiny_target

BLOCK, CHUNK = 8, 16
PREFILL, PLAIN, SPECULATIVE = (
    ProgramKey(step, Variant.GREEDY) for step in (Step.PREFILL, Step.PLAIN, Step.SPECULATIVE)
)
FEW = (Variant.GREEDY, Variant.SAMPLED)
FORCED, SCORED = ProgramKey(Step.FORCED_TOKENS), ProgramKey(Step.PROMPT_LOGPROBS)
CLEARED = ProgramKey(Step.CLEAR_ROWS)
COPIED = ProgramKey(Step.COPY_ROW)
# Wide heads and few of them: caches are large beside anything a step computes.
TARGET = tiny_target(num_layers=1, num_heads=2, num_kv_heads=2, head_dim=64, vocab_size=61)
DRAFTER = tiny_drafter(
    TARGET,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=64,
    windows=(None,),
    causal=(False,),
    target_layer_ids=(0,),
)


def plan(rows: int, **fields: Any) -> ResolvedPlan:
    fields = {"dtype": "float32", "kernels": "xla"} | fields
    made = Plan(rows=rows, max_length=2000, block=BLOCK, chunk=CHUNK, **fields)
    return resolve(made, build_pair(TARGET, DRAFTER), platform="cpu", memory=AMPLE)


def build(rows: int, *keys: ProgramKey, exact: bool = True) -> dict[ProgramKey, Executable]:
    programs = declare(planned(TARGET, DRAFTER, plan(rows, exact=exact)))
    return compile_programs(programs[key] for key in keys)


@pytest.fixture(scope="module")
def built() -> dict[tuple[int, ProgramKey], Executable]:
    """Every kind of program over three rows; over one row a block and a one-token step."""
    sampled = ProgramKey(Step.SPECULATIVE, Variant.SAMPLED)
    three = build(3, PREFILL, PLAIN, SPECULATIVE, sampled, FORCED, SCORED, CLEARED, COPIED)
    one = build(1, SPECULATIVE, SCORED) | build(1, PLAIN, exact=False)
    found = {(3, key): program for key, program in three.items()}
    return found | {(1, key): program for key, program in one.items()}


def test_the_programs_are_few_and_known_from_the_plan() -> None:
    steps = (Step.PREFILL, Step.PLAIN, Step.SPECULATIVE)
    both = {ProgramKey(step, variant) for step in steps for variant in FEW}
    helpers = {FORCED, SCORED, CLEARED}
    for exact in (True, False):
        found = declare(planned(TARGET, DRAFTER, plan(3, exact=exact)), variants=FEW)
        assert found.keys() == both | helpers | {COPIED}
    alone = declare(planned(TARGET, None, plan(1)), variants=FEW).keys()
    assert alone == {key for key in both if key.step != Step.SPECULATIVE} | helpers
    every = declare(planned(TARGET, DRAFTER, plan(3))).keys()
    assert every - both - helpers - {COPIED} == {
        ProgramKey(Step.SET_LOGITS_STATE),
        *(ProgramKey(step, Variant.PENALIZED) for step in steps),
        *(
            ProgramKey(step, Variant.CONSTRAINED)
            for step in (Step.PREFILL, Step.PLAIN, Step.DRAFT, Step.VERIFY)
        ),
    }


@pytest.mark.exhaustive
@pytest.mark.skipif(not library(), reason=f"no native kernels: {library().reason}")
def test_with_native_kernels_steps_need_less_memory_and_still_copy_no_state(
    built: dict[tuple[int, ProgramKey], Executable],
) -> None:
    pair = planned(TARGET, DRAFTER, plan(3, kernels="native"))
    programs = declare(pair)
    keys = {pair.key(key.step): key for key in (PREFILL, PLAIN, SPECULATIVE)}
    for key, program in compile_programs(programs[key] for key in keys).items():
        assert program.aliased_bytes == built[3, keys[key]].aliased_bytes
        assert program.temporary_bytes < built[3, keys[key]].temporary_bytes


@pytest.mark.parametrize("kernels", ["auto", "xla"])
def test_caches_of_16_bits_are_half_as_large_and_are_never_widened(
    built: dict[tuple[int, ProgramKey], Executable], kernels: str
) -> None:
    """XLA would widen all of a bfloat16 cache on a CPU to write a few slots: it is no choice."""
    made = plan(3, kernels=kernels, kv_dtype="float16")
    pair = planned(TARGET, DRAFTER, made)
    programs, decoding = declare(pair), [pair.key(key.step) for key in (PLAIN, SPECULATIVE)]
    for key, program in compile_programs(programs[key] for key in decoding).items():
        wide = built[3, ProgramKey(key.step, Variant.GREEDY)]
        numbers = 2 * 4 * made.rows  # positions and anchors
        assert program.donated_bytes == (wide.donated_bytes - numbers) // 2 + numbers
        assert program.aliased_bytes == program.donated_bytes
        assert program.temporary_bytes < made.rows * made.slots * 2 * 64 * 2  # keys of a layer


def test_the_width_of_plain_steps_follows_from_the_plan() -> None:
    for exact in (True, False):
        program = declare(planned(TARGET, DRAFTER, plan(3, exact=exact)))[PLAIN]
        _, _, out = jax.eval_shape(program.function, *program.arguments)
        assert out.packed.shape[-1] == (BLOCK if exact else 1) + 5


def test_all_of_the_donated_state_is_updated_in_place(
    built: dict[tuple[int, ProgramKey], Executable],
) -> None:
    for (rows, name), program in built.items():
        slot = 2 * 2 * 64 * 4  # key and value, two heads, float32
        caches = 2 * rows * plan(rows).slots * slot  # a target layer's and a drafter layer's
        assert program.donated_bytes == caches + 2 * 4 * rows, name
        assert program.aliased_bytes == program.donated_bytes, name


def test_no_program_has_room_to_copy_a_cache(
    built: dict[tuple[int, ProgramKey], Executable],
) -> None:
    """But for the one row that is fed or scored difference from the others."""
    for (rows, name), program in built.items():
        keys = rows * plan(rows).slots * 2 * 64 * 4  # of one layer: half a cache
        difference = rows > 1 and name in (PREFILL, SCORED, COPIED)
        own = program.donated_bytes / rows if difference else 0
        assert program.temporary_bytes < keys + own, (rows, name)
    assert built[3, CLEARED].temporary_bytes < 1000


def test_temporaries_stay_under_the_budget_of_the_plan(
    built: dict[tuple[int, ProgramKey], Executable],
) -> None:
    for (rows, name), program in built.items():
        allowed = budget(planned(TARGET, DRAFTER, plan(rows))).temporaries
        assert program.temporary_bytes <= allowed, (rows, name)


def test_prefixes_are_copied_a_chunk_at_a_time() -> None:
    """Taking and putting back a chunk of one row moves neither rows nor caches."""
    kept = dataclasses.replace(plan(3), prefix_cache=1 << 30)
    programs = declare(planned(TARGET, DRAFTER, kept))
    take, put = ProgramKey(Step.TAKE_SEGMENT), ProgramKey(Step.PUT_SEGMENT)
    built = compile_programs(programs[key] for key in (take, put))
    chunk = 2 * CHUNK * 2 * 64 * 4  # keys and values of a layer
    for program in built.values():
        assert program.temporary_bytes <= 3 * 2 * chunk, program.key
        assert program.temporary_bytes < kept.slots * 2 * 64 * 4 / 10, program.key
    assert built[put].aliased_bytes == built[put].donated_bytes > 0
    assert built[take].donated_bytes == 0


@pytest.mark.parametrize(
    "key",
    [PREFILL, ProgramKey(Step.PREFILL, Variant.PENALIZED), SPECULATIVE, FORCED],
    ids=str,
)
def test_a_program_looks_once_at_its_models_and_never_at_how_weights_begin(
    key: ProgramKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tracing a deep model takes seconds."""
    program = declare(planned(TARGET, DRAFTER, plan(3)))[key]
    passes = []

    def noted(*arguments: Any, **options: Any) -> Any:
        passes.append(key)
        return forward(*arguments, **options)

    monkeypatch.setattr(steps, "forward", noted)
    monkeypatch.setattr(nn.initializers, "ones", None)
    jax.make_jaxpr(program.function)(*program.arguments)
    assert passes == [key]


def test_no_program_calls_back_to_the_host(built: dict[tuple[int, ProgramKey], Executable]) -> None:
    for key, program in built.items():
        hlo = program.compiled.as_text()
        assert "HloModule" in hlo
        for text in (hlo, program.stablehlo):
            assert not re.search(r"callback|outfeed|infeed|\bsend\b|\brecv\b", text), key


def test_programs_read_their_parts_by_name(built: dict[tuple[int, ProgramKey], Executable]) -> None:
    """Profiles show the parts by these scopes."""
    hlo = built[3, SPECULATIVE].compiled.as_text()
    for scope in ("draft", "target", "verify", "attention", "mlp", "head", "context"):
        assert re.search(rf'op_name="[^"]*/{scope}/', hlo), scope


@pytest.mark.parametrize("weights", [pytest.param("int8", marks=pytest.mark.soak), "int4"])
def test_no_step_has_room_for_an_unpacked_matrix(weights: str) -> None:
    target = tiny_target(num_layers=1, hidden_size=256, intermediate_size=4096)
    made = Plan(max_length=64, block=4, chunk=16, dtype="bfloat16", weights=weights, kernels="xla")
    made = resolve(made, build_pair(target, None), platform="cpu", memory=AMPLE)
    programs = declare(planned(target, None, made))
    largest = 256 * 2 * 4096 * 2  # bytes of gate and up in bfloat16
    program = compile_programs([programs[PLAIN]])[PLAIN]
    assert program.temporary_bytes < largest * 0.75
    assert program.argument_bytes < 1.2 * budget(planned(target, None, made)).weights


@pytest.mark.parametrize("backend", ["gpu", "cpu"])
def test_kernels_of_the_target_are_chosen_before_others_share_them(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two programs compiled at once on a GPU could take different kernels for one product."""
    keys = [
        ProgramKey(Step.DRAFT, Variant.CONSTRAINED),
        SPECULATIVE,
        ProgramKey(Step.PLAIN, Variant.SAMPLED),
        PREFILL,
        PLAIN,
    ]
    begun: list[ProgramKey] = []
    beside: dict[ProgramKey, int] = {}

    def compiled(program: Program, stored: Any) -> Any:
        begun.append(program.key)
        before = len(begun)
        time.sleep(0.05)  # others begin meanwhile, if they may
        beside[program.key] = len(begun) - before
        return types.SimpleNamespace(key=program.key, cached=False, seconds=0.0)

    monkeypatch.setattr(build_module, "_compile", compiled)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    made = compile_programs((Program(key, jnp.sin, ()) for key in keys), workers=2)
    assert made.keys() == set(keys)
    alone = keys[2:] if backend == "gpu" else []
    assert begun[: len(alone)] == alone
    assert [beside[key] for key in alone] == [0] * len(alone)
    assert sum(beside.values()) > 0  # the others are compiled together


@pytest.mark.parametrize(
    "key",
    [
        ProgramKey(Step.PLAIN, Variant.SAMPLED),
        ProgramKey(Step.PLAIN, Variant.PENALIZED),
        ProgramKey(Step.PREFILL, Variant.SAMPLED),
    ],
    ids=str,
)
def test_no_variant_fuses_the_sums_of_its_logits_with_their_readers(key: ProgramKey) -> None:
    """On a GPU a product may end with a sum of parts, which XLA would fuse with its only reader."""
    program = declare(planned(TARGET, DRAFTER, plan(3)))[key]
    text = jax.jit(program.function).lower(*program.arguments).as_text()
    places = 1 if key.step == Step.PREFILL else 3 * BLOCK
    assert re.search(rf"optimization_barrier .*: tensor<{places}x{TARGET.vocab_size}xf32>", text)


@pytest.mark.parametrize("key", [PLAIN, SPECULATIVE, PREFILL, FORCED], ids=str)
def test_the_target_is_given_tokens_and_positions_that_share_nothing(key: ProgramKey) -> None:
    """Else a drafted step would read the drafter's rotary table where a plain one makes its own."""
    program = declare(planned(TARGET, DRAFTER, plan(3)))[key]
    text = jax.jit(program.function).lower(*program.arguments).as_text()
    width, rows = (CHUNK, 1) if key == PREFILL else (BLOCK, 3)
    assert re.search(
        rf"optimization_barrier .*: tensor<{rows}x{width}xi32>, tensor<{rows}xi32>", text
    )


def test_a_forced_step_makes_the_whole_pass_of_a_plain_one(
    built: dict[tuple[int, ProgramKey], Executable],
) -> None:
    """What only the caches need of the last layer could be other kernels than a plain step's."""
    params = random_params(build_pair(TARGET, DRAFTER), seed=1)
    last = params["target"][f"layers_{TARGET.num_layers - 1}"]["mlp"]
    last["down"] = np.full_like(last["down"], np.nan)  # in no cache
    state = planned(TARGET, DRAFTER, plan(3)).empty_state()
    tokens, count = np.ones((3, BLOCK), np.int32), np.array([2, 0, BLOCK], np.int32)
    inputs = ForcedTokensInputs(tokens, num_tokens=count, forced=count > 0, anchor=count)
    state, _, finite = built[3, FORCED](jax.device_put(params), state, None, inputs)
    assert not finite.any()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(state)))


def test_a_prompt_is_fed_to_its_row_and_to_no_other(
    built: dict[tuple[int, ProgramKey], Executable],
) -> None:
    """Its row becomes what the only row of a smaller plan becomes; all others keep their bits."""
    rng, row = np.random.default_rng(0), 1
    params = jax.device_put(random_params(build_pair(TARGET, DRAFTER), seed=1))
    fed = (
        rng.integers(0, 60, (1, CHUNK)).astype(np.int32),
        np.array([11], np.int32),
        np.ones(1, bool),
    )

    def noise(rows: int) -> DecodeState:
        empty = planned(TARGET, DRAFTER, plan(rows)).empty_state()
        filled = jax.tree.map(lambda x: jnp.asarray(rng.integers(0, 9, x.shape), x.dtype), empty)
        return filled

    def after(
        state: DecodeState, program: Executable, *where: np.int32
    ) -> tuple[DecodeState, list]:
        rules = idle_rules(plan(len(state.position)))
        inputs = PrefillInputs(*fed, rules, *where)
        state, _, out = program(params, state, None, inputs)
        return jax.device_get(state), read_output(out)

    before = noise(3)
    held = jax.device_get(before)
    three, said = after(before, built[3, PREFILL], np.int32(row))
    one, alone = after(noise(1), build(1, PREFILL)[PREFILL])
    assert said == alone
    assert three.position[row] == one.position[0] == 11
    for old, new, wanted in zip(*map(jax.tree.leaves, (held, three, one)), strict=True):
        np.testing.assert_array_equal(np.delete(new, row, 0), np.delete(old, row, 0))
        if new.ndim > 1:  # what was there before is garbage behind the position
            np.testing.assert_allclose(new[row, :, :11], wanted[0, :, :11], atol=1e-5)
