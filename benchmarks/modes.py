"""Timed decoding: prefill and decoding separately, and the fused step in bare loops."""

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.engine.engine import Engine
from dflash_jax.graph.build import jit
from dflash_jax.graph.graph import GraphPrograms
from dflash_jax.graph.keys import ProgramKey, Step, Variant
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
    decode_cpu_s: float  # of all threads of this process, unaffected by other processes


def generate(engine: Engine, prompt: list[int], **options: Any) -> Run:
    """Generate with the engine's own loop.

    The decoding time starts when the prompt is in the caches and nothing else is dispatched, and
    ends when the last token has been read.
    """
    started = time.perf_counter()
    live = engine.submit(prompt, **options)
    while live.num_fed < len(prompt):
        engine.advance()
    jax.block_until_ready(engine.core.runner.state)
    ready, busy = time.perf_counter(), time.process_time()
    while not live.done:
        engine.advance()
    ended, done = time.perf_counter(), time.process_time()
    result = live.result()
    lengths = result.stats.acceptance_lengths
    return Run(result.token_ids, lengths, ready - started, ended - ready, done - busy)


class BareLoop:
    """The fused step of an engine's plan, run for a number of rounds without a request."""

    def __init__(self, engine: Engine):
        engine.warm_up()
        self._engine, self._plan = engine, engine.plan
        graph = engine.graph
        self._programs = GraphPrograms(graph, engine.core.runner.executables)
        self._pair = dataclasses.replace(graph.pair, block=graph.plan.block)
        self._state = graph.init_state()
        self._loop = jit(self._rounds, donate=(1, 4))

    def on_device(
        self, prompt: list[int], *, max_tokens: int, stop_ids: tuple[int, ...], rounds: int
    ) -> Run:
        """Prefill as the engine does, then decode in one call, a loop on the device."""
        width = self._plan.block + output_columns(idle_rules(self._plan))
        answers = jnp.zeros((max_tokens, width), jnp.int32)
        count = jnp.int32(rounds)
        jax.block_until_ready((answers, count))

        def decode(rules: RowRules) -> list[list[int]]:
            params, state = self._engine.params, self._state
            self._state, said = self._loop(params, state, rules, count, answers)
            steps = read_output(StepOutput(said[:rounds, None], reports_odds=self._plan.call_odds))
            return [list(row.tokens) for step in steps for row in step]

        return self._timed(prompt, max_tokens, stop_ids, decode)

    def on_host(
        self, prompt: list[int], *, max_tokens: int, stop_ids: tuple[int, ...], rounds: int
    ) -> Run:
        """Prefill as the engine does, then dispatch its calls and read their results.

        Like the engine, it runs several steps per call if they are short; otherwise the next call
        is dispatched before the previous result is read.
        """
        each = self._engine.core.scheduler.pacer.num_steps
        count = jax.device_put(np.int32(each)) if self._plan.steps_per_call > 1 else None
        ahead = self._plan.lookahead if each == 1 else 0
        step = self._engine.core.runner.executables[ProgramKey(Step.SPECULATIVE, Variant.GREEDY)]
        params = self._engine.params

        def decode(rules: RowRules) -> list[list[int]]:
            said, unread = [], collections.deque()
            for _ in range(0, rounds, each):
                inputs = DecodeInputs(rules, num_steps=count)
                self._state, _, out = step(params, self._state, None, inputs)
                unread.append(out)
                if len(unread) > ahead:
                    said += read_output(unread.popleft())
            said += itertools.chain.from_iterable(map(read_output, unread))
            return [list(row.tokens) for [row] in said]

        return self._timed(prompt, max_tokens, stop_ids, decode)

    def _timed(
        self,
        prompt: list[int],
        max_tokens: int,
        stop_ids: tuple[int, ...],
        decode: Callable[[RowRules], list[list[int]]],
    ) -> Run:
        started = time.perf_counter()
        graph, params = self._engine.graph, self._engine.params
        rules = graph.rules(stop=stop_ids, max_length=len(prompt) + max_tokens)
        rules = jax.device_put(rules)
        self._state, out = self._programs.prefill(params, self._state, prompt, rules=rules)
        jax.block_until_ready(self._state)
        ready, busy = time.perf_counter(), time.process_time()
        said = decode(rules)
        ended, done = time.perf_counter(), time.process_time()
        tokens = [*out.tokens[0], *itertools.chain.from_iterable(said)]
        return Run(tokens, [len(row) for row in said], ready - started, ended - ready, done - busy)

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
