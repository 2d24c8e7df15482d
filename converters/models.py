"""Open any model on disk: its configuration, and its tensors under canonical names."""

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dflash_jax import families
from dflash_jax.checkpoint import is_checkpoint, open_checkpoint
from dflash_jax.config import DrafterConfig, TargetConfig, is_gguf, read_json, wrong_role
from dflash_jax.config.base import id_tuple
from dflash_jax.config.fields import has_file
from dflash_jax.converters import adapter, orbax_folder
from dflash_jax.converters.formats.canonical import Canonical, Origin, check
from dflash_jax.converters.formats.gguf.file import GgufFile, open_gguf
from dflash_jax.converters.gguf import drafter, target
from dflash_jax.converters.gguf.tokenizer import stop_ids, tokenizer_files
from dflash_jax.converters.hf import (
    ADAPTER,
    ADAPTER_ADVICE,
    ShardedSafetensors,
    ignored_index,
    open_directory,
)
from dflash_jax.converters.hf_quantised import dequantised, quantization, unused_scales
from dflash_jax.converters.load import Params, Progress, lazily, load
from dflash_jax.converters.names import flax, huggingface, speculators
from dflash_jax.converters.packed import stored_specs, unpacked_kinds
from dflash_jax.converters.taps import AUTO
from dflash_jax.converters.tree_source import CheckpointSource
from dflash_jax.errors import CheckpointError
from dflash_jax.families.configs import drafter_config, target_config
from dflash_jax.model_files import FILES, files_in
from dflash_jax.quant.layouts import Spec

COMPANIONS = (*FILES, "generation_config.json")
Role = Literal["target", "drafter"]


@dataclass(frozen=True)
class StoredModel:
    """A model whose configuration was read; its tensors are read on demand."""

    path: Path
    role: Role
    layout: str  # such as "GGUF, architecture llama"
    config: TargetConfig | DrafterConfig
    tensors: Canonical
    notes: tuple[str, ...]
    warning: str = ""  # about files that may not be the ones that were meant

    def check(self) -> None:
        """Check that the tensors are exactly those of the configuration.

        Raises:
          CheckpointError: they are not.
        """
        with self._explained():
            check(families.slots(self.config), self.tensors, where=str(self.path))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Add the warning to errors about the tensors."""
        try:
            yield
        except CheckpointError as error:
            if not self.warning:
                raise
            raise CheckpointError(f"{error}\n{self.warning}") from error

    def load(
        self,
        dtype: str,
        progress: Progress = lambda name, weights: None,
        *,
        specs: Mapping[str, Spec] | None = None,
        native: bool = False,
    ) -> Params:
        """Return the parameter tree as NumPy arrays of `dtype`.

        Args:
          specs: how parameters are packed, by path.
          native: packed parameters are in strips, for the native kernels.

        Raises:
          CheckpointError: the tensors do not fit the configuration, or hold non-finite values.
        """
        source = self.tensors.source
        origins = self.tensors.origins.values()
        if isinstance(source, CheckpointSource) and not specs and all(o.whole for o in origins):
            return source.checkpoint.load(dtype)
        with self._explained():
            return load(
                self.tensors,
                self.config,
                dtype,
                where=str(self.path),
                specs=specs,
                native=native,
                progress=progress,
            )

    def lazily(self, dtype: str, progress: Progress = lambda name, weights: None) -> Params:
        """Return the parameter tree as arrays of `dtype` that are read when they are needed.

        Raises:
          CheckpointError: the tensors do not fit the configuration.
        """
        with self._explained():
            return lazily(self.tensors, self.config, dtype, where=str(self.path), progress=progress)

    def stored(self, paths: Collection[str]) -> dict[str, Spec]:
        """Return how the file packs parameters, by path, of those `paths` that can be used so."""
        return stored_specs(self.tensors, self.config, paths)

    def unpacked_kinds(self, paths: Collection[str], specs: Mapping[str, Spec]) -> frozenset[str]:
        """Return the quantised types of the parameters at `paths` that `specs` do not keep."""
        return unpacked_kinds(self.tensors, self.config, paths, specs)

    def companions(self) -> dict[str, str | Path]:
        """Return tokenizer and generation files by name, as rebuilt texts or existing paths.

        Raises:
          TokenizerError: a file's tokenizer cannot be rebuilt.
          CheckpointError: see `companions`.
        """
        if isinstance(self.tensors.source, GgufFile):
            return dict(tokenizer_files(self.tensors.source.metadata))
        return companions(self.path)


def companions(folder: Path) -> dict[str, str | Path]:
    """Return tokenizer and generation files of a folder, by name.

    Raises:
      CheckpointError: one of them is no file, or a link to another file outside of the folder.
    """
    return files_in(folder, COMPANIONS)


def open_model(
    path: str | Path, *, role: Role | None = None, taps: str = AUTO, lora: Path | None = None
) -> StoredModel:
    """Open a Hugging Face or speculators folder, a checkpoint or a .gguf file.

    Checkpoints are those of dflash_jax, and those of Flax libraries that orbax wrote.

    Args:
      role: the expected role; None accepts both.
      taps: the numbering of a drafter's target layers, for files that leave it open.
      lora: a PEFT folder, whose adapter is added to the weights.

    Raises:
      ConfigError: the model or adapter is not supported, or the model has another role.
      CheckpointError: its files are missing or damaged.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} has no configuration; give the folder it lies in")
    if not path.is_dir() and not is_gguf(path):
        raise no_model(path)
    if is_checkpoint(path):
        model = _from_checkpoint(path)
    elif is_gguf(path):
        model = of_gguf(open_gguf(path), taps)
    else:
        model = replace(_from_folder(path, taps), warning=ignored_index(path))
    if role is not None and role != model.role:
        raise wrong_role(path, role)
    if lora is None:
        return model
    tensors, note = adapter.merged(model.tensors, lora)
    return replace(model, tensors=tensors, notes=(*model.notes, note))


def no_model(path: Path) -> CheckpointError:
    """Return the error that a path leads to no folder and no weight file."""
    state = "is no model" if os.path.lexists(path) else "does not exist"
    return CheckpointError(f"{path} {state}; give a folder, a checkpoint or a .gguf file")


def of_gguf(source: GgufFile, taps: str = AUTO) -> StoredModel:
    """Return the model of an open GGUF file.

    Raises:
      ConfigError: it is not supported.
    """
    architecture = source.metadata.get("general.architecture")
    layout = f"GGUF, architecture {architecture}"
    if architecture in drafter.DRAFTER_ARCHITECTURES:
        config, dialect = drafter.read_config(source, taps)
        tensors = drafter.canonical(source, config)
        notes = (dialect.taps.line(), *dialect.notes, *source.notes)
        return StoredModel(
            source.path, "drafter", f"{layout} ({dialect.name})", config, tensors, notes
        )
    config = target.read_config(source, stop_ids(source.metadata))
    tensors = target.canonical(source, config)
    return StoredModel(source.path, "target", layout, config, tensors, source.notes)


def _from_checkpoint(path: Path) -> StoredModel:
    source = CheckpointSource(open_checkpoint(path))
    config = source.checkpoint.config
    role: Role = "drafter" if isinstance(config, DrafterConfig) else "target"
    if not isinstance(config, TargetConfig | DrafterConfig):
        raise CheckpointError(f"{path} holds a {type(config).__name__}; expected a model")
    tensors = Canonical(source, {name: Origin(name) for name in source.names()}, {})
    return StoredModel(path, role, "our checkpoint (orbax)", config, tensors, ())


def _from_folder(path: Path, taps: str) -> StoredModel:
    where = str(path / "config.json")
    if arrays := orbax_folder.find(path):
        return _from_orbax(path, arrays)
    if has_file(path / ADAPTER) and not has_file(path / "config.json"):
        raise CheckpointError(f"{path} holds no model; {ADAPTER_ADVICE}")
    fields = read_json(path / "config.json")
    quantised = quantization(fields, path)
    source = open_directory(path)
    notes = source.notes if isinstance(source, ShardedSafetensors) else ()
    if has_file(path / ADAPTER):
        notes = (*notes, f"the adapter beside the weights ({ADAPTER}) is not applied")
    if quantised is not None and (scales := unused_scales(source)):
        notes = (*notes, f"{len(scales)} scales of caches and activations are not used")
    source = dequantised(source, quantised, where=where)
    if speculators.is_speculators(fields):
        fields, read = speculators.published_fields(fields, where=where, choice=taps)
        config = huggingface.owned(source, drafter_config(fields, where))
        tensors = huggingface.drafter(source, config)
        return StoredModel(path, "drafter", "speculators", config, tensors, (read.line(), *notes))
    if "dflash_config" in fields or "target_layer_ids" in fields:
        config = huggingface.owned(source, drafter_config(fields, where))
        line = f"taps: {list(config.target_layer_ids)}, zero-based by definition of this layout"
        tensors = huggingface.drafter(source, config)
        return StoredModel(path, "drafter", "Hugging Face (z-lab)", config, tensors, (line, *notes))
    fields["eos_token_id"] = _stop_ids(fields, path)
    config = target_config(fields, where)
    tensors = huggingface.target(source, tied=config.tie_embeddings, folder=families.folder(config))
    if config.tie_embeddings and "lm_head.weight" in tensors.names():
        config = replace(config, tie_embeddings=False)
        notes = (*notes, "head: the file's own, though tie_word_embeddings is true: they differ")
    return StoredModel(path, "target", "Hugging Face", config, tensors, notes)


def _from_orbax(path: Path, folder: Path) -> StoredModel:
    source = orbax_folder.OrbaxSource(path, folder)
    if not has_file(path / "config.json"):
        raise CheckpointError(
            f"{path} holds a checkpoint of {source.written_by.name} without its configuration; put"
            " the model's config.json, as Hugging Face spells it, and its tokenizer's files into it"
        )
    fields = read_json(path / "config.json")
    fields["eos_token_id"] = _stop_ids(fields, path)
    config = target_config(fields, str(path / "config.json"))
    tensors = flax.target(source, config, where=str(path))
    assert tensors is not None  # the source has a library
    steps = orbax_folder.steps(path)
    notes = (f"step {steps[-1]}, the last of {len(steps)}",) if len(steps) > 1 else ()
    layout = f"{source.written_by.name} (orbax)"
    return StoredModel(path, "target", layout, config, tensors, notes)


def _stop_ids(fields: dict[str, Any], path: Path) -> list[int]:
    """Return end tokens of config.json, then those of generation_config.json."""
    generation = path / "generation_config.json"
    both = [fields, read_json(generation) if has_file(generation) else {}]
    return list(dict.fromkeys(i for f in both for i in id_tuple(f.get("eos_token_id"))))
