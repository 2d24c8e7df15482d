"""Dispatch an engine's compiled programs on the one device state they share.

Dispatching waits for the device only where grammar masks are made from drafts.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dflash_jax.engine.prefix.cache import PromptCursor
from dflash_jax.engine.prefix.disk import identity
from dflash_jax.engine.prefix.store import PrefixStore
from dflash_jax.engine.request import Request
from dflash_jax.engine.result import TokenLogprob
from dflash_jax.engine.running_request import RunningRequest
from dflash_jax.engine.scheduler import SchedulerOutput
from dflash_jax.engine.state_machine.trace import CallTime
from dflash_jax.engine.structured.grammars import Grammar, MaskThread
from dflash_jax.graph.abstract import PlannedPair
from dflash_jax.graph.build import CompiledPrograms, Executable
from dflash_jax.graph.executor import Executor
from dflash_jax.graph.keys import (
    LOGITS_VARIANTS,
    STEP_VARIANTS,
    ProgramKey,
    Step,
    Variant,
)
from dflash_jax.graph.programs import is_multi_step
from dflash_jax.graph.state import (
    Logprobs,
    PromptPart,
    RowStep,
    StepOutput,
    prompt_arrays,
    read_output,
)
from dflash_jax.graph.steps import forced_tokens
from dflash_jax.graph.steps.forced_tokens import ForcedTokens
from dflash_jax.graph.steps.inputs import (
    CopyRowInputs,
    DecodeInputs,
    PrefillInputs,
    PromptLogprobsInputs,
    SetLogitsStateInputs,
)
from dflash_jax.graph.steps.logits_processing import LogitsState, mask_words
from dflash_jax.graph.steps.pair import Params

STEPS = (Step.PREFILL, Step.PLAIN, Step.SPECULATIVE)  # that exist in variants
ALL_ALLOWED = 2**32 - 1  # a word of masks that excludes no token
Output = tuple[int, tuple[int, ...], StepOutput]  # first row, rows that wait, and the output


@dataclasses.dataclass(frozen=True, slots=True)
class InFlightStep:
    """Dispatched work, and the outputs that its sequences wait for."""

    work: SchedulerOutput
    dispatched: float  # when, by `time.perf_counter`
    outputs: tuple[Output, ...]  # of each call

    def results(self) -> Iterator[tuple[CallTime, dict[int, RowStep]]]:
        """Wait for outputs that are still wanted; yield the results of each step, by row."""
        for first, rows, output in self.outputs:
            if any(map(self.work.waits, rows)):
                steps = read_output(output)
                now = time.perf_counter()
                for at, step in enumerate(steps):
                    results = {row: step[row - first] for row in rows}
                    yield CallTime(now, len(steps) - at), results

    def logprobs(self, row: int) -> list[TokenLogprob]:
        """Return a row's log-probabilities, with the alternatives that its request asks for."""
        output, place = next((x, row - first) for first, rows, x in self.outputs if row in rows)
        logprobs = output.logprobs
        most = self.work.sequences[row].request.params.logprobs
        if logprobs is None or most is None:
            return []
        packed: Any = np.asarray(output.packed)
        tokens = dataclasses.replace(output, packed=packed).tokens[place]
        return _named(tokens.tolist(), logprobs, place, most)


class ModelRunner:
    """Compiled programs, and the state of all rows. The executor has the parameters.

    Every step consumes `state` and returns the next one. `prefixes` moves prompt segments between
    rows and the prefix cache; it is None without one.
    """

    def __init__(self, graph: PlannedPair, executor: Executor):
        self.graph = graph
        self.plan = graph.plan
        self.executor = executor
        plan = graph.plan
        vocab = graph.config.vocab_size
        self._mask_words = mask_words(vocab)
        self.compiled = CompiledPrograms(executor.programs, kernels=plan.kernels)
        self.in_use: set[ProgramKey] = set()  # compiled programs of which turns were told
        self._prefill_rows = plan.prefill_rows
        self.slow_tokens = 0  # of prompts, that wide calls would have fed faster so far
        self._multi_step = {x: is_multi_step(plan, x) for x in STEP_VARIANTS}
        self.state: Any = executor.empty_state()
        self.prefixes = self._make_prefixes(executor.params)
        # Hosts with other clocks would decide otherwise.
        self._masks = MaskThread(gives_up=executor.hosts == 1)
        # By step and kind of requests: looked up in every call.
        self._keys = {(x, v): graph.key(x, v) for x in STEPS for v in STEP_VARIANTS}
        self._neutral_masks: dict[tuple[int, ...], Any] = {}  # by shape
        self._logits = LogitsProcessor(vocab, executor.empty_logits_state)
        # Kept on the device, because sending a number in every call takes 0.1 ms.
        self._num_steps = executor.put([np.int32(n) for n in range(plan.steps_per_call + 1)])

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of each part that stays in memory; may be read by any thread.

        "programs" is machine code, and 0 where XLA does not report it, as on a CPU.
        """
        return {
            "weights": self.executor.weight_bytes,
            "caches": 0 if self.state is None else self.executor.state_bytes,
            "prefix_cache": self.prefixes.cache.bytes if self.prefixes else 0,
            "programs": sum(made.code_bytes for made in list(self.executables.values())),
        }

    @property
    def executables(self) -> dict[ProgramKey, Executable]:
        """The compiled programs."""
        return self.compiled.executables

    # -- steps --------------------------------------------------------------------------------

    def execute(self, work: SchedulerOutput) -> InFlightStep:
        """Dispatch a turn's work; its results are read later."""
        started = time.perf_counter()
        if work.prefill:
            return InFlightStep(work, started, tuple(self._prefill(work)))
        steps = self._num_steps[work.num_steps] if self._multi_step[work.variant] else None
        step = Step.SPECULATIVE if work.drafting else Step.PLAIN
        rows = tuple(work.sequences)
        inputs = DecodeInputs(work.rules, num_steps=steps)
        output = self.step(step, work, inputs, rows)
        return InFlightStep(work, started, ((0, rows, output),))

    def _prefill(self, work: SchedulerOutput) -> Iterator[Output]:
        """Feed one chunk of each prompt; yield the outputs of last chunks.

        Rows with the same prompt at the same position share a chunk: the first is fed, the others
        copy its row. Last chunks are fed to each row, as they decide a token, and so are prompts
        whose log-probabilities are wanted.
        """
        if self._prefill_rows == self.plan.rows:
            for row, sequence in work.sequences.items():
                self._restore(row, sequence.cursor)
            yield from self._feed(work, work.sequences, first=0)
            return
        fed: dict[tuple[int, int], tuple[int, int]] = {}  # rows and tokens by group and position
        for row, sequence in work.sequences.items():
            cursor = sequence.cursor
            self._restore(row, cursor)
            start = cursor.num_computed
            place = (sequence.group, cursor.num_computed)
            scores = sequence.request.params.prompt_logprobs is not None
            from_row, count = fed.get(place, (row, 0))
            if count and not scores and start + count < len(cursor.prompt):
                copied = CopyRowInputs(np.int32(from_row), np.int32(row))
                self._change_rows(Step.COPY_ROW, copied)
                cursor.num_computed += count
                self._keep(row, cursor, start)
            else:
                yield from self._feed(work, {row: sequence}, first=row)
                fed[place] = row, cursor.num_computed - start

    def _feed(
        self, work: SchedulerOutput, sequences: Mapping[int, RunningRequest], *, first: int
    ) -> Iterator[Output]:
        """Dispatch one prefill call for rows from `first` on."""
        rows = self._prefill_rows
        width = self.plan.chunk
        most = width
        several = self._wide_part(work, sequences.values())
        if several:
            width = self.graph.wide_prefill
            most = several
        parts: dict[int, PromptPart] = {}
        last = []
        for row, sequence in sequences.items():
            cursor = sequence.cursor
            start = cursor.num_computed
            tokens = cursor.prompt[start : start + most]
            parts[row] = PromptPart(row - first, start, tokens)
            if sequence.request.params.prompt_logprobs is not None:
                self._prompt_logprobs(row, cursor)
            cursor.num_computed += len(tokens)
            if sequence.prefilled:
                last.append(row)
                self.set_logits_state(row, sequence)
        inputs = PrefillInputs(
            *prompt_arrays(parts.values(), rows, width),
            work.rules,
            row=np.int32(first) if rows < self.plan.rows else None,
        )
        if several:
            output = self._dispatch(ProgramKey(Step.PREFILL_WIDE), inputs)
        else:
            output = self.step(Step.PREFILL, work, inputs, last, first=first)
        for row, sequence in sequences.items():
            self._keep(row, sequence.cursor, parts[row].position)
        if last:
            yield first, tuple(last), output

    def _wide_part(self, work: SchedulerOutput, sequences: Iterable[RunningRequest]) -> int:
        """Return how many tokens of a prompt a wide call feeds; 0 for a call of the plan's chunk.

        Long prompts are fed so where no row decodes.
        """
        if not (work.wide and self.graph.wide_prefill):
            return 0
        (sequence,) = sequences
        cursor = sequence.cursor
        left = len(cursor.prompt) - cursor.num_computed
        count = self.graph.wide_part(cursor.num_computed, left, work.variant)
        if not count or sequence.request.params.prompt_logprobs is not None:
            return 0
        if ProgramKey(Step.PREFILL_WIDE) in self.in_use:
            return count
        self.slow_tokens += self.plan.chunk
        return 0

    def step(
        self,
        step: Step,
        work: SchedulerOutput,
        inputs: PrefillInputs | DecodeInputs,
        rows: Iterable[int],
        *,
        first: int = 0,
    ) -> StepOutput:
        """Dispatch a prefill or decode step, and start copying its output to the host.

        Args:
          rows: rows that wait for the output; their grammars constrain the constrained variant.
          first: first row of a prefill.
        """
        key = self._keys[step, work.variant]
        if key.variant == Variant.CONSTRAINED:
            grammars = {row - first: (row, work.sequences[row].output.grammar) for row in rows}
            step, inputs = self._constrain(step, inputs, grammars)
        return self._dispatch(key._replace(step=step), inputs)

    def _dispatch(self, key: ProgramKey, inputs: Any) -> StepOutput:
        output = self.run(key, inputs)
        if self.executor.copies:
            output.packed.copy_to_host_async()
        return output

    def run(self, key: ProgramKey, inputs: Any) -> Any:
        """Dispatch a program that runs a model; return its output."""
        logits_state = self._logits.state if key.variant in LOGITS_VARIANTS else None
        self.state, logits_state, output = self.executables[key](
            self.executor.params, self.state, logits_state, inputs
        )
        if logits_state is not None:
            self._logits.keep(logits_state)
        return output

    def swap_params(self, params: Any) -> None:
        """Replace the parameters while nothing runs, and drop all cached prefixes.

        Raises:
          CheckpointError: they do not fit; the engine keeps its own.
        """
        placed = self.executor.replacement(params)
        prefixes = self._make_prefixes(placed)
        self.executor.params = placed
        self.prefixes = prefixes

    # -- changes of rows ----------------------------------------------------------------------

    def set_logits_state(self, row: int, sequence: RunningRequest) -> None:
        """Set a row's penalties, biases and counts to those of a request so far."""
        key = ProgramKey(Step.SET_LOGITS_STATE)
        if key in self.in_use:
            program = self.executables[key]
            self._logits.set_row(program, row, sequence.request, sequence.state.ids)

    def force_tokens(self, forced: Mapping[int, ForcedTokens]) -> None:
        """Replace pending tokens of rows and append others; all of the rows must be frozen."""
        rows = self.plan.rows
        block = self.plan.block
        for inputs in forced_tokens.blocks(rows, block, forced):
            self.run(ProgramKey(Step.FORCED_TOKENS), inputs)

    def _prompt_logprobs(self, row: int, cursor: PromptCursor) -> None:
        """Dispatch the log-probabilities of the next chunk of a prompt."""
        start = cursor.num_computed
        places = np.zeros((1, self.plan.chunk + 1), np.int32)
        part = cursor.prompt[start : start + places.size]
        places[0, : len(part)] = part
        fresh = np.array([start == 0])
        inputs = PromptLogprobsInputs(np.int32(row), places[:, :-1], places[:, 1:], fresh)
        logprobs = self.run(ProgramKey(Step.PROMPT_LOGPROBS), inputs)
        cursor.logprobs = [*(cursor.logprobs if start else ()), logprobs]

    def _restore(self, row: int, cursor: PromptCursor) -> None:
        """Copy cached chunks of a prompt into a row, continuing at its position."""
        if self.prefixes:
            self.state = self.prefixes.restore(self.executables, self.state, row, cursor)

    def _keep(self, row: int, cursor: PromptCursor, start: int) -> None:
        """Add the chunk that was fed to a row from `start` on to the prefix cache."""
        if self.prefixes:
            self.prefixes.keep(self.executables, self.state, row, cursor, start)

    def clear_rows(self, rows: Iterable[int]) -> None:
        """Clear rows that may hold non-finite numbers, before other requests get them."""
        mask = np.isin(np.arange(self.plan.rows), list(rows))
        self._change_rows(Step.CLEAR_ROWS, mask)

    def reset(self) -> None:
        """Make a new state, after a failed step consumed the old one."""
        self.drop()
        self.state = self.executor.empty_state()

    def drop(self) -> None:
        """Free the state and all cached prefixes."""
        self.state = None
        self._logits.reset()
        if self.prefixes:
            self.prefixes.cache.clear()  # segments may have been cut from the lost state

    def close(self) -> None:
        """Wait until prefixes are on disk."""
        if self.prefixes and self.prefixes.disk:
            self.prefixes.disk.flush()

    def _change_rows(self, step: Step, inputs: Any) -> None:
        self.state, _, _ = self.executables[ProgramKey(step)](None, self.state, None, inputs)

    def _constrain(
        self, step: Step, inputs: Any, grammars: Mapping[int, tuple[int, Grammar | None]]
    ) -> tuple[Step, Any]:
        """Return a step with masks in its inputs; a speculative one is drafted.

        Where a row has a grammar, which reads the drafts, they are waited for. The rows and their
        grammars are given by their places in the inputs.
        """
        prefill = step == Step.PREFILL
        rows = self._prefill_rows if prefill else self.plan.rows
        width = self.plan.plain_width if step == Step.PLAIN else self.plan.block
        shape = (rows, 1 if prefill else width, self._mask_words)
        if step == Step.SPECULATIVE:
            program = self.executables[ProgramKey(Step.DRAFT, Variant.CONSTRAINED)]
            self.state, _, draft = program(self.executor.params, self.state, None, inputs)
            step = Step.VERIFY
            inputs = dataclasses.replace(inputs, draft=draft)
        if not any(grammar for _, grammar in grammars.values()):
            return step, dataclasses.replace(inputs, masks=self._all_allowed(shape))
        drafts = np.zeros((self.plan.rows, 0), np.int32)
        if step == Step.VERIFY:
            drafts = np.asarray(inputs.draft.block)[:, 1:]
        masks = np.full(shape, ALL_ALLOWED, np.uint32)
        self._masks.fill(
            [
                (grammar, masks[place], drafts[row].tolist())
                for place, (row, grammar) in grammars.items()
                if grammar
            ]
        )
        return step, dataclasses.replace(inputs, masks=masks)

    def _all_allowed(self, shape: tuple[int, ...]) -> Any:
        """Return masks that exclude no token, on the device."""
        if shape not in self._neutral_masks:
            masks = np.full(shape, ALL_ALLOWED, np.uint32)
            self._neutral_masks[shape] = self.executor.put(masks)
        return self._neutral_masks[shape]

    def _make_prefixes(self, params: Params) -> PrefixStore | None:
        if not self.plan.prefix_cache:
            return None
        name = functools.partial(identity, self.graph, params)
        hosts = self.executor.hosts
        return PrefixStore(self.plan, self.compiled.programs, name, hosts=hosts)


class LogitsProcessor:
    """Holds the logits state between steps; uses no memory until it is needed.

    A row is set before the last chunk of its prompt is fed, because earlier counts of the device
    belong to other requests, and after forced tokens, which the device does not count.

    Args:
      vocab: size of the vocabulary.
      empty: returns a new state that changes no logits.
    """

    def __init__(self, vocab: int, empty: Callable[[], LogitsState]):
        self._vocab = vocab
        self._empty = empty
        self._state: LogitsState | None = None
        self._changed: set[int] = set()  # rows that are not neutral

    @property
    def state(self) -> LogitsState:
        """The state of all rows. A step that it is donated to must `keep` the next one."""
        if self._state is None:
            self._state = self._empty()
        return self._state

    def keep(self, state: LogitsState) -> None:
        """Keep the state that a step returned."""
        self._state = state

    def reset(self) -> None:
        """Drop the state, which a failed step may have consumed."""
        self._state = None
        self._changed.clear()

    def set_row(
        self, program: Callable[..., Any], row: int, request: Request, output: Sequence[int]
    ) -> None:
        """Set a row to the options of a request and its output so far."""
        params = request.params
        if not params.penalized and row not in self._changed:
            return
        if params.penalized:
            self._changed.add(row)
        else:
            self._changed.discard(row)
        bias = np.zeros(self._vocab, np.float32)
        prompt = np.zeros(self._vocab, bool)
        for token, value in (params.logit_bias or {}).items():
            bias[token] = value
        prompt[list(request.prompt)] = True
        counts = np.bincount(output[:], minlength=self._vocab).astype(np.int32)
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        inputs = SetLogitsStateInputs(
            row=np.int32(row),
            bias=bias,
            prompt=prompt,
            counts=counts,
            penalties=np.array(penalties, np.float32),
            reports=np.bool_(params.logprobs is not None),
        )
        _, self._state, _ = program(None, None, self.state, inputs)


def prompt_logprobs(request: Request, cursor: PromptCursor) -> list[TokenLogprob]:
    """Return the log-probabilities of a prompt that was fed; its first token has none."""
    first, *rest = request.prompt
    most = request.params.prompt_logprobs
    known = [TokenLogprob(first, None, ())]
    at = 0
    for logprobs in cursor.logprobs if most is not None else ():
        part = rest[at : at + logprobs.chosen.shape[1]]
        known += _named(part, logprobs, 0, most or 0)
        at += len(part)
    return known


def _named(tokens: Sequence[int], logprobs: Logprobs, row: int, most: int) -> list[TokenLogprob]:
    """Return the log-probabilities of a row's first places, with their tokens."""
    chosen = np.asarray(logprobs.chosen)[row].tolist()
    ids = np.asarray(logprobs.top_ids)[row, :, :most].tolist()
    values = np.asarray(logprobs.top)[row, :, :most].tolist()
    return [
        TokenLogprob(token, logprob, tuple(zip(i, x, strict=True)))
        for token, logprob, i, x in zip(tokens, chosen, ids, values, strict=False)
    ]
