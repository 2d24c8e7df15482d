"""What a target family and a kind of drafter declare, each in a file of its name."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.config.drafter import DrafterFields
from dflash_jax.config.fields import Fields
from dflash_jax.converters.formats.canonical import Origin
from dflash_jax.converters.formats.gguf.file import GgufFile
from dflash_jax.converters.formats.gguf.keys import GgufFields, Metadata
from dflash_jax.converters.formats.gguf.tensors import Shapes
from dflash_jax.converters.formats.gguf.writer import Typed
from dflash_jax.converters.formats.slots import Folder, Slot


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetGguf:
    """GGUF files of a target family.

    Attributes:
      architectures: the `general.architecture` values that are read.
      from_gguf: the fields of config.json that metadata holds; None: no file is read.
      to_gguf: the family's own metadata; None: no file is written.
      written: the architecture by `model_type`, where it is not the first of `architectures`.
      layer_names: names of tensors in a layer that differ from the usual ones.
      origin: where a file holds a canonical tensor; None: under its name in Hugging Face's form.
      stored: the stored tensors that a canonical one becomes; None: the same tensor by its name.
      computed: further tensors of files, which follow from the configuration.
      ignored: why a tensor is not needed, or None if it is unexpected.
      mrope_sections: the rotary sections of targets with several position rows.
    """

    architectures: tuple[str, ...] = ()
    from_gguf: Callable[[GgufFields, GgufFile], dict[str, Any]] | None = None
    to_gguf: Callable[[Any], Metadata] | None = None
    written: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layer_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    origin: Callable[[str, Any, Shapes], Origin | None] | None = None
    stored: Callable[[str, Any], dict[str, Origin]] | None = None
    computed: Callable[[Any], dict[str, np.ndarray]] = lambda config: {}
    ignored: Callable[[str, Any], str | None] = lambda name, config: None
    mrope_sections: Callable[[Any], Typed] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A target architecture.

    Attributes:
      config: the class of its configurations.
      from_hf: makes a configuration from the fields of a config.json.
      model_types: its `model_type` values, of text models and of files that wrap one.
      defaults: by `model_type`, what transformers takes for absent fields. Sizes that decide
        the shape of most weights have none: files must have them.
      optional_window: whether `sliding_window` counts only with `use_sliding_window`.
      net: the module with `build(config)`, its network, by name, or that function itself.
      slots: its parameters, and the canonical tensors that fill them.
      folder: how Hugging Face folders differ from the canonical tensors.
      to_hf: the config.json of an export, given the dtype; None: targets are not exported.
      mlx_fields: further fields of an export for MLX; None: there are none.
      hf_stored: the tensors of such a folder that a canonical one becomes; None: the same tensor.
      gguf: its GGUF files; None: there are none.
    """

    config: type[TargetConfig]
    from_hf: Callable[[Fields], TargetConfig]
    model_types: tuple[str, ...]
    defaults: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    optional_window: bool = False
    net: str | Callable[[Any], Any] = "dflash_jax.families.llama_net"
    slots: Callable[[Any], list[Slot]]
    folder: Callable[[Any], Folder] = lambda config: Folder()
    to_hf: Callable[[Any, str], dict[str, Any]] | None = None
    mlx_fields: Callable[[Any], dict[str, Any]] | None = None
    hf_stored: Callable[[str, Any], dict[str, Origin]] | None = None
    gguf: TargetGguf | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterGguf:
    """GGUF files of a kind of drafter.

    Attributes:
      names: the spellings of tensors; exactly one must be present, exports write the first.
      layer_names: the spellings of tensors in a layer.
      marks: tensors any of which shows that a file holds this kind.
      flat: tensors that some writers store without their axes of length 1.
      from_gguf: the kind's own fields of `dflash_config` that metadata holds.
      to_gguf: the kind's own metadata.
    """

    names: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    layer_names: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    marks: tuple[str, ...] = ()
    flat: tuple[str, ...] = ()
    from_gguf: Callable[[GgufFields, Shapes], dict[str, Any]]
    to_gguf: Callable[[Any], dict[str, Typed]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculator:
    """A kind of drafter in the speculators layout.

    Attributes:
      name: the class that the layout names.
      fields: its names of fields that differ.
      tensors: its prefixes of tensors that differ.
    """

    name: str
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterKind:
    """A kind of drafter.

    Attributes:
      config: the class of its configurations, whose `kind` is the file's name.
      from_hf: makes a configuration from the fields of a config.json.
      architectures: its `architectures` values; exports write the first.
      projector_types: its `projector_type` values, which SpecForge and ModelOpt write.
      own_tables: whether it may have its own embedding and head over the whole vocabulary.
      recipe_fields: makes the kind's own fields of a configuration from a training recipe.
      second_loss: whether its training objective has a loss of a second head.
      wants_distribution: whether its objective needs the target's distributions, by the recipe.
      reads_embeddings: whether its objective needs the embeddings of tokens before drafted places.
      net: the module with `build(config)`, its network, by name, or that function itself.
      slots: its parameters, and the canonical tensors that fill them.
      fields: the names of its own fields of `dflash_config`.
      to_hf: these fields of a configuration.
      speculator: its form in the speculators layout; None: there is none.
      gguf: its GGUF files; None: there are none.
    """

    config: type[DrafterConfig]
    from_hf: Callable[[DrafterFields], DrafterConfig]
    architectures: tuple[str, ...]
    projector_types: tuple[str, ...] = ()
    own_tables: bool = False
    recipe_fields: Callable[[Any], Mapping[str, Any]] = lambda recipe: {}
    second_loss: bool = False
    wants_distribution: Callable[[Any], bool] = lambda recipe: False
    reads_embeddings: bool = False
    net: str | Callable[[Any], Any]
    slots: Callable[[Any], list[Slot]]
    fields: tuple[str, ...] = ()
    to_hf: Callable[[Any], dict[str, Any]] = lambda config: {}
    speculator: Speculator | None = None
    gguf: DrafterGguf | None = None
