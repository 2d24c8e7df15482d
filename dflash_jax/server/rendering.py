"""Rendering of conversations by chat templates that refuse some orders of messages.

A client cannot edit past turns, so a conversation that a template refuses is rendered in a form
that is closer to what the template expects.
"""

from collections.abc import Callable, Sequence
from typing import Any

from dflash_jax.errors import RequestError
from dflash_jax.server.protocol import Message, Problem
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers.syntax import as_json

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
    """Render a conversation, repaired until the template takes it.

    Args:
      messages: with texts as contents, see `Tokenizer.plain`.
      warnings: repairs that change what the model sees are added here.

    Raises:
      Problem: the template refuses every form; the message is that of the first one.
    """
    try:
        return tokenizer.render(messages, **variables)
    except RequestError as error:
        refused = error
    tried = [list(messages)]
    alone = [(repair,) for repair in repairs]
    for chosen in (*alone, *(repairs[:n] for n in range(2, len(repairs) + 1))):
        current, notes = list(messages), []
        for repair in chosen:
            changed = repair(current)
            notes += [REPAIRS[repair]] if REPAIRS[repair] and changed != current else []
            current = changed
        if current in tried:
            continue
        tried.append(current)
        try:
            text = tokenizer.render(current, **variables)
        except RequestError:
            continue
        warnings.extend(f"the chat template refused the messages: {note}" for note in notes)
        return text
    raise Problem(400, str(refused), param="messages") from None
