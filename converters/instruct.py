"""Judge by metadata whether a GGUF target is instruction-tuned, as its drafter expects."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_jax.converters.gguf.file import GgufArray

ACCEPT, REFUSE, UNKNOWN = "ACCEPT", "REFUSE", "UNKNOWN"
_TUNED = re.compile(r"(^|[^a-z])(it|instruct|instruction|chat|thinking|coder)([^a-z]|$)")
_BASE = re.compile(r"(^|[^a-z])(base|pt|pretrained|pretrain)([^a-z]|$)")
KEYS = ("general.name", "general.basename", "general.finetune", "general.size_label")


@dataclass(frozen=True)
class InstructVerdict:
    """ACCEPT, REFUSE or UNKNOWN, and the reasons."""

    outcome: str
    reasons: tuple[str, ...]


def check_instruct(metadata: Mapping[str, Any], file_name: str) -> InstructVerdict:
    """Judge by names, tags and ancestry; the model's own name outweighs its base model's."""
    own = {key: _text(metadata.get(key)) for key in KEYS} | {"the file name": file_name}
    tuned = [
        f"{k} {v!r} says instruction-tuned" for k, v in own.items() if _TUNED.search(v.lower())
    ]
    base = [f"{k} {v!r} says base model" for k, v in own.items() if _BASE.search(v.lower())]
    parents = {
        k: _text(v)
        for k, v in metadata.items()
        if k.startswith("general.base_model.") and k.endswith((".name", ".repo_url"))
    }
    from_base = [f"{k} {v!r} is a base model" for k, v in parents.items() if _is_base(v)]
    template = "tokenizer.chat_template" in metadata
    if base and not tuned:
        return InstructVerdict(REFUSE, tuple(base))
    if from_base and not tuned:
        return InstructVerdict(REFUSE, tuple(from_base))
    if tuned and not base:
        kept = (*tuned, *(() if template else ("it has no chat template",)))
        return InstructVerdict(ACCEPT if template else UNKNOWN, kept)
    if tuned and base:
        return InstructVerdict(UNKNOWN, (*tuned, *base))
    if not template:
        return InstructVerdict(
            REFUSE, ("nothing says instruction-tuned and there is no chat template",)
        )
    return InstructVerdict(UNKNOWN, ("it has a chat template, but no name says instruction-tuned",))


def _is_base(text: str) -> bool:
    lowered = text.lower()
    return bool(_BASE.search(lowered)) and not _TUNED.search(lowered)


def _text(value: Any) -> str:
    if isinstance(value, GgufArray):
        return " ".join(map(str, value.tolist()[:16]))
    return value if isinstance(value, str) else ""
