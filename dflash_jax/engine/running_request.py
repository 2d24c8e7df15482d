"""A request while it runs: recovery state, progress of its prompt, output, statistics."""

import dataclasses
import itertools
import math
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from dflash_jax.engine.detokenizer import OutputBuffer
from dflash_jax.engine.prefix.cache import PromptCursor
from dflash_jax.engine.request import CancelCell, Request
from dflash_jax.engine.result import Result, Stats, TokenLogprob
from dflash_jax.engine.state_machine import (
    call_retry,
    controller,
    guards,
    request_state,
    speculation,
)
from dflash_jax.engine.state_machine.guards import runaway_drop
from dflash_jax.engine.state_machine.trace import NO_TOPS, CallTime, Tops
from dflash_jax.engine.structured.grammars import CallGrammars, Grammar
from dflash_jax.errors import ComputeError, DFlashError, RequestError
from dflash_jax.graph.state import CHOICES
from dflash_jax.graph.steps.forced_tokens import ForcedTokens
from dflash_jax.tokenizer import Tokenizer

_STOPPED = controller.Cancelled(controller.Finish.STOP)
_numbers = itertools.count(1)
CERTAIN = 0.75  # of a block: requests that commit this many tokens per round gain by drafting


class RowSettings(NamedTuple):
    """What a request's row needs to know of it, see `RowRules`."""

    request: Request
    limit: int  # tokens of prompt and output after which the device waits for the host
    speculates: bool
    choices: tuple[int, ...]
    opening: int


class StepDetails(NamedTuple):
    """What is reported about a step besides the event that it is to the state machine."""

    logprobs: Sequence[TokenLogprob] = ()  # of its tokens, where the request asks for them
    drafts: tuple[int, ...] = ()  # that were verified, if the plan reports them
    copied: bool = False  # whether they were copied from the text
    time: CallTime | None = None  # of its call
    tops: Tops = NO_TOPS  # of drafter and target, if the plan reports them


NO_DETAILS = StepDetails()


class RunningRequest:
    """One request in the engine.

    The output processor changes it by the device's results; `EngineCore` ends it for its caller
    (`take`, `abandon`) and starts it over after the device state was lost (`rebuild`); the model
    runner moves its `cursor`.

    Args:
      cancel: a cell by which any thread may end the request.
      label: what the caller calls it, for log lines.
      call_grammars: compiles grammars for calls that cannot be parsed; None keeps such calls.
      break_even: of the engine's steps. None never stops drafting.
      acceptance: of earlier requests.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        grammar: Grammar | None = None,
        *,
        cancel: CancelCell | None = None,
        label: str = "",
        call_grammars: CallGrammars | None = None,
        break_even: speculation.BreakEven | None = speculation.UNKNOWN,
        acceptance: speculation.AcceptanceHistory = speculation.NO_HISTORY,
    ):
        if not isinstance(cancel, CancelCell | None):
            raise RequestError(f"cancel is {cancel!r}; expected None, or a dj.CancelCell()")
        self.request = request
        self.number = next(_numbers)  # unique in the process, for log lines
        self.label = label
        self.cancel = CancelCell() if cancel is None else cancel
        self._call_grammars, recovery = call_grammars, request.recovery
        if call_grammars is None and recovery.call_retry:
            recovery = dataclasses.replace(recovery, call_retry=False)
        self.policy = controller.Policy(
            max_tokens=request.max_tokens,
            stop_ids=request.stop_ids,
            speculative=request.speculative,
            prompt_tokens=len(request.prompt),
            break_even=break_even or speculation.UNKNOWN,
            fixed=break_even is None,
            recovery=recovery,
            words=request.words,
        )
        first = self.policy.break_even.at(len(request.prompt))
        drafting = acceptance.first_state(self.number, first)
        self.state = controller.State(drafting=drafting)
        self.row: int | None = None  # given by the scheduler; kept after the end
        self.epoch = 0  # how often the prompt was started over; results of earlier ones are dropped
        params = request.params
        scores = params.prompt_logprobs is not None
        self.cursor = PromptCursor(request.prompt, params.cache_salt, use_cache=not scores)
        self.output = OutputBuffer(request, tokenizer, grammar)  # what the caller was given
        self.prompt_logprobs: list[TokenLogprob] = []
        self.call_grammar: Future[Grammar] | None = None  # of a call to decode again, in the making
        self.rebuilding = False  # the output so far is to be fed again after the prompt
        self.row_cleared = False  # as the prompt's numbers were not finite in the row
        self.dropped = False  # the stream was given up; any thread may set it
        self.failures = 0  # of the device while the request ran
        self.error: DFlashError | None = None  # why there is no result
        self.finish: controller.Finish | None = None  # why the request ended; None while it runs
        self.stats = Stats(prompt_tokens=len(request.prompt))
        self._counted: Counter[str] = Counter()  # recovery events of this decoding of the answer
        self._submitted = self._started = self._first = time.perf_counter()
        allowed = request.recovery.deadline_s
        self.deadline = math.inf if allowed is None else self._submitted + allowed
        self.settings = self._settings()

    @property
    def done(self) -> bool:
        """Whether the request ended."""
        return self.finish is not None

    @property
    def prefilled(self) -> bool:
        """Whether the whole prompt was fed."""
        return self.cursor.num_fed == len(self.request.prompt)

    @property
    def loaded(self) -> bool:
        """Whether no part of the prompt is still being read from disk."""
        return self.cursor.loading is None or self.cursor.loading.done()

    @property
    def tainted(self) -> bool:
        """Whether what the ended request added to the prefix cache should serve no other one."""
        failed = self.finish is controller.Finish.ERROR or bool(self.cancel)
        return failed or not request_state.is_visible(self.state.ids, self.policy)

    def _settings(self) -> RowSettings:
        state, policy = self.state, self.policy
        length = len(self.request.prompt) + request_state.room(state, policy)
        speculates = request_state.speculates(state, policy)
        choices, opening = request_state.choices(state), request_state.opening(state, policy)
        return RowSettings(self.request, length, speculates, choices[:CHOICES], opening)

    def delay(self, seconds: float) -> None:
        """Count seconds before the request was queued as `Stats.compile_s`; moves its deadline."""
        self.stats.compile_s += seconds
        self.deadline += seconds

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.request.prompt) + self.state.num_decided

    def drafting(self, block: int) -> speculation.Drafting:
        """Return what the number of its next drafts depends on, in a plan with such a block."""
        own, known = self.state.drafting.acceptance, self.policy.break_even
        most = self.request.params.block_size or block
        return speculation.Drafting(own, known, self.num_tokens, most - 1)

    def doubts_drafting(self, history: speculation.AcceptanceHistory, block: int) -> bool:
        """Return whether the request drafts, but may not gain by it.

        Args:
          history: acceptance of earlier requests.
          block: of the plan.
        """
        if self.policy.fixed or not self.settings.speculates or not self.prefilled:
            return False
        own, block = self.state.drafting, min(self.request.params.block_size or block, block)
        if own.rounds >= speculation.TRIAL:
            return own.length < CERTAIN * block
        return history.requests >= speculation.TRIAL and history.length < CERTAIN * block

    def learn(self, break_even: speculation.BreakEven) -> None:
        """Decide about drafting by a break-even that was measured while the request ran."""
        if not self.policy.fixed:
            self.policy = dataclasses.replace(self.policy, break_even=break_even)

    def start(self, row: int | None = None) -> None:
        """Note that the request was given a row."""
        self.row = row
        self._started = time.perf_counter()
        if self.output.trace:
            self.output.trace.begin(self._started)

    # -- events -------------------------------------------------------------------------------

    def process(
        self, event: controller.Prefilled | controller.Stepped, details: StepDetails = NO_DETAILS
    ) -> controller.Effects:
        """Process a step's result, unless the caller cancelled; a failure outranks that."""
        return self.abandon() if event.finite and self.cancel else self.take(event, details)

    def abandon(self) -> controller.Effects:
        """End the request because its caller cancelled it, and count the reason."""
        self.stats.recovery[f"cancelled_{self.cancel.reason}"] += 1
        return self.take(controller.Cancelled())

    def take(
        self, event: controller.Event, details: StepDetails = NO_DETAILS
    ) -> controller.Effects:
        """Advance the state machine by an event; return the effects that concern the device."""
        now = time.perf_counter()
        if isinstance(event, controller.Prefilled):
            self.stats.prefill_s += now - self._started
            self._first = now - self.stats.decode_s
        self.stats.cached_tokens = self.cursor.num_cached
        before, probing = len(self.state.ids), bool(self.state.probe)
        self.state, effects = controller.advance(self.state, event, self.policy)
        if self.request.params.logprobs is not None:
            new = self.state.ids[before - effects.retract :]
            probes = bool(self.state.probe) and not probing  # the end token was just replaced
            given = {"retracted": effects.retract, "probes": probes}
            self.output.add_logprobs(new, details.logprobs, **given)
        if self.output.trace:
            new, ended = self.state.ids[before - effects.retract :], details.time or CallTime(now)
            drafts = {"drafts": details.drafts, "copied": details.copied, "tops": details.tops}
            self.output.trace.record(event, new, retracted=effects.retract, **drafts, time=ended)
        self.settings = self._settings()
        if effects.fallback:
            self.stats.fallbacks[effects.fallback] += 1
        discards = effects.restart in (controller.Restart.SAVED, controller.Restart.FRESH)
        if discards:
            self.stats.decode_s, self._started = now - self._first, now
            self.output.discard_pending()
        if effects.emit:
            if not self.output.ids:
                self.stats.first_token_s = now - self._submitted
            self.stats.decode_s = now - self._first
            self.output.emit(effects.emit)
            self.stats.output_tokens = len(self.output.ids)
        if self.output.ended:  # tokens after the stop string are not part of the answer
            effects = effects._replace(notes=effects.notes_before(len(self.output.ids)))
        if effects.notes or discards:
            self._count(effects, discards=discards)
        if self.done:
            return controller.Effects()
        if self.output.grammar is not None and (reason := self.output.grammar.error):
            self.error = RequestError(
                f"the grammar gave up after {len(self.output.ids)} output tokens ({reason});"
                " simplify the structure, such as by fewer choices or properties"
            )
        if self.error or self.output.ended:
            self._stop(controller.Finish.ERROR if self.error else controller.Finish.STOP)
            return controller.Effects(notes=effects.notes)
        if effects.finish:
            self._end(effects.finish)
        return effects

    def _count(self, effects: controller.Effects, *, discards: bool) -> None:
        """Count recovery events of the answer that the caller gets, and retries as fallbacks."""
        notes = Counter(effects.notes)
        self.stats.fallbacks.update({n: notes[n] for n in speculation.RETRIES if notes[n]})
        if discards:  # the caller gets none of this decoding
            self.stats.recovery -= self._counted
            self._counted = Counter()
            return
        found = Counter({n: times for n, times in notes.items() if n not in speculation.NOTES})
        if found["runaway"]:
            found["runaway_dropped_tokens"] = runaway_drop(self.state.ids)
        if found[guards.REPEATED_CALLS]:
            dropped = len(self.state.ids) - self.state.memory.called.first
            found["repeated_calls_dropped_tokens"] = dropped
        self.stats.recovery += found
        self._counted += found

    def _stop(self, reason: controller.Finish) -> None:
        self.state, _ = controller.advance(self.state, _STOPPED, self.policy)
        self._end(reason)

    def _end(self, reason: controller.Finish) -> None:
        self.output.finish()
        self.finish = reason  # last, as other threads may look at it

    # -- starting over ------------------------------------------------------------------------

    def restart(self, *, use_cache: bool) -> None:
        """Feed the prompt again; results still in flight for this request are discarded."""
        self.epoch += 1
        use_cache &= self.request.params.prompt_logprobs is None
        self.cursor = self.cursor.restarted(use_cache=use_cache)

    def begin_call_retry(self) -> None:
        """Begin to compile the grammar under which a call is decoded once more."""
        assert self._call_grammars is not None
        self.epoch += 1
        before = call_retry.marker_before(self.state.ids[: self.state.call_at], self.policy.words)
        self.call_grammar = self._call_grammars.begin(self.request, before)

    def retry_call(self, grammar: Grammar) -> controller.Effects:
        """Drop the call that could not be parsed; from there on the output follows a grammar."""
        effects = self.take(controller.CallRetried())
        recovery = self.request.recovery.for_structure()
        self.policy = dataclasses.replace(self.policy, recovery=recovery)
        self.output.grammar = grammar
        self.settings = self._settings()
        self.restart(use_cache=True)
        self.rebuilding = bool(self.state.ids)
        return effects

    def rebuild(self, error: Exception | None) -> None:
        """The row's device state was lost: feed prompt and output again, or end the request.

        A request that saw two failures, which are given as `error`, ends, whichever request caused
        them.
        """
        self.failures += error is not None
        emitted = len(self.state.ids) - self.state.held
        if self.failures > 1:
            self.error = ComputeError(
                f"the device failed twice while the request ran ({error}); lower rows or"
                " max_length if its memory is short, else look at the device's log"
            )
        elif self.state.phase is controller.Phase.DONE or len(self.output.ids) != emitted:
            self.error = ComputeError(
                "the thread that ran the request was stopped while it processed a result, so that"
                " a part of the output is lost; send the request again"
            )
        if self.error:
            self._stop(controller.Finish.ERROR)
            return
        self.stats.recovery["rebuilt"] += 1
        cursor = self.cursor
        self.restart(use_cache=cursor.use_cache)
        self.cursor.num_cached = cursor.num_cached
        self.rebuilding = bool(self.state.ids)

    def rebuilt(self) -> ForcedTokens:
        """Return the output so far, to be fed after the prompt, which was fed again."""
        self.rebuilding = False
        return ForcedTokens(self.state.ids[0], self.state.ids[1:])

    def result(self) -> Result:
        """Return the finished request.

        Raises:
          ComputeError: the device or the target's numbers broke.
          RequestError: the grammar gave up on what the output must follow.
        """
        if self.error:
            raise self.error
        if self.finish is controller.Finish.ERROR:
            raise ComputeError(
                f"the target's logits are not finite after {len(self.output.ids)} output tokens;"
                " the weights are damaged or the dtype is too narrow: check the weights with"
                " `dflash-jax probe`, or load with dtype='float32'"
            )
        assert self.finish is not None
        output, params = self.output, self.request.params
        logprobs = None if params.logprobs is None else output.logprobs
        prompt = None if params.prompt_logprobs is None else self.prompt_logprobs
        trace = tuple(traced for piece in output.pieces for traced in piece.trace)
        reports = {"logprobs": logprobs, "prompt_logprobs": prompt, "trace": trace}
        return Result(output.ids, output.text, self.finish.value, self.stats, **reports)
