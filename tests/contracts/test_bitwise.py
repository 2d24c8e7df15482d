"""R1, R2, R9: all steps agree bit for bit on logits, whatever fills the rest of a block."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Plan
from dflash_jax.config import TargetConfig
from dflash_jax.engine.engine import Engine
from dflash_jax.graph.build import compile_programs, jit
from dflash_jax.graph.keys import ProgramKey, Step
from dflash_jax.graph.protocols import Draft
from dflash_jax.graph.state import DecodeState, OutputSizes, RowRules, idle_rules, read_output
from dflash_jax.graph.steps import decoding as steps
from dflash_jax.graph.steps.decoding import verify_block
from dflash_jax.graph.steps.drafting import draft as draft_step
from dflash_jax.graph.steps.inputs import DecodeInputs, ForcedTokensInputs
from dflash_jax.graph.steps.multi_step import multi_step, plain_multi_step
from dflash_jax.graph.steps.pair import StepOptions
from dflash_jax.networks import build_pair
from dflash_jax.target_model import TargetModel
from dflash_jax.testing import (
    random_engine,
    tiny_drafter,
    tiny_gpt_oss,
    tiny_hybrid,
    tiny_moe,
    tiny_target,
)

BLOCK, CHUNK, NEW, VOCAB = 6, 16, 36, 97
FORCED = ProgramKey(Step.FORCED_TOKENS)


def verify(pair: Any, params: Any, state: DecodeState, rules: RowRules, block: jax.Array) -> Any:
    """A verify step over a given block, logits included."""
    drafts = jnp.full_like(state.anchor, BLOCK - 1)
    draft = Draft(block, jnp.ones_like(state.anchor, bool), drafts)
    return verified(pair, params, state, rules, draft)


def plain(pair: Any, params: Any, state: DecodeState, rules: RowRules, junk: jax.Array) -> Any:
    """A plain step with chosen junk after the anchor, logits included."""
    draft = Draft(jnp.concatenate([state.anchor[:, None], junk], axis=1))
    return verified(pair, params, state, rules, draft)


def draft_and_verify(pair: Any, params: Any, state: DecodeState, rules: RowRules) -> Any:
    """The fused speculative step, logits included."""
    state, _, draft = draft_step(pair, params, state, None, DecodeInputs(rules))
    return verified(pair, params, state, rules, draft)


def verified(pair: Any, params: Any, state: DecodeState, rules: RowRules, draft: Draft) -> Any:
    """Logits, state and output."""
    inputs = DecodeInputs(rules, draft=draft)
    logits, state, _, out = verify_block(pair, params, state, None, inputs)
    return logits, state, out


class Stepper:
    """The steps of one engine as programs that also return logits."""

    def __init__(self, engine: Engine):
        pair = build_pair(engine.graph.config, engine.graph.drafter_config)
        options = StepOptions(block=BLOCK, kernels=engine.plan.kernels)
        pair = pair.with_options(options)
        self.engine = engine
        for step in (Step.PLAIN, Step.SPECULATIVE):  # run below, and compiling takes the time
            del engine.core.runner.compiled.programs[engine.graph.key(step)]
        self.plain = jit(functools.partial(plain, pair))
        self.verify = jit(functools.partial(verify, pair))
        self.fused = jit(functools.partial(draft_and_verify, pair))
        free = jax.device_put(idle_rules(engine.plan))
        self.rules = RowRules(**vars(free) | {"limit": jnp.full_like(free.limit, 10**6)})

    def prefilled(self, prompt: list[int]) -> DecodeState:
        self.engine.generate_many([prompt] * self.engine.plan.rows, max_tokens=1)
        return self.engine.core.runner.state

    def plain_logits(self, prompt: list[int], junk: np.random.Generator) -> Any:
        """Per position the logits of plain steps, and the greedy text."""
        state, rows, tokens = self.prefilled(prompt), [], []
        for _ in range(NEW):
            fill = junk.integers(0, VOCAB, (self.engine.plan.rows, BLOCK - 1)).astype(np.int32)
            tokens.append(int(state.anchor[0]))
            logits, state, _ = self.plain(self.engine.params, state, self.rules, fill)
            rows.append(np.asarray(logits)[:, 0])
        return rows, tokens


DENSE = tiny_target(num_layers=2, windows=(None, 20))
RECURRENT = tiny_hybrid(num_layers=2, recurrent=(True, False))
MIXED = tiny_moe(num_layers=1, windows=(None,), sparse=(True,))
RECURRENT_MIXED = tiny_hybrid(
    model_type="qwen3_5_moe_text",
    num_layers=2,
    recurrent=(True, False),
    num_experts=8,
    experts_per_token=2,
    expert_size=24,
    shared_expert_size=16,
)
SINKS = tiny_gpt_oss(num_layers=2, windows=(12, None))
WIDE = tiny_target(num_layers=1, hidden_size=64, intermediate_size=64, windows=(None,))
NATIVE: dict[str, Any] = {"kernels": "auto"}  # native kernels, where there are some
INT4: dict[str, Any] = NATIVE | {"weights": "int4", "kv_dtype": "int8"}
INT8: dict[str, Any] = NATIVE | {"weights": "int8"}
INT8_XLA = INT8 | {"kernels": "xla"}
SMALL: dict[str, Any] = {"num_layers": 1, "windows": (12,), "causal": (False,)}  # drafters


@pytest.mark.sample("target4-bfloat16-1-packing4")
@pytest.mark.optimised
@pytest.mark.parametrize(
    ("target", "dtype", "rows", "packing"),
    [
        (dataclasses.replace(DENSE, num_layers=1, windows=(None,)), "bfloat16", 3, {}),
        (WIDE, "float32", 2, {}),
        (WIDE, "float32", 2, INT8),
        (WIDE, "float32", 2, INT8 | {"kv_dtype": "float16"}),
        (dataclasses.replace(DENSE, num_layers=1, windows=(20,)), "bfloat16", 1, NATIVE),
        *(
            pytest.param(target, dtype, rows, NATIVE, marks=pytest.mark.soak)
            for target in (DENSE, RECURRENT, MIXED, RECURRENT_MIXED, SINKS)
            for dtype, rows in (("float32", 1), ("bfloat16", 3))
        ),
        pytest.param(WIDE, "float32", 2, {"kv_dtype": "float16"}, marks=pytest.mark.soak),
        pytest.param(WIDE, "float32", 2, INT8_XLA, marks=pytest.mark.soak),
        pytest.param(WIDE, "bfloat16", 1, INT8_XLA, marks=pytest.mark.soak),
        pytest.param(RECURRENT, "float32", 2, INT8, marks=pytest.mark.soak),
        pytest.param(WIDE, "float32", 2, INT4, marks=pytest.mark.soak),
        pytest.param(DENSE, "bfloat16", 3, {}, marks=pytest.mark.soak),
        pytest.param(
            dataclasses.replace(RECURRENT_MIXED, num_layers=1, recurrent=(False,)),
            "float32",
            2,
            {},
            marks=pytest.mark.soak,
        ),
        pytest.param(RECURRENT_MIXED, "bfloat16", 2, {}, marks=pytest.mark.soak),
        pytest.param(RECURRENT_MIXED, "float32", 3, {}, marks=pytest.mark.soak),
        pytest.param(DENSE, "float32", 1, {}, marks=pytest.mark.soak),
        pytest.param(RECURRENT_MIXED, "bfloat16", 3, {}, marks=pytest.mark.soak),
        pytest.param(RECURRENT, "bfloat16", 2, {}, marks=pytest.mark.soak),
        pytest.param(MIXED, "bfloat16", 3, {}, marks=pytest.mark.soak),
        pytest.param(MIXED, "bfloat16", 2, {}, marks=pytest.mark.soak),
        pytest.param(SINKS, "bfloat16", 1, {}, marks=pytest.mark.soak),
        pytest.param(WIDE, "bfloat16", 2, INT4, marks=pytest.mark.soak),
        pytest.param(DENSE, "float32", 3, {}, marks=pytest.mark.soak),
        pytest.param(DENSE, "bfloat16", 1, {}, marks=pytest.mark.soak),
        pytest.param(WIDE, "bfloat16", 3, INT4, marks=pytest.mark.soak),
        pytest.param(WIDE, "float32", 1, INT4, marks=pytest.mark.soak),
        pytest.param(WIDE, "bfloat16", 1, INT8, marks=pytest.mark.soak),
        pytest.param(RECURRENT, "float32", 1, {}, marks=pytest.mark.soak),
        pytest.param(RECURRENT, "bfloat16", 2, INT8, marks=pytest.mark.soak),
        pytest.param(MIXED, "float32", 1, {}, marks=pytest.mark.soak),
        pytest.param(SINKS, "float32", 2, {}, marks=pytest.mark.soak),
    ],
)
def test_verify_rows_equal_plain_rows_bit_for_bit(
    target: TargetConfig, dtype: str, rows: int, packing: dict[str, Any]
) -> None:
    drafter = tiny_drafter(target, target_layer_ids=(0,), **SMALL)
    length = 640 if rows == 3 else 128  # attention in pieces, and at once
    shape = {"rows": rows, "max_length": length, "chunk": CHUNK, "block": BLOCK, "dtype": dtype}
    plan = Plan(**shape | {"kernels": "xla"} | packing)
    stepper = Stepper(random_engine(target, drafter, plan))
    prompt = np.random.default_rng(1).integers(0, VOCAB, 19).tolist()
    truth, text = stepper.plain_logits(prompt, np.random.default_rng(2))
    again, _ = stepper.plain_logits(prompt, np.random.default_rng(3))
    np.testing.assert_array_equal(np.stack(truth), np.stack(again))  # junk does not matter

    state, at, accepted = stepper.prefilled(prompt), 0, itertools.cycle([2, 5, 0, 4, 1, 3])
    while at + BLOCK < NEW:  # blocks right up to some place, wrong behind it
        right = next(accepted)
        block = np.array(text[at : at + BLOCK], np.int32)
        block[1 + right :] = (block[1 + right :] + 1) % VOCAB
        blocks = np.broadcast_to(block, (rows, BLOCK))
        logits, state, out = stepper.verify(stepper.engine.params, state, stepper.rules, blocks)
        for i in range(right + 1):
            np.testing.assert_array_equal(np.asarray(logits)[:, i], truth[at + i])
        at += right + 1
        assert int(out.num_tokens[0]) == right + 1

    state, at = stepper.prefilled(prompt), 0
    while at + BLOCK < NEW:  # and the fused step with its own drafts
        logits, state, out = stepper.fused(stepper.engine.params, state, stepper.rules)
        kept = int(out.num_tokens[0])
        for i in range(kept):
            np.testing.assert_array_equal(np.asarray(logits)[:, i], truth[at + i])
        at += kept


@pytest.mark.exhaustive
@pytest.mark.optimised
@pytest.mark.parametrize(
    ("target", "dtype"),
    [
        (dataclasses.replace(DENSE, num_layers=1, windows=(20,)), "bfloat16"),
        pytest.param(DENSE, "bfloat16", marks=pytest.mark.soak),
        pytest.param(DENSE, "float32", marks=pytest.mark.soak),
        pytest.param(RECURRENT, "bfloat16", marks=pytest.mark.soak),
        pytest.param(MIXED, "bfloat16", marks=pytest.mark.soak),
        pytest.param(SINKS, "float32", marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize(
    "function", [steps.speculative, pytest.param(steps.plain, marks=pytest.mark.soak)]
)
def test_steps_of_one_call_have_the_bits_of_single_steps(
    target: TargetConfig, dtype: str, function: Any
) -> None:
    """Caches, anchors and answers; single-step and multi-step programs alternate in one row.

    Plain steps of one call extend the drafter's context together, in a call of another width.
    """
    plan = Plan(rows=2, max_length=128, chunk=CHUNK, block=BLOCK, dtype=dtype)
    drafter = tiny_drafter(target, target_layer_ids=(0,), **SMALL)
    engine = random_engine(target, drafter, plan)
    stepper, rounds = Stepper(engine), 4
    prompt = np.random.default_rng(4).integers(0, VOCAB, 19).tolist()
    pair = build_pair(engine.graph.config, engine.graph.drafter_config)
    options = StepOptions(block=BLOCK, kernels=engine.plan.kernels)
    pair = pair.with_options(options)
    step = functools.partial(function, pair)
    single = jit(step)
    whole = functools.partial(multi_step, step)
    if function is steps.plain:
        whole = functools.partial(plain_multi_step, pair)
    multi = jit(functools.partial(whole, max_steps=6, sizes=OutputSizes(BLOCK)))
    start = stepper.prefilled(prompt)
    wanted, said = start, []
    for _ in range(rounds):
        wanted, _, out = single(engine.params, wanted, None, DecodeInputs(stepper.rules))
        said.append(np.asarray(out.packed))
    inputs = DecodeInputs(stepper.rules, num_steps=np.int32(rounds))
    found, _, out = multi(engine.params, start, None, inputs)
    np.testing.assert_array_equal(np.asarray(out.packed)[:rounds], said)
    assert (np.asarray(out.packed)[rounds:] == -1).all()
    if function is steps.plain:
        found, wanted = (dataclasses.replace(state, drafter=()) for state in (found, wanted))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.soak)])
def test_forced_tokens_carry_context_and_leave_decoding_exact(dtype: str) -> None:
    """R7: forced steps at block width, their taps captured, the next anchor forced."""
    target = tiny_target(num_layers=2)
    plan = Plan(max_length=128, chunk=CHUNK, block=BLOCK, dtype=dtype)
    engine = random_engine(target, tiny_drafter(target, target_layer_ids=(0,)), plan)
    engine.warm_up()
    run = engine.core.runner.executables | compile_programs(
        [engine.core.runner.compiled.programs[FORCED]]
    )
    prompt = np.random.default_rng(5).integers(0, VOCAB, 21).tolist()
    forced = np.random.default_rng(6).integers(0, VOCAB, 9).tolist()
    free = idle_rules(engine.plan)
    rules = RowRules(**vars(free) | {"limit": jnp.full_like(free.limit, 100)})
    texts, contexts = [], []
    for step in (Step.SPECULATIVE, Step.PLAIN):
        first = engine.generate(prompt, max_tokens=1).token_ids[0]
        state, feed = engine.core.runner.state, [first, *forced]
        for at in range(0, len(forced), BLOCK):
            part = feed[at : min(at + BLOCK, len(forced))]
            tokens = np.zeros((1, BLOCK), np.int32)
            tokens[0, : len(part)] = part
            count, anchor = np.array([[len(part)], [feed[at + len(part)]]], np.int32)
            inputs = ForcedTokensInputs(
                tokens, num_tokens=count, forced=np.ones(1, bool), anchor=anchor
            )
            state, _, finite = run[FORCED](engine.params, state, None, inputs)
            assert finite.all()
        assert int(state.position[0]) == len(prompt) + len(forced)
        contexts.append(np.asarray(state.drafter[1].k[0, :, : int(state.position[0])], np.float32))
        text: list[int] = []
        while len(text) < 30:
            key, inputs = engine.graph.key(step), DecodeInputs(rules, np.int32(1))
            state, _, out = run[key](engine.params, state, None, inputs)
            text += read_output(out)[0][0].tokens
        texts.append(text[:30])
        engine.core.runner.state = state
    assert texts[0] == texts[1]
    if dtype == "float32":
        whole = engine.generate([*prompt, first, *forced], max_tokens=30).token_ids
        assert texts[0] == whole
        reference = np.asarray(engine.core.runner.state.drafter[1].k[0, :, : contexts[0].shape[1]])
        np.testing.assert_allclose(contexts[0], reference, atol=1e-4)


def test_the_floor_is_the_best_token_that_does_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """R6: when a stop token comes, its replacement is already there."""
    target = tiny_target(num_layers=2)
    plan = Plan(max_length=128, chunk=CHUNK, block=BLOCK)
    engine = random_engine(target, tiny_drafter(target, target_layer_ids=(0,)), plan)
    prompt = np.random.default_rng(8).integers(0, VOCAB, 12).tolist()
    text = engine.generate(prompt, max_tokens=40, speculative=False).token_ids
    stop = next(t for i, t in enumerate(text) if i > 3 and t not in text[:i])
    outputs, step = [], engine.core.runner.step

    def noted(*arguments: Any, **options: Any) -> Any:
        outputs.append(step(*arguments, **options))
        return outputs[-1]

    monkeypatch.setattr(engine.core.runner, "step", noted)
    live = engine.submit(prompt, max_tokens=40, stop_token_ids=[stop])
    while not live.done:
        engine.advance()
    answers = [rows[0] for output in outputs for rows in read_output(output)]
    floors = [answer.replacement_token for answer in answers if answer.tokens]
    assert live.token_ids[-1] == stop
    model = TargetModel(target, engine.params["target"], "float32")
    last = np.asarray(model.forward([[*prompt, *live.token_ids[:-1]]]).logits)[0, -1].copy()
    assert int(last.argmax()) == stop
    last[stop] = -np.inf
    assert floors[-1] == int(last.argmax())
