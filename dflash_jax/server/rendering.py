"""Rendering of conversations, by chat templates that refuse some orders of messages, too.

A client cannot edit past turns, so a conversation that a template refuses is rendered in a form
that is closer to what the template expects.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dflash_jax.errors import RequestError
from dflash_jax.server.protocol import Message, Problem
from dflash_jax.server.reasoning import nearest_efforts
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers.syntax import as_json

Repair = Callable[[Sequence[Message]], list[Message]]


def system_first(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with all system messages merged into a first one."""
    system = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    if not system:
        return others
    return [{"role": "system", "content": "\n\n".join(system)}, *others]


def results_with_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with results that follow no call as messages of the user."""
    repaired: list[Message] = []
    follows_call = False
    for message in messages:
        is_result = message["role"] == "tool"
        if not is_result:
            follows_call = bool(message.get("tool_calls"))
        if is_result and not follows_call:
            message = _as_user(message)
        repaired.append(message)
    return repaired


def user_first(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with an empty one of the user in front, if the assistant begins."""
    roles = [message["role"] for message in messages]
    first = next((at for at, role in enumerate(roles) if role != "system"), 0)
    repaired = list(messages)
    if roles[first] == "assistant":
        repaired.insert(first, {"role": "user", "content": ""})
    return repaired


def alternating(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with neighbouring ones of the user, or of the assistant, merged."""
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else {}
        role = message["role"]
        same_role = role == last.get("role") and role in ("user", "assistant")
        if same_role and not last.get("tool_calls"):
            texts = [text for text in (last["content"], message["content"]) if text]
            merged[-1] = last | message | {"content": "\n\n".join(texts)}
        else:
            merged.append(message)
    return merged


def without_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with calls and their results as text."""
    repaired = []
    for message in messages:
        if message.get("tool_calls"):
            message = _calls_as_text(message)
        if message["role"] == "tool":
            message = _as_user(message)
        repaired.append(message)
    return alternating(repaired)


def _calls_as_text(message: Message) -> Message:
    """Return an assistant's message with its calls below its content."""
    lines = [message["content"]] if message["content"] else []
    for call in message["tool_calls"]:
        function = call["function"]
        lines.append(as_json({"name": function["name"], "arguments": function["arguments"]}))
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return others | {"content": "\n".join(lines)}


def without_system(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with those of the system as text of the user."""
    if all(message["role"] != "system" for message in messages):
        return list(messages)
    repaired = []
    for message in messages:
        if message["role"] == "system":
            message = message | {"role": "user"}
        repaired.append(message)
    return alternating(repaired)


def _as_user(message: Message) -> Message:
    return {"role": "user", "content": f"Result of a tool call:\n{message['content']}"}


# Changes of messages, with what warnings say of them: first each is tried alone, then each on the
# result of those before it.
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
      messages: a conversation whose contents are texts, see `Tokenizer.plain`.
      variables: variables of the template.
      warnings: changes of what the model sees are added here, as sentences.
      repairs: changes to try, in this order.

    Raises:
      Problem: the template refuses every form.
    """
    try:
        return tokenizer.render(messages, **variables)
    except RequestError as error:
        refusal = str(error)
    required = {key: value for key, value in variables.items() if key not in REASONING}
    for repaired, notes in _repaired(messages, repairs):
        try:
            text = tokenizer.render(repaired, **required)
        except RequestError:
            continue
        warnings.extend(f"the chat template refused the messages: {note}" for note in notes)
        if required != variables:
            text = _with_reasoning(tokenizer, repaired, required, variables, text, warnings)
        return text
    raise Problem(refusal, param="messages") from None


def _repaired(
    messages: Sequence[Message], repairs: Sequence[Repair]
) -> Iterator[tuple[list[Message], list[str]]]:
    """Yield the messages, and each different form that repairs give them, with its notes."""
    tried: list[list[Message]] = []
    alone = [(repair,) for repair in repairs]
    together = [repairs[:count] for count in range(2, len(repairs) + 1)]
    for chosen in ((), *alone, *together):
        current = list(messages)
        notes: list[str] = []
        for repair in chosen:
            changed = repair(current)
            if changed != current and REPAIRS[repair]:
                notes.append(REPAIRS[repair])
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
      text: the conversation that `required` gives.
    """
    accepted = dict(required)
    for name in REASONING:
        if name not in variables:
            continue
        asked = variables[name]
        values = nearest_efforts(asked) if name == "reasoning_effort" else [asked]
        for value in values:
            try:
                text = tokenizer.render(messages, **accepted | {name: value})
            except RequestError:
                continue
            accepted[name] = value
            if value != asked:
                warnings.append(
                    f"the chat template knows no {name} {asked!r:.50}; it is {value!r} instead"
                )
            break
        else:
            warnings.append(f"the chat template refused {name} {asked!r:.50}, which was left out")
    return text
