"""Accounting of the lines of data that a run uses and skips."""

from collections.abc import Sequence

from dflash_jax.train.data import HELD_OUT_SHARE, Example, assistant_turns
from dflash_jax.train.recipes import Recipe
from dflash_jax.train.regenerate import AnswerPrompt


class Usage:
    """Number of lines a run is given and skips, by reason; `str` gives one line."""

    def __init__(self, lines: int):
        self.lines = lines
        self.left_out: dict[str, int] = {}

    def leave_out(self, count: int, reason: str) -> None:
        """Count skipped lines."""
        if count:
            self.left_out[reason] = self.left_out.get(reason, 0) + count

    def __bool__(self) -> bool:
        """Return whether any line was skipped."""
        return bool(self.left_out)

    def __str__(self) -> str:
        used = self.lines - sum(self.left_out.values())
        reasons = "; ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())
        return f"using {used:,} of {self.lines:,} lines" + f": {reasons}" * bool(reasons)

    def hold_out(self, count: int, measured: int) -> None:
        """Count held-out lines, and how many of them the measurement uses."""
        rest = f", the first {measured:,} of them (held_out)" if measured < count else ""
        self.leave_out(count, f"held out to measure on, 1 in {HELD_OUT_SHARE} by hash{rest}")

    def answer(
        self, asked: Sequence[Example], prompts: Sequence[AnswerPrompt], recipe: Recipe
    ) -> None:
        """Count the lines that the target does not answer.

        Args:
          asked: the candidate lines.
          prompts: their prompts, from `data.prompts`.
        """
        longest = recipe.answer_buckets[-1].length
        chosen = {prompt.line for prompt in prompts}
        short = {prompt.line for prompt in prompts if prompt.room <= longest}
        rest = [example for i, example in enumerate(asked) if i not in chosen]
        texts = [example for example in rest if not example.messages]
        silent = [x for x in rest if x.messages and not assistant_turns(x)]
        self.leave_out(len(silent), "with nothing for the assistant to answer")
        more = len(rest) - len(texts) - len(silent)
        self.leave_out(more, f"more than the recipe asks for (prompts={recipe.prompts})")
        self.leave_out(
            len(texts), f"more than the recipe continues (text_prompts={recipe.text_prompts})"
        )
        self.leave_out(
            len(chosen - short),
            f"longer than {longest} tokens with their answers, the longest of answer_buckets",
        )
