"""What `Engine.stream` can be asked for, by name, and the request that it makes."""

import dataclasses
import difflib
import operator
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from dflash_jax.config import TargetConfig
from dflash_jax.engine.recovery import OFF, CancelCell, Recovery
from dflash_jax.engine.request import Request, check, check_fits, is_id
from dflash_jax.engine.structured.grammars import Structure
from dflash_jax.engine.vocabulary import words_of
from dflash_jax.errors import RequestError
from dflash_jax.plan import Plan, as_number
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers.tool_schema import tools_of


class Options(TypedDict, total=False):
    """Arguments that ask for an output; `Engine.stream` says what they mean."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    prompt_logprobs: int | None
    structured: Structure | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool
    speculative: bool
    block_size: int | None
    recovery: Recovery | None
    tools: Sequence[Any] | None
    tool_choice: Any


class CancellableOptions(Options, total=False):
    """And a cell to end it by."""

    cancel: CancelCell | None


def check_names(options: Mapping[str, Any], kind: type) -> None:
    """Refuses, by TypeError as Python does, arguments that `kind` does not name."""
    known = kind.__annotations__
    for name in options.keys() - known.keys():
        close = difflib.get_close_matches(name, known, 1)
        rather = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
        raise TypeError(f"{name!r} is no argument that asks for an output; {rather}")


def requests_of(
    prompt: str | Sequence[int],
    n: int,
    plan: Plan,
    target: TargetConfig,
    tokenizer: Tokenizer | None,
    options: Options,
) -> list[Request]:
    """The checked requests of n answers to a prompt; answer i draws with seed + i.

    Raises:
      RequestError: they cannot be served under the plan.
      TypeError: an option has no such name.
    """
    check_names(options, Options)
    n = as_number(n)
    if type(n) is not int or n < 1:
        raise RequestError(f"n is {n!r}; expected an integer of at least 1")
    first = request_of(prompt, target, tokenizer, max_length=plan.max_length, **options)
    check_fits(first, plan, target)
    seeds = [(first.seed + i) % 2**32 for i in range(n)]
    return [dataclasses.replace(first, seed=seed) for seed in seeds]


def request_of(
    prompt: str | Sequence[int],
    target: TargetConfig,
    tokenizer: Tokenizer | None,
    *,
    max_length: int | None = None,
    max_tokens: int = 256,
    min_tokens: int = 0,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    structured: Structure | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    ignore_eos: bool = False,
    speculative: bool = True,
    block_size: int | None = None,
    recovery: Recovery | None = None,
    tools: Sequence[Any] | None = None,
    tool_choice: Any = None,
) -> Request:
    """The request that arguments of `Engine.stream` describe; raises RequestError.

    Args:
      max_length: tokens the plan holds: a text that has certainly more is refused unencoded.
      min_tokens: end tokens that come before so many tokens become the next best ones.
      block_size: most tokens a round of this request may decide, the plan's at most; changes
        speed, never a token of a greedy request.
    """
    ids, eos = token_ids(prompt, tokenizer, target.vocab_size, max_length), target.eos_token_ids
    ends = _items("stop_token_ids", stop_token_ids, "token ids, integers from 0")
    check(all(map(is_id, ends)), "stop_token_ids", list(ends), "token ids, integers from 0")
    texts = _items("stop", (stop,) if isinstance(stop, str) else stop, "a text or several")
    if texts and tokenizer is None:
        raise RequestError(
            "stop has texts, but this model ships no tokenizer.json; give stop_token_ids"
        )
    max_tokens, min_tokens, top_k = map(as_number, (max_tokens, min_tokens, top_k))
    logprobs, prompt_logprobs = as_number(logprobs), as_number(prompt_logprobs)
    seed, block_size = as_number(seed), as_number(block_size)
    recovery = OFF if recovery is None else recovery
    check(isinstance(recovery, Recovery), "recovery", recovery, "None, or a dj.Recovery(...)")
    if min_tokens:
        recovery = _with_minimum(recovery, min_tokens, max_tokens, structured)
    if structured is not None:
        recovery = recovery.for_structure()
    return Request(
        prompt=ids,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        logit_bias=as_biases(logit_bias, target.vocab_size),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured=structured,
        seed=pick_seed(seed),
        stop=texts,
        stop_ids=frozenset((*(() if ignore_eos else eos), *ends)),
        speculative=speculative and block_size != 1,
        block_size=block_size,
        recovery=recovery,
        words=words_of(tokenizer, ids, recovery, tools, tool_choice),
        tools=tools_of(tools),
    )


def _with_minimum(
    recovery: Recovery, tokens: int, most: int, structured: Structure | None
) -> Recovery:
    """The rules with a minimum of output tokens."""
    check(
        type(tokens) is int and 0 <= tokens <= most,
        "min_tokens",
        tokens,
        f"an integer from 0 to max_tokens, {most}",
    )
    if structured is not None:
        raise RequestError(
            "min_tokens and structured output do not go together: the structure says where it"
            " ends; drop one of them"
        )
    return dataclasses.replace(recovery, min_tokens=tokens)


def token_ids(
    prompt: Any, tokenizer: Tokenizer | None, vocab_size: int, max_length: int | None = None
) -> tuple[int, ...]:
    """Ids of a prompt given as text or as ids; refuses what the model has no row for."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError(
                "the prompt is text, but this model ships no tokenizer.json; give token ids, or"
                " load it with the tokenizer= of another folder"
            )
        if max_length is not None:
            tokenizer.check_fits(prompt, max_length)
        prompt = tokenizer.encode(prompt)
    try:
        items: Any = None if isinstance(prompt, bytes) else prompt  # bytes are no ids
        ids = tuple(operator.index(i) for i in items)
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
    """The biases of a mapping, if any; ids may be texts of digits, as in JSON."""
    try:
        pairs = tuple((int(i), x) for i, x in dict(biases or {}).items())
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"logit_bias is {biases!r}; expected a mapping of token ids to numbers"
        ) from error
    if outside := [i for i, _ in pairs if not 0 <= i < vocab_size]:
        raise RequestError(
            f"logit_bias names {outside[:5]}; the target knows 0 to {vocab_size - 1}"
        )
    return pairs


def _items(name: str, value: Any, expected: str) -> tuple[Any, ...]:
    """The items of an argument that may be left out."""
    try:
        return () if value is None else tuple(value)
    except TypeError as error:
        raise RequestError(f"{name} is {value!r}; expected {expected}") from error
