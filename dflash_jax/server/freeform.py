"""Freeform (custom) tools: functions of one string, whose calls are answered as plain text."""

import json
import re
from collections.abc import Mapping
from typing import Any

from dflash_jax.tokenizer import well_formed

PARAMETER = "input"  # the only parameter of the functions
HEAD = re.compile(rf'\s*\{{\s*"{PARAMETER}"\s*:\s*"')
LETTERS = re.compile(r'[^"\\]+|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4}')
HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB]")


def freeform_function(name: Any, description: Any, form: Any) -> tuple[dict[str, Any], str | None]:
    """Return the function by which the model calls a freeform tool, and a warning.

    Args:
      form: the tool's `format`: text, or a grammar, which the model is shown but not held to.
    """
    about = "The text that the tool takes."
    warning = None
    if not isinstance(form, Mapping):
        form = {}
    grammar = form.get("grammar", form)  # nested in chat completions
    if form.get("type") == "grammar" and isinstance(grammar, Mapping):
        about = (
            f"The text that the tool takes, in this {grammar.get('syntax')} grammar:\n"
            f"{grammar.get('definition')}"
        )
        warning = f"the input of the tool {name!r} is not held to its grammar"
    function: dict[str, Any] = {"name": name}
    if isinstance(description, str):
        function["description"] = description
    function["parameters"] = {
        "type": "object",
        "properties": {PARAMETER: {"type": "string", "description": about}},
        "required": [PARAMETER],
        "additionalProperties": False,
    }
    return function, warning


def freeform_input(arguments: str) -> str:
    """Return the text of a freeform tool's call; arguments of another form are the text."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return FreeformInput().push(arguments) or arguments
    if isinstance(value, dict) and isinstance(text := value.get(PARAMETER), str):
        return well_formed(text)
    return "" if value in ({}, None) else arguments


class FreeformInput:
    """Decodes the text of a freeform tool's call while its arguments arrive.

    Attributes:
      text: the text as far as it is decoded.
    """

    def __init__(self) -> None:
        self._pending = ""  # JSON that is not decoded yet
        self._inside = False  # the string with the text has begun
        self._ended = False  # the string with the text has ended
        self.text = ""

    def push(self, part: str) -> str:
        """Add a part of the arguments, and return the text that it completes."""
        if self._ended:
            return ""
        self._pending += part
        if not self._inside:
            head = HEAD.match(self._pending)
            if head is None:
                return ""
            self._pending = self._pending[head.end() :]
            self._inside = True
        letters = []
        at = 0
        while letter := LETTERS.match(self._pending, at):
            letters.append(letter[0])
            at = letter.end()
        self._ended = self._pending.startswith('"', at)
        if letters and HIGH_SURROGATE.match(letters[-1]) and not self._ended:
            at -= len(letters.pop())  # the other half may follow
        self._pending = self._pending[at:]
        new = well_formed(json.loads(f'"{"".join(letters)}"', strict=False))
        self.text += new
        return new

    def finish(self, arguments: str) -> str:
        """Return the rest of the text, given the complete arguments."""
        whole = freeform_input(arguments)
        rest = whole[len(self.text) :] if whole.startswith(self.text) else ""
        self.text += rest
        return rest
