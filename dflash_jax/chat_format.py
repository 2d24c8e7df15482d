"""A model's chat template, and the forms of messages that it supports."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.chat_template import Message, calls_of, one_call_each, rendered
from dflash_jax.errors import RequestError

PROBE = "zqxprobe"  # a content to look for in rendered text
FUNCTION = {"name": "f", "description": "", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]


class ChatFormat:
    """Renders conversations in the forms that a template supports.

    The forms are found by rendering small conversations, once each.

    Args:
      template: the chat template, if the model has one.
      tool_template: that of conversations with tools, if it is different.
      specials: variables such as bos_token.
    """

    def __init__(
        self, template: str | None, tool_template: str | None, specials: Mapping[str, str]
    ):
        self._template, self._tool_template = template, tool_template
        self._specials = specials
        self._takes_parts: dict[tuple[str, str], bool] = {}  # by template and role

    def render(self, messages: Sequence[Message], /, **variables: Any) -> str:
        """Return a conversation in the template; see `Tokenizer.render`.

        Raises:
          RequestError: the model has no template, or the template raises an error.
        """
        if wrong := [m for m in messages if not isinstance(m, dict)]:
            raise RequestError(
                f"a message is {wrong[0]!r}; expected dicts, such as"
                ' {"role": "user", "content": "..."}'
            )
        plain = [self.plain(message) for message in messages]
        if any(len(calls_of(message)) > 1 for message in plain) and self._takes_one_call:
            plain = [self.plain(message) for message in one_call_each(plain)]
        return self._render(plain, **variables)

    def plain(self, message: Message) -> Message:
        """Return a message with one text as its content, and calls in the form of the template.

        A list of texts, or of parts of type text, becomes one text, joined as the template joins
        parts; by a newline, as in other servers, if the template does not support lists. Tool calls
        without a content get an empty text if the template needs one.
        """
        content = message.get("content")
        if not content and message.get("tool_calls"):
            return self._without_content(message)
        if not isinstance(content, list):
            return message
        parts = (part.get("text") if isinstance(part, dict) else part for part in content)
        texts = [text for text in parts if isinstance(text, str)]
        if len(texts) < len(content):
            return message
        return message | {"content": self._part_separator.join(texts)}

    @property
    def hides_content(self) -> bool:
        """Whether the template renders a user's message, but not its content, in either form."""
        if self._template is None:
            return False
        texts = [self._shown(self._template, "user", form) for form in (PROBE, parts_of(PROBE))]
        return any(text is not None for text in texts) and not any(texts)

    def _without_content(self, message: Message) -> Message:
        """Return a turn of tool calls alone, with its reasoning in the field that gpt-oss uses."""
        thought = message.get("reasoning_content")
        template = self._tool_template or self._template or ""
        if thought and "message.thinking" in template:
            message = message | {"thinking": thought}
        if message.get("content") != "":
            message = message | {"content": self._empty_content}
        return message

    @functools.cached_property
    def _empty_content(self) -> str | None:
        """Content of a turn without text: None, or "" if the template rejects or prints None."""

        def harm(content: str | None) -> float:
            text = self._with_calls(content, ["."])
            return math.inf if text is None else text.count("None")

        return "" if harm("") < harm(None) else None

    @functools.cached_property
    def _takes_one_call(self) -> bool:
        """Whether the template supports a turn with one call, but not one with two."""
        first, second = "first-value", "second-value"
        alone, both = (
            self._with_calls(self._empty_content, values, answered=True) or ""
            for values in ([first], [first, second])
        )
        return first in alone and not (first in both and second in both)

    def _with_calls(
        self, content: str | None, values: Sequence[str], *, answered: bool = False
    ) -> str | None:
        """Return a conversation that calls a tool with each value; None if rendering fails."""
        calls = [call_of(value, f"call{i:05}") for i, value in enumerate(values)]
        turn = {"role": "assistant", "content": content, "tool_calls": calls}
        answers = [{"role": "tool", "tool_call_id": c["id"], "content": "."} for c in calls]
        talk = [{"role": "user", "content": "."}, turn, *(answers if answered else ())]
        try:
            return self._render(talk, tools=TOOLS)
        except RequestError:
            return None

    @functools.cached_property
    def _part_separator(self) -> str:
        """Separator that the template puts between two parts of a content."""
        first, second = "\ue000", "\ue001"
        parts = [{"type": "text", "text": text} for text in (first, second)]
        try:
            text = self._render([{"role": "user", "content": parts}])
        except RequestError:
            return "\n"
        separator, complete, _ = text.partition(first)[2].partition(second)
        return separator if complete and not separator.strip() else "\n"

    def _render(self, messages: Sequence[Message], /, **variables: Any) -> str:
        """Render messages whose contents are texts, as lists of parts where that is needed."""
        template = (variables.get("tools") and self._tool_template) or self._template
        if template is None:
            raise RequestError(
                "this model ships no chat template; give a plain text or token ids instead"
            )
        formed = [self._formed(message, template) for message in messages]
        return self._render_as_given(template, formed, variables)

    def _render_as_given(
        self, template: str, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> str:
        defaults: dict[str, Any] = {"add_generation_prompt": True, "tools": None, "documents": None}
        given = {**self._specials, **variables, "messages": messages}
        return rendered(template, defaults | given)

    def _formed(self, message: Message, template: str) -> Message:
        """Return a message with its text as a list of parts if the template reads no text."""
        content, role = message.get("content"), message.get("role")
        if not isinstance(content, str) or not isinstance(role, str):
            return message
        if (key := (template, role)) not in self._takes_parts:
            self._takes_parts[key] = not self._shown(template, role, PROBE) and bool(
                self._shown(template, role, parts_of(PROBE))
            )
        return message | {"content": parts_of(content)} if self._takes_parts[key] else message

    def _shown(self, template: str, role: str, content: Any) -> bool | None:
        """Return whether the content of a message of this role is in the rendered text.

        None if the template refuses the message.
        """
        probe = {"role": role, "content": content}
        user, system = ({"role": name, "content": "."} for name in ("user", "system"))
        if role == "user":  # the form that the other role takes is not known yet
            system |= {"content": "." if isinstance(content, str) else parts_of(".")}
        else:
            user = self._formed(user, template)
        if role not in ("user", "system"):
            system = self._formed(system, template)
        talks = [[user, probe]]
        match role:
            case "user":
                talks = [[probe]]
            case "system":
                talks = [[probe, user]]
            case "assistant":
                talks = [[user, probe, user], [user, probe]]
            case "tool":
                call = call_of(".", "call00000")
                turn = {"role": "assistant", "content": "", "tool_calls": [call]}
                turn = self._formed(turn, template)
                talks = [[user, turn, probe | {"tool_call_id": call["id"]}]]
        if role != "system":
            talks += [[system, *talk] for talk in talks]  # some templates need one
        with_tools = role == "tool" or template == self._tool_template
        variables = {"tools": TOOLS} if with_tools else {}
        for talk in talks:
            try:
                return PROBE in self._render_as_given(template, talk, variables)
            except RequestError:
                continue
        return None


def parts_of(text: str) -> list[Message]:
    """Return a text as a content of one part."""
    return [{"type": "text", "text": text}]


def call_of(value: str, call_id: str) -> dict[str, Any]:
    """Return a call with one argument of this value."""
    function = {"name": "f", "arguments": {"k": value}}
    return {"id": call_id, "type": "function", "function": function}
