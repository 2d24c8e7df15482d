"""What requests say about thoughts: how much to think, and what was thought before."""

from collections.abc import Mapping
from typing import Any

from dflash_jax.server.protocol import Problem

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def reasoning_options(
    given: Mapping[str, Any] | None,
    *,
    word: Any = None,
    where: str = "reasoning.effort",
    reasoning: Mapping[str, Any] | None = None,
    thinking: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Template variables of what a request says about thoughts, and warnings.

    Reasoning without an effort is on, `thinking` outranks it, unknown efforts count as high.

    Args:
      given: variables that were given as such; they win.
      word: an effort that stands at `where`, outside of `reasoning`.
    """
    found: dict[str, Any] = {}
    warnings: tuple[str, ...] = ()
    if reasoning is not None:
        if reasoning.get("exclude"):
            raise Problem(
                400, "reasoning.exclude is not supported here; leave out reasoning_content",
                param="reasoning.exclude",
            )  # fmt: skip
        found["enable_thinking"] = True
        if reasoning.get("effort") is not None:
            word, where = reasoning["effort"], "reasoning.effort"
    if word is not None:
        if not isinstance(word, str):
            raise Problem(400, f"{where} is {word!r}; expected {', '.join(EFFORTS)}", param=where)
        if word not in EFFORTS:
            warnings = (f"{where} {word!r} is unknown and counts as high",)
            word = "high"
        found |= {"reasoning_effort": word, "enable_thinking": word != "none"}
    if reasoning is not None and reasoning.get("enabled") is False:
        found["enable_thinking"] = False
    if thinking is not None:
        found["enable_thinking"] = thinking.get("type") != "disabled"
    return found | dict(given or {}), warnings


def positive_budget(tokens: Any) -> int | None:
    """A thinking budget; 0 and less is none."""
    return tokens if isinstance(tokens, int) and tokens > 0 else None


def join_reasoning(*parts: str | None) -> str:
    """Thoughts of one turn as one."""
    return "\n\n".join(part for part in parts if part)
