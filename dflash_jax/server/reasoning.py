"""Reasoning options of requests, and reasoning of past turns."""

from collections.abc import Mapping
from typing import Any

from dflash_jax.server.protocol import Problem

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def nearest_efforts(effort: Any) -> list[Any]:
    """Return an effort, and then the known efforts from the nearest on.

    An unknown effort is as near as "high". Of two that are as near, the stronger one comes first.
    """
    place = EFFORTS.index(effort if effort in EFFORTS else "high")

    def distance(other: str) -> tuple[int, int]:
        other_place = EFFORTS.index(other)
        return abs(other_place - place), -other_place

    others = [other for other in EFFORTS if other != effort]
    return [effort, *sorted(others, key=distance)]


def reasoning_options(
    client_variables: Mapping[str, Any] | None,
    *,
    effort: Any = None,
    where: str = "reasoning.effort",
    reasoning: Mapping[str, Any] | None = None,
    thinking: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the chat template variables for a request's reasoning options, and warnings.

    `reasoning` without an effort turns reasoning on; `thinking` overrides it. Unknown efforts
    count as "high".

    Args:
      client_variables: template variables set by the client; they take precedence.
      effort: an effort from outside of `reasoning`.
      where: name of the field that `effort` comes from.
      reasoning: OpenRouter's and OpenAI's `reasoning` object.
      thinking: Anthropic's `thinking` object.

    Raises:
      Problem: 400, an effort is no text, or reasoning is to be left out of the response.
    """
    variables: dict[str, Any] = {}
    warnings: tuple[str, ...] = ()
    if reasoning is not None:
        if reasoning.get("exclude"):
            raise Problem(
                "reasoning.exclude is not supported here; leave out reasoning_content",
                param="reasoning.exclude",
            )
        variables["enable_thinking"] = True
        if reasoning.get("effort") is not None:
            effort = reasoning["effort"]
            where = "reasoning.effort"
    if effort is not None:
        if not isinstance(effort, str):
            raise Problem(f"{where} is {effort!r}; expected {', '.join(EFFORTS)}", param=where)
        if effort not in EFFORTS:
            warnings = (f"{where} {effort!r} is unknown and counts as high",)
            effort = "high"
        variables["reasoning_effort"] = effort
        variables["enable_thinking"] = effort != "none"
    if reasoning is not None and reasoning.get("enabled") is False:
        variables["enable_thinking"] = False
    if thinking is not None:
        variables["enable_thinking"] = thinking.get("type") != "disabled"
    return variables | dict(client_variables or {}), warnings


def positive_budget(tokens: Any) -> int | None:
    """Return a thinking budget in tokens; None for 0, less, or anything but an integer."""
    return tokens if isinstance(tokens, int) and tokens > 0 else None


def join_reasoning(*parts: str | None) -> str:
    """Return the reasoning texts of one turn as one text."""
    return "\n\n".join(part for part in parts if part)
