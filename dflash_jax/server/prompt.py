"""Prompts of requests: rendering and token ids. Past tool turns keep their generated ids."""

import array
import collections
import contextlib
import dataclasses
import functools
import json
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from dflash_jax.errors import RequestError
from dflash_jax.server.fields import nearest_efforts
from dflash_jax.server.protocol import NO_LIMIT, GenerationRequest, Message, Problem
from dflash_jax.tokenizer import MARKED, Tokenizer
from dflash_jax.tool_parsers import tools_warning
from dflash_jax.tool_parsers.syntax import Thought, as_json

# Rendering of conversations by chat templates that refuse some orders of messages.
#
# A client cannot edit past turns, so a conversation that a template refuses is rendered in a form
# that is closer to what the template expects.

Repair = Callable[[Sequence[Message]], list[Message]]


def system_first(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with all system messages merged into a first one."""
    system = [m["content"] for m in messages if m["role"] == "system"]
    rest = [m for m in messages if m["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(system)}, *rest] if system else rest


def results_with_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with results that follow no call as messages of the user."""
    result: list[Message] = []
    open_calls = False
    for message in messages:
        if message["role"] != "tool":
            open_calls = bool(message.get("tool_calls"))
        result.append(message if message["role"] != "tool" or open_calls else _as_user(message))
    return result


def user_first(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with an empty one of the user in front, if the assistant begins."""
    at = next((at for at, m in enumerate(messages) if m["role"] != "system"), 0)
    begins = messages[at]["role"] == "assistant"
    return (
        [*messages[:at], {"role": "user", "content": ""}, *messages[at:]]
        if begins
        else list(messages)
    )


def alternating(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with neighbouring ones of the user, or of the assistant, merged."""
    result: list[Message] = []
    for message in messages:
        last = result[-1] if result else {}
        same = message["role"] == last.get("role") and message["role"] in ("user", "assistant")
        if same and not last.get("tool_calls"):
            texts = [text for text in (last["content"], message["content"]) if text]
            result[-1] = {**last, **message, "content": "\n\n".join(texts)}
        else:
            result.append(message)
    return result


def without_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with calls and their results as text."""
    result = []
    for message in messages:
        if calls := message.get("tool_calls"):
            functions = [call["function"] for call in calls]
            written = [as_json({key: f[key] for key in ("name", "arguments")}) for f in functions]
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            message = kept | {"content": "\n".join([*filter(None, [message["content"]]), *written])}
        result.append(_as_user(message) if message["role"] == "tool" else message)
    return alternating(result)


def without_system(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with those of the system as text of the user."""
    user = [m | {"role": "user"} if m["role"] == "system" else m for m in messages]
    return alternating(user) if user != list(messages) else user


def _as_user(message: Message) -> Message:
    return {"role": "user", "content": f"Result of a tool call:\n{message['content']}"}


# In the order of trying, first each alone, then each on the result of those before.
REPAIRS: dict[Repair, str] = {
    system_first: "",  # changes no text
    results_with_calls: "results of unknown calls are shown as messages of the user",
    user_first: "an empty message of the user precedes the assistant's first one",
    alternating: "neighbouring messages of one role are shown as one",
    without_system: "system messages are shown as the user's",
    without_calls: "tool calls and their results are shown as text",
}


def render_messages(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    variables: dict[str, Any],
    warnings: list[str],
    repairs: tuple[Repair, ...] = tuple(REPAIRS),
) -> str:
    """Render a conversation; messages and reasoning options are changed until the template agrees.

    Args:
      messages: with texts as contents, see `Tokenizer.plain`.
      warnings: changes of what the model sees are added here.

    Raises:
      Problem: the template refuses every form.
    """
    try:
        return tokenizer.render(messages, **variables)
    except RequestError as error:
        refused = error
    required = {key: value for key, value in variables.items() if key not in REASONING}
    for current, notes in _repaired(messages, repairs):
        try:
            text = tokenizer.render(current, **required)
        except RequestError:
            continue
        warnings.extend(f"the chat template refused the messages: {note}" for note in notes)
        if required != variables:
            text = _with_reasoning(tokenizer, current, required, variables, text, warnings)
        return text
    raise Problem(str(refused), param="messages") from None


def _repaired(
    messages: Sequence[Message], repairs: Sequence[Repair]
) -> Iterator[tuple[list[Message], list[str]]]:
    """Yield the messages, and each different form that repairs give them, with its notes."""
    tried: list[list[Message]] = []
    alone = [(repair,) for repair in repairs]
    for chosen in ((), *alone, *(repairs[:n] for n in range(2, len(repairs) + 1))):
        current = list(messages)
        notes: list[str] = []
        for repair in chosen:
            changed = repair(current)
            notes += [REPAIRS[repair]] if REPAIRS[repair] and changed != current else []
            current = changed
        if current not in tried:
            tried.append(current)
            yield current, notes


# Variables by which clients ask for reasoning; a template may know other values, or none.
REASONING = ("enable_thinking", "reasoning_effort")


def _with_reasoning(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    required: dict[str, Any],
    variables: dict[str, Any],
    text: str,
    warnings: list[str],
) -> str:
    """Return the conversation with the reasoning options that the template takes.

    Args:
      required: the variables without reasoning options.
      text: the conversation that they give.
    """
    kept = dict(required)
    for name in (name for name in REASONING if name in variables):
        asked = variables[name]
        for value in nearest_efforts(asked) if name == "reasoning_effort" else [asked]:
            try:
                text = tokenizer.render(messages, **kept, **{name: value})
            except RequestError:
                continue
            kept[name] = value
            if value != asked:
                warnings.append(
                    f"the chat template knows no {name} {asked!r:.50}; it is {value!r} instead"
                )
            break
        else:
            warnings.append(f"the chat template refused {name} {asked!r:.50}, which was left out")
    return text


PLACEHOLDER = f"\ue000{secrets.token_hex(8)}\ue001"  # for a cached turn; clients cannot guess it
# Tokens before the prefix, the suffix and the middle, as the families' files name them.
INFILL_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SmolLM
    ("<PRE>", "<SUF>", "<MID>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # CodeLlama
    (
        "<\uff5cfim\u2581begin\uff5c>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<\uff5cfim\u2581end\uff5c>",
    ),  # DeepSeek
)


@dataclasses.dataclass(frozen=True)
class EncodedPrompt:
    """Token ids of a prompt, and how its output starts.

    Attributes:
      thinking: the prompt ends inside reasoning.
      may_think: reasoning may follow, as the prompt does not end after some.
      warnings: about messages that the chat template refused as they were.
      lead: returns the ids that the template puts after the assistant's header, such as empty
        reasoning. A past turn has to start with them. It returns None if the template renders past
        turns with another header.
      prefix: beginning of the answer that the prompt ends with, and that the output continues.
    """

    ids: list[int]
    thinking: bool = False
    may_think: bool = False
    warnings: tuple[str, ...] = ()
    lead: Callable[[], tuple[int, ...] | None] = tuple
    prefix: str = ""


class ToolTurnCache:
    """Token ids of assistant turns with tool calls, by call ids.

    The least recently used turns are dropped first. Thread-safe.

    Args:
      most_ids: most token ids of all turns.
      most_turns: most turns.
    """

    def __init__(self, most_ids: int = 8_000_000, most_turns: int = 50_000):
        self._most_ids, self._most_turns = most_ids, most_turns
        self._turns: collections.OrderedDict[tuple[str, ...], _StoredTurn] = (
            collections.OrderedDict()
        )
        self._size = 0
        self._lock = threading.Lock()  # prompts are built in threads

    def __len__(self) -> int:
        return len(self._turns)

    def put(self, message: Message, ids: Sequence[int]) -> None:
        """Store the output ids of a turn that clients will send back as this message."""
        turn = _StoredTurn(array.array("I", ids), json.dumps(_comparable(message)))
        with self._lock:
            self._turns[_call_ids(message)] = turn
            self._size += len(ids)
            while self._size > self._most_ids or len(self._turns) > self._most_turns:
                self._size -= len(self._turns.popitem(last=False)[1].ids)

    def lookup(self, message: Message) -> tuple[int, ...] | None:
        """Return the output ids of the turn that an assistant message repeats.

        None if the turn is not stored, or the client changed its text, a name or an argument.
        """
        key = _call_ids(message)
        with self._lock:
            if not key or key not in self._turns:
                return None
            self._turns.move_to_end(key)
            turn = self._turns[key]
        current = json.loads(json.dumps(_comparable(message)))  # its tuples become lists
        return tuple(turn.ids) if json.loads(turn.message) == current else None


class _StoredTurn(NamedTuple):
    """A turn in compact form: tuples and dictionaries take six times the memory."""

    ids: "array.array[int]"
    message: str  # `_comparable` as JSON


def _call_ids(message: Message) -> tuple[str, ...]:
    return tuple(str(call.get("id")) for call in message.get("tool_calls") or ())


def _comparable(message: Message) -> tuple[str, list[Any]]:
    """Return the parts of a message that clients may edit; surrounding white space is ignored."""
    functions = [call["function"] for call in message["tool_calls"]]
    text = (message.get("content") or "").strip()
    return text, [(function["name"], function["arguments"]) for function in functions]


def message_size(message: Message) -> int:
    """Return the approximate number of characters of a rendered message."""
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else content
    return 40 + sum(map(len, texts)) + 100 * len(message.get("tool_calls") or ())


def text_prompts(
    request: GenerationRequest, tokenizer: Tokenizer | None, max_length: int
) -> list[EncodedPrompt]:
    """Return the prompts of a request that contains texts or token ids.

    Raises:
      Problem: the model has no tokenizer, or no tokens for a suffix.
      PromptTooLongError: a text certainly has more than `max_length` tokens.
    """
    suffix = request.suffix
    prompts = request.prompts
    if tokenizer is not None and request.parse_special is False:
        suffix = tokenizer.marked(suffix)
        prompts = [tokenizer.marked(prompt) for prompt in prompts]
    ids = (_given_ids(prompt, suffix, tokenizer, max_length) for prompt in prompts)
    return [EncodedPrompt(given) for given in ids]


def _given_ids(
    given: str | list[int], suffix: str, tokenizer: Tokenizer | None, max_length: int
) -> list[int]:
    """Return the ids of one prompt of completions; raises as `text_prompts` does."""
    if isinstance(given, list) and not suffix:
        return list(given)
    if tokenizer is None:
        raise Problem("this model ships no tokenizer; give token ids", param="prompt")
    for text in (given, suffix):
        if isinstance(text, str):
            tokenizer.check_fits(text, max_length)
    if suffix or isinstance(given, list):
        return infill_ids(tokenizer, given, suffix)
    return tokenizer.encode(given)


def infill_ids(tokenizer: Tokenizer, prefix: str | list[int], suffix: str) -> list[int]:
    """Return the ids after which a model writes the text between prefix and suffix.

    Raises:
      Problem: 400, the vocabulary has no tokens for that.
    """
    for family in INFILL_TOKENS:
        before, after, middle = map(tokenizer.core.token_to_id, family)
        if before is not None and after is not None and middle is not None:
            break
    else:
        names = ", ".join(family[0] for family in INFILL_TOKENS)
        raise Problem(
            "suffix needs a model with fill-in-the-middle tokens, and this model's vocabulary has"
            f" none of {names}; leave suffix out, and put the text around the gap into the prompt",
            param="suffix",
        )
    start: list[int] = []  # what the tokenizer puts before every text
    if isinstance(prefix, str):
        text = prefix
        prefix = tokenizer.encode(text, specials=False)
        whole = tokenizer.encode(text)
        if whole[len(whole) - len(prefix) :] == prefix:
            start = whole[: len(whole) - len(prefix)]
    tail = tokenizer.encode(suffix, specials=False)
    return [*start, before, *prefix, after, *tail, middle]


def chat_prompt(
    request: GenerationRequest,
    tokenizer: Tokenizer | None,
    turns: ToolTurnCache,
    thought: Thought | None,
    max_length: int = sys.maxsize,
) -> EncodedPrompt:
    """Return the prompt of a conversation.

    Raises:
      Problem: the model has no tokenizer or template, or the template refuses the messages.
      PromptTooLongError: the conversation certainly has more than `max_length` tokens.
    """
    if tokenizer is None:
        raise Problem("this model ships no tokenizer; use /v1/completions with token ids")
    try:
        prompt = _chat_prompt(request, tokenizer, turns, thought, max_length)
    except Problem as problem:
        problem.param = request.source if problem.param == "messages" else problem.param
        raise
    if request.tools and (text := tools_warning(tokenizer.teaches)):
        prompt = dataclasses.replace(prompt, warnings=(text, *prompt.warnings))
    return prompt


def _chat_prompt(
    request: GenerationRequest,
    tokenizer: Tokenizer,
    turns: ToolTurnCache,
    thought: Thought | None,
    max_length: int,
) -> EncodedPrompt:
    given = [tokenizer.plain(message) for message in request.messages or ()]
    variables: dict[str, Any] = {"tools": request.tools or None} | request.template_kwargs
    messages = given
    if not request.parse_special:
        messages = tokenizer.marked_messages(given)
        for name in MARKED & variables.keys():
            variables[name] = tokenizer.marked(variables[name])
    if request.continue_final_message:
        prompt = _continued_prompt(messages, tokenizer, variables, thought, max_length)
        return dataclasses.replace(prompt, prefix=given[-1]["content"] or "")
    recalled: list[tuple[int, ...]] = []
    marked: list[Message] = []
    for message, own in zip(messages, given, strict=True):
        if own["role"] == "assistant" and (past := turns.lookup(own)) is not None:
            recalled.append(past)
            message = {"role": "assistant", "content": PLACEHOLDER}
        marked.append(message)
    warnings: list[str] = []
    text, parts = "", list[str]()
    with contextlib.suppress(Problem):
        text = render_messages(tokenizer, marked, variables, warnings, (system_first,))
        parts = text.split(PLACEHOLDER)
    if len(parts) != len(recalled) + 1:  # the template refuses, changes or drops contents
        recalled = []
        marked = messages
        warnings.clear()
        parts = [text := render_messages(tokenizer, messages, variables, warnings)]
    tokenizer.check_fits("".join(parts), max_length - sum(map(len, recalled)))
    ids = tokenizer.encode(parts[0], specials=False)
    for turn, part in zip(recalled, parts[1:], strict=True):
        ids += turn
        ids += tokenizer.encode(part, specials=False)
    end = text.rstrip()
    return EncodedPrompt(
        ids,
        thought is not None and end.endswith(thought.opening.rstrip()),
        thought is not None and not end.endswith(thought.closing.rstrip()),
        tuple(warnings),
        functools.partial(_lead_ids, marked, tokenizer, variables, text),
    )


def _continued_prompt(
    messages: list[Message],
    tokenizer: Tokenizer,
    variables: dict[str, Any],
    thought: Thought | None,
    max_length: int,
) -> EncodedPrompt:
    """Return the prompt that ends inside the last message, which the output continues."""
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        raise Problem(
            "continue_final_message needs an assistant's text as the last message",
            param="continue_final_message",
        )
    content, reasoning = last["content"] or "", last.get("reasoning_content") or ""
    field, text = ("content", content) if content else ("reasoning_content", reasoning)
    field = field if text else "content"
    marked = [*messages[:-1], last | {field: text + PLACEHOLDER}]
    warnings: list[str] = []
    variables = variables | {"add_generation_prompt": False}
    before, mark, _ = render_messages(tokenizer, marked, variables, warnings).rpartition(
        PLACEHOLDER
    )
    if not mark:
        raise Problem("this model's chat template cannot continue a message")
    tokenizer.check_fits(before, max_length)
    ids = tokenizer.encode(before, specials=False)
    inside = _inside(thought, before, text)
    return EncodedPrompt(ids, inside, warnings=tuple(warnings))


def _inside(thought: Thought | None, prompt: str, continued: str) -> bool:
    """Return whether a prompt ends inside reasoning, in or before the text that it continues."""
    if thought is None:
        return False
    at = prompt.rfind(continued) if continued else len(prompt)
    before, own = (prompt[:at], prompt[at:]) if at >= 0 else ("", prompt)
    return thought.is_open(own, inside=before.rstrip().endswith(thought.opening.rstrip()))


def _lead_ids(
    marked: list[Message], tokenizer: Tokenizer, variables: dict[str, Any], text: str
) -> tuple[int, ...] | None:
    """Return the ids of the generation prompt after the header of an assistant message.

    None if the prompt does not start with the header that the template writes for past messages,
    as in harmony, where the channel is part of the header.
    """
    past = [*marked, {"role": "assistant", "content": PLACEHOLDER}]
    for following in ([{"role": "tool", "content": "."}], []):
        try:
            rest = variables | {"add_generation_prompt": False}
            later = render_messages(tokenizer, [*past, *following], rest, [], (system_first,))
        except Problem:  # the template requires more fields in a tool message
            continue
        header = PLACEHOLDER.join(later.split(PLACEHOLDER)[: text.count(PLACEHOLDER) + 1])
        if not (header and text.startswith(header)):
            return None
        return tuple(tokenizer.encode(text.removeprefix(header), specials=False))
    return None


def resolve_max_tokens(
    prompt: Sequence[int], request: GenerationRequest, most: int, default: int
) -> int:
    """Return the max_tokens to use for a prompt.

    Args:
      most: capacity of the plan in tokens, for prompt and output.
      default: value for requests without max_tokens; 0 for all that fits.
    """
    free = most - len(prompt)
    asked = request.max_tokens
    if free < 1 or (asked is not None and asked > free and not request.clamp_max_tokens):
        output = "" if asked in (None, NO_LIMIT) else f" and max_tokens is {asked}"
        text = f"the prompt has {len(prompt)} tokens{output}"
        if free < 1:  # agents match on these words, and then shorten the conversation
            text = f"prompt is too long: {len(prompt)} tokens > {most - 1} maximum{output}"
        raise Problem(
            f"{text}; this model's maximum context length is {most} tokens for prompt and output"
            " together; shorten the prompt or lower max_tokens",
            param=request.source,
            code="context_length_exceeded",
        )
    if asked is None:
        return min(default or free, free)
    if asked == NO_LIMIT:
        return free
    if asked == 0 and request.echo:  # the engine generates at least one token, which is dropped
        return 1
    return min(asked, free)
