"""Canonical names for the parameters of MaxText, Tunix and Gemma's Flax library.

A library is a table of paths, and of how an array there is turned into the canonical tensor. What
the tables say was read from maxtext 0.2.3, google-tunix 0.1.7 and gemma 3.3.0.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from dflash_jax import families
from dflash_jax.checkpoint import LazyArray
from dflash_jax.config import TargetConfig
from dflash_jax.converters.formats.canonical import MOST_LINES, Canonical, Origin
from dflash_jax.converters.formats.slots import TensorPart
from dflash_jax.converters.formats.source import Rows, TensorSource, rows_of_view
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.families import family_of

TABLE = "embed_tokens.weight"
IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")
PROJECTED = re.compile(r"\.self_attn\.([qkvo])_proj\.(weight|bias)")
CYCLE = 6  # layers of Gemma 3 that MaxText scans as one
Shape = tuple[int, ...]
# Puts a canonical tensor, by name, into its view of an array, with its values changed.
Fill = Callable[[str, np.ndarray, Callable[[np.ndarray], np.ndarray]], None]


@dataclass(frozen=True)
class Place:
    """Where a library holds a canonical tensor, and in which form.

    Attributes:
      axes: the array's axes in canonical order, where those of heads and of their width are two.
      stack: index and number of the layers in it, along its second axis.
      part: index and number of the tensors in it, along its first axis.
      pairs: the two halves of a head alternate.
      times, plus: the canonical values are the stored ones times this, plus that.
      change: the conversion of values in words.
    """

    path: str
    axes: Shape
    stack: tuple[int, int] | None = None
    part: tuple[int, int] | None = None
    pairs: bool = False
    times: float = 1.0
    plus: float = 0.0
    change: str = ""

    @property
    def converts(self) -> bool:
        """Whether canonical values differ from stored ones."""
        return (self.times, self.plus) != (1.0, 0.0)

    def stored_shape(self, form: Shape) -> Shape:
        """Return the shape of the stored array.

        Args:
          form: the canonical shape, with heads and their width apart.
        """
        shape = tuple(form[self.axes.index(axis)] for axis in range(len(form)))
        if self.stack:
            shape = (shape[0], self.stack[1], *shape[1:])
        return (self.part[1], *shape) if self.part else shape

    def view(self, stored: np.ndarray) -> np.ndarray:
        """Return the tensor in a stored array; flattened it has the canonical order."""
        if self.part:
            stored = stored[self.part[0]]
        if self.stack:
            stored = stored[:, self.stack[0]]
        tensor = stored.transpose(self.axes)
        if self.pairs:
            heads, width, *rest = tensor.shape
            tensor = tensor.reshape(heads, width // 2, 2, *rest).swapaxes(1, 2)
        return tensor

    def values(self, stored: np.ndarray) -> np.ndarray:
        """Return canonical values of stored ones."""
        return stored * np.float32(self.times) + np.float32(self.plus)

    def stored(self, values: np.ndarray) -> np.ndarray:
        """Return stored values of canonical ones; the inverse of `values`."""
        if not self.converts:
            return values
        return (values.astype(np.float32) - np.float32(self.plus)) / np.float32(self.times)


@dataclass(frozen=True)
class FlaxLibrary:
    """The naming of a library.

    Attributes:
      families: the target families that it shares with us.
      mark: the end of a path that only its trees have; what precedes it is their prefix.
      place: returns the place of a canonical tensor, or None if the library has none.
      scanned: the beginning of paths of stacked layers, if it has them.
      respelt: a pattern of paths in older checkpoints, and the usual spelling.
      ignored: reasons, by a pattern of paths.
    """

    name: str
    families: tuple[str, ...]
    mark: str
    place: Callable[[str, TargetConfig, bool], Place | None]
    scanned: str = "-"
    respelt: tuple[str, str] = ("$^", "")
    ignored: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Viewed(Origin):
    """A canonical tensor that is a view of a stored array."""

    place: Place
    form: Shape  # the canonical shape

    @property
    def whole(self) -> bool:
        """False: its axes may be exchanged."""
        return False

    def shape(self, source: TensorSource) -> Shape:
        """Return the canonical shape."""
        return self.form

    def read_rows(self, source: TensorSource, rows: Rows) -> np.ndarray:
        """Return chosen rows as [rows, last axis]."""
        chosen = rows_of_view(self.place.view(source.read(self.name)), self.form, rows)
        return chosen if self.values is None else self.values(chosen.astype(self.dtype(source)))


def find_library(paths: Iterable[str]) -> tuple[FlaxLibrary, str] | None:
    """Return the library whose parameters have these paths, and their common prefix.

    Copies in the state of an optimizer have the same paths below a longer prefix.
    """
    matches = [
        (path.removesuffix(library.mark), library)
        for path in paths
        for library in LIBRARIES.values()
        if path == library.mark or path.endswith(f"/{library.mark}")
    ]
    if not matches:
        return None
    prefix, library = min(matches, key=lambda item: len(item[0]))
    return library, prefix


def target(source: TensorSource, config: TargetConfig, *, where: str) -> Canonical | None:
    """Return a target's tensors in a tree of one of the libraries; None if it is of another.

    Raises:
      CheckpointError: an array has another shape or depth than the configuration asks for.
      ConfigError: the library has no such family.
    """
    known = find_library(source.names())
    if known is None:
        return None
    library, prefix = known
    _check_family(library, config)
    stored = {
        re.sub(*library.respelt, name.removeprefix(prefix)): name
        for name in source.names()
        if name.startswith(prefix)
    }
    scanned = any(path.startswith(library.scanned) for path in stored)
    origins: dict[str, Origin] = {}
    used = set()
    lines = []
    for name, part in tensor_parts(config).items():
        place = library.place(name, config, scanned)
        if place is None:
            continue
        if place.path not in stored:
            lines.append(f"missing: {prefix}{place.path}, which is {name}")
            continue
        used.add(place.path)
        path = stored[place.path]
        expected = place.stored_shape(with_heads(part, config))
        shape = source.shape(path)
        if shape != expected:
            stack = f", {place.stack[1]} layers of them on axis 1" if place.stack else ""
            lines.append(f"wrong shape: {path} is {list(shape)}, expected {list(expected)}{stack}")
        origins[name] = Viewed(
            path,
            change=place.change,
            values=place.values if place.converts else None,
            offset=abs(place.plus),
            place=place,
            form=part.shape,
        )
    if lines:
        lines = list(dict.fromkeys(lines))  # stacked layers repeat them
        shown = lines[:MOST_LINES]
        if len(lines) > MOST_LINES:
            shown.append(f"... and {len(lines) - MOST_LINES} more")
        raise CheckpointError(
            f"{where} does not match its configuration ({library.name}, {len(lines)} differences);"
            " give the weights that belong to this configuration\n  " + "\n  ".join(shown)
        )
    rest = {short: name for short, name in stored.items() if short not in used}
    outside = "not among the model's parameters"
    ignored = {name: outside for name in source.names() if not name.startswith(prefix)}
    for short, name in rest.items():
        why = next((why for what, why in library.ignored if re.search(what, short)), None)
        if why:
            ignored[name] = why
        else:
            origins[short] = Origin(name)
    return Canonical(source, origins, ignored)


def places(config: TargetConfig, naming: str) -> dict[str, Place]:
    """Return the place of every canonical tensor of a target in a library.

    Args:
      naming: a key of `LIBRARIES`, or "maxtext_scanned".

    Raises:
      CheckpointError: the library has no name for one of them.
      ConfigError: the library has no such family.
    """
    library = LIBRARIES[naming.removesuffix("_scanned")]
    scanned = naming.endswith("_scanned")
    _check_family(library, config)
    placed = {}
    for name in tensor_parts(config):
        place = library.place(name, config, scanned)
        if place is None:
            raise CheckpointError(
                f"{library.name} has no name for {name}; its {', '.join(library.families)} can be"
                " converted, without biases that it does not have"
            )
        placed[name] = place
    return placed


def arrays_of(
    fill: Fill, dtypes: Mapping[str, np.dtype], config: TargetConfig, naming: str
) -> dict[str, LazyArray]:
    """Return a target's parameters by the paths of a library; the inverse of `target`.

    Args:
      fill: called for every tensor of an array when that is made.
      dtypes: dtypes of the canonical tensors by name.
      naming: as for `places`, with its errors.
    """
    parts = tensor_parts(config)
    members: dict[str, list[tuple[str, Place]]] = {}
    for name, place in places(config, naming).items():
        members.setdefault(place.path, []).append((name, place))

    def lazy(path: str) -> LazyArray:
        first, place = members[path][0]
        shape = place.stored_shape(with_heads(parts[first], config))

        def make() -> np.ndarray:
            array = np.empty(shape, dtypes[first])
            for name, place in members[path]:
                fill(name, place.view(array), place.stored)
            return array

        return LazyArray(shape, dtypes[first], make)

    return {path: lazy(path) for path in members}


def tensor_parts(config: TargetConfig) -> dict[str, TensorPart]:
    """Return the canonical tensors of a target by name."""
    return {part.name: part for slot in families.slots(config) for part in slot.parts}


def with_heads(part: TensorPart, config: TargetConfig) -> Shape:
    """Return the shape of a canonical tensor, with heads and their width apart."""
    match = PROJECTED.search(part.name)
    if not match:
        return part.shape
    kind = match[1]
    width = config.head_dim
    if kind == "o":
        last = (config.num_heads, width) if match[2] == "weight" else ()
        return (part.shape[0], *last)
    heads = config.num_heads if kind == "q" else config.num_kv_heads
    return (heads, width, *part.shape[1:])


def _check_family(library: FlaxLibrary, config: TargetConfig) -> None:
    if family_of(config.model_type) not in library.families:
        raise ConfigError(
            f"{library.name}'s parameters of a {config.model_type} target are not converted;"
            f" those of {', '.join(library.families)} are"
        )


def _axes(name: str) -> Shape:
    """Return the axes of an array whose inputs come first, as in MaxText and Tunix."""
    if match := PROJECTED.search(name):
        if match[2] == "bias":
            return (0,) if match[1] == "o" else (0, 1)
        return (2, 0, 1) if match[1] == "o" else (1, 2, 0)
    if name.endswith((".bias", "norm.weight")):
        return (0,)
    return (0, 1) if name == TABLE else (1, 0)


# MaxText
MAXTEXT = {
    TABLE: "token_embedder/embedding",
    "norm.weight": "decoder/decoder_norm/scale",
    "lm_head.weight": "decoder/logits_dense/kernel",
}
MAXTEXT_LAYER = {
    "input_layernorm": "pre_self_attention_layer_norm",
    "post_attention_layernorm": "post_self_attention_layer_norm",
    "self_attn.q_proj": "self_attention/query",
    "self_attn.k_proj": "self_attention/key",
    "self_attn.v_proj": "self_attention/value",
    "self_attn.o_proj": "self_attention/out",
    "self_attn.q_norm": "self_attention/query_norm",
    "self_attn.k_norm": "self_attention/key_norm",
    "mlp.gate_proj": "mlp/wi_0",
    "mlp.up_proj": "mlp/wi_1",
    "mlp.down_proj": "mlp/wo",
}
MAXTEXT_GEMMA3 = {
    "input_layernorm": "pre_self_attention_norm",
    "post_attention_layernorm": "post_self_attention_norm",
    "pre_feedforward_layernorm": "pre_ffw_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
FOLDED = ("llama", "mistral")  # families whose queries have the scale of scores in their weights


def _maxtext(name: str, config: TargetConfig, scanned: bool) -> Place | None:
    family = family_of(config.model_type)
    gemma = family == "gemma3"
    match = IN_LAYER.fullmatch(name)
    if match:
        layer = int(match[1])
        what = match[2]
        short = (MAXTEXT_LAYER | (MAXTEXT_GEMMA3 if gemma else {})).get(what)
        if short is None:
            return None
        leaf = "scale" if what.endswith("norm") else "kernel"
        if match[3] == "bias":
            leaf = "bias"
        at = f"layers_{layer}"
        stack = None
        if scanned:
            at, stack = _maxtext_layer(layer, config, gemma)
        place = Place(f"decoder/{at}/{short}/{leaf}", _axes(name), stack)
    elif name in MAXTEXT:
        place = Place(MAXTEXT[name], _axes(name))
    else:
        return None
    if gemma and name.endswith("norm.weight"):
        return dataclasses.replace(place, plus=-1.0, change="norm: 1 subtracted")
    if gemma and name == TABLE:
        # MaxText rounds this factor to bfloat16 when it converts from Hugging Face's form and back.
        root = float(ml_dtypes.bfloat16(math.sqrt(config.hidden_size)))
        return dataclasses.replace(place, times=1 / root, change="table: divided by sqrt(width)")
    projected = PROJECTED.search(name)
    if projected and projected[1] in "qk" and config.rope.kind == "llama3":
        place = dataclasses.replace(place, pairs=True, change="rotary rows: pairs to halves")
    if projected and projected[1] == "q" and family in FOLDED:
        root = math.sqrt(config.head_dim)
        change = "queries: times sqrt(head width)"
        joined = f"{place.change}; {change}" if place.change else change
        place = dataclasses.replace(place, times=root, change=joined)
    return place


def _maxtext_layer(
    layer: int, config: TargetConfig, gemma: bool
) -> tuple[str, tuple[int, int] | None]:
    """Return the path of scanned layers that hold this one, and its index and their number."""
    if not gemma:
        return "layers", (layer, config.num_layers)
    times, rest = divmod(config.num_layers, CYCLE)
    if layer >= config.num_layers - rest:
        return f"layers_remainder/layers_{layer - times * CYCLE}", None
    return f"layers/layers_{layer % CYCLE}", (layer // CYCLE, times)


# Tunix
TUNIX = {
    r"embed_tokens\.weight": "embedder/input_embedding",
    r"lm_head\.weight": "lm_head/w",
    r"norm\.weight": "final_norm/w",
    r"layers\.(\d+)\.self_attn\.([qkvo]_proj|[qk]_norm)\.weight": r"layers/\1/attn/\2/w",
    r"layers\.(\d+)\.mlp\.(gate|up|down)_proj\.weight": r"layers/\1/mlp/\2_proj/kernel",
    r"layers\.(\d+)\.(input|post_attention)_layernorm\.weight": r"layers/\1/\2_layernorm/w",
}


def _tunix(name: str, config: TargetConfig, scanned: bool) -> Place | None:
    for pattern, path in TUNIX.items():
        if match := re.fullmatch(pattern, name):
            return Place(match.expand(path), _axes(name))
    return None


# Gemma
GEMMA = {
    TABLE: "embedder/input_embedding",
    "norm.weight": "final_norm/scale",
    "input_layernorm": "pre_attention_norm/scale",
    "post_attention_layernorm": "post_attention_norm/scale",
    "pre_feedforward_layernorm": "pre_ffw_norm/scale",
    "post_feedforward_layernorm": "post_ffw_norm/scale",
    "self_attn.q_norm": "attn/_query_norm/scale",
    "self_attn.k_norm": "attn/_key_norm/scale",
    "self_attn.o_proj": "attn/attn_vec_einsum/w",
    "mlp.gate_proj": "mlp/gating_einsum",
    "mlp.up_proj": "mlp/gating_einsum",
    "mlp.down_proj": "mlp/linear",
}


def _gemma(name: str, config: TargetConfig, scanned: bool) -> Place | None:
    match = IN_LAYER.fullmatch(name)
    if not match:
        return Place(GEMMA[name], _axes(name)) if name in GEMMA else None
    layer, what, leaf = match.groups()
    if leaf == "bias":
        return None
    if what in GEMMA:
        place = Place(f"layer_{layer}/{GEMMA[what]}", _axes(name))
        halves = {"mlp.gate_proj": (0, 2), "mlp.up_proj": (1, 2)}
        if what in halves:
            return dataclasses.replace(place, axes=(0, 1), part=halves[what])
        return place
    kind = PROJECTED.search(name)
    together = config.num_heads == config.num_kv_heads
    if kind is None:
        return None
    if kind[1] == "q" and not together:
        return Place(f"layer_{layer}/attn/q_einsum/w", (0, 2, 1))
    names = "qkv" if together else "kv"
    part = (names.index(kind[1]), len(names))
    return Place(f"layer_{layer}/attn/{names}_einsum/w", (0, 2, 1), part=part)


LIBRARIES = {
    "gemma": FlaxLibrary(
        "Gemma",
        ("gemma3",),
        "final_norm/scale",
        _gemma,
        respelt=(r"(/mlp/(gating_einsum|linear))/w$", r"\1"),
        ignored=((r"^(vision_encoder/|embedder/mm_)", "vision: only text is run"),),
    ),
    "maxtext": FlaxLibrary(
        "MaxText",
        ("llama", "mistral", "qwen2", "qwen3", "gemma3"),
        "token_embedder/embedding",
        _maxtext,
        scanned="decoder/layers/",
        ignored=((r"^vision_encoder/", "vision: only text is run"), (r"(^|/)rngs(/|$)", "a key")),
    ),
    "tunix": FlaxLibrary("Tunix", ("llama", "qwen2", "qwen3"), "final_norm/w", _tunix),
}
