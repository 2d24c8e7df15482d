"""Options of one request: what to generate, how to sample it, and where to stop.

Imported without JAX, so that a command or a server can check options before it loads anything.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypedDict

from dflash_jax.engine.state_machine import OFF, Recovery
from dflash_jax.errors import RequestError
from dflash_jax.plan_fields import plain_value

Structure = Mapping[str, Any]  # see `SamplingParams.structured`

SEEDS = 2**64  # number of seeds
MAX_TEMPERATURE = 1e6  # float32 overflows somewhere above it
MIN_TEMPERATURE = 1e-30  # lower positive values are raised to it; the result is greedy either way
MAX_PENALTY = 1e6  # of repetition_penalty; its inverse is the least
MAX_STOPS = 64  # stop strings of a request
MAX_STOP_LENGTH = 256  # characters of one stop string
MAX_STOP_TOTAL = 4096  # characters of all stop strings of a request


class SamplingOptions(TypedDict, total=False):
    """Keyword arguments of `Engine.generate` and its kin: the fields of `SamplingParams`."""

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    prompt_logprobs: int | None
    structured: Structure | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    speculative: bool | None
    block_size: int | None
    recovery: Recovery | None
    tools: Sequence[Any] | None
    tool_choice: Any
    trace: bool | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of one request. `None` stands for "not given" in every field, as over HTTP.

    Attributes:
      max_tokens: most tokens to generate; None for all that the plan has room for.
      min_tokens: an end token before this many output tokens is replaced by the next best token.
      temperature: 0 is greedy.
      top_p, top_k, min_p: filters of sampling; 1, 0 (or -1) and 0 are off.
      repetition_penalty: divides positive logits, and multiplies negative ones, of tokens of the
        prompt and the output; 1 is off.
      frequency_penalty, presence_penalty: subtracted from the logits of output tokens, once for
        each occurrence and once in all; 0 is off. Greedy requests are penalized as well.
      logit_bias: numbers to add to the logits of token ids.
      logprobs: report the log-probability of each output token, and of this many alternatives.
      prompt_logprobs: the same for the prompt, which is then computed in full, twice.
      structured: what the text must follow: {"json": a schema}, {"regex": a pattern},
        {"choice": texts} or {"grammar": a Lark grammar}. A Lark grammar under the additional key
        "around" describes the whole output and refers to the structure as `@answer`. Text under the
        key "prefix" ends the prompt, and is the beginning of what follows the structure. Needs the
        extra `structured`.
      seed: of random numbers, 64 bits with or without a sign; without one, or with -1, each
        request draws a new one. With one, a request drafts even where that does not pay off, as
        its tokens depend on it.
      stop: text or texts that end the output and are not part of it: at most 64, of at most 256
        characters each and 4,096 together.
      stop_token_ids: token ids that end the output, in addition to the model's own end tokens.
      ignore_eos: do not stop at the model's end tokens.
      speculative: False decodes without drafting; the tokens are the same.
      block_size: most tokens a round may commit, at most the plan's block; changes speed, never a
        token of a greedy request.
      recovery: rules that act when the model stalls, loops or says nothing; None is off. With
        structured output, rules that force tokens or override ends are off.
      tools, tool_choice: tools the prompt offers, in the form of any supported API. Recovery may
        begin a call of one of them, and `stop` texts do not apply inside calls.
      trace: report the rounds of decoding and where each token came from, see `RoundTrace`.

    Raises:
      RequestError: a value no engine could serve.
    """

    max_tokens: int | None = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: Structure | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    speculative: bool = True
    block_size: int | None = None
    recovery: Recovery | None = None
    tools: Sequence[Any] | None = None
    tool_choice: Any = None
    trace: bool = False

    def __post_init__(self) -> None:
        for name, default in _DEFAULTS.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        for name, nothing in _NOT_GIVEN.items():
            if getattr(self, name) == nothing:
                object.__setattr__(self, name, getattr(SamplingParams, name))
        for name, (low, high, expected) in _RANGES.items():
            if type(value := getattr(self, name)) not in _PLAIN:
                object.__setattr__(self, name, value := plain_value(value))
            kinds = (int,) if name in _INTEGERS else (int, float)
            fits = type(value) in kinds and low <= value <= high
            check(fits or (value is None and name in _OPTIONAL), name, value, expected)
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                from dflash_jax.graph.steps.logits_processing import TOP  # which imports JAX

                expected = f"None, or how many alternatives to report, 0 to {TOP}"
                check(type(value) is int and 0 <= value <= TOP, name, value, expected)
        expected = "token ids, integers from 0"
        ends = _items("stop_token_ids", self.stop_token_ids, expected)
        check(all(map(is_id, ends)), "stop_token_ids", list(ends), expected)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        stop = _items("stop", stop, "a text or several texts")
        _check_stops(stop)
        recovery = OFF if self.recovery is None else self.recovery
        check(isinstance(recovery, Recovery), "recovery", recovery, "None, or a dj.Recovery(...)")
        check(type(self.trace) is bool, "trace", self.trace, "True or False")
        least, most = self.min_tokens, self.max_tokens
        expected = f"an integer from 0 to max_tokens, {most}"
        check(most is None or least <= most, "min_tokens", least, expected)
        if least and self.structured is not None:
            raise RequestError(
                "min_tokens and structured output do not go together: the structure determines"
                " where it ends; drop one of them"
            )
        object.__setattr__(self, "logit_bias", _as_biases(self.logit_bias))
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(map(int, ends)))
        object.__setattr__(self, "recovery", recovery)

    @classmethod
    def of(cls, params: "SamplingParams | None", options: Mapping[str, Any]) -> "SamplingParams":
        """Return `params`, or the defaults, with options in place of its fields.

        Raises:
          TypeError: an option is no field.
          RequestError: a value no engine could serve.
        """
        check_names(options, SamplingOptions)
        if params is None:
            return cls(**options)
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params is {params!r}; expected dj.SamplingParams(...)")
        return dataclasses.replace(params, **options) if options else params

    def for_answer(self, number: int) -> "SamplingParams":
        """Return the options of answer `number` to a prompt, which draws with seed + number."""
        if self.seed is None or number == 0:
            return self
        return dataclasses.replace(self, seed=(self.seed + number) % SEEDS)

    @property
    def penalized(self) -> bool:
        """Whether logits are changed by penalties or biases, or log-probabilities reported."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1, 0, 0) or bool(self.logit_bias) or self.logprobs is not None


_INTEGERS: dict[str, tuple[int, int, str]] = {
    "max_tokens": (1, 2**31 - 1, "an integer of at least 1"),
    "min_tokens": (0, 2**31 - 1, "an integer from 0 to max_tokens"),
    "top_k": (0, 2**31 - 1, "0 (off) or a positive integer below 2**31"),
    "seed": (-SEEDS // 2, SEEDS - 1, "an integer of 64 bits, from -2**63 to 2**64 - 1"),
    "block_size": (1, 2**31 - 1, "None, or an integer of at least 1"),
}
_OPTIONAL = ("max_tokens", "seed", "block_size")
_NOT_GIVEN = {"top_k": -1, "seed": -1}  # further values of fields that are not given
_PLAIN = (int, float, type(None))  # other numbers are NumPy's
_PENALTY = (-2, 2, "a number from -2 to 2")
_FACTOR = f"a positive number from {1 / MAX_PENALTY} to {MAX_PENALTY}; 1 is off"
_NUMBERS: dict[str, tuple[float, float, str]] = {
    "temperature": (0, MAX_TEMPERATURE, f"0 (greedy) or a number up to {MAX_TEMPERATURE}"),
    "top_p": (0, 1, "a number from 0 (the most likely token alone) to 1 (off)"),
    "min_p": (0, 1, "a number from 0 (off) to 1"),
    "repetition_penalty": (1 / MAX_PENALTY, MAX_PENALTY, _FACTOR),
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
}


_RANGES = _INTEGERS | _NUMBERS
_DEFAULTS = {
    field.name: field.default
    for field in dataclasses.fields(SamplingParams)
    if field.name != "max_tokens" and field.default not in (None, ())
}


def check_names(options: Iterable[str], kind: type) -> None:
    """Raise TypeError, as Python does, for option names that a TypedDict lacks."""
    known = kind.__annotations__
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
            raise TypeError(f"{name!r} is no argument of a request; {hint}")


def check(good: bool, name: str, value: Any, expected: str) -> None:
    """Raise RequestError, naming what was expected, unless an option is good."""
    if not good:
        raise RequestError(f"{name} is {value!r}; expected {expected}")


def is_id(value: Any) -> bool:
    """Return whether a value could be a token id of some model."""
    return isinstance(value, Integral) and 0 <= int(value) < 2**31


def _as_biases(biases: Any) -> Mapping[int, float]:
    """Return biases by token id; ids may be given as texts of digits, as in JSON."""
    try:
        pairs = {int(i): x for i, x in dict(biases or {}).items()}
    except (TypeError, ValueError) as error:
        expected = "a mapping of token ids to numbers"
        raise RequestError(f"logit_bias is {biases!r}; expected {expected}") from error
    numbers = all(isinstance(x, Real) and not isinstance(x, bool) for x in pairs.values())
    good = numbers and all(map(is_id, pairs)) and all(abs(x) <= 100 for x in pairs.values())
    check(good, "logit_bias", pairs, "token ids with numbers from -100 to 100")
    return pairs


def _check_stops(stop: Sequence[Any]) -> None:
    if len(stop) > MAX_STOPS:
        raise RequestError(
            f"stop has {len(stop)} texts; expected at most {MAX_STOPS}: give fewer of them"
        )
    texts = all(isinstance(s, str) and s for s in stop)
    check(texts, "stop", stop, "texts of at least one character")
    if (longest := max(map(len, stop), default=0)) > MAX_STOP_LENGTH:
        raise RequestError(
            f"stop has a text of {longest} characters; expected at most {MAX_STOP_LENGTH} in each:"
            " give a shorter part of it"
        )
    if (total := sum(map(len, stop))) > MAX_STOP_TOTAL:
        raise RequestError(
            f"stop has texts of {total} characters together; expected at most {MAX_STOP_TOTAL}:"
            " give fewer or shorter ones"
        )


def _items(name: str, value: Any, expected: str) -> tuple[Any, ...]:
    """Return the items of an option that may be None."""
    try:
        return () if value is None else tuple(value)
    except TypeError as error:
        raise RequestError(f"{name} is {value!r}; expected {expected}") from error
