"""A request while it runs: recovery state, progress of its prompt, output, statistics."""

import dataclasses
import itertools
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from dflash_jax.engine.detokenizer import Detokenizer
from dflash_jax.engine.prefix.cache import PromptCursor
from dflash_jax.engine.request import CancelCell, CancelReason, Request
from dflash_jax.engine.result import Piece, Result, Stats, TokenLogprob
from dflash_jax.engine.state_machine import (
    call_retry,
    controller,
    guards,
    request_state,
    speculation,
)
from dflash_jax.engine.state_machine.trace import (
    NO_TOPS,
    CallTime,
    RoundTrace,
    Tops,
    TraceRecorder,
)
from dflash_jax.engine.structured.grammars import Grammar
from dflash_jax.engine.vocabulary import opens_thought
from dflash_jax.errors import ComputeError, DFlashError, RequestError
from dflash_jax.graph.state import CHOICES
from dflash_jax.graph.steps.forced_tokens import ForcedTokens
from dflash_jax.tokenizer import TextStream, Tokenizer

_STOPPED = controller.Cancelled(controller.Finish.STOP)
_numbers = itertools.count(1)
# A request that commits at least this share of a block per round always gains by drafting, whatever
# a step costs.
ALWAYS_GAINS = 0.75
CONTEXT = 4  # number of tokens before a rejected draft that its text may depend on


class RowSettings(NamedTuple):
    """Settings of one device row, from which `RowRules` are made."""

    request: Request
    limit: int  # tokens of prompt and output after which the device waits for the host
    speculates: bool  # whether the row drafts
    choices: tuple[int, ...]  # tokens of which the next step reports the best; usually none
    opening: int  # token whose margin the next step reports; -1 for none


class StepDetails(NamedTuple):
    """Facts about a step for the caller. The state machine does not need them."""

    logprobs: Sequence[TokenLogprob] = ()  # of the step's tokens, if the request asks for them
    drafts: tuple[int, ...] = ()  # verified drafts; empty unless the plan reports them
    copied: bool = False  # whether the drafts were copied from earlier text
    time: CallTime | None = None  # when the step's device call ended
    tops: Tops = NO_TOPS  # most probable tokens of drafter and target, if the plan reports them


NO_DETAILS = StepDetails()


class _RoundTexts:
    """Adds the texts of tokens to the rounds of one request, in their order."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer.showing(["".join(tokenizer.special_texts)])
        self._stream = self._tokenizer.stream()
        self._last: tuple[int, ...] = ()

    def add(self, traced: RoundTrace) -> RoundTrace:
        """Return a round with the texts of its tokens and its rejected drafts."""
        before_rejected = (*self._last, *traced.tokens[: traced.accepted])[-CONTEXT:]
        self._last = (*self._last, *traced.tokens)[-CONTEXT:]
        texts = tuple(self._stream.push([token]) for token in traced.tokens)
        if not traced.rejected:
            return dataclasses.replace(traced, texts=texts)
        stream = self._tokenizer.stream()
        stream.push(before_rejected)
        rejected_texts = tuple(stream.push([token]) for token in traced.rejected)
        return dataclasses.replace(traced, texts=texts, rejected_texts=rejected_texts)


class OutputBuffer:
    """The output that a request's caller received so far. Nothing in it is ever taken back."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, grammar: Grammar | None):
        self.ids: list[int] = []  # a stop string and the tokens after it are not part of the output
        self.pieces: list[Piece] = []  # the same output, in the portions that were emitted
        self.logprobs: list[TokenLogprob] = []  # of `ids`, if the request asks for them
        self.grammar = grammar  # advances with the emitted tokens
        self.trace: TraceRecorder | None = None  # of decided tokens, if the request asks for it
        self._decoder: TextStream | None = None
        self._stops: Detokenizer | None = None  # looks for stop strings; None without any
        self._texts: _RoundTexts | None = None
        if tokenizer:
            self._decoder = tokenizer.stream(request.stop_ids)
            if request.params.stop:
                self._stops = _stops_of(request, tokenizer)
        if request.params.trace:
            self.trace = TraceRecorder()
            if tokenizer:
                self._texts = _RoundTexts(tokenizer)
        # Log-probabilities of tokens that are decided, and not emitted yet.
        self._pending: list[TokenLogprob] = []
        # The log-probability of an end token that a probe for a call replaced.
        self._replaced_end: Sequence[TokenLogprob] = ()

    @property
    def ended(self) -> bool:
        """Whether a stop string was completed, or the grammar allows nothing more."""
        stopped = self._stops is not None and self._stops.stopped
        return stopped or (self.grammar is not None and self.grammar.finished)

    @property
    def text(self) -> str | None:
        """The text so far; None without a tokenizer."""
        decoder = self._stops or self._decoder
        return decoder.text if decoder else None

    def emit(self, ids: tuple[int, ...]) -> None:
        """Give ids to the caller, up to where the output ends."""
        decoder = self._stops or self._decoder
        text = ""
        used = 0
        if self._stops is None and self.grammar is None:  # nothing can end the output in between
            text = decoder.push(ids) if decoder else ""
            used = len(ids)
        while used < len(ids) and not self.ended:
            next_id = ids[used : used + 1]
            text += decoder.push(next_id) if decoder else ""
            if self.grammar:
                if self.trace and self.grammar.leaves_no_choice():
                    self.trace.force(used)
                self.grammar.accept(next_id)
            used += 1
        logprobs = tuple(self._pending[:used])
        self._pending = self._pending[len(ids) :]
        rounds = self._with_texts(self.trace.emit(used)) if self.trace else ()
        self.pieces.append(Piece(ids[:used], text, logprobs, rounds))
        self.logprobs += logprobs
        self.ids += ids[:used]  # last: an interrupted call is recognised by missing ids

    def finish(self) -> None:
        """Give the caller the text that was held back."""
        rest = ""
        if self._stops:
            rest = self._stops.finish()
        elif self._decoder:
            rest = self._decoder.flush()
        rounds = self._with_texts(self.trace.finish()) if self.trace else ()
        if rest or rounds:
            self.pieces.append(Piece((), rest, (), rounds))

    def _with_texts(self, rounds: Sequence[RoundTrace]) -> tuple[RoundTrace, ...]:
        if self._texts:
            return tuple(self._texts.add(traced) for traced in rounds)
        return tuple(rounds)

    def add_logprobs(
        self,
        ids: tuple[int, ...],
        logprobs: Sequence[TokenLogprob],
        *,
        retracted: int,
        probes: bool,
    ) -> None:
        """Keep log-probabilities of newly decided ids; forced ids have none.

        Args:
          ids: ids that were decided.
          logprobs: log-probabilities of the tokens of the device, which recovery may have replaced.
          retracted: number of ids that were dropped before. They replaced an end token, which is
            the new id.
          probes: whether the ids replace an end token. Its log-probability is the last one.
        """
        if retracted:
            del self._pending[-retracted:]
            logprobs = self._replaced_end
        elif probes and ids:
            self._replaced_end = logprobs[-1:]
        for token, logprob in itertools.zip_longest(ids, logprobs[: len(ids)]):
            is_forced = logprob is None or logprob.token_id != token
            self._pending.append(TokenLogprob(token, None, ()) if is_forced else logprob)

    def discard_pending(self) -> None:
        """Drop log-probabilities and rounds of tokens that will be decoded again."""
        self._pending.clear()
        if self.trace:
            self.trace.discard()


def _stops_of(request: Request, tokenizer: Tokenizer) -> Detokenizer:
    """Return a detokenizer that looks for the stop strings of a request in its text."""
    return Detokenizer(
        tokenizer,
        request.params.stop or (),
        request.tools,
        end_ids=request.stop_ids,
        thinking=bool(request.tools) and opens_thought(tokenizer, request.prompt),
        lenient=request.params.structured is None,
        fenced=request.vocabulary.fenced,
    )


class RunningRequest:
    """One request in the engine.

    Only the engine's turns change it: by the device's results, by the events of the turn, and where
    the device state was lost (`rebuild`). The model runner moves its `cursor`.

    Args:
      cancel: a cell by which any thread may end the request.
      label: the caller's name of the request, for log lines.
      number: the number by which log lines and events name the request; by default one that is new
        in the process.
      group: number of the first of several requests for one prompt; by default the request's own.
      retries_calls: whether calls that cannot be parsed are decoded again, under a grammar.
      stops_drafting: whether the request stops drafting where that does not pay off.

    Raises:
      RequestError: `cancel` is no cell.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        grammar: Grammar | None = None,
        *,
        cancel: CancelCell | None = None,
        label: str = "",
        number: int | None = None,
        group: int | None = None,
        retries_calls: bool = False,
        stops_drafting: bool = True,
    ):
        if not isinstance(cancel, CancelCell | None):
            raise RequestError(f"cancel is {cancel!r}; expected None, or a dj.CancelCell()")
        self.request = request
        self.number = next(_numbers) if number is None else number
        self.group = self.number if group is None else group
        self.label = label
        self.cancel = CancelCell() if cancel is None else cancel
        self.cancelled: CancelReason | None = None  # why its cell ended it; None if it did not
        recovery = request.recovery
        if not retries_calls and recovery.call_retry:
            recovery = dataclasses.replace(recovery, call_retry=False)
        self.policy = controller.Policy(
            max_tokens=request.max_tokens,
            stop_ids=request.stop_ids,
            speculative=request.speculative,
            prompt_tokens=len(request.prompt),
            fixed=not stops_drafting,
            recovery=recovery,
            vocabulary=request.vocabulary,
        )
        self.state = controller.State()
        self.row: int | None = None  # the scheduler's choice; kept after the end
        # Counts restarts of the prompt. A result that carries an earlier attempt is dropped.
        self.attempt = 0
        params = request.params
        use_cache = params.prompt_logprobs is None
        self.cursor = PromptCursor(request.prompt, params.cache_salt, use_cache=use_cache)
        self.output = OutputBuffer(request, tokenizer, grammar)
        self.prompt_logprobs: list[TokenLogprob] = []
        self.retries_call = False  # whether it waits for the grammar of a call to decode again
        self.rebuilding = False  # whether the output so far is to be fed again after the prompt
        # Whether its row was cleared, as the prompt's numbers were not finite there.
        self.row_cleared = False
        self.queued = False  # whether the engine has it
        self.failures = 0  # number of device failures while it ran
        self.error: DFlashError | None = None  # why there is no result
        self.finish: controller.Finish | None = None  # why it ended; None while it runs
        self.stats = Stats(prompt_tokens=len(request.prompt))
        # Recovery events since the answer was last started over.
        self._recovery_events: Counter[str] = Counter()
        # Times of submission, of the last start of the prompt, and from which decoding is counted.
        self._submitted = time.perf_counter()
        self._started = self._submitted
        self._decoding_since = self._submitted
        self.deadline = math.inf
        if request.recovery.deadline_s is not None:
            self.deadline = self._submitted + request.recovery.deadline_s
        self.settings = self._settings()

    @property
    def done(self) -> bool:
        """Whether the request ended."""
        return self.finish is not None

    @property
    def prefilled(self) -> bool:
        """Whether the whole prompt is in the row's caches."""
        return self.cursor.num_computed == len(self.request.prompt)

    @property
    def loaded(self) -> bool:
        """Whether no part of the prompt is still being read from disk."""
        return self.cursor.loading is None or self.cursor.loading.done()

    @property
    def not_cacheable(self) -> bool:
        """Whether no other request should use the prefixes that this one, which ended, added."""
        failed = self.finish is controller.Finish.ERROR or self.cancelled is not None
        return failed or not request_state.is_visible(self.state.ids, self.policy)

    def _settings(self) -> RowSettings:
        state = self.state
        policy = self.policy
        return RowSettings(
            request=self.request,
            limit=len(self.request.prompt) + request_state.room(state, policy),
            speculates=request_state.speculates(state, policy),
            choices=request_state.choices(state)[:CHOICES],
            opening=request_state.opening(state, policy),
        )

    def delay(self, seconds: float) -> None:
        """Count seconds before the request was queued as `Stats.compile_s`; moves its deadline."""
        self.stats.compile_s += seconds
        self.deadline += seconds

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and output so far."""
        return len(self.request.prompt) + self.state.num_decided

    def drafting(self, block: int) -> speculation.Drafting:
        """Return the facts by which the number of the next drafts is chosen.

        Args:
          block: tokens of a block in the plan.
        """
        most_tokens = self.request.params.block_size or block
        return speculation.Drafting(
            acceptance=self.state.drafting.acceptance,
            break_even=self.policy.break_even,
            position=self.num_tokens,
            most=most_tokens - 1,
        )

    def doubts_drafting(self, history: speculation.AcceptanceHistory, block: int) -> bool:
        """Return whether the request drafts, but may not gain by it.

        Args:
          history: acceptance of earlier requests.
          block: tokens of a block in the plan.
        """
        if self.policy.fixed or not self.settings.speculates or not self.prefilled:
            return False
        own_block = min(self.request.params.block_size or block, block)
        enough = ALWAYS_GAINS * own_block
        drafting = self.state.drafting
        if drafting.rounds >= speculation.TRIAL:
            return drafting.length < enough
        return history.requests >= speculation.TRIAL and history.length < enough

    def learn(self, break_even: speculation.BreakEven) -> None:
        """Decide about drafting by a new break-even from now on."""
        if not self.policy.fixed:
            self.policy = dataclasses.replace(self.policy, break_even=break_even)

    def expect(self, history: speculation.AcceptanceHistory) -> None:
        """Begin with the acceptance of earlier requests."""
        break_even = self.policy.break_even.at(len(self.request.prompt))
        drafting = history.first_state(self.number, break_even)
        self.state = self.state._replace(drafting=drafting)
        self.settings = self._settings()

    def start(self, row: int | None = None) -> None:
        """Begin the prompt, in a row if the request has one."""
        self.row = row
        self._started = time.perf_counter()
        if self.output.trace:
            self.output.trace.begin(self._started)

    # -- events -------------------------------------------------------------------------------

    def abandon(self, reason: CancelReason) -> None:
        """End the request because its cell was set, and count the reason."""
        self.cancelled = reason
        self.stats.recovery[f"cancelled_{reason}"] += 1
        self.take(controller.Cancelled())

    def take(
        self, event: controller.Event, details: StepDetails = NO_DETAILS
    ) -> controller.Effects:
        """Advance the state machine by an event; return the effects that concern the device."""
        now = time.perf_counter()
        if isinstance(event, controller.Prefilled):
            self.stats.prefill_s += now - self._started
            self._decoding_since = now - self.stats.decode_s
        self.stats.cached_tokens = self.cursor.num_cached
        effects = self._advance(event, details, now)
        self.settings = self._settings()
        if effects.fallback:
            self.stats.fallbacks[effects.fallback] += 1
        starts_over = effects.restart in (controller.Restart.SAVED, controller.Restart.FRESH)
        if starts_over:
            self.stats.decode_s = now - self._decoding_since
            self._started = now
            self.output.discard_pending()
        if effects.emit:
            self._emit(effects.emit, now)
        if self.output.ended:  # tokens after the stop string are not part of the answer
            effects = effects._replace(notes=effects.notes_before(len(self.output.ids)))
        self._count_retries(effects.notes)
        if starts_over:  # the caller gets nothing of what was decoded so far
            self.stats.recovery -= self._recovery_events
            self._recovery_events = Counter()
        elif effects.notes:
            self._count_recovery(effects.notes)
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

    def _advance(
        self, event: controller.Event, details: StepDetails, now: float
    ) -> controller.Effects:
        """Advance the state machine; keep log-probabilities and rounds of new tokens."""
        num_decided = len(self.state.ids)
        was_probing = self.state.probe is not None
        self.state, effects = controller.advance(self.state, event, self.policy)
        if self.request.params.logprobs is None and self.output.trace is None:
            return effects
        new = self.state.ids[num_decided - effects.retract :]
        if self.request.params.logprobs is not None:
            # A probe that begins replaced the end token of this event.
            probes = self.state.probe is not None and not was_probing
            self.output.add_logprobs(
                new, details.logprobs, retracted=effects.retract, probes=probes
            )
        if self.output.trace:
            self.output.trace.record(
                event,
                new,
                retracted=effects.retract,
                drafts=details.drafts,
                time=details.time or CallTime(now),
                copied=details.copied,
                tops=details.tops,
            )
        return effects

    def _emit(self, ids: tuple[int, ...], now: float) -> None:
        """Give tokens to the caller, and note the time."""
        if not self.output.ids:
            self.stats.first_token_s = now - self._submitted
        self.stats.decode_s = now - self._decoding_since
        self.output.emit(ids)
        self.stats.output_tokens = len(self.output.ids)

    def _count_retries(self, notes: Sequence[str]) -> None:
        """Count retries of empty answers, and their outcomes, as fallbacks."""
        for note in notes:
            if note in speculation.RETRIES:
                self.stats.fallbacks[note] += 1

    def _count_recovery(self, notes: Sequence[str]) -> None:
        """Count recovery events of the answer that the caller gets."""
        events = Counter(note for note in notes if note not in speculation.NOTES)
        if events["runaway"]:
            events["runaway_dropped_tokens"] = guards.runaway_drop(self.state.ids)
        if events[guards.REPEATED_CALLS]:
            dropped = guards.repeated_calls_drop(self.state.ids[:], self.policy.vocabulary)
            events["repeated_calls_dropped_tokens"] = dropped
        self.stats.recovery += events
        self._recovery_events += events

    def _stop(self, reason: controller.Finish) -> None:
        self.state, _ = controller.advance(self.state, _STOPPED, self.policy)
        self._end(reason)

    def _end(self, reason: controller.Finish) -> None:
        self.output.finish()
        self.finish = reason  # last, as other threads may look at it

    # -- starting over ------------------------------------------------------------------------

    def restart(self, *, use_cache: bool) -> None:
        """Feed the prompt again; results still in flight for this request are discarded."""
        self.attempt += 1
        if self.request.params.prompt_logprobs is not None:
            use_cache = False
        self.cursor = self.cursor.restarted(use_cache=use_cache)

    def begin_call_retry(self) -> str:
        """Wait for a grammar; return the beginning of the call, which is not decoded again."""
        self.attempt += 1
        self.retries_call = True
        return call_retry.marker_before(
            self.state.ids[: self.state.call_at], self.policy.vocabulary
        )

    def retry_call(self, grammar: Grammar) -> controller.Effects:
        """Drop the call that could not be parsed; from there on the output follows a grammar."""
        self.retries_call = False
        effects = self.take(controller.CallRetried())
        recovery = self.request.recovery.for_structure()
        self.policy = dataclasses.replace(self.policy, recovery=recovery)
        self.output.grammar = grammar
        self.settings = self._settings()
        self.restart(use_cache=True)
        self.rebuilding = bool(self.state.ids)
        return effects

    def rebuild(self, error: Exception | None) -> None:
        """Feed prompt and output again, as the row's device state was lost, or end the request.

        A request that saw two failures of the device ends, whichever request caused them.

        Args:
          error: the device's failure; None if something else lost the state.
        """
        if error is not None:
            self.failures += 1
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
        """Return the result of the finished request.

        Raises:
          ComputeError: the device failed, or the target's numbers are not finite.
          RequestError: the grammar that the output must follow gave up.
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
        params = self.request.params
        rounds: list[RoundTrace] = []
        for piece in self.output.pieces:
            rounds += piece.trace
        return Result(
            token_ids=self.output.ids,
            text=self.output.text,
            finish_reason=self.finish.value,
            stats=self.stats,
            logprobs=None if params.logprobs is None else self.output.logprobs,
            prompt_logprobs=None if params.prompt_logprobs is None else self.prompt_logprobs,
            trace=tuple(rounds),
        )
