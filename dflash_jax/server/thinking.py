"""Reasoning options of requests, and reasoning of past turns."""

from collections.abc import Mapping
from typing import Any

from dflash_jax.server.protocol import Problem

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def reasoning_options(
    given: Mapping[str, Any] | None,
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
      given: template variables set by the client; they take precedence.
      effort: an effort from outside of `reasoning`.
      where: name of the field that `effort` comes from.
      reasoning: OpenRouter's and OpenAI's `reasoning` object.
      thinking: Anthropic's `thinking` object.

    Raises:
      Problem: the effort is not a string, or `reasoning.exclude` is set.
    """
    variables: dict[str, Any] = {}
    warnings: tuple[str, ...] = ()
    if reasoning is not None:
        if reasoning.get("exclude"):
            raise Problem(
                400, "reasoning.exclude is not supported here; leave out reasoning_content",
                param="reasoning.exclude",
            )  # fmt: skip
        variables["enable_thinking"] = True
        if reasoning.get("effort") is not None:
            effort, where = reasoning["effort"], "reasoning.effort"
    if effort is not None:
        if not isinstance(effort, str):
            raise Problem(400, f"{where} is {effort!r}; expected {', '.join(EFFORTS)}", param=where)
        if effort not in EFFORTS:
            warnings = (f"{where} {effort!r} is unknown and counts as high",)
            effort = "high"
        variables |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    if reasoning is not None and reasoning.get("enabled") is False:
        variables["enable_thinking"] = False
    if thinking is not None:
        variables["enable_thinking"] = thinking.get("type") != "disabled"
    return variables | dict(given or {}), warnings


def positive_budget(tokens: Any) -> int | None:
    """Return a thinking budget in tokens; None for 0, less, or anything but an integer."""
    return tokens if isinstance(tokens, int) and tokens > 0 else None


def join_reasoning(*parts: str | None) -> str:
    """Return the reasoning texts of one turn as one text."""
    return "\n\n".join(part for part in parts if part)
