"""Options of one request: what to generate, how to sample it, and where to stop.

Imported without JAX, so that a command or a server can check options before it loads anything.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    TypedDict,
    Unpack,
    cast,
    get_args,
    get_type_hints,
)

from dflash_jax.declared import Field, documentation, plain_value, unknown_names
from dflash_jax.engine.state_machine import OFF, Recovery
from dflash_jax.errors import RequestError
from dflash_jax.plan import MAX_LOGPROBS

Structure = Mapping[str, Any]  # see `SamplingParams.structured`

SEEDS = 2**64  # number of seeds
MAX_TEMPERATURE = 1e6  # float32 overflows somewhere above it
MIN_TEMPERATURE = 1e-30  # lower positive values are raised to it; the result is greedy either way
MAX_PENALTY = 1e6  # of repetition_penalty; its inverse is the least
MAX_STOPS = 64  # stop strings of a request
MAX_STOP_LENGTH = 256  # characters of one stop string
MAX_STOP_TOTAL = 4096  # characters of all stop strings of a request


MAX_INT = 2**31 - 1
_SHARED: dict[str, Any] = {"served": True, "command": True}
_PENALTY: dict[str, Any] = {"minimum": -2, "maximum": 2, **_SHARED}
_ALTERNATIVES = f"None, or how many alternatives to report, 0 to {MAX_LOGPROBS}"
_LOGPROBS: dict[str, Any] = {"maximum": MAX_LOGPROBS, "expected": _ALTERNATIVES}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option(Field):
    """Declaration of an option.

    Attributes:
      default: the value of an option that is not given.
      unset: a further value that stands for "not given".
      optional: whether None is a value of its own.
      served: whether requests of all APIs have a field of the name, or the type that it has there.
      aliases: other names of that field.
      command: whether commands have a flag of the name.
    """

    default: Any = None
    unset: Any = None
    optional: bool = False
    served: Any = False
    aliases: tuple[str, ...] = ()
    command: bool = False


def option(default: Any, help: str, **more: Any) -> Option:
    """Return the declaration of an option."""
    return Option(default=default, help=help, **more)


# fmt: off
class SamplingOptions(TypedDict, total=False):
    """Keyword arguments of `Engine.generate` and its kin: the fields of `SamplingParams`."""

    max_tokens: Annotated[
        int | None,
        option(
            256,
            "most tokens to generate; None for all that the plan has room for",
            minimum=1, maximum=MAX_INT, optional=True, command=True,
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
            maximum=MAX_INT, unset=-1, **_SHARED,
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
            minimum=-SEEDS // 2, maximum=SEEDS - 1, unset=-1, command=True,
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


OPTIONS: Mapping[str, Option] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(SamplingOptions, include_extras=True).items()
}
_HINTS = get_type_hints(SamplingOptions)
KINDS: Mapping[str, Any] = {name: [*get_args(hint), hint][0] for name, hint in _HINTS.items()}

if TYPE_CHECKING:

    class _Options:
        def __init__(self, **options: Unpack[SamplingOptions]) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

else:
    _Options = dataclasses.make_dataclass(
        "_Options",
        [(name, _HINTS[name], info.default) for name, info in OPTIONS.items()],
        namespace={"__post_init__": lambda self: self._check()},
        frozen=True,
        kw_only=True,
    )


class SamplingParams(_Options):
    """Options of one request. `None` stands for "not given" in every field, as over HTTP."""

    if not TYPE_CHECKING:  # where the options are the arguments

        def __new__(cls, /, **options: Any) -> "SamplingParams":
            """Check the names of options, which Python would refuse in words of its own."""
            _check_names(options)
            return super().__new__(cls)

    def _check(self) -> None:
        """Complete and check the values."""
        for name, info in OPTIONS.items():
            if (kind := KINDS[name]) not in (bool, int, float):
                continue
            value = plain_value(getattr(self, name))
            if (value is None and not info.optional) or (value is not None and value == info.unset):
                value = info.default
            if value is not None:
                check(not (found := info.mismatch(value, kind)), name, value, found)
            object.__setattr__(self, name, value)
        expected = "token ids, integers from 0"
        ends = _items("stop_token_ids", self.stop_token_ids, expected)
        check(all(map(is_id, ends)), "stop_token_ids", list(ends), expected)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        stop = _items("stop", stop, "a text or several texts")
        _check_stops(stop)
        salt = "" if self.cache_salt is None else self.cache_salt
        check(isinstance(salt, str), "cache_salt", salt, "a text")
        recovery = OFF if self.recovery is None else self.recovery
        check(isinstance(recovery, Recovery), "recovery", recovery, "None, or a dj.Recovery(...)")
        least, most = self.min_tokens, self.max_tokens
        expected = f"an integer from 0 to max_tokens, {most}"
        check(most is None or least <= most, "min_tokens", least, expected)
        if least and self.structured is not None:
            raise RequestError(
                "min_tokens and structured output do not go together: the structure determines"
                " where it ends; drop one of them"
            )
        object.__setattr__(self, "logit_bias", _as_biases(self.logit_bias))
        object.__setattr__(self, "cache_salt", salt)
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
        _check_names(options)
        if params is None:
            return cls(**options)
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params is {params!r}; expected dj.SamplingParams(...)")
        return params.with_options(**options) if options else params

    def with_options(self, **options: Unpack[SamplingOptions]) -> "SamplingParams":
        """Return the same options but for some."""
        return dataclasses.replace(cast(Any, self), **options)

    def for_answer(self, number: int) -> "SamplingParams":
        """Return the options of answer `number` to a prompt, which draws with seed + number."""
        if self.seed is None or number == 0:
            return self
        return self.with_options(seed=(self.seed + number) % SEEDS)

    @property
    def penalized(self) -> bool:
        """Whether logits are changed by penalties or biases, or log-probabilities reported."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1, 0, 0) or bool(self.logit_bias) or self.logprobs is not None


SamplingParams.__doc__ = documentation(
    SamplingParams.__doc__ or "",
    OPTIONS,
    "\n\nRaises:\n  RequestError: a value no engine could serve.",
)


def _check_names(names: Iterable[str]) -> None:
    """Raise TypeError, as Python does, for names that are no options."""
    unknown = [name for name in names if name not in OPTIONS]
    if unknown:
        raise TypeError(unknown_names(unknown, OPTIONS, "argument of a request"))


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
