"""A request as the engine runs it: a prompt and its options, checked against a model and a plan.

Imported without JAX, so that a command can check options before it loads anything.
"""

import dataclasses
import operator
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal

from dflash_jax.config import TargetConfig
from dflash_jax.engine.sampling_params import SEEDS, SamplingParams
from dflash_jax.engine.state_machine import OFF, Recovery
from dflash_jax.engine.state_machine.output_vocabulary import NO_VOCABULARY, OutputVocabulary
from dflash_jax.engine.vocabulary import vocabulary_of
from dflash_jax.errors import RequestError
from dflash_jax.plan import ResolvedPlan
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers.tool_schema import Tool, tools_of

Prompt = str | Sequence[int]
CancelReason = Literal["client_abort", "disconnect", "deadline", "shutdown"]
DEFAULTS = SamplingParams()


class CancelCell:
    """A flag that ends requests, with the reason. Any thread may set it; it is never cleared."""

    __slots__ = ("_ends", "reason")

    def __init__(self) -> None:
        self.reason: CancelReason | None = None
        # Functions to call with the reason, by the number of the request that each ends.
        self._ends: dict[int, Callable[[CancelReason], object]] = {}

    def cancel(self, reason: CancelReason = "client_abort") -> None:
        """Set the flag. The first reason is kept."""
        self.reason = self.reason or reason
        for end in list(self._ends.values()):
            end(self.reason)

    def __bool__(self) -> bool:
        """Whether the flag is set."""
        return self.reason is not None

    def watch(self, number: int, end: Callable[[CancelReason], object]) -> None:
        """Call a function with the reason once the flag is set.

        Args:
          number: number of a request that runs.
          end: ends the request.
        """
        self._ends[number] = end
        if self.reason is not None:
            end(self.reason)

    def forget(self, number: int) -> None:
        """Forget a request that ended, so that nothing is called for it."""
        self._ends.pop(number, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt, its options, and what follows from both for one model.

    Raises:
      RequestError: the prompt is empty.
    """

    prompt: tuple[int, ...]  # token ids, at least one
    params: SamplingParams = DEFAULTS
    seed: int = 0  # of the random numbers, from 0 to `SEEDS` - 1
    # End tokens of the options and, unless the options ignore them, of the model.
    stop_ids: frozenset[int] = frozenset()
    speculative: bool = True  # whether drafts are wanted and there is a drafter
    recovery: Recovery = OFF  # the rules that apply
    vocabulary: OutputVocabulary = NO_VOCABULARY  # the model's vocabulary as those rules need it
    tools: tuple[Tool, ...] = ()  # declared tools, in whose calls no stop string counts

    def __post_init__(self) -> None:
        if not self.prompt:
            raise RequestError("the prompt is empty; give at least one token")

    @property
    def max_tokens(self) -> int:
        """Most tokens of output."""
        assert self.params.max_tokens is not None, "filled in by `make_requests`"
        return self.params.max_tokens

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and output together."""
        return len(self.prompt) + self.max_tokens


def make_requests(
    prompt: Prompt,
    params: SamplingParams,
    n: int,
    plan: ResolvedPlan,
    target: TargetConfig,
    tokenizer: Tokenizer | None,
    *,
    drafts: bool,
) -> list[Request]:
    """Return the requests of n answers to a prompt; answer i draws with seed + i.

    Args:
      drafts: whether the engine has a drafter.

    Raises:
      RequestError: this model cannot serve them under this plan.
    """
    if type(n) is not int or n < 1:
        raise RequestError(f"n is {n!r}; expected an integer of at least 1")
    ids = token_ids(prompt, tokenizer, target.vocab_size, plan.max_length)
    if params.max_tokens is None:
        room = max(plan.max_length - len(ids), params.min_tokens, 1)
        params = params.with_options(max_tokens=room)
    if params.stop and tokenizer is None:
        raise RequestError(
            "stop has texts, but this model ships no tokenizer.json; give stop_token_ids"
        )
    outside = [token for token in params.logit_bias or () if not 0 <= token < target.vocab_size]
    if outside:
        raise RequestError(
            f"logit_bias names {outside[:5]}; the target knows 0 to {target.vocab_size - 1}"
        )
    recovery = params.recovery or OFF
    if params.min_tokens:
        recovery = dataclasses.replace(recovery, min_tokens=params.min_tokens)
    if params.structured is not None:
        recovery = recovery.for_structure()
    vocabulary = NO_VOCABULARY
    tools = ()
    if recovery != OFF or params.tools or params.tool_choice:
        vocabulary = vocabulary_of(tokenizer, ids, recovery, params.tools, params.tool_choice)
        tools = tools_of(params.tools)
    stop_ids = set(params.stop_token_ids or ())
    if not params.ignore_eos:
        stop_ids.update(target.eos_token_ids)
    first = Request(
        prompt=ids,
        params=params,
        stop_ids=frozenset(stop_ids),
        speculative=drafts and params.speculative and params.block_size != 1,
        recovery=recovery,
        vocabulary=vocabulary,
        tools=tools,
    )
    check_fits(first, plan, target)
    seed = secrets.randbits(64) if params.seed is None else params.seed
    return [dataclasses.replace(first, seed=(seed + i) % SEEDS) for i in range(n)]


def check_fits(request: Request, plan: ResolvedPlan, target: TargetConfig) -> None:
    """Raise RequestError for a request that the plan has no room for."""
    if request.max_length > plan.max_length:
        raise RequestError(
            f"the prompt has {len(request.prompt)} tokens and max_tokens is"
            f" {request.max_tokens}: together"
            f" {request.max_length}, but the plan holds {plan.max_length}. Lower max_tokens,"
            " shorten the prompt, or load with a larger max_length (the target allows"
            f" {target.max_length})"
        )
    block = request.params.block_size
    if block is not None and block > plan.block:
        raise RequestError(
            f"block_size is {block}, but the plan's blocks have {plan.block} tokens;"
            " ask for as many or fewer, or load with a larger block"
        )
    if len(request.stop_ids) > plan.stop_slots:
        raise RequestError(
            f"{len(request.stop_ids)} stop tokens were given, but the plan has room for"
            f" {plan.stop_slots}; load with a larger stop_slots"
        )


def token_ids(
    prompt: Any, tokenizer: Tokenizer | None, vocab_size: int, max_length: int | None = None
) -> tuple[int, ...]:
    """Return the ids of a prompt given as text or as ids.

    Args:
      max_length: number of tokens that the plan holds. A text that certainly has more is refused
        before it is encoded.

    Raises:
      RequestError: the prompt is neither, there is no tokenizer for a text, or the model has no
        embedding for some ids.
    """
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
        items: Any = None if isinstance(prompt, bytes) else prompt  # bytes would pass as ids
        ids = tuple(operator.index(i) for i in items)
    except (TypeError, ValueError) as error:
        raise RequestError(f"the prompt is {prompt!r}; expected a text or a list of ids") from error
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise RequestError(
            f"token ids {outside[:5]} are out of range; the target knows 0 to {vocab_size - 1}"
        )
    return ids
