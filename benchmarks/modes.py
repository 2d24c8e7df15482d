"""Timed decoding: prefill and decoding separately, and the fused step in a loop on the device."""

import dataclasses
import itertools
import time
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from dflash_jax.engine.engine import Engine
from dflash_jax.engine.sampling_params import SamplingOptions
from dflash_jax.graph.build import jit
from dflash_jax.graph.graph import GraphPrograms
from dflash_jax.graph.state import (
    DecodeState,
    RowRules,
    StepOutput,
    idle_rules,
    output_columns,
    read_output,
)
from dflash_jax.graph.steps import decoding as steps
from dflash_jax.graph.steps.inputs import DecodeInputs
from dflash_jax.graph.steps.pair import Params


@dataclasses.dataclass(frozen=True)
class Run:
    """One generation. Seconds of decoding exclude the prefill and the first token."""

    token_ids: list[int]
    acceptance_lengths: list[int]
    prefill_s: float
    decode_s: float
    decode_cpu_s: float  # CPU seconds of all threads, unaffected by other processes


def generate(engine: Engine, prompt: list[int], **options: Unpack[SamplingOptions]) -> Run:
    """Generate with the engine's own loop.

    The decoding time starts when the prompt is in the caches and nothing else is dispatched, and
    ends when the last token has been read.
    """
    started = time.perf_counter()
    live = engine.submit(prompt, **options)
    while live.num_computed < len(prompt):
        engine.advance()
    jax.block_until_ready(engine.core.runner.state)
    ready = time.perf_counter()
    busy = time.process_time()
    while not live.done:
        engine.advance()
    ended = time.perf_counter()
    done = time.process_time()
    result = live.result()
    lengths = result.stats.acceptance_lengths
    return Run(result.token_ids, lengths, ready - started, ended - ready, done - busy)


class DeviceLoop:
    """The fused step of an engine's plan, run for a number of rounds in one call."""

    def __init__(self, engine: Engine):
        engine.warm_up()
        self._engine = engine
        self._plan = engine.plan
        graph = engine.graph
        self._programs = GraphPrograms(graph, engine.core.runner.executables)
        self._pair = graph.pair
        self._state = graph.init_state()
        self._loop = jit(self._rounds, donate=(1, 4))

    def run(
        self, prompt: list[int], *, max_tokens: int, stop_ids: tuple[int, ...], rounds: int
    ) -> Run:
        """Prefill as the engine does, then decode all rounds in a loop on the device."""
        params = self._engine.params
        width = self._plan.block + output_columns(idle_rules(self._plan))
        answers = jnp.zeros((max_tokens, width), jnp.int32)
        count = jnp.int32(rounds)
        rules = self._engine.graph.rules(stop=stop_ids, max_length=len(prompt) + max_tokens)
        rules = jax.block_until_ready(jax.device_put(rules))
        started = time.perf_counter()
        self._state, out = self._programs.prefill(params, self._state, prompt, rules=rules)
        jax.block_until_ready((self._state, answers, count))
        ready = time.perf_counter()
        busy = time.process_time()
        self._state, said = self._loop(params, self._state, rules, count, answers)
        steps = read_output(
            StepOutput(
                said[:rounds, None], reports_tool_call_margin=self._plan.report_tool_call_margin
            )
        )
        ended = time.perf_counter()
        done = time.process_time()
        rounds_of_tokens = [row.tokens for step in steps for row in step]
        tokens = [*out.tokens[0], *itertools.chain.from_iterable(rounds_of_tokens)]
        return Run(
            tokens, [*map(len, rounds_of_tokens)], ready - started, ended - ready, done - busy
        )

    def _rounds(
        self,
        params: Params,
        state: DecodeState,
        rules: RowRules,
        rounds: jax.Array,
        answers: jax.Array,
    ) -> tuple[DecodeState, jax.Array]:
        """Run all rounds of a request; row i of `answers` is the output of round i."""

        def body(i: jax.Array, carry: tuple[DecodeState, jax.Array]) -> Any:
            state, answers = carry
            inputs = DecodeInputs(rules)
            state, _, out = steps.speculative(self._pair, params, state, None, inputs)
            return state, jax.lax.dynamic_update_slice(answers, out.packed, (i, 0))

        return jax.lax.fori_loop(0, rounds, body, (state, answers))
