"""Prompts of requests, as token ids. Past tool turns keep the ids that the model generated."""

import contextlib
import dataclasses
import functools
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import Any

from dflash_jax.server.background import LONG_PROMPT, SHORT_TEXT, at_once, in_thread
from dflash_jax.server.protocol import NO_LIMIT, GenerationRequest, Message, Problem
from dflash_jax.server.rendering import render_messages, system_first
from dflash_jax.server.served_models import ServedModel
from dflash_jax.server.tool_turns import ToolTurnCache
from dflash_jax.tokenizer import MARKED, Tokenizer
from dflash_jax.tool_parsers import tools_warning
from dflash_jax.tool_parsers.syntax import Thought

# Stands for a remembered turn, or for the end of a continued message, while a conversation is
# rendered. Clients cannot guess it.
PLACEHOLDER = f"\ue000{secrets.token_hex(8)}\ue001"
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
      ids: token ids of the whole prompt.
      thinking: the prompt ends inside reasoning.
      may_think: reasoning may follow, as the prompt does not end after some.
      warnings: changes of messages that the chat template refused as they were, as sentences.
      lead: returns the ids that the template puts after the assistant's header, such as empty
        reasoning, with which the turn begins once it is a past one. It returns None if the template
        renders past turns with another header.
      prefix: beginning of the answer that the prompt ends with, and that the output continues.
    """

    ids: list[int]
    thinking: bool = False
    may_think: bool = False
    warnings: tuple[str, ...] = ()
    lead: Callable[[], tuple[int, ...] | None] = tuple
    prefix: str = ""


async def prepare(model: ServedModel, request: GenerationRequest) -> list[EncodedPrompt]:
    """Return the prompts of a request, built in a thread unless they are short texts.

    Long ones may take seconds, and so may a chat template.
    """
    tokenizer = model.engine.tokenizer
    max_length = model.engine.plan.max_length
    param = request.source
    if request.messages is None:
        size = len(request.suffix) + sum(map(len, request.prompts))
        if size <= SHORT_TEXT:
            return at_once(text_prompts, request, tokenizer, max_length, param=param)
        long = size > LONG_PROMPT
        return await in_thread(text_prompts, request, tokenizer, max_length, long=long, param=param)
    thought = model.syntax.thought if model.syntax else None
    make = functools.partial(chat_prompt, request, tokenizer, model.tool_turns, thought, max_length)
    size = sum(map(message_size, request.messages)) + 200 * len(request.tools)
    return [await in_thread(make, long=size > LONG_PROMPT, param=param)]


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
    return [
        EncodedPrompt(_completion_ids(prompt, suffix, tokenizer, max_length)) for prompt in prompts
    ]


def _completion_ids(
    prompt: str | list[int], suffix: str, tokenizer: Tokenizer | None, max_length: int
) -> list[int]:
    """Return the ids of one prompt of completions; raises as `text_prompts` does."""
    if isinstance(prompt, list) and not suffix:
        return list(prompt)
    if tokenizer is None:
        raise Problem("this model ships no tokenizer; give token ids", param="prompt")
    for text in (prompt, suffix):
        if isinstance(text, str):
            tokenizer.check_fits(text, max_length)
    if suffix or isinstance(prompt, list):
        return infill_ids(tokenizer, prompt, suffix)
    return tokenizer.encode(prompt)


def infill_ids(tokenizer: Tokenizer, prefix: str | list[int], suffix: str) -> list[int]:
    """Return the ids after which a model writes the text between prefix and suffix.

    Raises:
      Problem: 400, the vocabulary has no tokens for that.
    """
    before_prefix, before_suffix, before_middle = _infill_tokens(tokenizer)
    leading: list[int] = []  # tokens that the tokenizer puts before every text
    if isinstance(prefix, list):
        prefix_ids = prefix
    else:
        prefix_ids = tokenizer.encode(prefix, specials=False)
        whole = tokenizer.encode(prefix)
        if whole[len(whole) - len(prefix_ids) :] == prefix_ids:
            leading = whole[: len(whole) - len(prefix_ids)]
    suffix_ids = tokenizer.encode(suffix, specials=False)
    return [*leading, before_prefix, *prefix_ids, before_suffix, *suffix_ids, before_middle]


def _infill_tokens(tokenizer: Tokenizer) -> tuple[int, int, int]:
    for family in INFILL_TOKENS:
        prefix, suffix, middle = map(tokenizer.core.token_to_id, family)
        if prefix is not None and suffix is not None and middle is not None:
            return prefix, suffix, middle
    names = ", ".join(family[0] for family in INFILL_TOKENS)
    raise Problem(
        "suffix needs a model with fill-in-the-middle tokens, and this model's vocabulary has"
        f" none of {names}; leave suffix out, and put the text around the gap into the prompt",
        param="suffix",
    )


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
        if problem.param == "messages":
            problem.param = request.source
        raise
    if request.tools and (warning := tools_warning(tokenizer.teaches)):
        prompt = dataclasses.replace(prompt, warnings=(warning, *prompt.warnings))
    return prompt


def _chat_prompt(
    request: GenerationRequest,
    tokenizer: Tokenizer,
    turns: ToolTurnCache,
    thought: Thought | None,
    max_length: int,
) -> EncodedPrompt:
    plain = [tokenizer.plain(message) for message in request.messages or ()]
    variables: dict[str, Any] = {"tools": request.tools or None} | request.template_kwargs
    messages = plain
    if not request.parse_special:
        messages = tokenizer.marked_messages(plain)
        for name in MARKED & variables.keys():
            variables[name] = tokenizer.marked(variables[name])
    if request.continue_final_message:
        prompt = _continued_prompt(messages, tokenizer, variables, thought, max_length)
        return dataclasses.replace(prompt, prefix=plain[-1]["content"] or "")
    remembered: list[tuple[int, ...]] = []  # ids of past turns
    shown: list[Message] = []  # messages as they are rendered
    for message, plain_message in zip(messages, plain, strict=True):
        turn_ids = None
        if plain_message["role"] == "assistant":
            turn_ids = turns.lookup(plain_message)
        if turn_ids is None:
            shown.append(message)
        else:
            remembered.append(turn_ids)
            shown.append({"role": "assistant", "content": PLACEHOLDER})
    warnings: list[str] = []
    text = ""
    parts: list[str] = []  # parts of the text between the remembered turns
    with contextlib.suppress(Problem):
        text = render_messages(tokenizer, shown, variables, warnings, (system_first,))
        parts = text.split(PLACEHOLDER)
    if len(parts) != len(remembered) + 1:  # the template refuses, changes or drops contents
        remembered = []
        shown = messages
        warnings.clear()
        text = render_messages(tokenizer, messages, variables, warnings)
        parts = [text]
    tokenizer.check_fits("".join(parts), max_length - sum(map(len, remembered)))
    ids = tokenizer.encode(parts[0], specials=False)
    for turn_ids, part in zip(remembered, parts[1:], strict=True):
        ids += turn_ids
        ids += tokenizer.encode(part, specials=False)
    end = text.rstrip()
    return EncodedPrompt(
        ids,
        thinking=thought is not None and end.endswith(thought.opening.rstrip()),
        may_think=thought is not None and not end.endswith(thought.closing.rstrip()),
        warnings=tuple(warnings),
        lead=functools.partial(_lead_ids, shown, tokenizer, variables, text),
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
    reasoning = last.get("reasoning_content")
    field = "content"
    if reasoning and not last["content"]:
        field = "reasoning_content"
    continued = last.get(field) or ""
    shown = [*messages[:-1], last | {field: continued + PLACEHOLDER}]
    variables = variables | {"add_generation_prompt": False}
    warnings: list[str] = []
    text = render_messages(tokenizer, shown, variables, warnings)
    before, placeholder, _ = text.rpartition(PLACEHOLDER)
    if not placeholder:
        raise Problem("this model's chat template cannot continue a message")
    tokenizer.check_fits(before, max_length)
    return EncodedPrompt(
        tokenizer.encode(before, specials=False),
        thinking=_ends_thinking(before, continued, thought),
        warnings=tuple(warnings),
    )


def _ends_thinking(prompt: str, continued: str, thought: Thought | None) -> bool:
    """Return whether a prompt ends inside reasoning, in or before the text that it continues."""
    if thought is None:
        return False
    start = prompt.rfind(continued) if continued else len(prompt)
    start = max(start, 0)  # the template changed the text
    opened = prompt[:start].rstrip().endswith(thought.opening.rstrip())
    return thought.is_open(prompt[start:], inside=opened)


def _lead_ids(
    shown: list[Message], tokenizer: Tokenizer, variables: dict[str, Any], text: str
) -> tuple[int, ...] | None:
    """Return the ids of the generation prompt after the header of an assistant message.

    None if the prompt does not start with the header that the template writes for past messages,
    as in harmony, where the channel is part of the header.

    Args:
      shown: the messages as they are rendered.
      text: the prompt that they give.
    """
    past = [*shown, {"role": "assistant", "content": PLACEHOLDER}]
    variables = variables | {"add_generation_prompt": False}
    for following in ([{"role": "tool", "content": "."}], []):
        try:
            later = render_messages(tokenizer, [*past, *following], variables, [], (system_first,))
        except Problem:  # the template requires more fields in a tool message
            continue
        header = PLACEHOLDER.join(later.split(PLACEHOLDER)[: text.count(PLACEHOLDER) + 1])
        if not (header and text.startswith(header)):
            return None
        return tuple(tokenizer.encode(text.removeprefix(header), specials=False))
    return None


def resolve_max_tokens(
    prompt: Sequence[int], request: GenerationRequest, max_length: int, default: int
) -> int:
    """Return the max_tokens to use for a prompt.

    Args:
      prompt: token ids of the prompt.
      max_length: capacity of the plan in tokens, for prompt and output.
      default: value for requests without max_tokens; 0 for all that fits.

    Raises:
      Problem: 400, the prompt leaves less room than the request needs.
    """
    free = max_length - len(prompt)
    asked = request.max_tokens
    exceeds = asked is not None and asked > free and not request.clamp_max_tokens
    if free < 1 or exceeds:
        output = "" if asked in (None, NO_LIMIT) else f" and max_tokens is {asked}"
        text = f"the prompt has {len(prompt)} tokens{output}"
        if free < 1:  # agents match on these words, and then shorten the conversation
            text = f"prompt is too long: {len(prompt)} tokens > {max_length - 1} maximum{output}"
        raise Problem(
            f"{text}; this model's maximum context length is {max_length} tokens for prompt and"
            " output together; shorten the prompt or lower max_tokens",
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
