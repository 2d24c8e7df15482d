"""What has to be known of a family's way to write thoughts and tool calls."""

import dataclasses
import enum
import json
from collections.abc import Callable, Mapping
from typing import Any


class CallState(enum.Enum):
    """Where an output stands with its tool calls."""

    NONE = "none"  # no call was begun
    OPEN = "open"  # the last call that was begun is not finished
    COMPLETE = "complete"  # every call that was begun is finished


@dataclasses.dataclass(frozen=True)
class Thought:
    """The texts around reasoning."""

    opening: str
    closing: str
    forced: str  # what ends a thought that has to end, and leads into the answer

    def is_open(self, text: str, *, inside: bool = False) -> bool:
        """Whether the text ends inside a thought.

        Args:
          inside: whether it began inside one, because the prompt opened it.
        """
        begun = text.rfind(self.opening)
        closed = text.rfind(self.closing)
        return inside if begun < 0 and closed < 0 else begun > closed


def by_markers(syntax: "Syntax", text: str) -> CallState:
    """The state that the last opening and the last closing marker tell."""
    begun = max(text.rfind(marker) for marker in syntax.opens)
    closed = max(text.rfind(marker) for marker in syntax.closes)
    if begun < 0:
        return CallState.NONE
    return CallState.OPEN if begun > closed else CallState.COMPLETE


@dataclasses.dataclass(frozen=True)
class Syntax:
    """A family's syntax. All texts are raw output: special tokens are part of them.

    Attributes:
      opens: texts that begin a call; whoever shows output to a user stops showing there.
      closes: texts that finish one.
      opening: what may be appended to an answer so that only the tool's name can follow.
      lead: what models of the family write between a text and a call.
      marker: what a call begins with after that, and an answer does not.
      begin: the same with the name, and with the first parameter's name if there is one, so
        that only the parameter's value, or the arguments, can follow. Never ends in a space:
        tokenizers glue spaces to what comes next.
      render: a whole call as the family's chat template writes it.
      read_state: how `call_state` reads an output.
    """

    name: str
    thought: Thought | None
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    opening: str
    lead: str
    marker: str
    begin: Callable[[str, str | None], str]
    render: Callable[[str, Mapping[str, Any]], str]
    read_state: Callable[["Syntax", str], CallState] = by_markers

    def call_state(self, text: str) -> CallState:
        """Where an output stands with its calls."""
        return self.read_state(self, text)

    def markers(self, *, calls: bool) -> tuple[str, ...]:
        """Texts whose special tokens whoever reads an output has to see."""
        found = [self.thought.opening, self.thought.closing] if self.thought else []
        if calls or self.name == "harmony":
            found += [*self.opens, *self.closes, self.opening, self.render("f", {"k": "v"})]
        if self.name == "harmony":
            found += ["<|start|>assistant<|channel|>final<|message|><|end|><|call|>"]
        return tuple(found)


def as_json(value: Any) -> str:
    """JSON as chat templates write it: with spaces, letters of any language as they are."""
    return json.dumps(value, ensure_ascii=False)


QWEN_THOUGHT = Thought("<think>", "</think>", "\n</think>\n\n")
