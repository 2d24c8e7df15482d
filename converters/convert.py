"""Convert any model to plain weights, a checkpoint or GGUF, with a report on every tensor."""

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax import families
from dflash_jax.checkpoint import write
from dflash_jax.config import TargetConfig, is_gguf
from dflash_jax.converters import kept_metadata, orbax_folder, target_tokenizer
from dflash_jax.converters.export import (
    QuantisedForm,
    Weights,
    check_name,
    export,
    plan,
    write_form,
)
from dflash_jax.converters.formats.gguf.file import SHARD
from dflash_jax.converters.formats.gguf.writer import Typed
from dflash_jax.converters.formats.quants.types import BY_NAME
from dflash_jax.converters.formats.source import trim_mapped_memory
from dflash_jax.converters.forms import (
    AUTO,
    FLAX,
    GGUF,
    GPTQ,
    HUGGING_FACE,
    MLX,
    ORBAX,
    SAFETENSORS,
)
from dflash_jax.converters.gguf.export import as_gguf
from dflash_jax.converters.gguf.importance import Importance, read_importance
from dflash_jax.converters.gguf.mixtures import Choice, by_reason
from dflash_jax.converters.gptq import GptqForm
from dflash_jax.converters.load import Progress, float_dtype, read_into
from dflash_jax.converters.mlx import MlxForm
from dflash_jax.converters.models import StoredModel, companions, open_model
from dflash_jax.converters.names import flax, published
from dflash_jax.errors import CheckpointError, ConfigError, TokenizerError
from dflash_jax.families import family_of
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.utils.atomic import copy_companions, new_path

# Families whose matrices are quantised: their layers have linear modules only, with the names of
# Hugging Face's folders in mlx-lm, too.
DENSE_FAMILIES = str.split("""
    llama qwen2 qwen3 mistral gemma3 olmo2 granite smollm3 glm4
""")
# Families whose GGUF files have no place for sliding windows.
WITHOUT_WINDOWS = str.split("""
    glm4 granite llama ministral3 mistral olmo2 qwen2 qwen3 qwen3_moe smollm3
""")
FORMS: Mapping[str, type[MlxForm | GptqForm]] = {MLX: MlxForm, GPTQ: GptqForm}
REPORT = "conversion.json"
NO_TOKENIZER = (
    "there is no tokenizer.json: what is written takes token ids only (--tokenizer DIR brings one)"
)
UNWINDOWED = "MaxText runs Mistral without its sliding window, so its logits differ past that"
NO_GGUF_TOKENIZER = "no tokenizer was written, without which llama.cpp does not load the file"


@dataclasses.dataclass(frozen=True)
class GgufOptions:
    """Choices for a GGUF file besides its type.

    Attributes:
      output_type, embedding_type: types of head and embedding, of `TENSOR_TYPES`.
      imatrix: an importance matrix, which steers errors of quantised matrices.
    """

    output_type: str | None = None
    embedding_type: str | None = None
    imatrix: Path | None = None


@dataclasses.dataclass(frozen=True)
class Details:
    """Choices for what is written besides the layout and the type of weights.

    Attributes:
      gguf: further choices for a GGUF file.
      shard_size: most bytes of a safetensors file; 0 for one file.
      metadata: GGUF metadata that replace the model's own, see `kept_metadata.labels`.
      form: how matrices are quantised for one of `FORMS`.
    """

    gguf: GgufOptions = GgufOptions()
    shard_size: int = 0
    metadata: Mapping[str, Typed] = dataclasses.field(default_factory=dict)
    form: QuantisedForm | None = None


def chosen_dtype(model: StoredModel, dtype: str, *, gguf: bool = False) -> str:
    """Return the requested dtype or GGUF type; "auto" is that of the published weights.

    Args:
      gguf: whether types of GGUF matrices are known, too.

    Raises:
      ConfigError: the dtype is unknown.
    """
    name = model.config.dtype if dtype == AUTO else dtype
    if gguf:
        Choice(name).check()
    else:
        float_dtype(name)
    return name


def quantised_form(to: str, *, bits: int | None, group: int | None) -> MlxForm | GptqForm:
    """Return how matrices are quantised for one of `FORMS`.

    Args:
      bits, group: bits of a code and weights of a group; None is the form's default.
    """
    form = FORMS[to]()
    if bits is not None:
        form = dataclasses.replace(form, bits=bits)
    if group is not None:
        form = dataclasses.replace(form, group=group)
    return form


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
        "notes": [*filter(None, [model.warning]), *model.notes],
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
    details: Details = Details(),
    progress: Progress = lambda name, weights: None,
) -> dict[str, Any]:
    """Write the model and return its inventory, which is also stored with it.

    Args:
      to: "safetensors", a Hugging Face folder; one of `FORMS`, one with quantised matrices;
        "gguf", a file; "orbax", a checkpoint of dflash_jax; or one of `FLAX`, a checkpoint of that
        library with the config.json that `open_model` needs.
      dtype: dtype of the weights; for GGUF, also one of `GGUF_TYPES`.
      tokenizer: a folder, or for GGUF also a .gguf file, whose tokenizer is copied instead of the
        model's. A tokenizer that is missing or has no form there is noted in the inventory.

    Raises:
      CheckpointError: the weights do not fit their configuration, or cannot be written there.
      ConfigError: the dtype is unknown, this layout cannot hold the model, or the tokenizer is
        that of another model.
      TokenizerError: the tokenizer that was given has no form in GGUF.
    """
    for source in filter(None, (model.path, tokenizer)):
        keep_apart(source, path)
    check_name(path, folder=to != GGUF)
    check_shard_size(details.shard_size, to)
    kind = chosen_dtype(model, dtype, gguf=to == GGUF)
    choice = Choice(kind, details.gguf.output_type, details.gguf.embedding_type)
    importance = _importance(choice, details.gguf.imatrix, to)
    notes = _check_flax(model, to) if to in FLAX else []
    form = None
    if to in FORMS:
        form = details.form or FORMS[to]()
        _check_form(model, form, to)
    report = inventory(model, kind)
    report["notes"] += notes
    if to == GGUF:
        metadata, notes = gguf_metadata(model, tokenizer, details.metadata)
        file = as_gguf(model.config, model.tensors, choice, metadata, importance)
        report["notes"] += notes + _quantised_twice(report["types"], choice)
        report["written"] = dict(Counter(tensor.kind.name for tensor in file.planned))
        report["fallbacks"] = dict(file.fallbacks)
        write_form(file, path, overwrite=overwrite, progress=progress)
        return report
    files, missing = _companions(model, tokenizer)
    if model.role == "target" and "tokenizer.json" not in files:
        report["notes"].append(missing)
    files |= kept_metadata.beside(model, files, details.metadata)
    files |= {REPORT: json.dumps(report, indent=1) + "\n"}
    if to in (ORBAX, *FLAX):
        _write_checkpoint(model, path, to, kind, files, overwrite, progress)
        return report
    weights = Weights(
        model.config,
        model.tensors,
        files,
        fields=_form_fields(model, form, to) if form else {},
        shard_size=details.shard_size,
        form=form,
    )
    export(weights, path, layout=HUGGING_FACE, dtype=kind, overwrite=overwrite, progress=progress)
    return report


def _quantised_twice(kinds: Iterable[str], choice: Choice) -> list[str]:
    """Return a note if matrices that are in blocks of a file are quantised again."""
    coded = [kind for kind in kinds if kind in BY_NAME and BY_NAME[kind].dtype is None]
    if not coded or not choice.quantised:
        return []
    return [
        f"the weights were in {', '.join(coded)} before, and the errors of both types add up;"
        " unquantised ones give better files"
    ]


def _importance(choice: Choice, imatrix: Path | None, to: str) -> Importance | None:
    """Return the importance matrix in a file, if one is to be used.

    Raises:
      CheckpointError: the file is none.
      ConfigError: what is written has no use for the choices.
    """
    options: dict[str, str | Path | None] = {
        "--output-type": choice.head,
        "--embedding-type": choice.embedding,
        "--imatrix": imatrix,
    }
    for option, value in options.items():
        if value is not None and to != GGUF:
            raise ConfigError(
                f"{option} {value} is of no use for {to}; leave it out, or write a .gguf file"
            )
    if imatrix is None:
        return None
    if not choice.quantised:
        raise ConfigError(
            f"--imatrix {imatrix} is of no use for {choice.name}, which is not quantised; leave it"
            " out, or choose a quantised --type"
        )
    return read_importance(imatrix)


def _write_checkpoint(
    model: StoredModel,
    path: Path,
    to: str,
    kind: str,
    files: dict[str, str | Path],
    overwrite: bool,
    progress: Progress,
) -> None:
    """Write a checkpoint of ours or of another library, with the files beside it."""
    config = dataclasses.replace(model.config, dtype=kind)
    weights = Weights(model.config, model.tensors, files)
    needed = sum(planned.nbytes for planned in plan(weights, float_dtype(kind)))
    with new_path(path, overwrite=overwrite, needed=needed) as at:
        if to == ORBAX:
            write(at, config, model.lazily(kind, progress), files)
        else:
            _write_flax(weights, at, to, kind, progress)


def limited(model: StoredModel, length: int) -> StoredModel:
    """Return a target for contexts of at most `length` tokens.

    Windows of families whose GGUF files have no place for them are opened, since they cut nothing
    then. Those of others stay: they may decide more than what a layer sees.

    Raises:
      ConfigError: it is a drafter, has a shorter context, or such a window is shorter than that.
    """
    config = model.config
    if not isinstance(config, TargetConfig):
        raise ConfigError(f"{model.path} is a drafter; --max-context is for targets")
    if not 0 < length <= config.max_length:
        raise ConfigError(
            f"--max-context {length}: {model.path} has contexts of 1 to {config.max_length} tokens"
        )
    config = dataclasses.replace(config, max_length=length)
    if family_of(config.model_type) not in WITHOUT_WINDOWS:
        return dataclasses.replace(model, config=config)
    narrow = min((window for window in config.windows if window is not None), default=length)
    if narrow < length:
        raise ConfigError(
            f"--max-context {length}: {model.path} has layers that see {narrow} tokens, so contexts"
            f" above that need its windows; give at most {narrow}"
        )
    open_windows = (None,) * len(config.windows)
    return dataclasses.replace(model, config=dataclasses.replace(config, windows=open_windows))


def _check_form(model: StoredModel, form: QuantisedForm, to: str) -> None:
    """Check that a model's matrices can be quantised so.

    Raises:
      ConfigError: such a form is not written, or the family has other modules or names.
    """
    family = family_of(model.config.model_type) if isinstance(model.config, TargetConfig) else ""
    if family not in DENSE_FAMILIES:
        others = "mlx_lm.convert reads" if to == MLX else "GPTQ's tools read"
        raise ConfigError(
            f"{model.path} is {f'a {family} target' if family else 'a drafter'}; written for {to}"
            f" are {', '.join(DENSE_FAMILIES)}. {others} the Hugging Face folder"
        )
    form.check()


def _form_fields(model: StoredModel, form: QuantisedForm, to: str) -> dict[str, Any]:
    """Return what readers of quantised matrices look for besides the usual fields."""
    assert isinstance(model.config, TargetConfig), "checked before"
    if to != MLX:
        return form.fields
    own = families.family(model.config.model_type).mlx_fields
    fields = form.fields | {"mlp_bias": model.config.mlp_bias}
    return fields if own is None else fields | own(model.config)


def check_shard_size(shard_size: int, to: str) -> None:
    """Check that a layout can have its weights in files of some size.

    Raises:
      ConfigError: it cannot.
    """
    if shard_size and to == GGUF:
        raise ConfigError("--shard-size is for safetensors; `split` divides a GGUF file")
    if shard_size and to in (ORBAX, *FLAX):
        raise ConfigError(f"--shard-size is for safetensors; orbax divides {to} as it does")


def _check_flax(model: StoredModel, naming: str) -> list[str]:
    """Check that a library has such a model and names for its parameters; return notes.

    Raises:
      CheckpointError, ConfigError: it does not.
    """
    if not isinstance(model.config, TargetConfig):
        raise ConfigError(
            f"{model.path} is a drafter, and {naming} a layout of targets; write it as"
            f" {SAFETENSORS} or {ORBAX}"
        )
    flax.places(model.config, naming)
    windowed = model.config.model_type == "mistral" and any(model.config.windows)
    return [UNWINDOWED] if windowed else []


def _write_flax(weights: Weights, place: Path, naming: str, dtype: str, progress: Progress) -> None:
    """Write a checkpoint of another library, its configuration last."""
    assert isinstance(weights.config, TargetConfig)
    fields = published.fields(weights.config, dtype)
    kinds = {planned.name: planned.dtype for planned in plan(weights, float_dtype(dtype))}
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:

        def fill(name: str, view: np.ndarray, change: Callable[[np.ndarray], np.ndarray]) -> None:
            read_into(weights.tensors, name, view, pool, change)
            trim_mapped_memory(weights.tensors)
            progress(name, view.size)

        place.mkdir()
        copy_companions(weights.companions, place)
        arrays = flax.arrays_of(fill, kinds, weights.config, naming)
        orbax_folder.write(place, naming, arrays)
    text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
    (place / "config.json").write_text(text, encoding="utf-8")


def _companions(model: StoredModel, tokenizer: Path | None) -> tuple[dict[str, str | Path], str]:
    """Return tokenizer and generation files, and why there is no tokenizer if there is none."""
    if tokenizer is None:
        try:
            return model.companions(), NO_TOKENIZER
        except TokenizerError as error:
            return {}, f"no tokenizer is written, so only token ids can be given: {error}"
    files = companions(tokenizer)
    if "tokenizer.json" not in files:
        raise CheckpointError(f"{tokenizer} holds no tokenizer.json; give a folder that does")
    made = Tokenizer.from_files(files, where=str(tokenizer))
    target_tokenizer.check_belongs(made, model, where=tokenizer)
    return files, ""


def gguf_metadata(
    model: StoredModel, tokenizer: Path | None, labels: Mapping[str, Typed]
) -> tuple[dict[str, Any], list[str]]:
    """Return the metadata that a GGUF file keeps, and notes if there is no tokenizer.

    Args:
      tokenizer: where the tokenizer is copied from, see `_gguf_tokenizer`.
      labels: keys that replace the model's own.

    Raises:
      CheckpointError, ConfigError, TokenizerError: see `_gguf_tokenizer`.
    """
    own, notes = _gguf_tokenizer(model, tokenizer)
    return {**kept_metadata.of_model(model), **own, **labels}, notes


def _gguf_tokenizer(model: StoredModel, tokenizer: Path | None) -> tuple[dict[str, Any], list[str]]:
    """Return the tokenizer's metadata for a GGUF file, and notes if there is none.

    Args:
      tokenizer: where it is copied from: for a drafter, its target; for a target, any folder or
        .gguf file with one. None is the target's own.

    Raises:
      CheckpointError, ConfigError: `tokenizer` has none, or belongs to another model.
      TokenizerError: that tokenizer has no form in GGUF.
    """
    config = model.config
    if not isinstance(config, TargetConfig):
        if tokenizer is None:
            return {}, [f"{NO_GGUF_TOKENIZER}: --tokenizer TARGET copies the target's"]
        return target_tokenizer.for_drafter(config, open_model(tokenizer, role="target")), []
    if tokenizer is not None:
        metadata = target_tokenizer.of_path(tokenizer, config)
        made = Tokenizer.from_files(companions(tokenizer), where=str(tokenizer))
        target_tokenizer.check_belongs(made, model, where=tokenizer)
        return metadata, []
    try:
        metadata = target_tokenizer.of_model(model)
    except TokenizerError as error:
        return {}, [f"{NO_GGUF_TOKENIZER}: {error}"]
    if "tokenizer.ggml.model" in metadata:
        return metadata, []
    return metadata, [f"{NO_GGUF_TOKENIZER} (--tokenizer DIR brings one)"]


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
        return not is_gguf(file)
    own = SHARD.fullmatch(source.name)
    other = SHARD.fullmatch(file.name)
    return own is not None and other is not None and own["prefix"] == other["prefix"]


def lines(report: dict[str, Any]) -> list[str]:
    """Return the inventory as text."""
    changes = Counter(row["change"] for row in report["tensors"] if row["change"])
    listed = [f"{report['role']} from {report['layout']}, as {report['dtype']}"]
    listed += [f"  {note}" for note in report["notes"]]
    listed.append(
        f"  {report['stored_tensors']} stored tensors: {report['used_tensors']} used,"
        f" {len(report['ignored'])} ignored, 0 left over; {report['parameters']} parameters filled"
    )
    listed += [f"  {count} tensors of type {kind}" for kind, count in report["types"].items()]
    listed += [f"  {count} tensors changed: {change}" for change, count in changes.items()]
    written = report.get("written", {})
    listed += [f"  {count} tensors written as {kind}" for kind, count in written.items()]
    listed += [f"  {line}" for line in by_reason(report.get("fallbacks", {}))]
    listed += [f"  ignored {name}: {why}" for name, why in report["ignored"].items()]
    return listed
