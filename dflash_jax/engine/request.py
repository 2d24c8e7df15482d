"""A request as the engine sees it: checked arguments, and what is collected while it runs."""

import dataclasses
import operator
import secrets
import time
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from dflash_jax.decode.shaping import TOP
from dflash_jax.engine import controller
from dflash_jax.engine.prefix_cache import Node
from dflash_jax.engine.result import Piece, Result, Stats, TokenLogprob
from dflash_jax.engine.structured import Grammar, Structure
from dflash_jax.engine.text import OutputText
from dflash_jax.errors import ComputeError, RequestError
from dflash_jax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for. Raises RequestError when it cannot be served by any engine."""

    prompt: tuple[int, ...]
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    structured: Structure | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    speculative: bool = True

    def __post_init__(self) -> None:
        if not self.prompt:
            raise RequestError("the prompt is empty; give at least one token")
        _check(
            type(self.max_tokens) is int and self.max_tokens >= 1,
            "max_tokens",
            self.max_tokens,
            "an integer of at least 1",
        )
        _check(
            isinstance(self.temperature, Real) and 0 <= self.temperature < float("inf"),
            "temperature",
            self.temperature,
            "0 (greedy) or a positive number",
        )
        _check(
            isinstance(self.top_p, Real) and 0 < self.top_p <= 1,
            "top_p",
            self.top_p,
            "a number above 0, up to 1",
        )
        _check(
            type(self.top_k) is int and 0 <= self.top_k < 2**31,
            "top_k",
            self.top_k,
            "0 (off) or a positive integer below 2**31",
        )
        _check(
            _is_number(self.min_p) and 0 <= self.min_p <= 1,
            "min_p",
            self.min_p,
            "a number from 0 (off) to 1",
        )
        _check(
            _is_number(self.repetition_penalty) and 0 < self.repetition_penalty < float("inf"),
            "repetition_penalty",
            self.repetition_penalty,
            "a positive number; 1 is off",
        )
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _check(_is_number(value) and -2 <= value <= 2, name, value, "a number from -2 to 2")
        biases = all(_is_id(i) and _is_number(x) and abs(x) <= 100 for i, x in self.logit_bias)
        expected = "token ids with numbers from -100 to 100"
        _check(biases, "logit_bias", dict(self.logit_bias), expected)
        _check(
            self.logprobs is None or (type(self.logprobs) is int and 0 <= self.logprobs <= TOP),
            "logprobs",
            self.logprobs,
            f"None, or how many alternatives to report, 0 to {TOP}",
        )
        _check(
            type(self.seed) is int and 0 <= self.seed < 2**32,
            "seed",
            self.seed,
            "an integer from 0 to 2**32 - 1",
        )
        texts = all(isinstance(s, str) and s for s in self.stop)
        _check(texts, "stop", self.stop, "texts of at least one character")
        ids = all(map(_is_id, self.stop_ids))
        _check(ids, "stop_token_ids", list(self.stop_ids), "token ids, integers from 0")

    @property
    def shaped(self) -> bool:
        """Whether the request needs the lane whose steps shape logits and report on them."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1, 0, 0) or bool(self.logit_bias) or self.logprobs is not None

    @property
    def limit(self) -> int:
        """Most tokens prompt and output may have together."""
        return len(self.prompt) + self.max_tokens


_STOPPED = controller.Cancelled(controller.Finish.STOP)


def _check(good: bool, name: str, value: Any, expected: str) -> None:
    if not good:
        raise RequestError(f"{name} is {value!r}; expected {expected}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return isinstance(value, Integral) and 0 <= int(value) < 2**31


def token_ids(prompt: Any, tokenizer: Tokenizer | None, vocab_size: int) -> tuple[int, ...]:
    """Ids of a prompt given as text or as ids; refuses what the model has no row for."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError(
                "the prompt is text, but this model ships no tokenizer.json; give token ids"
            )
        prompt = tokenizer.encode(prompt)
    try:
        ids = tuple(operator.index(i) for i in prompt)
    except (TypeError, ValueError) as error:
        raise RequestError(f"the prompt is {prompt!r}; expected a text or a list of ids") from error
    if outside := [i for i in ids if not 0 <= i < vocab_size]:
        raise RequestError(
            f"token ids {outside[:5]} are out of range; the target knows 0 to {vocab_size - 1}"
        )
    return ids


def pick_seed(seed: int | None) -> int:
    """The given seed, or a fresh one."""
    return secrets.randbits(32) if seed is None else seed


def as_biases(biases: Any, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """The biases of a mapping; ids may be texts of digits, as in JSON."""
    try:
        pairs = tuple((int(i), x) for i, x in dict(biases).items())
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"logit_bias is {biases!r}; expected a mapping of token ids to numbers"
        ) from error
    if outside := [i for i, _ in pairs if not 0 <= i < vocab_size]:
        raise RequestError(
            f"logit_bias names {outside[:5]}; the target knows 0 to {vocab_size - 1}"
        )
    return pairs


def as_texts(stop: str | Sequence[str]) -> tuple[str, ...]:
    """One stop string or several, as several."""
    return (stop,) if isinstance(stop, str) else tuple(stop)


class Live:
    """A request in the engine: its controller state, its output so far, its clock."""

    def __init__(
        self, request: Request, tokenizer: Tokenizer | None, grammar: Grammar | None = None
    ):
        self.request = request
        self.policy = controller.Policy(
            max_tokens=request.max_tokens,
            stop_ids=request.stop_ids,
            speculative=request.speculative,
        )
        self.state = controller.State()
        self.grammar = grammar  # what the output must follow
        self.fed = 0  # prompt tokens given to the device
        self.node: Node | None = None  # how far the prompt is in the prefix cache
        self.ids: list[int] = []
        self.pieces: list[Piece] = []
        self.logprobs: list[TokenLogprob] = []
        self.likely: list[TokenLogprob] = []  # of the tokens of the step that is taken next
        self.stats = Stats(prompt_tokens=len(request.prompt))
        self.finish: controller.Finish | None = None
        self._text = OutputText(tokenizer, request.stop)
        self._has_text = tokenizer is not None
        self._submitted = self._started = self._first = time.perf_counter()

    @property
    def done(self) -> bool:
        return self.finish is not None

    @property
    def _over(self) -> bool:
        """Whether a stop string came, or the end of what the output must follow."""
        return self._text.stopped or (self.grammar is not None and self.grammar.finished)

    @property
    def speculates(self) -> bool:
        return controller.speculates(self.state, self.policy)

    def start(self) -> None:
        """The first chunk of the prompt goes to the device."""
        self._started = time.perf_counter()

    def take(self, event: controller.Event) -> None:
        """Lets the controller judge an event and does what it says."""
        self.state, effects = controller.advance(self.state, event, self.policy)
        if effects.fallback:
            self.stats.fallbacks[effects.fallback] += 1
        if effects.emit:
            self._emit(effects.emit)
        if self.done:
            return
        if self._over:  # whatever else was decided after the stop string never was
            self.state, _ = controller.advance(self.state, _STOPPED, self.policy)
            self._end(controller.Finish.STOP)
        elif effects.finish:
            self._end(effects.finish)

    def result(self) -> Result:
        """The finished request; ComputeError if the target's numbers broke."""
        if self.finish is controller.Finish.ERROR:
            raise ComputeError(
                f"the target's logits are not finite after {len(self.ids)} output tokens;"
                " the weights are damaged or the dtype is too narrow: check the weights with"
                " `dflash-jax probe`, or load with dtype='float32'"
            )
        assert self.finish is not None
        text = self._text.text if self._has_text else None
        likely = None if self.request.logprobs is None else self.logprobs
        return Result(self.ids, text, self.finish.value, self.stats, likely)

    def _emit(self, ids: tuple[int, ...]) -> None:
        now = time.perf_counter()
        if not self.ids:
            self._first = now
            self.stats.first_token_s = now - self._submitted
            self.stats.prefill_s = now - self._started
        self.stats.decode_s = now - self._first
        text, used = "", 0
        while used < len(ids) and not self._over:
            text += self._text.push(ids[used : used + 1])
            if self.grammar:
                self.grammar.accept(ids[used : used + 1])
            used += 1
        self.ids += ids[:used]
        self.stats.output_tokens = len(self.ids)
        likely = self._name_likely(ids[:used])
        self.logprobs += likely
        self.pieces.append(Piece(ids[:used], text, likely))

    def _name_likely(self, ids: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
        """The step's log-probabilities of what is given; None where a token was dictated."""
        if self.request.logprobs is None:
            return ()
        known = [*self.likely, *[None] * len(ids)]
        pairs = zip(ids, known, strict=False)
        return tuple(x if x and x.token_id == i else TokenLogprob(i, None, ()) for i, x in pairs)

    def _end(self, reason: controller.Finish) -> None:
        self.finish = reason
        if rest := self._text.finish():
            self.pieces.append(Piece((), rest))
