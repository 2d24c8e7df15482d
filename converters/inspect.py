"""Describe a weight file by its header: metadata, tensors, types, sizes, instruction tuning."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_jax.checkpoint import is_checkpoint, open_checkpoint
from dflash_jax.config import is_gguf
from dflash_jax.converters import orbax_folder
from dflash_jax.converters.formats.gguf.file import GgufArray, GgufFile, open_gguf
from dflash_jax.converters.formats.safetensors import SafetensorsFile, open_safetensors
from dflash_jax.converters.formats.source import TensorSource
from dflash_jax.converters.hf import open_directory
from dflash_jax.converters.models import StoredModel, no_model, open_model
from dflash_jax.converters.taps import AUTO
from dflash_jax.converters.tree_source import CheckpointSource
from dflash_jax.errors import CheckpointError, DFlashError

# Judge by metadata whether a GGUF target is instruction-tuned, as its drafter expects.


ACCEPT = "ACCEPT"
REFUSE = "REFUSE"
UNKNOWN = "UNKNOWN"
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


LONGEST = 60  # characters of a metadata value shown


def open_any(path: Path) -> TensorSource:
    """Open a .gguf or .safetensors file, a Hugging Face folder or a checkpoint.

    Raises:
      CheckpointError: it is none of these, or damaged.
    """
    if is_gguf(path):
        return open_gguf(path)
    if path.suffix == ".safetensors":
        return open_safetensors(path)
    if is_checkpoint(path):
        return CheckpointSource(open_checkpoint(path))
    if arrays := orbax_folder.find(path):
        return orbax_folder.OrbaxSource(path, arrays)
    if path.is_dir():
        return open_directory(path)
    raise no_model(path)


def inspect(path: Path, *, taps: str = AUTO) -> dict[str, Any]:
    """Return a JSON-able report, which for a model that cannot be run includes the reason."""
    source = open_any(path)
    report: dict[str, Any] = {"path": str(path)} | _model(path, taps)
    tensors = [
        {
            "name": name,
            "type": source.kind(name),
            "shape": list(source.shape(name)),
            "bytes": source.nbytes(name),
        }
        for name in source.names()
    ]
    weights = sum(math.prod(t["shape"]) for t in tensors)
    total = sum(t["bytes"] for t in tensors)
    mix: Counter[str] = Counter()
    for tensor in tensors:
        mix[tensor["type"]] += tensor["bytes"]
    return report | {
        "metadata": _metadata(source),
        "tensor_count": len(tensors),
        "weights": weights,
        "bytes": total,
        "bits_per_weight": round(8 * total / weights, 4) if weights else 0.0,
        "bytes_by_type": dict(mix.most_common()),
        "tensors": tensors,
    }


def _model(path: Path, taps: str) -> dict[str, Any]:
    try:
        model: StoredModel = open_model(path, taps=taps)
    except DFlashError as error:
        return {"model": None, "problem": str(error)}
    try:
        model.check()
    except CheckpointError as error:
        return {"model": _summary(model), "problem": str(error)}
    return {"model": _summary(model), "problem": None}


def _summary(model: StoredModel) -> dict[str, Any]:
    return {
        "role": model.role,
        "layout": model.layout,
        "config": model.config.to_json(),
        "notes": [*filter(None, [model.warning]), *model.notes],
    }


def _metadata(source: TensorSource) -> dict[str, Any]:
    if not isinstance(source, GgufFile | SafetensorsFile):
        return {}
    return {key: _short(value) for key, value in source.metadata.items()}


def _short(value: Any) -> Any:
    if isinstance(value, GgufArray):
        return value.tolist() if len(value) <= 16 else f"array of {len(value)}"
    if isinstance(value, str) and len(value) > LONGEST:
        return value[:LONGEST] + f"... ({len(value)} characters)"
    return value


def instruct(path: Path) -> InstructVerdict:
    """Judge whether a GGUF target is instruction-tuned.

    Raises:
      CheckpointError: the file is not GGUF, or truncated.
    """
    source = open_any(path)
    if not isinstance(source, GgufFile):
        raise CheckpointError(f"{path} is not GGUF; --check-instruct reads GGUF metadata")
    return check_instruct(source.metadata, source.path.name)


def lines(report: dict[str, Any]) -> list[str]:
    """Return the report as text."""
    model = report["model"]
    listed = [report["path"]]
    if model:
        listed += [f"  {model['role']}, {model['layout']}", *(f"  {n}" for n in model["notes"])]
    if report["problem"]:
        listed.append(f"  cannot be used as it stands: {report['problem']}")
    listed.append(
        f"  {report['tensor_count']} tensors, {report['weights'] / 1e6:.2f} M weights,"
        f" {report['bytes'] / 1e6:.2f} MB, {report['bits_per_weight']} bits per weight"
    )
    listed += [
        f"    {kind:8} {size / 1e6:10.2f} MB" for kind, size in report["bytes_by_type"].items()
    ]
    listed += [f"  {key} = {value!r}" for key, value in report["metadata"].items()]
    width = max((len(t["name"]) for t in report["tensors"]), default=0)
    listed += [f"  {t['name']:{width}} {t['type']:8} {t['shape']}" for t in report["tensors"]]
    return listed
