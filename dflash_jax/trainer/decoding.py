"""Decoding of many requests by a pool of engines, and recording of the target's taps meanwhile."""

import contextlib
import functools
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from dflash_jax.engine.engine import Engine
from dflash_jax.engine.result import Result
from dflash_jax.engine.sampling_params import SamplingParams
from dflash_jax.graph import Graph, Pair
from dflash_jax.graph.abstract import PlannedPair
from dflash_jax.graph.build import jit
from dflash_jax.graph.keys import Step, Variant
from dflash_jax.graph.placement import place_params
from dflash_jax.graph.steps.pair import Params
from dflash_jax.plan import Plan, Weights
from dflash_jax.quant.layouts import pack_tree
from dflash_jax.target_model import TargetModel
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.trainer.recipes import FLOAT, INT8, Bucket
from dflash_jax.trainer.recorder import recorded, recorder

MOST_ENGINES = 4  # engines that decode concurrently
PREFIXES = 1 << 28  # bytes of an engine's cached prefixes
Taps = Callable[[], np.ndarray]  # float32 [taps, tokens, D] of a request that just ended


class EnginePool:
    """A pool of engines that decode plainly, one bucket at a time, with shared programs.

    Args:
      taps: target layers whose outputs are recorded; none by default.
      chunk: tokens of a prefill, whose multiples prompts may share; the plan's default, and
        nothing shared, by default.
      tokenizer: the target's tokenizer, for requests with stop texts.
      most: engines that decode concurrently.
      weights: format of the target's matrices while decoding; int8 is faster on a CPU, and has
        int8 caches where requests sample.
    """

    def __init__(
        self,
        model: TargetModel,
        variant: Variant,
        *,
        taps: Sequence[int] = (),
        chunk: int = 0,
        tokenizer: Tokenizer | None = None,
        most: int = MOST_ENGINES,
        weights: Weights = "float",
    ):
        self._most = most
        self._weights = weights
        self._model = model
        self._variant = variant
        self._tokenizer = tokenizer
        self._pair = Pair(model.module, recorder(model.config, taps) if taps else None)
        self._chunk = chunk
        self._lock = threading.Lock()
        self._free: dict[Bucket, queue.SimpleQueue[Engine]] = {}

    def count(self, bucket: Bucket) -> int:
        """Return the number of concurrent engines: at most what a quarter of the memory holds."""
        graph = self._graph(bucket)
        each = graph.budget
        room = graph.plan.memory_limit // 4 // (each.caches + each.temporaries)
        return max(1, min(parallel_calls(self._most, self._model), room))

    @contextlib.contextmanager
    def engine(self, bucket: Bucket) -> Iterator[Engine]:
        """Yield a free engine of the bucket; the pool of another bucket is dropped."""
        with self._lock:
            if bucket not in self._free:
                self._free = {bucket: self._new_pool(bucket)}
            free = self._free[bucket]
        engine = free.get()
        try:
            yield engine
        finally:
            free.put(engine)

    def _new_pool(self, bucket: Bucket) -> "queue.SimpleQueue[Engine]":
        free: queue.SimpleQueue[Engine] = queue.SimpleQueue()
        graph = self._graph(bucket)
        first = None
        params = packed_params({"target": self._model.params}, graph)
        if graph.pair.drafter is not None:
            params["drafter"] = {}
        for _ in range(self.count(bucket)):
            engine = Engine(graph, params, tokenizer=self._tokenizer)
            if first is None:
                first = engine
                # Requests that never draft need no such program.
                unused = graph.key(Step.SPECULATIVE, self._variant)
                engine.core.runner.compiled.programs.pop(unused, None)
                engine.warm_up(self._variant)
            else:
                engine.share_programs(first)
            free.put(engine)
        return free

    def _graph(self, bucket: Bucket) -> Graph:
        config = self._model.config
        length = min(bucket.length, config.max_length)
        sampled = self._variant == Variant.SAMPLED
        plan = Plan(
            rows=bucket.rows,
            max_length=length,
            dtype=self._model.dtype,
            weights=self._weights,
            exact=False,
            kv_dtype="int8" if self._weights == INT8 and sampled else "auto",
            block=2 if self._pair.drafter else 0,
            chunk=self._chunk,
            prefix_cache=PREFIXES if self._chunk else 0,
        )
        return Graph(self._pair, plan, mesh=self._model.mesh)


def packed_params(params: Params, planned: PlannedPair) -> Params:
    """Return float parameters, by role, for a plan; the same ones if it keeps floats."""
    plan = planned.plan
    if plan.weights == FLOAT:
        return params
    return place_params(planned, pack_tree(jax.device_get(params), planned.specs))


def decode(
    engine: Engine,
    asked: Sequence[tuple[list[int], SamplingParams]],
    ended: Callable[[int, Taps], None] | None = None,
) -> list[Result]:
    """Decode requests, as many at a time as the engine has rows.

    Args:
      asked: prompt and options of each request.
      ended: called with a request's number and a function that returns the taps of its prompt and
        output, except for the last token, which no step was fed. The engine records taps.
    """
    handles = []
    running = {}

    def advance() -> None:
        engine.advance()
        for number, handle in [*running.items()]:
            if handle.done:
                del running[number]
                if ended is not None:  # before the next turn, which may give the row away
                    tokens = len(asked[number][0]) + len(handle.token_ids) - 1
                    ended(number, functools.partial(_taps, engine, handle.sequence.row, tokens))

    for number, (prompt, params) in enumerate(asked):
        [handle] = engine.prepare(prompt, params, n=1)
        handle.delay(engine.warm_up(*handle.variants))
        while not engine.core.try_add([handle.sequence]):
            advance()
        handles.append(handle)
        running[number] = handle
    while running:
        advance()
    return [handle.result() for handle in handles]


@functools.cache
def _row_reader() -> Callable[..., jax.Array]:
    return jit(recorded, static_argnums=(2,))


def _taps(engine: Engine, row: int, tokens: int) -> np.ndarray:
    count = len(engine.graph.pair.taps)
    taps = _row_reader()(engine.core.runner.state.drafter, np.int32(row), count)
    return jax.device_get(taps)[:, :tokens]


def parallel_calls(most: int, model: TargetModel) -> int:
    """Return one call per core on a CPU, because a small program uses one core; otherwise one.

    Calls on a mesh would wait for each other's collectives.
    """
    return min(cores(), most) if jax.default_backend() == "cpu" and model.mesh is None else 1


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
