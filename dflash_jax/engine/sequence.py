"""A request while it runs: the controller's state, the output so far, the clock."""

import dataclasses
import itertools
import math
import time
from collections import Counter
from concurrent.futures import Future
from typing import Any

from dflash_jax.engine.detokenizer import OutputText
from dflash_jax.engine.forced_tokens import ForcedTokens
from dflash_jax.engine.prefix.cache import Node
from dflash_jax.engine.recovery import CancelCell, controller, repeated_calls, speculation
from dflash_jax.engine.recovery.cancellation import Compute, Handle, classify
from dflash_jax.engine.recovery.guards import runaway_drop
from dflash_jax.engine.request import Request
from dflash_jax.engine.result import Piece, Result, Stats, TokenLogprob
from dflash_jax.engine.structured.call_grammars import CallGrammars
from dflash_jax.engine.structured.grammars import Grammar
from dflash_jax.engine.vocabulary import opens_thought
from dflash_jax.errors import ComputeError, DFlashError, RequestError
from dflash_jax.state import CHOICES, Logprobs
from dflash_jax.tokenizer import Tokenizer

_STOPPED = controller.Cancelled(controller.Finish.STOP)
_numbers = itertools.count(1)


class Live:
    """A request in the engine: its controller state, its output so far, its clock.

    Args:
      cancel: a cell by which anyone may end it.
      call_grammars: for calls that cannot be read; without it they stay as they are.
      break_even: tokens a drafted round must decide to pay; 0 where lanes may not change.
      fixed: they may not change for any other reason either.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        grammar: Grammar | None = None,
        *,
        cancel: CancelCell | None = None,
        call_grammars: CallGrammars | None = None,
        break_even: float = 0.0,
        fixed: bool = False,
    ):
        self.request = request
        self.number = next(_numbers)
        self.handle = Handle(cancel)
        self._call_grammars, recovery = call_grammars, request.recovery
        if call_grammars is None and recovery.call_retry:
            recovery = dataclasses.replace(recovery, call_retry=False)
        self.policy = controller.Policy(
            max_tokens=request.max_tokens,
            stop_ids=request.stop_ids,
            speculative=request.speculative,
            break_even=break_even,
            fixed=fixed,
            recovery=recovery,
            words=request.words,
        )
        self.state = controller.State()
        self.grammar = grammar  # what the output must follow
        self.call_grammar: Future[Grammar] | None = None  # of a call to be decoded once more
        self.fed = 0  # prompt tokens given to the device
        self.node: Node | None = None  # how far the prompt is in the prefix cache
        self.added: list[Node] = []  # what the request put into it
        self.uncached = request.scored  # the prompt has to be fed whole
        self.recall: Future[list[Any]] | None = None  # segments on their way from the disk
        self.failures = 0  # of the device, while the request ran
        self.dropped = False  # nobody holds its stream any more
        self.cleaned = False  # its row was cleared, as the prompt's numbers were not finite there
        self.rebuilding = False  # the output so far is to be fed anew, behind the prompt
        self.error: DFlashError | None = None
        self.ids: list[int] = []
        self.pieces: list[Piece] = []
        self.logprobs: list[TokenLogprob] = []
        self.scores: list[Logprobs] = []  # of the prompt's chunks, on their way to the host
        self.prompt_logprobs: list[TokenLogprob] = []
        self._likely: list[TokenLogprob] = []  # of output tokens that were not emitted yet
        self._of_end: list[TokenLogprob] = []  # of the end token in whose place a call is tried
        self.stats = Stats(prompt_tokens=len(request.prompt))
        self._counted: Counter[str] = Counter()  # recovery events of this decoding of the answer
        self.finish: controller.Finish | None = None
        self._text = output_text(request, tokenizer)
        self._has_text = tokenizer is not None
        self._submitted = self._started = self._first = time.perf_counter()
        allowed = request.recovery.deadline_s
        self.deadline = math.inf if allowed is None else self._submitted + allowed
        self._look()

    @property
    def done(self) -> bool:
        return self.finish is not None

    @property
    def doubtful(self) -> bool:
        """Whether nothing the ended request left behind should serve another one."""
        lost = self.finish is controller.Finish.ERROR or bool(self.handle.cell)
        return lost or not controller.is_visible(self.state, self.policy)

    @property
    def _over(self) -> bool:
        """Whether a stop string came, or the end of what the output must follow."""
        return self._text.stopped or (self.grammar is not None and self.grammar.finished)

    def _look(self) -> None:
        """What the device has to know of the state; looked up once per event, read every step."""
        # Most tokens prompt and output may have before the host has to speak.
        self.limit = len(self.request.prompt) + controller.room(self.state, self.policy)
        self.speculates = controller.speculates(self.state, self.policy)
        self.choices = controller.choices(self.state)[:CHOICES]
        self.opening = controller.opening(self.state, self.policy)

    def delay(self, seconds: float) -> None:
        """Count the seconds before the request could be queued as time spent compiling for it.

        The time it may take begins after them.
        """
        self.stats.compile_s += seconds
        self.deadline += seconds

    def start(self) -> None:
        """The first chunk of the prompt goes to the device."""
        self._started = time.perf_counter()

    def hear(
        self,
        event: controller.Prefilled | controller.Stepped,
        likely: list[TokenLogprob] | None = None,
    ) -> controller.Effects:
        """Takes a step's answer, unless the caller left; a failure outranks that.

        Args:
          likely: log-probabilities of the step's tokens, where the request asks for them.
        """
        if classify(event.finite, self.handle) is Compute.CANCELLED:
            return self.leave()
        return self.take(event, likely)

    def leave(self) -> controller.Effects:
        """The caller left: ends the request, and counts why."""
        self.stats.recovery[f"cancelled_{self.handle.cell.reason}"] += 1
        return self.take(controller.Cancelled())

    def take(
        self, event: controller.Event, likely: list[TokenLogprob] | None = None
    ) -> controller.Effects:
        """Lets the controller judge an event; the effects that are left are the engine's."""
        if isinstance(event, controller.Prefilled):
            now = time.perf_counter()
            self.stats.prefill_s += now - self._started
            self._first = now - self.stats.decode_s
        before = len(self.state.ids)
        self.state, effects = controller.advance(self.state, event, self.policy)
        if self.request.logprobs is not None:
            self._note_logprobs(before - effects.retract, effects.retract, likely or [])
        self._look()
        if effects.fallback:
            self.stats.fallbacks[effects.fallback] += 1
        discards = effects.restart in (controller.Restart.SAVED, controller.Restart.FRESH)
        if discards:
            now = time.perf_counter()
            self.stats.decode_s, self._started = now - self._first, now
            self._likely.clear()
        if effects.emit:
            self._emit(effects.emit)
        if self._over:  # tokens after the stop string are not part of the answer
            effects = effects._replace(notes=effects.notes_before(len(self.ids)))
        if effects.notes or discards:
            self._count(effects, discards=discards)
        if self.done:
            return controller.Effects()
        if self.grammar is not None and (why := self.grammar.error):
            self.error = RequestError(
                f"the grammar gave up after {len(self.ids)} output tokens ({why}); simplify the"
                " structure, such as by fewer choices or properties"
            )
            self.state, _ = controller.advance(self.state, _STOPPED, self.policy)
            self._end(controller.Finish.ERROR)
            return controller.Effects(notes=effects.notes)
        if self._over:
            self.state, _ = controller.advance(self.state, _STOPPED, self.policy)
            self._end(controller.Finish.STOP)
            return controller.Effects(notes=effects.notes)
        if effects.finish:
            self._end(effects.finish)
        return effects

    def _note_logprobs(self, before: int, retract: int, likely: list[TokenLogprob]) -> None:
        """Keep log-probabilities of the ids from `before` on, in place of those of dropped ids."""
        if retract:
            del self._likely[-retract:]
            likely = self._of_end
        elif self.state.asked and len(self.state.ids) > before:
            self._of_end = likely[-1:]
        self._likely += _named(self.state.ids[before:], likely)

    def _count(self, effects: controller.Effects, *, discards: bool) -> None:
        """Count recovery events of the answer that the caller gets, and retries as fallbacks."""
        notes = Counter(effects.notes)
        self.stats.fallbacks.update({n: notes[n] for n in speculation.RETRIES if notes[n]})
        if discards:  # this decoding is
            self.stats.recovery -= self._counted
            self._counted = Counter()
            return
        found = Counter({n: times for n, times in notes.items() if n not in speculation.NOTES})
        if found["runaway"]:
            found["runaway_dropped_tokens"] = runaway_drop(self.state.ids)
        if found[repeated_calls.KIND]:
            dropped = len(self.state.ids) - self.state.memory.called.first
            found["repeated_calls_dropped_tokens"] = dropped
        self.stats.recovery += found
        self._counted += found

    def begin_call_retry(self) -> None:
        """Begin to make the grammar under which a call is decoded once more."""
        assert self._call_grammars is not None
        self.call_grammar = self._call_grammars.begin(self.request)

    def retry_call(self, grammar: Grammar) -> controller.Effects:
        """The call that could not be read goes; the output from there on follows a grammar."""
        effects = self.take(controller.CallRetried())
        self.request = dataclasses.replace(self.request, structured={})  # decoded in its lane
        settings = self.request.recovery.for_structure()
        self.policy = dataclasses.replace(self.policy, recovery=settings)
        self.grammar = grammar
        self.feed_again(uncached=False)
        self.rebuilding = bool(self.state.ids)
        return effects

    def feed_again(self, *, uncached: bool) -> None:
        """The prompt is fed once more.

        Args:
          uncached: nothing of it comes from the prefix cache this time.
        """
        self.fed, self.uncached = 0, uncached or self.request.scored
        self.stats.cached_tokens = 0

    def fail(self, error: Exception | None) -> bool:
        """The request's state was lost; True if that ends it, else it is fed anew.

        Args:
          error: the device's failure, if it was one.
        """
        self.failures += error is not None
        heard = len(self.state.ids) - self.state.held
        if self.failures > 1:
            self.error = ComputeError(
                f"the device failed twice while the request ran ({error}); lower rows or"
                " max_length if its memory is short, else look at the device's log"
            )
        elif self.state.phase is controller.Phase.DONE or len(self.ids) != heard:
            self.error = ComputeError(
                "the thread that ran the request was stopped while it took in an answer, so that a"
                " part of the output is lost; send the request again"
            )
        if self.error:
            self.state, _ = controller.advance(self.state, _STOPPED, self.policy)
            self._end(controller.Finish.ERROR)
            return True
        self.stats.recovery["rebuilt"] += 1
        self.fed, self.rebuilding = 0, bool(self.state.ids)
        return False

    def rebuilt(self) -> ForcedTokens:
        """The prompt was fed anew; what goes behind it now."""
        self.rebuilding = False
        return ForcedTokens(self.state.ids[0], True, self.state.ids[1:])

    def result(self) -> Result:
        """The finished request.

        Raises:
          ComputeError: the device or the target's numbers broke.
          RequestError: the grammar gave up on what the output must follow.
        """
        if self.error:
            raise self.error
        if self.finish is controller.Finish.ERROR:
            raise ComputeError(
                f"the target's logits are not finite after {len(self.ids)} output tokens;"
                " the weights are damaged or the dtype is too narrow: check the weights with"
                " `dflash-jax probe`, or load with dtype='float32'"
            )
        assert self.finish is not None
        text = self._text.text if self._has_text else None
        likely = None if self.request.logprobs is None else self.logprobs
        scored = self.prompt_logprobs if self.request.scored else None
        return Result(self.ids, text, self.finish.value, self.stats, likely, scored)

    def _emit(self, ids: tuple[int, ...]) -> None:
        now = time.perf_counter()
        if not self.ids:
            self.stats.first_token_s = now - self._submitted
        self.stats.decode_s = now - self._first
        text, used = "", 0
        if not self.request.stop and self.grammar is None:  # then nothing can end it in between
            text, used = self._text.push(ids), len(ids)
        while used < len(ids) and not self._over:
            text += self._text.push(ids[used : used + 1])
            if self.grammar:
                self.grammar.accept(ids[used : used + 1])
            used += 1
        likely, self._likely = tuple(self._likely[:used]), self._likely[len(ids) :]
        self.pieces.append(Piece(ids[:used], text, likely))
        self.logprobs += likely
        self.ids += ids[:used]  # last: `fail` asks whether the output was taken in
        self.stats.output_tokens = len(self.ids)

    def _end(self, reason: controller.Finish) -> None:
        if rest := self._text.finish():
            self.pieces.append(Piece((), rest))
        self.finish = reason  # last, as other threads may look at it


def output_text(request: Request, tokenizer: Tokenizer | None) -> OutputText:
    """The text of a request's output, which ends before the first stop string."""
    if tokenizer is None or not (request.stop and request.tools):
        return OutputText(tokenizer, request.stop)
    return OutputText(
        tokenizer,
        request.stop,
        request.tools,
        thinking=opens_thought(tokenizer, request.prompt),
        slips=request.structured is None,
    )


def _named(ids: tuple[int, ...], likely: list[TokenLogprob]) -> list[TokenLogprob]:
    """A step's log-probabilities of the tokens it added; None where they were dictated."""
    known = [*likely, *[None] * len(ids)]
    pairs = zip(ids, known, strict=False)
    return [x if x and x.token_id == i else TokenLogprob(i, None, ()) for i, x in pairs]
