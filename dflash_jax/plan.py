"""The plan: every decision that shapes the compiled programs, as one frozen value.

A plan can be printed, compared, hashed and stored next to a result. Each field is declared with
its documentation, its bounds and its scope; validation, command-line flags, `help(Plan)` and the
keys of caches are derived from that. This module never imports JAX, so that a command can check a
plan before JAX starts.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from dflash_jax.declared import Field, documentation, plain_value, tuples, unknown_names
from dflash_jax.errors import PlanError
from dflash_jax.quant.formats import Stored
from dflash_jax.show import plan_html, plan_text

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES = get_args(Dtype)
Weights = Literal["auto", "float", "int8", "int4", "packed"]
Kernels = Literal["auto", "xla", "pallas", "native"]
Activations = Literal["auto", "int8", "float"]
KvDtype = Literal["auto", "float16", "int8"]
WeightLayout = Literal["auto", "row_major", "column_major", "tiled", "interleaved"]
TapsAt = Literal["auto", "early", "late", "upstream"]


Scope = Literal["cache", "program", "host"]
MAX_LOGPROBS = 20  # alternatives that programs report for a token


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanField(Field):
    """Declaration of a field of a plan.

    Attributes:
      scope: "cache" if the contents of a row's caches depend on the field, and so do programs;
        "program" if only programs depend on it; "host" if neither does.
    """

    scope: Scope


def plan_field(default: Any, help: str, scope: Scope, **options: Any) -> Any:
    """Return a dataclass field with a default and the `PlanField` of the other arguments."""
    info = PlanField(help=help, scope=scope, **options)
    return dataclasses.field(default=default, metadata={"plan": info})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Choices made before compiling. 0 and "auto" leave a choice to `graph.resolve`."""

    rows: int = plan_field(1, "requests decoded in parallel", "cache", minimum=1, metavar="N")
    max_length: int = plan_field(
        0,
        "most tokens of prompt and output together, per row; by default what the model or the"
        " command needs",
        "cache",
        details="That is what the target supports, up to 1024 on a CPU and 8192 elsewhere.",
        minimum=2,
        automatic=True,
        metavar="TOKENS",
    )
    block: int = plan_field(
        0,
        "tokens per decode step, the anchor included; by default what the drafter's config says",
        "cache",
        details="Drafts beyond the trained block are hardly ever accepted; `load` warns about it.",
        minimum=2,
        automatic=True,
        metavar="TOKENS",
    )
    chunk: int = plan_field(
        0,
        "prompt tokens per prefill call; by default 64 on a CPU, else 256",
        "cache",
        minimum=1,
        automatic=True,
        metavar="TOKENS",
    )
    dtype: Dtype = plan_field(
        "auto",
        "dtype of weights, activations and caches (of matrices only, with native kernels): float32,"
        " bfloat16 or float16; by default float32 on a CPU, else bfloat16",
        "cache",
        automatic=True,
    )
    weights: Weights = plan_field(
        "auto",
        "format of weight matrices: float (as in dtype), int8 or int4 (quantised on loading), or"
        " packed (as in the file: blocks of GGUF, groups of AWQ, GPTQ and compressed-tensors);"
        " by default packed where the file has such blocks and there are kernels, else float",
        "cache",
        details="With int4, head and drafter are int8; with packed ones and native kernels, the"
        " drafter. Packed ones are never unpacked in memory.",
        automatic=True,
    )
    stored: Stored = plan_field((), "formats of packed matrices; filled in by `load`", "cache")
    weight_layout: WeightLayout = plan_field(
        "auto",
        "memory layout of matrices: interleaved (for native kernels), or of float matrices"
        " row_major, column_major or tiled; by default the fastest on the processor",
        "cache",
        details="A matrix [D, N] of a product x · w is stored as [D, N] (row_major), as [N, D]"
        " (column_major), with a copy in tiles [N/16, D, 16] (tiled; column_major above 4096"
        " columns), or in such tiles only (interleaved). Without native kernels, one device with"
        " AVX2 but not AVX-512 takes tiled for narrow float32 models, else column_major.",
        automatic=True,
    )
    kv_dtype: KvDtype = plan_field(
        "auto",
        "dtype of cached keys and values: that of dtype (auto), float16, or int8 with a scale per"
        " vector",
        "cache",
    )
    kernels: Kernels = plan_field(
        "auto",
        "kernels: native ones on a CPU, Pallas for products with packed weights on a GPU (auto);"
        " Pallas for attention as well (pallas); native; or XLA's own (xla)",
        "cache",
    )
    activations: Activations = plan_field(
        "auto",
        "by what quantised weights are multiplied: int8 (native kernels only) or float",
        "cache",
        automatic=True,
    )
    plain_width: int = plan_field(
        0,
        "tokens that a plain step feeds to a row: 1, or block where a token's bits depend on it",
        "cache",
        minimum=1,
        automatic=True,
        metavar="TOKENS",
    )
    exact: bool = plan_field(
        True,
        "compute tokens alike in plain and drafted steps: speculative output equals plain output",
        "cache",
    )
    rings: bool = plan_field(
        True,
        "cache only the window and the widest call in sliding-window layers, as a ring",
        "cache",
    )
    taps_at: TapsAt = plan_field(
        "auto",
        "where in a target layer the drafter's taps are read: its output (late), the output"
        " before per-layer inputs and layer scalars (early), or late with the final norm applied"
        " to the last layer (upstream); auto is late for all but the last layer",
        "cache",
    )
    lookahead: int = plan_field(
        1,
        "calls dispatched before the previous result is read",
        "host",
        details="0 is used if a call makes more than one step.",
        choices=(0, 1),
    )
    steps_per_call: int = plan_field(
        0,
        "most decode steps per call; by default 4 on a single CPU device, else 1",
        "program",
        details="If more than 1, their number is tuned to about 0.1 s per call, and is 1 while"
        " requests wait for a row. Steps of few milliseconds are faster, tokens arrive in bursts.",
        minimum=1,
        automatic=True,
        metavar="N",
    )
    prefix_cache: int = plan_field(
        0,
        "memory for cached prompt prefixes; 0 for no prefix cache",
        "host",
        details="Cached prefixes need no prefill.",
        minimum=0,
        metavar="BYTES",
    )
    prefix_folder: str | os.PathLike[str] = plan_field(  # a str once made
        "",
        "folder that keeps prompt prefixes on disk as well, for when they are evicted from memory"
        " or the engine restarts",
        "host",
        details="Empty for none. Needs `prefix_cache`. Prefixes of other models are never read.",
        metavar="DIR",
    )
    prefix_disk: int = plan_field(
        1 << 33, "most bytes of the prefix folder", "host", minimum=1, metavar="BYTES"
    )
    mesh: tuple[int, int] = plan_field(
        (1, 1),
        "devices as (data, model): rows are split over data, heads and widths over model",
        "cache",
        items="(data, model)",
        metavar="DATAxMODEL",
    )
    devices: tuple[int, int] = plan_field(
        (0, 0),
        "devices of target and drafter, as indices of `jax.devices()`",
        "cache",
        items="(target, drafter)",
        details="If they differ, the drafter's device has copies of the target's embedding and"
        " head.",
        metavar="INDEX",
    )
    queue: int = plan_field(
        1024,
        "most requests waiting for a row; more are refused with QueueFullError",
        "host",
        minimum=1,
    )
    stop_slots: int = plan_field(8, "most stop tokens of a request", "program", minimum=1)
    call_odds: bool = plan_field(
        True,
        "report with every step the odds of a tool call at its end, by which recovery tells a"
        " stall from an answer",
        "program",
        details="False leaves this out of the programs: recovery then judges by punctuation only.",
    )
    min_survival: float = plan_field(
        0.0,
        "do not verify drafts that the drafter's confidence head gives a lower probability of"
        " acceptance; 0 verifies all",
        "program",
        minimum=0,
        maximum=1,
        metavar="P",
    )
    draft_window: int = plan_field(
        0,
        "positions that the drafter sees, and caches: the last N of a row; 0 for as many as it was"
        " made for",
        "cache",
        details="For long contexts, where a drafter of short texts accepts less and less.",
        minimum=0,
        metavar="N",
    )
    ngram: int = plan_field(
        0,
        "draft what followed the last N tokens, or more, where they occurred before in the text, in"
        " place of the drafter's drafts; 0 for never",
        "cache",
        details="Where all rows have such a match, the drafter does not run.",
        minimum=0,
        metavar="N",
    )
    report_drafts: bool = plan_field(
        False,
        "report the drafts of every step, so that traces of requests show the rejected ones",
        "program",
    )
    report_top: int = plan_field(
        0,
        "report with every step its drafts and, for each place, the N most probable tokens of"
        " drafter and target with their probabilities, for traces of requests; 0 for none",
        "program",
        minimum=0,
        metavar="N",
    )
    memory_limit: int = plan_field(
        0,
        "most bytes the engine may use; by default the free memory of the device",
        "host",
        minimum=1,
        automatic=True,
        metavar="BYTES",
    )

    if not TYPE_CHECKING:  # where the fields are the arguments

        def __new__(cls, /, *values: Any, **fields: Any) -> Self:
            """Check the names of fields, which Python would refuse in words of its own."""
            if values:
                raise PlanError(f"got {values!r} without names; expected fields by name")
            if problem := unknown_names(fields, FIELDS, "field of a plan"):
                raise PlanError(problem)
            return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, plain_value(getattr(self, field.name)))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if expected := FIELDS[field.name].mismatch(value, field.type):
                raise PlanError(f"{field.name} is {value!r}; expected {expected}")
        if self.prefix_folder and not self.prefix_cache:
            raise PlanError(
                f"prefix_folder is {self.prefix_folder!r} and prefix_cache {self.prefix_cache};"
                " expected a path, and bytes of memory for what is read from it"
            )
        if min(self.mesh) < 1 or self.rows % self.mesh[0]:
            raise PlanError(
                f"mesh is {self.mesh!r} for {self.rows} rows; expected integers of at least 1, the"
                " first a divisor of the rows"
            )
        places, two = self.devices, self.two_devices
        if min(places) < 0 or (max(places) and not two) or (two and max(self.mesh) > 1):
            raise PlanError(
                f"devices is {places!r} and mesh {self.mesh!r}; expected (0, 0), or two different"
                " devices and mesh (1, 1). The environment chooses which device is the first"
                " (CUDA_VISIBLE_DEVICES)"
            )

    def _repr_html_(self) -> str:
        return plan_html(self)

    def __str__(self) -> str:
        return plan_text(self)

    def to_json(self) -> str:
        """Return the plan as one JSON object, which `from_json` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the plan that `to_json` wrote.

        Raises:
          PlanError: the text is not a JSON object, or has unknown fields or wrong values.
        """
        try:
            fields = json.loads(text)
        except (ValueError, TypeError) as error:
            raise PlanError(f"the plan is not JSON ({error}); write it by `to_json`") from error
        if not isinstance(fields, dict):
            raise PlanError(f"the plan is {fields!r}; expected one JSON object")
        return cls(**fields | {"stored": tuples(fields.get("stored", ()))})

    @property
    def shape(self) -> tuple[tuple[str, Any], ...]:
        """The key of compiled programs: engines of the same models and shape can share them.

        It has the fields that programs depend on, by name, and whether there is a prefix cache,
        which adds programs.
        """
        fields = {name: getattr(self, name) for name, f in FIELDS.items() if f.scope != "host"}
        return tuple((fields | {"prefix_cache": bool(self.prefix_cache)}).items())

    @property
    def cache_key(self) -> tuple[tuple[str, Any], ...]:
        """The fields that the contents of a row's caches depend on, by name.

        Part of the identity of prefixes on disk.
        """
        return tuple(
            (name, getattr(self, name)) for name, f in FIELDS.items() if f.scope == "cache"
        )

    @property
    def two_devices(self) -> bool:
        """Whether target and drafter have a device each."""
        return self.devices[0] != self.devices[1]


FIELDS: Mapping[str, PlanField] = {f.name: f.metadata["plan"] for f in dataclasses.fields(Plan)}

Plan.__doc__ = documentation(Plan.__doc__ or "", FIELDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedPlan(Plan):
    """A plan that leaves no choice open; made and checked by `graph.resolve`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if left := [
            n for n, f in FIELDS.items() if f.automatic and getattr(self, n) in (0, "auto")
        ]:
            raise PlanError(
                f"{left[0]} is {getattr(self, left[0])!r}, a choice left open; expected"
                " a value, or a dj.Plan"
            )

    @property
    def widest(self) -> int:
        """Tokens of the widest call; caches keep this much room past the longest sequence."""
        return max(self.chunk, self.block)

    @property
    def fed_rows(self) -> int:
        """Rows that a prefill call feeds.

        One, so that the cost of a prompt is proportional to its length; all rows where they are
        split over devices, or the drafter has its own device.
        """
        return self.rows if self.two_devices or self.mesh[0] > 1 else 1

    @property
    def compute_dtype(self) -> str:
        """Dtype of activations and caches; native kernels compute in float32."""
        return "float32" if self.kernels == "native" else self.dtype

    @property
    def slots(self) -> int:
        """Slots of a plain cache; `dynamic_update_slice` would clamp a write past its end."""
        return -(-(self.max_length + self.widest) // 16) * 16

    def ring_slots(self, window: int | None) -> int | None:
        """Return the slots of a sliding layer's ring, or None where a plain cache is no larger."""
        if window is None or not self.rings:
            return None
        slots = -(-(window + self.widest) // 16) * 16
        return slots if slots < self.slots else None


# The least that a plan can ask for, to make caches or parameters outside an engine.
LEAST = ResolvedPlan(
    max_length=2,
    block=2,
    chunk=1,
    dtype="float32",
    weights="float",
    weight_layout="row_major",
    kernels="xla",
    activations="float",
    plain_width=1,
    rings=False,
    steps_per_call=1,
    memory_limit=1,
)
