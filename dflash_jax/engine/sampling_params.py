"""Options of one request: what to generate, how to sample it, and where to stop.

Imported without JAX, so that a command or a server can check options before it loads anything.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, Unpack, cast, get_type_hints

from dflash_jax.declared import Declared, Field, declared, document, sentences, unknown_names
from dflash_jax.engine.state_machine import OFF, Recovery
from dflash_jax.errors import RequestError
from dflash_jax.plan import MAX_LOGPROBS

Structure = Mapping[str, Any]  # see `SamplingParams.structured`

SEEDS = 2**64  # number of seeds
MAX_TEMPERATURE = 1e6  # float32 overflows somewhere above it
MIN_TEMPERATURE = 1e-30  # lower positive values are raised to it; the result is greedy either way
MAX_PENALTY = 1e6  # most of `repetition_penalty`; its inverse is the least
MAX_STOPS = 64  # most stop strings of a request
MAX_STOP_LENGTH = 256  # most characters of one stop string
MAX_STOP_TOTAL = 4096  # most characters of all stop strings of a request
MAX_INT = 2**31 - 1

# Arguments that several options declare alike.
_SHARED: dict[str, Any] = {"served": True, "command": True}
_PENALTY: dict[str, Any] = {"minimum": -2, "maximum": 2, **_SHARED}
_ALTERNATIVES = f"None, or how many alternatives to report, 0 to {MAX_LOGPROBS}"
_LOGPROBS: dict[str, Any] = {"maximum": MAX_LOGPROBS, "expected": _ALTERNATIVES}


def option(default: Any, help: str, *, unset: tuple[Any, ...] = (None,), **more: Any) -> Field:
    """Return the declaration of an option; None stands for "not given", as over HTTP."""
    return Field(default=default, help=help, unset=unset, **more)


# fmt: off
class SamplingOptions(TypedDict, total=False):
    """Keyword arguments of `Engine.generate` and its kin: the fields of `SamplingParams`."""

    max_tokens: Annotated[
        int | None,
        option(
            256,
            "most tokens to generate; None for all that the plan has room for",
            minimum=1, maximum=MAX_INT, unset=(), command=True, flags=("-n",),
        ),
    ]
    min_tokens: Annotated[
        int | None,
        option(
            0,
            "an end token before this many output tokens is replaced by the next best token",
            maximum=MAX_INT, served=True,
        ),
    ]
    temperature: Annotated[
        float | None, option(0.0, "0 is greedy", maximum=MAX_TEMPERATURE, **_SHARED)
    ]
    top_p: Annotated[
        float | None,
        option(
            1.0,
            "sample from the most probable tokens of this total probability; 1 is off",
            maximum=1, **_SHARED,
        ),
    ]
    top_k: Annotated[
        int | None,
        option(
            0,
            "sample from this many tokens, the most probable ones; 0 (or -1) is off",
            maximum=MAX_INT, unset=(None, -1), **_SHARED,
        ),
    ]
    min_p: Annotated[
        float | None,
        option(
            0.0,
            "leave out tokens less probable than this share of the most probable one; 0 is off",
            maximum=1, **_SHARED,
        ),
    ]
    repetition_penalty: Annotated[
        float | None,
        option(
            1.0,
            "divides positive logits, and multiplies negative ones, of tokens of the prompt and the"
            " output; 1 is off",
            minimum=1 / MAX_PENALTY, maximum=MAX_PENALTY, **_SHARED,
            aliases=("repeat_penalty", "rep_pen"),  # of llama.cpp and KoboldAI
        ),
    ]
    frequency_penalty: Annotated[
        float | None,
        option(
            0.0,
            "subtracted from the logits of output tokens once for each occurrence; 0 is off",
            details="Greedy requests are penalized as well.", **_PENALTY,
        ),
    ]
    presence_penalty: Annotated[
        float | None,
        option(
            0.0, "subtracted from the logits of output tokens once in all; 0 is off", **_PENALTY
        ),
    ]
    logit_bias: Annotated[
        Mapping[int, float] | None,
        option(None, "numbers to add to the logits of token ids", served=dict[str, float]),
    ]
    logprobs: Annotated[
        int | None,
        option(
            None,
            "report the log-probability of each output token, and of this many alternatives",
            **_LOGPROBS,
        ),
    ]
    prompt_logprobs: Annotated[
        int | None,
        option(None, "the same for the prompt, which is then computed in full, twice", **_LOGPROBS),
    ]
    structured: Annotated[
        Structure | None,
        option(
            None,
            'what the text must follow: {"json": a schema}, {"regex": a pattern}, {"choice": texts}'
            ' or {"grammar": a Lark grammar}',
            details='A Lark grammar under the additional key "around" describes the whole output'
            ' and refers to the structure as `@answer`. Text under the key "prefix" ends the'
            " prompt, and is the beginning of what follows the structure. Needs the extra"
            " `structured`.",
        ),
    ]
    seed: Annotated[
        int | None,
        option(
            None,
            "of random numbers, 64 bits with or without a sign; without one, or with -1, each"
            " request draws a new one",
            details="With one, a request drafts even where that does not pay off, as its tokens"
            " depend on it.",
            minimum=-SEEDS // 2, maximum=SEEDS - 1, unset=(None, -1), command=True,
            expected="an integer of 64 bits, from -2**63 to 2**64 - 1",
        ),
    ]
    stop: Annotated[
        str | Sequence[str] | None,
        option(
            None,
            f"text or texts that end the output and are not part of it: at most {MAX_STOPS}, of at"
            f" most {MAX_STOP_LENGTH} characters each and {MAX_STOP_TOTAL:,} together",
        ),
    ]
    stop_token_ids: Annotated[
        Sequence[int] | None,
        option(
            None,
            "token ids that end the output, in addition to the model's own end tokens",
            served=list[int],
        ),
    ]
    ignore_eos: Annotated[
        bool | None, option(False, "do not stop at the model's end tokens", **_SHARED)
    ]
    speculative: Annotated[
        bool | None, option(True, "False decodes without drafting; the tokens are the same")
    ]
    block_size: Annotated[
        int | None,
        option(
            None,
            "most tokens a round may commit, at most the plan's block",
            details="Changes speed, never a token of a greedy request.",
            minimum=1, maximum=MAX_INT,
        ),
    ]
    cache_salt: Annotated[
        str | None,
        option("", "only prompts of requests with the same salt share cached prefixes"),
    ]
    recovery: Annotated[
        Recovery | None,
        option(
            None,
            "rules that act when the model stalls, loops or says nothing; None is off",
            details="With structured output, rules that force tokens or override ends are off.",
        ),
    ]
    tools: Annotated[
        Sequence[Any] | None,
        option(
            None,
            "tools the prompt offers, in the form of any supported API",
            details="Recovery may begin a call of one of them, and `stop` texts do not apply inside"
            " calls.",
        ),
    ]
    tool_choice: Annotated[Any, option(None, "which of them the model may call, as in that API")]
    trace: Annotated[
        bool | None,
        option(False, "report rounds of decoding and where tokens came from, see `RoundTrace`"),
    ]
# fmt: on


_HINTS = get_type_hints(SamplingOptions, include_extras=True)

if TYPE_CHECKING:

    class _Options(Declared):
        def __init__(self, **options: Unpack[SamplingOptions]) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

else:
    _Options = dataclasses.make_dataclass(
        "_Options",
        [(name, hint.__origin__, declared(hint.__metadata__[0])) for name, hint in _HINTS.items()],
        bases=(Declared,),
        frozen=True,
        kw_only=True,
    )


class SamplingParams(_Options):
    """Options of one request. `None` stands for "not given" in every field, as over HTTP."""

    _error = RequestError
    _noun = "argument of a request"

    @classmethod
    def _check_names(cls, names: Collection[str]) -> None:
        """Raise TypeError, as Python does, for names that are no options."""
        problems = unknown_names(names, cls.fields(), cls._noun)
        if problems:
            raise TypeError(sentences(problems))

    def _check(self) -> None:
        """Complete and check the values.

        Raises:
          RequestError: a value no engine could serve.
        """
        expected = "token ids, integers from 0"
        stop_token_ids = _items("stop_token_ids", self.stop_token_ids, expected)
        are_ids = all(map(is_id, stop_token_ids))
        check(are_ids, "stop_token_ids", list(stop_token_ids), expected)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        stop = _items("stop", stop, "a text or several texts")
        _check_stops(stop)
        recovery = OFF if self.recovery is None else self.recovery
        check(isinstance(recovery, Recovery), "recovery", recovery, "None, or a dj.Recovery(...)")
        fits = self.max_tokens is None or self.min_tokens <= self.max_tokens
        expected = f"an integer from 0 to max_tokens, {self.max_tokens}"
        check(fits, "min_tokens", self.min_tokens, expected)
        if self.min_tokens and self.structured is not None:
            raise RequestError(
                "min_tokens and structured output do not go together: the structure determines"
                " where it ends; drop one of them"
            )
        object.__setattr__(self, "logit_bias", _as_biases(self.logit_bias))
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(map(int, stop_token_ids)))
        object.__setattr__(self, "recovery", recovery)

    @classmethod
    def of(cls, params: "SamplingParams | None", options: Mapping[str, Any]) -> "SamplingParams":
        """Return `params`, or the defaults, with options in place of its fields.

        Raises:
          TypeError: an option is no field.
          RequestError: a value no engine could serve.
        """
        cls._check_names(options)
        if params is None:
            return cls(**options)
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params is {params!r}; expected dj.SamplingParams(...)")
        return params.with_options(**options) if options else params

    def with_options(self, **options: Unpack[SamplingOptions]) -> "SamplingParams":
        """Return these options with some replaced.

        Raises:
          RequestError: a value no engine could serve.
        """
        return dataclasses.replace(cast(Any, self), **options)

    def for_answer(self, number: int) -> "SamplingParams":
        """Return the options of one of several answers to a prompt.

        Args:
          number: the answer, from 0. It draws with seed + number.
        """
        if self.seed is None or number == 0:
            return self
        return self.with_options(seed=(self.seed + number) % SEEDS)

    @property
    def penalized(self) -> bool:
        """Whether logits are changed by penalties or biases, or log-probabilities reported."""
        if self.repetition_penalty != 1 or self.frequency_penalty or self.presence_penalty:
            return True
        return bool(self.logit_bias) or self.logprobs is not None


document(SamplingParams, "\n\nRaises:\n  RequestError: a value no engine could serve.")


def check(good: bool, name: str, value: Any, expected: str) -> None:
    """Raise RequestError, naming what was expected, unless an option is good."""
    if not good:
        raise RequestError(f"{name} is {value!r}; expected {expected}")


def is_id(value: Any) -> bool:
    """Return whether a value could be a token id of some model."""
    return isinstance(value, Integral) and 0 <= int(value) < 2**31


def _as_biases(biases: Any) -> Mapping[int, float]:
    """Return biases by token id; an id may be a text of digits, as in JSON.

    Raises:
      RequestError: an id is none, or a bias is no number from -100 to 100.
    """
    try:
        by_id = {int(token): bias for token, bias in dict(biases or {}).items()}
    except (TypeError, ValueError) as error:
        expected = "a mapping of token ids to numbers"
        raise RequestError(f"logit_bias is {biases!r}; expected {expected}") from error
    good = all(map(is_id, by_id)) and all(map(_is_bias, by_id.values()))
    check(good, "logit_bias", by_id, "token ids with numbers from -100 to 100")
    return by_id


def _is_bias(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return abs(cast(Any, value)) <= 100


def _check_stops(stop: Sequence[Any]) -> None:
    """Raise RequestError for stop strings that are no texts, too many, or too long."""
    if len(stop) > MAX_STOPS:
        raise RequestError(
            f"stop has {len(stop)} texts; expected at most {MAX_STOPS}: give fewer of them"
        )
    are_texts = all(isinstance(text, str) and text for text in stop)
    check(are_texts, "stop", stop, "texts of at least one character")
    longest = max(map(len, stop), default=0)
    if longest > MAX_STOP_LENGTH:
        raise RequestError(
            f"stop has a text of {longest} characters; expected at most {MAX_STOP_LENGTH} in each:"
            " give a shorter part of it"
        )
    total = sum(map(len, stop))
    if total > MAX_STOP_TOTAL:
        raise RequestError(
            f"stop has texts of {total} characters together; expected at most {MAX_STOP_TOTAL}:"
            " give fewer or shorter ones"
        )


def _items(name: str, value: Any, expected: str) -> tuple[Any, ...]:
    """Return the items of an option; none if it is None.

    Raises:
      RequestError: the value has no items.
    """
    try:
        return () if value is None else tuple(value)
    except TypeError as error:
        raise RequestError(f"{name} is {value!r}; expected {expected}") from error
