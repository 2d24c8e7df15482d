"""The plan: every decision that shapes the compiled programs, as one frozen value.

A plan can be printed, compared, hashed and stored next to a result. Each field is declared with
its documentation, its bounds and its scope; the keys of caches are derived from these, too. This
module never imports JAX, so that a command can check a plan before JAX starts.
"""

import dataclasses
import os
from typing import Any, Literal, get_args

from dflash_jax.declared import Declared, Scope, declare, document
from dflash_jax.errors import PlanError
from dflash_jax.quant.formats import Stored
from dflash_jax.show import plan_html, plan_text

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES = get_args(Dtype)
Weights = Literal["auto", "float", "int8", "int4", "packed"]
Kernels = Literal["auto", "xla", "pallas", "native"]
Activations = Literal["auto", "int8", "float"]
KvDtype = Literal["auto", "float16", "int8"]
TapsAt = Literal["auto", "early", "late", "upstream"]

MAX_LOGPROBS = 20  # alternatives that programs report for a token


# fmt: off
@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Declared):
    """Choices made before compiling. 0 and "auto" leave a choice to `graph.resolve`."""

    _error = PlanError
    _noun = "field of a plan"

    rows: int = declare(1, "requests decoded in parallel", scope="cache", minimum=1, metavar="N")
    max_length: int = declare(
        0,
        "most tokens of prompt and output together, per row; by default what the model or the"
        " command needs",
        details="That is what the target supports, up to 1024 on a CPU and 8192 elsewhere.",
        scope="cache", minimum=2, automatic=True, metavar="TOKENS",
    )
    block: int = declare(
        0,
        "tokens per decode step, the anchor included; by default what the drafter's config says",
        details="Drafts beyond the trained block are hardly ever accepted; `load` warns about it.",
        scope="cache", minimum=2, automatic=True, metavar="TOKENS",
    )
    chunk: int = declare(
        0,
        "prompt tokens per prefill call; by default 64 on a CPU, else 256",
        scope="cache", minimum=1, automatic=True, metavar="TOKENS",
    )
    dtype: Dtype = declare(
        "auto",
        "dtype of weights, activations and caches (of matrices only, with native kernels): float32,"
        " bfloat16 or float16; by default float32 on a CPU, else bfloat16",
        scope="cache", automatic=True,
    )
    weights: Weights = declare(
        "auto",
        "format of weight matrices: float (as in dtype), int8 or int4 (quantised on loading), or"
        " packed (as in the file: blocks of GGUF, groups of AWQ, GPTQ and compressed-tensors);"
        " by default packed where the file has such blocks and there are kernels, else float",
        details="With int4, head and drafter are int8; with packed ones and native kernels, the"
        " drafter. Packed ones are never unpacked in memory.",
        scope="cache", automatic=True,
    )
    stored: Stored = declare((), "formats of packed matrices; filled in by `load`", scope="cache")
    kv_dtype: KvDtype = declare(
        "auto",
        "dtype of cached keys and values: that of dtype (auto), float16, or int8 with a scale per"
        " vector",
        scope="cache",
    )
    kernels: Kernels = declare(
        "auto",
        "kernels: native ones on a CPU, Pallas for products with packed weights on a GPU (auto);"
        " Pallas for attention as well (pallas); native; or XLA's own (xla)",
        scope="cache",
    )
    activations: Activations = declare(
        "auto",
        "by what quantised weights are multiplied: int8 (native kernels only) or float",
        scope="cache", automatic=True,
    )
    plain_width: int = declare(
        0,
        "tokens that a plain step feeds to a row: 1, or block where a token's bits depend on it",
        scope="cache", minimum=1, automatic=True, metavar="TOKENS",
    )
    exact: bool = declare(
        True,
        "compute tokens alike in plain and drafted steps: speculative output equals plain output",
        scope="cache",
    )
    rings: bool = declare(
        True,
        "cache only the window and the widest call in sliding-window layers, as a ring",
        scope="cache",
    )
    taps_at: TapsAt = declare(
        "auto",
        "where in a target layer the drafter's taps are read: its output (late), the output"
        " before per-layer inputs and layer scalars (early), or late with the final norm applied"
        " to the last layer (upstream); auto is late for all but the last layer",
        scope="cache",
    )
    lookahead: int = declare(
        1,
        "calls dispatched before the previous result is read",
        details="0 is used if a call makes more than one step.",
        scope="host", choices=(0, 1),
    )
    steps_per_call: int = declare(
        0,
        "most decode steps per call; by default 4 on a single CPU device, else 1",
        details="If more than 1, their number is tuned to about 0.1 s per call, and is 1 while"
        " requests wait for a row. Steps of few milliseconds are faster, tokens arrive in bursts.",
        scope="program", minimum=1, automatic=True, metavar="N",
    )
    prefix_cache: int = declare(
        0,
        "memory for cached prompt prefixes; 0 for no prefix cache",
        details="Cached prefixes need no prefill.",
        scope="host", metavar="BYTES",
    )
    prefix_folder: str | os.PathLike[str] = declare(  # a str once made
        "",
        "folder that keeps prompt prefixes on disk as well, for when they are evicted from memory"
        " or the engine restarts",
        details="Empty for none. Needs `prefix_cache`. Prefixes of other models are never read.",
        scope="host", metavar="DIR",
    )
    prefix_disk: int = declare(
        1 << 33, "most bytes of the prefix folder", scope="host", minimum=1, metavar="BYTES"
    )
    mesh: tuple[int, int] = declare(
        (1, 1),
        "devices as (data, model): rows are split over data, heads and widths over model",
        scope="cache", expected="two integers (data, model), such as [1, 4]", metavar="DATAxMODEL",
    )
    devices: tuple[int, int] = declare(
        (0, 0),
        "devices of target and drafter, as indices of `jax.devices()`",
        details="If they differ, the drafter's device has copies of the target's embedding and"
        " head.",
        scope="cache", expected="two integers (target, drafter), such as [0, 1]", metavar="INDEX",
    )
    queue: int = declare(
        1024,
        "most requests waiting for a row; more are refused with QueueFullError",
        scope="host", minimum=1,
    )
    stop_slots: int = declare(8, "most stop tokens of a request", scope="program", minimum=1)
    report_tool_call_margin: bool = declare(
        True,
        "report with every step the odds of a tool call at its end, by which recovery tells a"
        " stall from an answer",
        details="False leaves this out of the programs: recovery then judges by punctuation only.",
        scope="program",
    )
    confidence_threshold: float = declare(
        0.0,
        "do not verify drafts that the drafter's confidence head gives a lower probability of"
        " acceptance; 0 verifies all",
        scope="program", maximum=1, metavar="P",
    )
    draft_window: int = declare(
        0,
        "positions that the drafter sees, and caches: the last N of a row; 0 for as many as it was"
        " made for",
        details="For long contexts, where a drafter of short texts accepts less and less.",
        scope="cache", metavar="N",
    )
    ngram: int = declare(
        0,
        "draft what followed the last N tokens, or more, where they occurred before in the text, in"
        " place of the drafter's drafts; 0 for never",
        details="Where all rows have such a match, the drafter does not run.",
        scope="cache", metavar="N",
    )
    report_drafts: bool = declare(
        False,
        "report the drafts of every step, so that traces of requests show the rejected ones",
        scope="program",
    )
    report_top: int = declare(
        0,
        "report with every step its drafts and, for each position, the N most probable tokens of"
        " drafter and target with their probabilities, for traces of requests; 0 for none",
        scope="program", metavar="N",
    )
    memory_limit: int = declare(
        0,
        "most bytes the engine may use; by default the free memory of the device",
        scope="host", minimum=1, automatic=True, metavar="BYTES",
    )
    # fmt: on

    def _check(self) -> None:
        """Raise PlanError for values that contradict each other."""
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
        places = self.devices
        two = self.two_devices
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

    @property
    def shape(self) -> tuple[tuple[str, Any], ...]:
        """The key of compiled programs: engines of the same models and shape can share them.

        It has the fields that programs depend on, by name, and whether there is a prefix cache,
        which adds programs.
        """
        fields = self._values("cache", "program") | {"prefix_cache": bool(self.prefix_cache)}
        return tuple(fields.items())

    @property
    def cache_key(self) -> tuple[tuple[str, Any], ...]:
        """The fields that the contents of a row's caches depend on, by name.

        Part of the identity of prefixes on disk.
        """
        return tuple(self._values("cache").items())

    def _values(self, *scopes: Scope) -> dict[str, Any]:
        """Return the values of fields that have one of these scopes."""
        fields = self.fields().items()
        return {name: getattr(self, name) for name, field in fields if field.scope in scopes}

    @property
    def two_devices(self) -> bool:
        """Whether target and drafter have a device each."""
        return self.devices[0] != self.devices[1]


document(Plan)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedPlan(Plan):
    """A plan that leaves no choice open; made and checked by `graph.resolve`."""

    def _check(self) -> None:
        """Raise PlanError for values that contradict each other, or leave a choice open."""
        super()._check()
        for name, field in self.fields().items():
            value = getattr(self, name)
            if field.automatic and value in (0, "auto"):
                raise PlanError(
                    f"{name} is {value!r}, a choice left open; expected a value, or a dj.Plan"
                )

    @property
    def widest(self) -> int:
        """Tokens of the widest call; caches keep this much room past the longest sequence."""
        return max(self.chunk, self.block)

    @property
    def prefill_rows(self) -> int:
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
    kernels="xla",
    activations="float",
    plain_width=1,
    rings=False,
    steps_per_call=1,
    memory_limit=1,
)
