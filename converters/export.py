"""Write models in the layouts of other engines: Hugging Face, speculators, GGUF.

The same model gives the same bytes. Output is written atomically.
"""

import itertools
import json
import math
import os
import types
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dflash_jax import families
from dflash_jax.config import AttentionConfig, DrafterConfig, TargetConfig
from dflash_jax.converters.formats.canonical import Canonical, Origin
from dflash_jax.converters.formats.gguf.writer import PlannedBlocks, write_gguf
from dflash_jax.converters.formats.safetensors import Planned, write_shards
from dflash_jax.converters.formats.source import TensorSource
from dflash_jax.converters.forms import GGUF, HUGGING_FACE, LAYOUTS, SPECULATORS
from dflash_jax.converters.gguf.export import GgufForm, as_gguf
from dflash_jax.converters.load import Progress, float_dtype, kept_as, read_as, read_blocks
from dflash_jax.converters.names import published, speculators
from dflash_jax.errors import ConfigError
from dflash_jax.utils.atomic import copy_companions, new_path

FILES = (".gguf", ".safetensors")
WHOLE = np.dtype(np.int64)  # dtype of token ids


def _silent(name: str, weights: int) -> None:
    pass


class QuantisedForm(Protocol):
    """How a library stores quantised matrices in a folder."""

    @property
    def library(self) -> str:
        """Return whose layout the tensors have, see `write_safetensors`."""
        ...

    @property
    def fields(self) -> dict[str, Any]:
        """Return what config.json says about it."""
        ...

    def check(self) -> None:
        """Check the numbers; raises ConfigError if such a form is not written."""
        ...

    def takes(self, planned: Planned) -> bool:
        """Return whether a tensor is quantised."""
        ...

    def planned(self, tensor: Planned) -> list[Planned]:
        """Return the tensors that a quantised matrix becomes, its codes first."""
        ...

    def quantise(
        self, tensors: TensorSource, name: str, dtype: np.dtype, pool: Executor
    ) -> list[np.ndarray]:
        """Return these tensors."""
        ...


@dataclass(frozen=True)
class Weights:
    """A model to write: its configuration, its canonical tensors, and accompanying files."""

    config: AttentionConfig
    tensors: TensorSource
    companions: Mapping[str, str | Path] = field(default_factory=dict)
    tokenizer: Mapping[str, Any] = field(default_factory=dict)  # and other GGUF metadata
    fields: Mapping[str, Any] = field(default_factory=dict)  # added to config.json
    shard_size: int = 0  # bytes of a safetensors file; 0 for one file
    form: QuantisedForm | None = None  # form of the matrices, if they are quantised


def export(
    weights: Weights,
    path: Path,
    *,
    layout: str,
    dtype: str,
    overwrite: bool = False,
    progress: Progress = _silent,
) -> None:
    """Write a folder (Hugging Face, speculators) or a file (GGUF) at `path`.

    Args:
      dtype: dtype of the weights; for GGUF, also one of `GGUF_TYPES`.

    Raises:
      CheckpointError: it cannot be written there.
      ConfigError: the layout cannot hold the model, or the name has the wrong ending.
    """
    writers: dict[str, Callable[[_Output], None]] = {
        HUGGING_FACE: _write_huggingface,
        SPECULATORS: _write_speculators,
    }
    if layout not in LAYOUTS:
        raise ConfigError(f"layout {layout!r} is not one of {', '.join(LAYOUTS)}")
    check_name(path, folder=layout != GGUF)
    if layout == GGUF:
        form = as_gguf(weights.config, weights.tensors, dtype, weights.tokenizer)
        write_form(form, path, overwrite=overwrite, progress=progress)
        return
    kind = float_dtype(dtype)
    listed = plan(weights, kind)
    needed = sum(x.nbytes for planned in listed for x in _parts(planned, weights.form))
    with new_path(path, overwrite=overwrite, needed=needed) as place:
        writers[layout](_Output(weights, place, dtype, kind, progress))


def check_name(path: Path, *, folder: bool) -> None:
    """Check the ending of an output's name, by which readers choose the format.

    Raises:
      ConfigError: a folder is named like a weight file, or a GGUF file is not.
    """
    if folder and path.suffix in FILES:
        raise ConfigError(f"{path} is to be a folder; give a name without {path.suffix}")
    if not folder and path.suffix != ".gguf":
        raise ConfigError(f"{path} is to be a GGUF file; give a name that ends in .gguf")


def plan(weights: Weights, dtype: np.dtype) -> list[Planned]:
    """Return every canonical tensor of the model, in the order of its name table.

    Ids are integers, and parameters in `ALWAYS_FLOAT32` are float32, whatever the dtype.
    """
    return [
        Planned(part.name, WHOLE if slot.integer else kept_as(slot, dtype), part.shape)
        for slot in families.slots(weights.config)
        for part in slot.parts
    ]


def _parts(planned: Planned, form: QuantisedForm | None) -> list[Planned]:
    """Return the tensors that are written for one, which are several if it is quantised."""
    return form.planned(planned) if form and form.takes(planned) else [planned]


@dataclass(frozen=True)
class _Output:
    weights: Weights
    place: Path
    dtype: str
    kind: np.dtype
    progress: Progress

    def write_tensors(
        self,
        rename: Callable[[str], str],
        write: Callable[[list[Planned], Any], None],
        made: Mapping[str, np.ndarray],
    ) -> None:
        """Pass the planned tensors, renamed, to a writer that reads them one by one.

        Args:
          made: tensors, by new name, that are computed instead of read.
        """
        listed = plan(self.weights, self.kind)
        tensors = self.weights.tensors
        if joined := _joined(self.weights.config):
            dtypes = {planned.name: planned.dtype for planned in listed}
            tensors = Canonical(tensors, joined, {})
            listed = [Planned(n, dtypes[x.name], tensors.shape(n)) for n, x in joined.items()]
        canonical = {rename(planned.name): planned.name for planned in listed}
        renamed = [Planned(rename(p.name), p.dtype, p.shape) for p in listed]
        renamed += [Planned(n, a.dtype, a.shape) for n, a in made.items() if n not in canonical]
        form = self.weights.form
        parts = [_parts(whole, form) for whole in renamed]
        wholes = {some[0].name: whole for some, whole in zip(parts, renamed, strict=True)}
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            beside: dict[str, np.ndarray] = {}  # what the last matrix has besides its codes

            def read(planned: Planned) -> np.ndarray:
                if planned.name in made:
                    return made[planned.name]
                if planned.name in beside:
                    return beside[planned.name]
                whole = wholes[planned.name]
                name = canonical[whole.name]
                self.progress(planned.name, math.prod(tensors.shape(name)))
                if form is None or not form.takes(whole):
                    return read_as(tensors, name, planned.dtype, pool)
                codes, *others = form.quantise(tensors, name, whole.dtype, pool)
                beside.clear()
                beside.update(zip((x.name for x in form.planned(whole)[1:]), others, strict=True))
                return codes

            write(list(itertools.chain.from_iterable(parts)), read)


def _joined(config: AttentionConfig) -> dict[str, Origin]:
    """Return the tensors of a Hugging Face folder, of families that store them otherwise."""
    stored = None
    if isinstance(config, TargetConfig):
        stored = families.family(config.model_type).hf_stored
    if stored is None:
        return {}
    parts = [part.name for slot in families.slots(config) for part in slot.parts]
    return {k: origin for name in parts for k, origin in stored(name, config).items()}


def _drafter(config: AttentionConfig, layout: str) -> DrafterConfig:
    if not isinstance(config, DrafterConfig):
        raise ConfigError(f"the layout {layout!r} is for drafters; write targets as {HUGGING_FACE}")
    return config


def write_huggingface(weights: Weights, folder: Path, dtype: str) -> None:
    """Write a Hugging Face folder in place; the caller makes that atomic."""
    _write_huggingface(_Output(weights, folder, dtype, float_dtype(dtype), _silent))


def _write_huggingface(output: _Output) -> None:
    drafter = isinstance(output.weights.config, DrafterConfig)
    fields = published.fields(output.weights.config, output.dtype)
    prefix = "" if drafter else "model."
    _write_folder(output, fields, lambda name: name if name == "lm_head.weight" else prefix + name)


def _write_speculators(output: _Output) -> None:
    config = _drafter(output.weights.config, SPECULATORS)
    fields = speculators.speculators_fields(config, output.dtype)
    made = {}
    if config.draft_vocab_size:
        chosen = np.zeros(config.vocab_size, np.bool_)
        chosen[_ids(output.weights.tensors)] = True
        made["t2d"] = chosen
    speculator = families.drafter_kinds()[config.kind].speculator
    spelt = speculator.tensors if speculator is not None else {}

    def rename(name: str) -> str:
        prefix = next((old for old in spelt if name.startswith(old)), "")
        return spelt.get(prefix, "") + name.removeprefix(prefix)

    _write_folder(output, fields, rename, made)


def _ids(tensors: TensorSource) -> np.ndarray:
    """Return the token of each row of a reduced head."""
    offsets = tensors.read("d2t").reshape(-1).astype(WHOLE)
    return offsets + np.arange(len(offsets))


def _write_folder(
    output: _Output,
    fields: dict[str, Any],
    rename: Callable[[str], str],
    made: Mapping[str, np.ndarray] = types.MappingProxyType({}),
) -> None:
    """Write weights first and config.json last, so that an incomplete folder does not load."""
    output.place.mkdir(exist_ok=True)
    copy_companions(output.weights.companions, output.place)
    most = output.weights.shard_size
    library = output.weights.form.library if output.weights.form else "pt"
    output.write_tensors(
        rename,
        lambda planned, read: write_shards(output.place, planned, read, most, library),
        made,
    )
    text = json.dumps(fields | dict(output.weights.fields), indent=2, sort_keys=True) + "\n"
    (output.place / "config.json").write_text(text, encoding="utf-8")


def write_form(
    form: GgufForm, path: Path, *, overwrite: bool = False, progress: Progress = _silent
) -> None:
    """Write a GGUF file, with one tensor in memory at a time.

    Raises:
      CheckpointError: it cannot be written there, or a tensor's values do not fit its type.
    """
    with (
        new_path(path, overwrite=overwrite, needed=form.nbytes) as place,
        ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool,
        place.open("wb") as file,
    ):

        def read(planned: PlannedBlocks) -> np.ndarray:
            name = planned.name
            dtype = planned.kind.dtype
            if dtype is None:
                counted = form.importance.get(name)
                array = read_blocks(form.tensors, name, planned.kind, pool, counted)
            else:
                array = read_as(form.tensors, name, dtype, pool)
            progress(name, math.prod(planned.shape))
            return array

        write_gguf(file, form.metadata, form.planned, read)
