"""Identity of programs: which step, in which variant."""

import enum
from typing import NamedTuple


class Step(enum.StrEnum):
    """What a program does."""

    PREFILL = "prefill"  # feed a prompt chunk
    PREFILL_WIDE = "prefill_wide"  # feed several chunks of a long prompt
    PLAIN = "plain"  # decode one token per row
    SPECULATIVE = "speculative"  # draft, verify and commit a block
    DRAFT = "draft"  # its two halves, where the host or another device comes between
    VERIFY = "verify"
    FORCED_TOKENS = "forced_tokens"
    PROMPT_LOGPROBS = "prompt_logprobs"
    UPDATE_DRAFTER = "update_drafter"  # part of other programs, on the drafter's own device
    SET_LOGITS_STATE = "set_logits_state"
    CLEAR_ROWS = "clear_rows"  # these change rows without parameters
    COPY_ROW = "copy_row"
    TAKE_SEGMENT = "take_segment"
    PUT_SEGMENT = "put_segment"


class Variant(enum.StrEnum):
    """Kinds of requests by the programs they need, the most common kind first."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    CHUNKS = "chunks"  # long prompts are fed in calls of several chunks
    RECOVERY = "recovery"  # tokens are forced
    CONSTRAINED = "constrained"  # structured output
    PENALIZED = "penalized"  # penalties, biases, log-probabilities of the output
    PROMPT = "prompt"  # log-probabilities of the prompt


# Variants that prefill and decode steps may exist in. Each also serves the requests of those before
# it.
STEP_VARIANTS = (Variant.GREEDY, Variant.SAMPLED, Variant.PENALIZED, Variant.CONSTRAINED)
LOGITS_VARIANTS = (Variant.PENALIZED, Variant.CONSTRAINED)  # steps that carry a logits state
_NEEDED_BY = {
    Step.FORCED_TOKENS: (Variant.RECOVERY,),
    Step.PROMPT_LOGPROBS: (Variant.PROMPT,),
    Step.PREFILL_WIDE: (Variant.CHUNKS,),
    Step.SET_LOGITS_STATE: LOGITS_VARIANTS,
}


def serving(variant: Variant, kernels: str) -> Variant:
    """Return the variant of the steps that serve a variant's requests.

    By native kernels, draws and masks that no row needs cost a step nothing that can be measured,
    so that half as many programs are compiled.

    Args:
      kernels: the plan's.
    """
    if kernels != "native":
        return variant
    return _NATIVE.get(variant, variant)


_NATIVE = {Variant.GREEDY: Variant.SAMPLED, Variant.PENALIZED: Variant.CONSTRAINED}


class ProgramKey(NamedTuple):
    """Identity of a program. `str` of it is what logs and `explain` print."""

    step: Step
    variant: Variant | None = None  # None for steps without variants

    def __str__(self) -> str:
        return f"{self.step}[{self.variant}]" if self.variant else str(self.step)

    @property
    def identifier(self) -> str:
        """The key as a Python name."""
        return "_".join(str(x) for x in self if x)

    @classmethod
    def parse(cls, text: str) -> "ProgramKey":
        """Return the key that is printed as a text.

        Raises:
          ValueError: there is no such step or variant.
        """
        step, _, variant = text.removesuffix("]").partition("[")
        return cls(Step(step), Variant(variant) if variant else None)

    def needed_by(self, kernels: str) -> tuple[Variant, ...]:
        """Return the variants whose requests need the program.

        Args:
          kernels: the plan's.
        """
        if self.variant is None:
            return _NEEDED_BY.get(self.step, STEP_VARIANTS)
        return tuple(x for x in STEP_VARIANTS if serving(x, kernels) == self.variant)
