"""Convert any model to plain weights or a checkpoint, with a report on every tensor."""

import dataclasses
import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

from dflash_jax.checkpoint import write
from dflash_jax.converters import families
from dflash_jax.converters.export import Weights, check_name, export
from dflash_jax.converters.forms import AUTO, HUGGING_FACE, ORBAX, SAFETENSORS
from dflash_jax.converters.gguf import GgufFile
from dflash_jax.converters.gguf.file import SHARD
from dflash_jax.converters.load import Progress, float_dtype
from dflash_jax.converters.models import StoredModel, companions
from dflash_jax.errors import CheckpointError, TokenizerError
from dflash_jax.utils.atomic import new_path

REPORT = "conversion.json"
NO_TOKENIZER = (
    "there is no tokenizer.json: what is written takes token ids only (--tokenizer DIR brings one)"
)


def chosen_dtype(model: StoredModel, dtype: str) -> str:
    """Return the requested dtype; "auto" is that of the published weights.

    Raises:
      ConfigError: the dtype is unknown.
    """
    found = model.config.dtype if dtype == AUTO else dtype
    float_dtype(found)
    return found


def inventory(model: StoredModel, dtype: str) -> dict[str, Any]:
    """Report the source of every parameter and the use of every stored tensor.

    Raises:
      CheckpointError: a parameter lacks its tensor, or a tensor its parameter.
    """
    model.check()
    origins = model.tensors.origins
    rows = [
        {
            "parameter": "/".join(slot.path),
            "tensor": part.name,
            "stored": " + ".join(origins[part.name].names),
            "type": model.tensors.kind(part.name),
            "shape": list(part.shape),
            "change": origins[part.name].change,
        }
        for slot in families.slots(model.config)
        for part in slot.parts
    ]
    stored = model.tensors.source.names()
    return {
        "source": model.path.name,
        "role": model.role,
        "layout": model.layout,
        "dtype": dtype,
        "config": model.config.to_json(),
        "notes": list(model.notes),
        "stored_tensors": len(stored),
        "used_tensors": len({n for row in rows for n in origins[row["tensor"]].names}),
        "ignored": dict(model.tensors.ignored),
        "parameters": len(families.slots(model.config)),
        "types": dict(Counter(row["type"] for row in rows)),
        "tensors": rows,
    }


def convert(
    model: StoredModel,
    path: Path,
    *,
    to: str = SAFETENSORS,
    dtype: str = AUTO,
    overwrite: bool = False,
    tokenizer: Path | None = None,
    progress: Progress = lambda name, weights: None,
) -> dict[str, Any]:
    """Write the model and return its inventory, which is also stored with it.

    Args:
      to: "safetensors", a Hugging Face folder, or "orbax", a checkpoint of dflash_jax, for which
        the whole model must fit into memory.
      tokenizer: a folder whose tokenizer is copied instead of the model's. A tokenizer that is
        missing or cannot be rebuilt is noted in the inventory.

    Raises:
      CheckpointError: the weights do not fit their configuration, or cannot be written there.
      ConfigError: the dtype is unknown, or this layout cannot hold the model.
    """
    for source in filter(None, (model.path, tokenizer)):
        keep_apart(source, path)
    check_name(path, folder=True)
    kind = chosen_dtype(model, dtype)
    report = inventory(model, kind)
    files, missing = _companions(model, tokenizer)
    if model.role == "target" and "tokenizer.json" not in files:
        report["notes"].append(missing)
    files |= {REPORT: json.dumps(report, indent=1) + "\n"}
    if to == ORBAX:
        config = dataclasses.replace(model.config, dtype=kind)
        needed = sum(math.prod(slot.shape) for slot in families.slots(config))
        with new_path(path, overwrite=overwrite, needed=needed * float_dtype(kind).itemsize) as at:
            write(at, config, model.load(kind, progress), files)
        return report
    weights = Weights(model.config, model.tensors, files)
    export(weights, path, layout=HUGGING_FACE, dtype=kind, overwrite=overwrite, progress=progress)
    return report


def _companions(model: StoredModel, tokenizer: Path | None) -> tuple[dict[str, str | Path], str]:
    """Return tokenizer and generation files, and why there is no tokenizer if there is none."""
    if tokenizer is None:
        try:
            return model.companions(), NO_TOKENIZER
        except TokenizerError as error:
            return {}, f"no tokenizer is written, so only token ids can be given: {error}"
    if "tokenizer.json" not in (found := companions(tokenizer)):
        raise CheckpointError(f"{tokenizer} holds no tokenizer.json; give a folder that does")
    return found, ""


def keep_apart(source: Path, path: Path) -> None:
    """Check that writing to `path` would not overwrite the source.

    Files of a folder may be links to other places, as in a download cache.

    Raises:
      CheckpointError: the source, or a file of it, lies at or below `path`.
    """
    destination = os.path.realpath(path)
    beside = source if source.is_dir() else source.parent
    files = [file for file in beside.iterdir() if _read_with(source, file)]
    for place in map(os.path.realpath, (source, *files)):
        if destination in (place, *map(str, Path(place).parents)):
            raise CheckpointError(
                f"{path} holds the source {source}, which would be lost; choose another place"
            )


def _read_with(source: Path, file: Path) -> bool:
    """Return whether a file belongs to `source`: its folder, or its set of .gguf files."""
    if source.is_dir():
        return file.suffix != ".gguf"
    own, other = SHARD.match(source.name), SHARD.match(file.name)
    return bool(own and other and own["prefix"] == other["prefix"])


def lines(report: dict[str, Any]) -> list[str]:
    """Return the inventory as text."""
    changes = Counter(row["change"] for row in report["tensors"] if row["change"])
    found = [f"{report['role']} from {report['layout']}, as {report['dtype']}"]
    found += [f"  {note}" for note in report["notes"]]
    found.append(
        f"  {report['stored_tensors']} stored tensors: {report['used_tensors']} used,"
        f" {len(report['ignored'])} ignored, 0 left over; {report['parameters']} parameters filled"
    )
    found += [f"  {count} tensors of type {kind}" for kind, count in report["types"].items()]
    found += [f"  {count} tensors changed: {change}" for change, count in changes.items()]
    found += [f"  ignored {name}: {why}" for name, why in report["ignored"].items()]
    return found


def gguf_file(model: StoredModel) -> GgufFile | None:
    """Return the GGUF file that a model was read from, or None."""
    source = model.tensors.source
    return source if isinstance(source, GgufFile) else None
