"""A request as the engine sees it: what was asked for, checked.

Imported without JAX, so that a command can check its values before it loads anything.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from dflash_jax.config import TargetConfig
from dflash_jax.engine.recovery import OFF, Recovery
from dflash_jax.engine.recovery.words import SILENT, Words
from dflash_jax.errors import RequestError
from dflash_jax.plan import Plan
from dflash_jax.tool_parsers.tool_schema import Tool

Structure = Mapping[str, Any]  # what an output must follow, as `structured.Grammars` reads it

HOTTEST = 1e6  # temperature; above it float32 ends sooner or later
COLDEST = 1e-30  # above 0, likewise below it: nearer to greedy there is nothing
MAX_STOPS = 64  # stop strings of a request
MAX_STOP_LENGTH = 256  # characters of a stop string
MAX_STOP_TOTAL = 4096  # characters of all stop strings of a request
HARSHEST = 1e6  # repetition_penalty, and one by it the mildest, likewise


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
    prompt_logprobs: int | None = None
    structured: Structure | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    speculative: bool = True
    block_size: int | None = None
    recovery: Recovery = OFF
    words: Words = SILENT
    tools: tuple[Tool, ...] = ()  # in whose calls no stop string counts

    def __post_init__(self) -> None:
        if not self.prompt:
            raise RequestError("the prompt is empty; give at least one token")
        check(
            type(self.max_tokens) is int and self.max_tokens >= 1,
            "max_tokens",
            self.max_tokens,
            "an integer of at least 1",
        )
        check(
            _is_number(self.temperature) and 0 <= self.temperature <= HOTTEST,
            "temperature",
            self.temperature,
            f"0 (greedy) or a positive number up to {HOTTEST}",
        )
        check(
            _is_number(self.top_p) and 0 <= self.top_p <= 1,
            "top_p",
            self.top_p,
            "a number from 0 (the likeliest token alone) to 1 (off)",
        )
        check(
            type(self.top_k) is int and 0 <= self.top_k < 2**31,
            "top_k",
            self.top_k,
            "0 (off) or a positive integer below 2**31",
        )
        check(
            _is_number(self.min_p) and 0 <= self.min_p <= 1,
            "min_p",
            self.min_p,
            "a number from 0 (off) to 1",
        )
        check(
            _is_number(self.repetition_penalty)
            and 1 / HARSHEST <= self.repetition_penalty <= HARSHEST,
            "repetition_penalty",
            self.repetition_penalty,
            f"a positive number from {1 / HARSHEST} to {HARSHEST}; 1 is off",
        )
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            check(_is_number(value) and -2 <= value <= 2, name, value, "a number from -2 to 2")
        biases = all(is_id(i) and _is_number(x) and abs(x) <= 100 for i, x in self.logit_bias)
        expected = "token ids with numbers from -100 to 100"
        check(biases, "logit_bias", dict(self.logit_bias), expected)
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                from dflash_jax.decode.logits_processing import TOP  # which imports JAX

                expected = f"None, or how many alternatives to report, 0 to {TOP}"
                check(type(value) is int and 0 <= value <= TOP, name, value, expected)
        check(
            type(self.seed) is int and 0 <= self.seed < 2**32,
            "seed",
            self.seed,
            "an integer from 0 to 2**32 - 1",
        )
        block = self.block_size
        check(
            block is None or (type(block) is int and block >= 1),
            "block_size",
            block,
            "None, or an integer of at least 1",
        )
        check_stops(self.stop)

    @property
    def shaped(self) -> bool:
        """Whether the request needs the lane whose steps shape logits and report on them."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1, 0, 0) or bool(self.logit_bias) or self.logprobs is not None

    @property
    def scored(self) -> bool:
        """Whether the request asks how likely its prompt is, which then is fed whole."""
        return self.prompt_logprobs is not None

    @property
    def limit(self) -> int:
        """Most tokens prompt and output may have together."""
        return len(self.prompt) + self.max_tokens


def check_fits(request: Request, plan: Plan, target: TargetConfig) -> None:
    """Refuses, by RequestError, what the plan has no room for."""
    if request.limit > plan.max_length:
        raise RequestError(
            f"the prompt has {len(request.prompt)} tokens and max_tokens is"
            f" {request.max_tokens}: together {request.limit}, but the plan holds"
            f" {plan.max_length}. Lower max_tokens, shorten the prompt, or load with a"
            f" larger max_length (the target allows {target.max_length})"
        )
    if request.block_size is not None and request.block_size > plan.block:
        raise RequestError(
            f"block_size is {request.block_size}, but the plan's blocks have {plan.block} tokens;"
            " ask for as many or fewer, or load with a larger block"
        )
    if len(request.stop_ids) > plan.stop_slots:
        raise RequestError(
            f"{len(request.stop_ids)} stop tokens were given, but the plan has room for"
            f" {plan.stop_slots}; load with a larger stop_slots"
        )


def check_stops(stop: Sequence[str]) -> None:
    """Refuse, by RequestError, stop strings that are empty, too many or too long."""
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


def check(good: bool, name: str, value: Any, expected: str) -> None:
    """Refuses, by RequestError, an argument that is not what was expected."""
    if not good:
        raise RequestError(f"{name} is {value!r}; expected {expected}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def is_id(value: Any) -> bool:
    """Whether it can be a token id of any model."""
    return isinstance(value, Integral) and 0 <= int(value) < 2**31
