"""The thread that owns an engine, and its communication with the event loop.

The thread blocks on its command queue while no request runs, and polls it between engine steps
otherwise, so a cancellation takes effect within one block or prompt chunk. `StructureThreads`
compile grammars and a `BackgroundCompiler` compiles programs; a request enters the engine's queue
once both are ready, and delays no other request before that. Engines that failed are made again.
"""

import asyncio
import concurrent.futures
import dataclasses
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from dflash_jax.engine.engine import Engine, RequestHandle
from dflash_jax.engine.request import CancelCell
from dflash_jax.engine.request import CancelReason as Reason
from dflash_jax.engine.result import Piece, Result
from dflash_jax.engine.sampling_params import SamplingParams
from dflash_jax.errors import ComputeError, DFlashError, HostError
from dflash_jax.graph.background import BackgroundCompiler
from dflash_jax.graph.keys import Variant
from dflash_jax.server import errors
from dflash_jax.server.background import Client, StructureThreads
from dflash_jax.utils.allocator import thaw_objects

log = logging.getLogger("dflash_jax.server")
MAX_FAILURES = 2  # consecutive failed steps after which the engine is not restarted

Warm = Literal["none", "common", "all"]
COMPILED_FIRST: dict[Warm, tuple[Variant, ...]] = {  # compiled before the server is ready
    "none": (Variant.GREEDY,),
    "common": (Variant.GREEDY, Variant.SAMPLED),
    "all": tuple(Variant),
}
Listener = Callable[[int, list[Piece], "Result | Exception | None"], None]


@dataclasses.dataclass(eq=False)
class PendingOutput:
    """One output in progress.

    `listener(index, pieces, end)` is called in the event loop with new pieces, and at the end with
    the result or the error. The first call, without pieces, means that the engine accepted the
    request.

    Attributes:
      client: names of who asked, for turns.
      label: id of the request, for log lines.
      delivered: number of pieces passed to the listener.
      cancelled: `EngineThread.cancel` was called.
      finished: the listener received the end.
      waits_for: variants whose programs are still being compiled.
    """

    prompt: list[int]
    params: SamplingParams
    index: int
    listener: Listener
    client: Client = ()
    label: str = ""
    handle: RequestHandle | None = None
    delivered: int = 0
    cancelled: bool = False
    finished: bool = False
    waits_for: tuple[Variant, ...] = ()
    cell: CancelCell = dataclasses.field(default_factory=CancelCell)

    @property
    def pending(self) -> bool:
        """Return whether the output grammar may still be compiling."""
        return self.handle is None and not self.finished and self.params.structured is not None

    def take_update(self) -> "tuple[PendingOutput, list[Piece], Result | Exception | None] | None":
        """Return what the listener has not received yet, or None, and mark it as delivered."""
        assert self.handle is not None
        pieces = self.handle.pieces[self.delivered :]
        self.delivered += len(pieces)
        if not self.handle.done:
            return (self, pieces, None) if pieces else None
        try:
            return self, pieces, self.handle.result()
        except DFlashError as error:
            return self, pieces, error


OutputUpdate = tuple[PendingOutput, list[Piece], Result | Exception | None]


class EngineThread:
    """An engine in its own thread.

    Args:
      make: loads the engine; called in the thread.
      name: the model's name, for log lines.
      warm: programs to compile before `ready`: "none" compiles greedy ones, "common" also sampled
        ones, and all others after it, "all" compiles all. Unless "none", drafted steps are then
        timed against plain ones, so that requests stop drafting where it does not pay off.
      compiler: shared by all models of the process; `stop` stops it.

    Attributes:
      engine: None until it is loaded.
      active: number of outputs submitted and not finished; for the event loop only.
      error: why the engine is not usable, or None.
      ended: set once `error` is.
      first: variants whose programs are compiled before `ready`; empty until the engine is loaded.
      ready: set once the server can answer requests.
    """

    def __init__(
        self,
        make: Callable[[], Engine],
        *,
        name: str = "",
        warm: Warm = "none",
        compiler: BackgroundCompiler | None = None,
    ):
        self._make = make
        self._name = name
        self._warm = warm
        self._compiler = compiler or BackgroundCompiler()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._turn_began: float | None = None  # None while there is no work
        self._running: list[PendingOutput] = []  # in the engine; for the thread only
        self._waiting: list[PendingOutput] = []  # for programs to be compiled; for the thread only
        self._failures = 0
        self._stopping = False
        self.engine: Engine | None = None
        self.first: tuple[Variant, ...] = ()
        self.active = 0
        self.error: Exception | None = None
        self.ended = asyncio.Event()
        self.ready = asyncio.Event()
        self._structures = StructureThreads(
            self._is_fast, self._prepare, self._refuse, self._is_known, self._brief
        )
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # -- for the event loop -------------------------------------------------------------------

    def has_room(self, outputs: int) -> bool:
        """Return whether the queue (`Plan.queue`) has room for this many more outputs."""
        return self.engine is not None and self.active + outputs <= self.engine.plan.queue

    @property
    def turn_s(self) -> float:
        """Seconds since the thread's current turn began; 0 while there is no work."""
        began = self._turn_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def held_tokens(self) -> int:
        """Return the number of tokens in the KV caches of running requests."""
        handles = [output.handle for output in list(self._running)]
        return sum(x.num_computed + len(x.token_ids) for x in handles if x and not x.done)

    def submit(self, output: PendingOutput) -> None:
        """Queue an output; its listener is also called if the engine refuses it."""
        self.active += 1
        if output.params.structured is not None:
            self._structures.submit(output, output.client)
        else:
            self._commands.put(lambda: self._prepare(output))

    def cancel(self, output: PendingOutput, reason: Reason | None = None) -> None:
        """End an output; its listener receives the result so far.

        Args:
          reason: why the rest is not needed; None if the answer is complete as it is.
        """
        if reason:
            output.cell.cancel(reason)  # takes effect in the engine's next step
        if not reason or output.waits_for or output.pending:
            self._commands.put(lambda: self._cancel(output))

    async def stop(self) -> None:
        """Cancel all outputs and end the thread."""
        self._compiler.stop()
        self._structures.stop()
        self._commands.put(self._stop)
        await asyncio.to_thread(self._thread.join, 30)

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            log.info("loading %s", self._name)
            self.engine = self._make()
        except Exception as error:
            self._fail(error)
            return
        self._compile(self.engine)
        while not self._stopping:
            self._turn_began = time.monotonic() if self._running else None
            if not self._running:
                command = self._commands.get()
                self._turn_began = time.monotonic()
                command()
            while not self._stopping:
                try:
                    self._commands.get_nowait()()
                except queue.Empty:
                    break
            if self._running:
                self._step()
        self.engine.close()

    @property
    def _loaded(self) -> Engine:
        assert self.engine is not None
        return self.engine

    def _compile(self, engine: Engine) -> None:
        """Queue programs for compilation in the order in which requests will probably need them."""
        compiled = engine.core.runner.compiled
        compiler = self._compiler
        first, later = compilation_order(engine, self._warm)
        self.first = first
        compiled.label = self._name
        compiled.want([*first, *later])  # before compilation starts, so that progress counts all
        future = compiler.want(compiled, first, urgent=True)
        for variant in later:
            compiler.want(compiled, [variant])
        future.add_done_callback(
            lambda done: self._commands.put(lambda: self._on_warm(engine, done))
        )

    def _on_warm(self, engine: Engine, future: concurrent.futures.Future[None]) -> None:
        if (
            future.cancelled()
            or engine.core.runner.compiled is not (self.engine or engine).core.runner.compiled
        ):
            return
        if (error := future.exception()) is not None:
            self._end(errors.as_exception(error))
        else:
            if self._warm != "none" and not self._running:
                self._measure()
            compiled = engine.core.runner.compiled
            _, later = compilation_order(engine, self._warm)
            missing = [variant for variant in later if compiled.missing([variant])]
            rest = f"; still compiling: {', '.join(missing)}" if missing else ""
            log.info("%s is ready%s", self._name, rest)
            self._call(self.ready.set)

    def _measure(self) -> None:
        """Find out when drafting pays off."""
        try:
            self._loaded.time_drafting()
        except BaseException as error:  # nothing may end this thread silently
            self._recover(errors.as_exception(error))

    def _step(self) -> None:
        try:
            self._loaded.advance()
        except BaseException as error:  # nothing may end this thread silently
            self._recover(errors.as_exception(error))
            return
        self._failures = 0
        self._publish([update for output in self._running if (update := output.take_update())])

    def _publish(self, updates: list[OutputUpdate]) -> None:
        ended = {id(output) for output, _, end in updates if end is not None}
        self._running = [output for output in self._running if id(output) not in ended]
        if updates:
            self._call(self._deliver, updates)

    def _deliver(self, updates: list[OutputUpdate]) -> None:
        for output, pieces, end in updates:
            if not output.finished:
                output.finished = end is not None
                self.active -= output.finished
                output.listener(output.index, pieces, end)

    def _refuse(self, output: PendingOutput, error: Exception) -> None:
        self._call(self._deliver, [(output, [], error)])

    def _is_known(self, output: PendingOutput) -> bool:
        """Return whether the output's grammar was compiled or refused before."""
        structure = output.params.structured
        return structure is not None and self._loaded.core.grammars.knows(structure)

    def _is_fast(self, output: PendingOutput) -> bool:
        """Return whether `_prepare` will take no longer than a trial compilation of the grammar."""
        structure = output.params.structured
        return output.cancelled or structure is None or self._loaded.core.grammars.decide(structure)

    def _brief(self, output: PendingOutput) -> Exception | None:
        """Return the error of an output whose grammar was refused, or None, without details."""
        structure = output.params.structured
        return None if structure is None else self._loaded.core.grammars.brief_refusal(structure)

    def _prepare(self, output: PendingOutput) -> None:
        """Validate an output's request and compile its grammar, in this or a structure thread."""
        if output.cancelled:
            return
        try:
            [handle] = self._loaded.prepare(
                output.prompt, output.params, cancel=output.cell, label=output.label
            )
        except BaseException as error:
            self._refuse(output, errors.as_exception(error))
            return
        if threading.current_thread() is self._thread:
            self._accept(output, handle)
        else:
            self._commands.put(lambda: self._accept(output, handle))

    def _accept(self, output: PendingOutput, handle: RequestHandle) -> None:
        """Queue a prepared request in the engine, or compile its programs first."""
        if output.cancelled:  # while its structure was compiled
            return
        output.handle = handle
        compiled = self._loaded.core.runner.compiled
        variants = handle.variants
        missing = tuple(variant for variant in variants if compiled.missing([variant]))
        if not missing:
            self._enqueue(output)
        elif len(self._waiting) >= max(self._loaded.plan.queue // 2, 1):  # leave room for others
            self._refuse(output, errors.still_compiling(compiled, missing))
        else:
            output.waits_for = missing
            self._waiting.append(output)
            future = self._compiler.want(compiled, missing, urgent=True)
            resume = functools.partial(self._resume, output, time.perf_counter())
            future.add_done_callback(lambda future: self._commands.put(lambda: resume(future)))
        if output in self._running or output in self._waiting:
            self._call(self._deliver, [(output, [], None)])
            if output.waits_for and output.cell:
                self._cancel(output)

    def _resume(
        self, output: PendingOutput, since: float, future: concurrent.futures.Future[None]
    ) -> None:
        """Queue a request after its programs were compiled, unless it was cancelled."""
        if output not in self._waiting:
            return
        self._waiting.remove(output)
        output.waits_for = ()
        if future.cancelled():
            self._refuse(output, ComputeError("the server stopped before the request began"))
        elif error := future.exception():
            self._refuse(output, errors.not_compiled(error))
        else:
            assert output.handle is not None
            output.handle.delay(time.perf_counter() - since)
            self._enqueue(output)

    def _enqueue(self, output: PendingOutput) -> None:
        assert output.handle is not None
        try:
            self._loaded.enqueue([output.handle])
        except DFlashError as error:
            self._refuse(output, error)
            return
        self._running.append(output)

    def _cancel(self, output: PendingOutput) -> None:
        output.cancelled = True
        if waiting := output in self._waiting:
            self._waiting.remove(output)
        if output.handle is None:
            self._refuse(output, errors.unfinished())
        elif output.cell and not waiting:
            return  # the engine's next step ends it
        elif not output.handle.done:
            output.handle.close()
            if update := output.take_update():
                self._publish([update])

    def _stop(self) -> None:
        for output in [*self._running, *self._waiting]:
            self._cancel(output)
        self._stopping = True

    def _recover(self, error: Exception) -> None:
        """Restart the engine after a failed step; its requests end, as device state is lost.

        Hosts that share a model end instead, as the others know nothing of another engine.
        """
        ended = ", ".join(dict.fromkeys(output.label for output in self._running)) or "no request"
        traced = None if isinstance(error, HostError) else error
        log.error("a step failed, which ends %s: %s", ended, error, exc_info=traced)
        failure = errors.step_failure(error)
        self._publish(
            [
                (output, output.handle.pieces[output.delivered :], failure)
                for output in self._running
                if output.handle
            ]
        )
        self._failures += 1
        if self._failures >= MAX_FAILURES or self._loaded.core.runner.executor.hosts > 1:
            self._end(error)
            return
        try:
            self.engine = rebuilt(self._loaded)
            thaw_objects()
        except Exception as last:
            self._end(last)

    def _end(self, error: Exception) -> None:
        self._fail(error)
        self._stopping = True

    def _fail(self, error: Exception) -> None:
        self.error = error
        self._call(self.ended.set)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed
            self._stopping = True


def compilation_order(engine: Engine, warm: Warm) -> tuple[tuple[Variant, ...], list[Variant]]:
    """Return the variants to compile before the server is ready, and those after that.

    Log-probabilities of prompts are asked for so rarely that the first request compiles them.
    """
    served = [x for x in Variant if x is not Variant.CONSTRAINED or engine.core.grammars.available]
    first = tuple(variant for variant in COMPILED_FIRST[warm] if variant in served)
    later = [x for x in served if x not in first and x is not Variant.PROMPT]
    return first, [] if warm == "none" else later


def rebuilt(old: Engine) -> Engine:
    """Return an engine with a new state, and the parameters and programs of one that failed.

    Raises:
      PlanError, JaxRuntimeError: there is no memory for it.
    """
    graph = old.graph
    params = old.params
    old.core.runner.drop()  # there may be no room for two states
    new = Engine(graph, params, tokenizer=old.tokenizer)
    new.share_programs(old)
    new.core.grammars = old.core.grammars
    return new
