"""Dispatch an engine's compiled programs on the one device state they share.

Nothing here waits for the device, except for the drafts that grammar masks are made from.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from dflash_jax.compiler import two_devices as apart
from dflash_jax.compiler.build import Executable
from dflash_jax.compiler.memory import tree_bytes
from dflash_jax.compiler.plan import Plan
from dflash_jax.compiler.programs import (
    ALL_LANES,
    DECODING,
    GREEDY,
    MASKED,
    SHAPED,
    Params,
    declare,
    empty_state,
    repeats,
    words,
)
from dflash_jax.compiler.settings import undisturbed
from dflash_jax.compiler.sharding import device_mesh, param_shardings, row_shardings
from dflash_jax.compiler.variants import OF_LANE, CompiledPrograms
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.engine.forced_tokens import Dictated, dictate
from dflash_jax.engine.logits_processing import Shaper
from dflash_jax.engine.prefix.cursor import PromptCursor
from dflash_jax.engine.prefix.disk import identity
from dflash_jax.engine.prefix.store import PrefixStore
from dflash_jax.engine.scheduler import SchedulerOutput
from dflash_jax.engine.sequence import Sequence
from dflash_jax.errors import CheckpointError
from dflash_jax.quant.layouts import KEPT
from dflash_jax.quant.products import put_in_order
from dflash_jax.state import RowRules, RowStep, StepOutput, read_output

LANE_OF = {variant: lane for lane, variant in OF_LANE.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class InFlightStep:
    """Dispatched work, and the outputs that its sequences wait for.

    Attributes:
      dispatched: when, by `time.perf_counter`.
      outputs: for each call, its first row, the rows that wait for it, and its output.
    """

    work: SchedulerOutput
    dispatched: float
    outputs: tuple[tuple[int, tuple[int, ...], StepOutput], ...]

    def results(self) -> Iterator[dict[int, RowStep]]:
        """Wait for each output; yield the results of each device step, by row.

        Outputs that no sequence waits for any more are not waited for.
        """
        for first, rows, output in self.outputs:
            if any(map(self.work.waits, rows)):
                for step in read_output(output):
                    yield {row: step[row - first] for row in rows}

    def output_of(self, row: int) -> tuple[StepOutput, int]:
        """Return the output that holds a row's results, and the row's place in it."""
        return next((x, row - first) for first, rows, x in self.outputs if row in rows)


class ModelRunner:
    """Parameters, compiled programs, and the state of all rows.

    Attributes:
      compiled: the programs of the plan, and the executables made of them so far.
      state: of all rows; donated to every step, which gives it back.
      prefixes: moves prompt segments between rows and the prefix cache; None without one.
    """

    def __init__(
        self, target: TargetConfig, drafter: DrafterConfig | None, params: Params, plan: Plan
    ):
        self.target, self.drafter, self.plan = target, drafter, plan
        self.compiled = CompiledPrograms(declare(plan, target, drafter, lanes=ALL_LANES))
        self._fed_rows = plan.fed_rows
        self._copies = jax.default_backend() != "cpu"  # there answers are on the host already
        self._apart = plan.apart and drafter is not None
        self._mesh = device_mesh(plan)
        self.params = self._place(params)
        self.state: Any = self._empty_state()
        self.prefixes = self._make_prefixes(self.params)
        self._shaper = Shaper(plan.rows, target.vocab_size)
        # Kept there, as to send a number in every call takes 0.1 ms.
        self._counts = jax.device_put([np.int32(n) for n in range(plan.rounds + 1)])

    @property
    def params_deleted(self) -> bool:
        """Whether parameters were donated to a program outside the engine."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self.params))

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of each part that stays in memory; any thread may ask.

        Parts are "weights", "caches" (keys, values and recurrent states of all rows),
        "prefix_cache", and "programs" (machine code; 0 where XLA does not say, as on a CPU).
        """
        return {
            "weights": tree_bytes(self.params),
            "caches": tree_bytes(self.state),
            "prefix_cache": self.prefixes.cache.bytes if self.prefixes else 0,
            "programs": sum(made.code_bytes for made in list(self.executables.values())),
        }

    @property
    def executables(self) -> dict[str, Executable]:
        """What was compiled so far, by name."""
        return self.compiled.executables

    def execute(self, work: SchedulerOutput) -> InFlightStep:
        """Dispatch a turn's work; its results are read later."""
        started = time.perf_counter()
        if work.prefill:
            return InFlightStep(work, started, tuple(self._prefill(work)))
        name = "plain" if self.plan.exact else "plain1"
        output = self.step("speculative" if work.drafting else name, work)
        return InFlightStep(work, started, ((0, tuple(work.sequences), output),))

    def _prefill(self, work: SchedulerOutput) -> Iterator[tuple[int, tuple[int, ...], StepOutput]]:
        """Feed one chunk of each prompt; yield the outputs of last chunks.

        Rows with the same prompt at the same position share a chunk: the first is fed, the others
        copy its row. Last chunks are fed to each row, as they decide a token, and so are prompts
        whose log-probabilities are wanted.
        """
        if self._fed_rows == self.plan.rows:
            for row, sequence in work.sequences.items():
                self._restore(row, sequence.cursor)
            yield from self._feed(work, work.sequences, first=0)
            return
        fed: dict[tuple[int, int], int] = {}  # rows by prompt and position
        for row, sequence in work.sequences.items():
            cursor = sequence.cursor
            self._restore(row, cursor)
            start = cursor.num_fed
            place = id(cursor.prompt), start
            scores = sequence.request.params.prompt_logprobs is not None
            if place in fed and not scores and start + self.plan.chunk < len(cursor.prompt):
                self.copy_row(fed[place], row)
                cursor.num_fed += self.plan.chunk
                self._keep(row, cursor, start)
            else:
                fed[place] = row
                yield from self._feed(work, {row: sequence}, first=row)

    def _feed(
        self, work: SchedulerOutput, sequences: Mapping[int, Sequence], *, first: int
    ) -> Iterator[tuple[int, tuple[int, ...], StepOutput]]:
        """Dispatch one prefill call for rows from `first` on."""
        rows, chunk = self._fed_rows, self.plan.chunk
        tokens, num_fed = np.zeros((rows, chunk), np.int32), np.zeros(rows, np.int32)
        fresh = np.zeros(rows, bool)
        starts = {row: sequence.cursor.num_fed for row, sequence in sequences.items()}
        last = []
        for row, sequence in sequences.items():
            cursor, at = sequence.cursor, row - first
            part = cursor.prompt[starts[row] : starts[row] + chunk]
            tokens[at, : len(part)], num_fed[at], fresh[at] = part, len(part), starts[row] == 0
            if sequence.request.params.prompt_logprobs is not None:
                self._score_chunk(row, cursor)
            cursor.num_fed += len(part)
            if sequence.prefilled:
                last.append(row)
                self.set_logits_state(row, sequence)
        output = self.step("prefill", work, tokens, num_fed, fresh, readers=last, first=first)
        for row, sequence in sequences.items():
            self._keep(row, sequence.cursor, starts[row])
        if last:
            yield first, tuple(last), output

    def step(
        self,
        name: str,
        work: SchedulerOutput,
        *arguments: Any,
        readers: Iterable[int] | None = None,
        first: int = 0,
    ) -> StepOutput:
        """Dispatch one program; its output is copied to the host in the background.

        Args:
          readers: rows whose grammars masks are made of; by default those of the work.
          first: the first of the rows that are fed.
        """
        lane, rules = LANE_OF[work.variant], work.rules
        carried: tuple[Any, ...] = ()
        if name in DECODING and repeats(self.plan, lane):
            arguments = (self._counts[work.num_steps], *arguments)
        elif name == "prefill" and self._fed_rows < self.plan.rows:
            arguments = (np.int32(first), *arguments)
        if lane == MASKED:
            name, arguments, masks = self._make_masks(name, work, arguments, readers, first)
            carried = (self._shaper.shaping, masks)
        elif lane == SHAPED:
            carried = (self._shaper.shaping,)
        program = self.executables[name + lane]
        made = program(self.params, self.state, *carried, *arguments, rules)
        self.state, output = made[0], made[-1]
        if carried:
            self._shaper.keep(made[1])
        if self._copies:
            output.packed.copy_to_host_async()
        return output

    def exchange(self, params: Params) -> None:
        """Goes on with other parameters of the same shapes; what is kept of prompts is not theirs.

        Nothing may run meanwhile.

        Raises:
          CheckpointError: they are made otherwise; the engine keeps those it has.
        """
        try:
            placed = self._place(params)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"what was given is no tree of parameters ({error}); give one like `engine.params`"
            ) from error
        given, wanted = _leaves(placed), _leaves(self.params)
        if wrong := sorted(given.items() ^ wanted.items()):
            name = wrong[0][0]
            raise CheckpointError(
                f"the parameter {name} is {given.get(name, 'missing')}, but the engine's is"
                f" {wanted.get(name, 'none')}; give a tree like `engine.params`, or load anew"
            )
        where = jax.tree.map(lambda leaf: leaf.sharding, self.params)
        placed = jax.device_put(placed, where)
        self.params, self.prefixes = placed, self._make_prefixes(placed)

    def prefetch(self, cursor: PromptCursor) -> None:
        """Begin to read cached chunks of a prompt from disk, if the plan keeps any there."""
        if self.prefixes:
            self.prefixes.prefetch(cursor)

    def refute(self, prompt: tuple[int, ...]) -> None:
        """Remove a prompt from the prefix cache."""
        if self.prefixes:
            self.prefixes.forget(prompt)

    def release(self, cursor: PromptCursor, *, tainted: bool) -> None:
        """Keep what an ended request added to the prefix cache, or remove it.

        Args:
          tainted: no other request should use it.
        """
        if self.prefixes:
            self.prefixes.release(cursor, tainted=tainted)

    def set_logits_state(self, row: int, sequence: Sequence) -> None:
        """Set a row's penalties and biases to those of a request at its present length."""
        if "shape" in self.executables:
            self._shaper.set_row(
                self.executables["shape"], row, sequence.request, sequence.state.ids[:]
            )

    def dictate(self, dictated: Mapping[int, Dictated]) -> None:
        """Has rows go on behind tokens the host decided."""
        size = {"rows": self.plan.rows, "block": self.plan.block}
        self.state = dictate(self.executables, self.params, self.state, dictated, **size)

    def _score_chunk(self, row: int, cursor: PromptCursor) -> None:
        """Dispatch the log-probabilities of the next chunk of a prompt."""
        start = cursor.num_fed
        places = np.zeros(self.plan.chunk + 1, np.int32)
        part = cursor.prompt[start : start + len(places)]
        places[: len(part)] = part
        chunk = places[None, :-1], places[None, 1:], np.array([start == 0])
        self.state, logprobs = self.executables["score"](
            self.params, self.state, np.int32(row), *chunk
        )
        cursor.logprobs = [*(cursor.logprobs if start else ()), logprobs]

    def _restore(self, row: int, cursor: PromptCursor) -> None:
        """Copy cached chunks of a prompt into a row, continuing at its position."""
        if self.prefixes:
            self.state = self.prefixes.restore(self.executables, self.state, row, cursor)

    def _keep(self, row: int, cursor: PromptCursor, start: int) -> None:
        """Add the chunk that was fed to a row from `start` on to the prefix cache."""
        if self.prefixes:
            self.prefixes.keep(self.executables, self.state, row, cursor, start)

    def copy_row(self, of: int, to: int) -> None:
        """Has a row know what another does."""
        self.state = self.executables["copy_row"](self.state, np.int32(of), np.int32(to))

    def wipe(self, rows: Iterable[int]) -> None:
        """Clears rows whose caches may hold non-finite numbers, before anyone else gets them."""
        mask = np.isin(np.arange(self.plan.rows), list(rows))
        self.state = self.executables["wipe"](self.state, mask)

    def reset(self) -> None:
        """Makes a new state after a failed step, which took the donated one with it."""
        self.drop()
        self.state = self._empty_state()

    def drop(self) -> None:
        """Lets go of what is left of the state, and of what is kept of prompts."""
        self.state = None
        self._shaper.reset()
        if self.prefixes:
            self.prefixes.cache.clear()  # segments may have been cut from what is lost

    def break_even(self, rules: RowRules, samples: int = 5) -> float:
        """Measure the time of a drafted step over that of a plain one; no row makes progress.

        A drafted round pays off if it commits more tokens than this.
        """
        repeated = repeats(self.plan, GREEDY)
        times: dict[str, list[float]] = {"speculative": [], "plain": []}
        for _ in range(samples + 1):  # the first is not counted
            for name, found in times.items():
                started = time.perf_counter()
                count = (np.int32(0),) if repeated else ()
                self.state, output = self.executables[name](self.params, self.state, *count, rules)
                read_output(output)
                found.append(time.perf_counter() - started)
        medians = [statistics.median(found[1:]) for found in times.values()]
        return medians[0] / medians[1]

    def _make_prefixes(self, params: Params) -> PrefixStore | None:
        if not self.plan.prefix_cache:
            return None
        made = (self.plan, self.target, self.drafter, params)
        return PrefixStore(self.plan, self.compiled.programs, functools.partial(identity, *made))

    @undisturbed()
    def _place(self, params: Params) -> Params:
        """Parameters where the plan wants them, as it wants them."""
        params = jax.tree.map(lambda leaf: leaf, params, is_leaf=lambda x: isinstance(x, KEPT))
        put_in_order(params, self.plan.order)  # in the copy of the tree
        if self._apart:
            return apart.place_params(self.plan, params)
        if self._mesh is not None:
            return jax.device_put(params, param_shardings(self._mesh, params))
        return jax.device_put(params)

    def _empty_state(self) -> Any:
        """A `DecodeState`, or its two `Halves` where target and drafter have a device each."""
        shapes = jax.eval_shape(lambda: empty_state(self.plan, self.target, self.drafter))
        empty = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        if self._apart:
            return apart.place_state(self.plan, empty)
        return jax.device_put(empty, self._mesh and row_shardings(self._mesh, empty))

    def _make_masks(
        self,
        name: str,
        work: SchedulerOutput,
        arguments: tuple[Any, ...],
        readers: Iterable[int] | None,
        first: int,
    ) -> tuple[str, tuple[Any, ...], np.ndarray]:
        """A step's masks [B, T, W]; of a speculative one the drafts are made, and waited for."""
        drafts = np.zeros((self.plan.rows, 0), np.int32)
        if name == "speculative":
            draft = self.executables["draft" + MASKED]
            self.state, drafted = draft(self.params, self.state, work.rules)
            name, arguments, drafts = "verify", (drafted,), np.asarray(drafted[0])[:, 1:]
        places = 1 if name in ("prefill", "plain1") else self.plan.block
        rows = self._fed_rows if name == "prefill" else self.plan.rows
        shape = (rows, places, words(self.target))
        masks = np.full(shape, 2**32 - 1, np.uint32)
        for row in work.sequences if readers is None else readers:
            if grammar := work.sequences[row].grammar:
                grammar.fill(masks[row - first], drafts[row].tolist())
        return name, arguments, masks


def _leaves(params: Params) -> dict[str, str]:
    """Type and shape of every parameter, by its path."""
    found = jax.tree_util.tree_leaves_with_path(params)
    named = ((jax.tree_util.keystr(path, simple=True, separator="/"), x) for path, x in found)
    return {name: f"{x.dtype}{list(x.shape)}" for name, x in named}
