"""From a conversation to prompt ids, with past tool turns exactly as the model wrote them."""

import array
import collections
import dataclasses
import functools
import json
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dflash_jax.errors import RequestError
from dflash_jax.server.protocol import NO_LIMIT, GenerationRequest, Message, Problem
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers.syntax import Thought

PLACEHOLDER = (
    f"\ue000{secrets.token_hex(8)}\ue001"  # stands for a remembered turn; unknown to clients
)


@dataclasses.dataclass(frozen=True)
class EncodedPrompt:
    """Ids of a prompt, and how its reply begins.

    Attributes:
      thinking: the prompt ends inside a thought.
      lead: gives the ids that the template put behind the assistant's header, such as an empty
        thought: a past turn has to begin with them again. None where no past turn can.
    """

    ids: list[int]
    thinking: bool = False
    lead: Callable[[], tuple[int, ...] | None] = tuple


class ToolTurnCache:
    """Ids of the assistant's past tool turns by call id, the oldest forgotten first."""

    def __init__(self, most_ids: int = 8_000_000, most_turns: int = 50_000):
        self._most_ids, self._most_turns = most_ids, most_turns
        self._turns: collections.OrderedDict[tuple[str, ...], _StoredTurn] = (
            collections.OrderedDict()
        )
        self._size = 0
        self._lock = threading.Lock()  # prompts are made in several threads

    def __len__(self) -> int:
        return len(self._turns)

    def put(self, message: Message, ids: Sequence[int]) -> None:
        """Keeps what the model wrote in a turn that clients will repeat as this message."""
        turn = _StoredTurn(array.array("I", ids), json.dumps(_comparable(message)))
        with self._lock:
            self._turns[_call_ids(message)] = turn
            self._size += len(ids)
            while self._size > self._most_ids or len(self._turns) > self._most_turns:
                self._size -= len(self._turns.popitem(last=False)[1].ids)

    def lookup(self, message: Message) -> tuple[int, ...] | None:
        """What the model wrote, for an assistant's message that repeats a turn and all its calls.

        None where the client changed the text, a name or an argument: it wants that to be read.
        """
        key = _call_ids(message)
        with self._lock:
            if not key or key not in self._turns:
                return None
            self._turns.move_to_end(key)
            turn = self._turns[key]
        said = json.loads(json.dumps(_comparable(message)))  # its tuples become lists
        return tuple(turn.ids) if json.loads(turn.said) == said else None


class _StoredTurn(NamedTuple):
    """A turn in few bytes: tuples and dictionaries take six times the memory."""

    ids: "array.array[int]"
    said: str  # what `_said` returns, as JSON


def _call_ids(message: Message) -> tuple[str, ...]:
    return tuple(str(call.get("id")) for call in message.get("tool_calls") or ())


def _comparable(message: Message) -> tuple[str, list[Any]]:
    """What of a turn a client may edit; space around the text is nobody's edit."""
    functions = [call["function"] for call in message["tool_calls"]]
    text = (message.get("content") or "").strip()
    return text, [(function["name"], function["arguments"]) for function in functions]


def message_size(message: Message) -> int:
    """Characters of a message, roughly: its content, and a little for everything else."""
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else content
    return 40 + sum(map(len, texts)) + 100 * len(message.get("tool_calls") or ())


def text_prompts(
    request: GenerationRequest, tokenizer: Tokenizer | None, max_length: int
) -> list[EncodedPrompt]:
    """The prompts of a request that gives them as texts or ids.

    Raises:
      Problem: the model has no tokenizer.
      PromptTooLongError: a text has certainly more than `max_length` tokens.
    """
    if tokenizer is None and any(isinstance(given, str) for given in request.prompts):
        raise Problem(400, "this model ships no tokenizer; give token ids", param="prompt")
    made = []
    for given in request.prompts:
        if isinstance(given, str):
            assert tokenizer is not None
            tokenizer.check_fits(given, max_length)
            given = tokenizer.encode(given)
        made.append(EncodedPrompt(list(given)))
    return made


def chat_prompt(
    request: GenerationRequest,
    tokenizer: Tokenizer | None,
    turns: ToolTurnCache,
    thought: Thought | None,
    max_length: int = sys.maxsize,
) -> EncodedPrompt:
    """The prompt of a conversation.

    Raises:
      Problem: the model has no tokenizer or template, or the template refuses the messages.
      PromptTooLongError: the conversation has certainly more than `max_length` tokens.
    """
    if tokenizer is None:
        raise Problem(400, "this model ships no tokenizer; use /v1/completions with token ids")
    try:
        return _chat_prompt(request, tokenizer, turns, thought, max_length)
    except Problem as problem:
        problem.param = request.source if problem.param == "messages" else problem.param
        raise


def _chat_prompt(
    request: GenerationRequest,
    tokenizer: Tokenizer,
    turns: ToolTurnCache,
    thought: Thought | None,
    max_length: int,
) -> EncodedPrompt:
    messages = [tokenizer.plain(message) for message in request.messages or ()]
    variables: dict[str, Any] = {"tools": request.tools or None} | request.template_kwargs
    if request.continue_final_message:
        return _continued_prompt(messages, tokenizer, variables, max_length)
    recalled: list[tuple[int, ...]] = []
    marked: list[Message] = []
    for message in messages:
        if message["role"] == "assistant" and (past := turns.lookup(message)) is not None:
            recalled.append(past)
            message = {"role": "assistant", "content": PLACEHOLDER}
        marked.append(message)
    text = _render(tokenizer, marked, variables)
    parts = text.split(PLACEHOLDER)
    if len(parts) != len(recalled) + 1:  # this template treats contents in a way of its own
        recalled, marked = [], messages
        parts = [text := _render(tokenizer, messages, variables)]
    tokenizer.check_fits("".join(parts), max_length - sum(map(len, recalled)))
    ids = tokenizer.encode(parts[0], specials=False)
    for turn, part in zip(recalled, parts[1:], strict=True):
        ids += turn
        ids += tokenizer.encode(part, specials=False)
    opened = thought is not None and text.rstrip().endswith(thought.opening.rstrip())
    return EncodedPrompt(
        ids, opened, functools.partial(_lead_ids, marked, tokenizer, variables, text)
    )


def _continued_prompt(
    messages: list[Message], tokenizer: Tokenizer, variables: dict[str, Any], max_length: int
) -> EncodedPrompt:
    """The prompt that ends inside the last message, so that it is continued."""
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        raise Problem(
            400, "continue_final_message needs an assistant's text as the last message",
            param="continue_final_message",
        )  # fmt: skip
    marked = [*messages[:-1], last | {"content": (last["content"] or "") + PLACEHOLDER}]
    text = _render(tokenizer, marked, variables | {"add_generation_prompt": False})
    before, mark, _ = text.rpartition(PLACEHOLDER)
    if not mark:
        raise Problem(400, "this model's chat template cannot continue a message")
    tokenizer.check_fits(before, max_length)
    return EncodedPrompt(tokenizer.encode(before, specials=False))


def _lead_ids(
    marked: list[Message], tokenizer: Tokenizer, variables: dict[str, Any], text: str
) -> tuple[int, ...] | None:
    """Ids that the generation prompt has beyond the header of an assistant's past message.

    None where the prompt does not begin with that header, as in harmony: a channel is part of it.
    """
    past = [*marked, {"role": "assistant", "content": PLACEHOLDER}]
    for behind in ([{"role": "tool", "content": "."}], []):
        try:
            rest = variables | {"add_generation_prompt": False}
            later = _render(tokenizer, [*past, *behind], rest)
        except Problem:  # the template wants more of a tool's answer than we can invent
            continue
        header = PLACEHOLDER.join(later.split(PLACEHOLDER)[: text.count(PLACEHOLDER) + 1])
        if not (header and text.startswith(header)):
            return None
        return tuple(tokenizer.encode(text.removeprefix(header), specials=False))
    return None


def _render(tokenizer: Tokenizer, messages: list[Message], variables: dict[str, Any]) -> str:
    """The conversation by the template; system messages lead where it takes them nowhere else."""
    try:
        try:
            return tokenizer.render(messages, **variables)
        except RequestError:
            if all(message["role"] != "system" for message in messages[1:]):
                raise
            return tokenizer.render(_system_first(messages), **variables)
    except RequestError as error:
        raise Problem(400, str(error), param="messages") from None


def _system_first(messages: list[Message]) -> list[Message]:
    """All system messages as one, before the others."""
    system = [m["content"] for m in messages if m["role"] == "system"]
    rest = [m for m in messages if m["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(system)}, *rest]


def resolve_max_tokens(
    prompt: Sequence[int], request: GenerationRequest, most: int, default: int
) -> int:
    """The max_tokens to use for a prompt.

    Args:
      most: tokens the plan holds.
      default: max_tokens of requests that name none; 0 for what fits.

    Raises:
      Problem: prompt and output do not fit together.
    """
    free = most - len(prompt)
    asked = request.max_tokens
    if free < 1 or (asked is not None and asked > free and not request.clamp_max_tokens):
        output = "" if asked in (None, NO_LIMIT) else f" and max_tokens is {asked}"
        told = f"the prompt has {len(prompt)} tokens{output}"
        if free < 1:  # in the words by which agents know that they have to shorten it
            told = f"prompt is too long: {len(prompt)} tokens > {most - 1} maximum{output}"
        raise Problem(
            400,
            f"{told}; this model's maximum context length is {most} tokens for prompt and output"
            " together; shorten the prompt or lower max_tokens",
            param=request.source,
            code="context_length_exceeded",
        )
    if asked is None:
        return min(default or free, free)
    if asked == NO_LIMIT:
        return free
    if asked == 0 and request.echo:  # the engine gives a token at least, which is left out
        return 1
    return min(asked, free)
