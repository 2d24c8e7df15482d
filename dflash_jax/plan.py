"""The plan: every decision that shapes the compiled programs, as one frozen value.

A plan can be printed, compared, hashed and stored next to a result. This module never imports
JAX, so that a command can check a plan's values before it starts anything.
"""

import dataclasses
import json
import os
from numbers import Integral, Real
from typing import Any, Literal, get_args

from dflash_jax.config import TAPS_AT
from dflash_jax.errors import PlanError
from dflash_jax.quant.layouts import Stored

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES = get_args(Dtype)
Weights = Literal["float", "int8", "int4", "packed"]
Kernels = Literal["auto", "xla", "pallas"]
KvDtype = Literal["auto", "int8"]
Order = Literal["auto", "rows", "columns", "panels"]
TapsAt = Literal["auto", "early", "late", "upstream"]
CHOICES = {
    "dtype": DTYPES,
    "weights": get_args(Weights),
    "kv_dtype": get_args(KvDtype),
    "kernels": get_args(Kernels),
    "taps_at": TAPS_AT,
    "order": get_args(Order),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is decided before compiling. 0 and "auto" leave the choice to `compiler.resolve`.

    Attributes:
      rows: requests that decode side by side.
      max_length: most tokens of prompt and output together, per row.
      block: tokens fed per decode step, the anchor included; the drafter's own size by default,
        past which drafts are hardly ever accepted (`load` warns).
      chunk: prompt tokens per prefill call.
      dtype: of weights, activations and caches; float32 on a CPU, else bfloat16 by default.
      weights: "float" keeps matrices in dtype; "int8" and "int4" quantise them on loading, head
        and drafter to int8 either way; "packed" keeps Q8_0, Q4_0, Q4_K and Q6_K blocks of .gguf
        files as they are. Packed weights are multiplied without being unpacked in memory.
      stored: which kinds a file keeps its matrices in, for "packed"; filled in on loading.
      order: how float matrices [D, N] lie: "rows" as in the products x · w; "columns" as [N, D], to
        come first in them; "panels" besides as [N/16, D, 16] up to 4096 columns, the others in
        columns. On a CPU with vectors of 256 bits a block then takes half to four fifths of the
        time. "auto" chooses on one CPU device with AVX2 and without AVX-512: panels for float32
        models narrower than 512, columns for wider ones.
      kv_dtype: of cached keys and values; "auto" is dtype, "int8" scales every row by itself.
      kernels: what GPUs run beside XLA's own kernels: "auto" multiplies packed weights by Pallas
        kernels, "pallas" attends by them too, reading only what is live; with "xla" alone,
        packed weights with groups are unpacked in memory.
      exact: plain steps and fallbacks run at block width, so that speculative output equals
        plain output bit for bit. False lets plain steps run one token wide.
      rings: sliding-window layers keep only a ring of window + widest call slots.
      taps_at: where in a target layer the drafter's taps are taken: "late", its output, as
        every engine does; "early", before per-layer inputs and layer scalars; "upstream", late,
        but the last layer's after the final norm. "auto" is late for all but the last layer.
      lookahead: calls the host stays ahead of what it has read, 0 or 1; 0 behind several steps.
      rounds: most decode steps of one call. With more than 1 it makes as many as take about 0.1 s
        where nobody waits for a row, and none once no row can go on: faster where a step takes
        less than a few milliseconds, but tokens are heard in bursts. 4 by default on one CPU
        device, else 1.
      prefix_cache: bytes for prefixes of prompts, kept so that they need not be fed again; 0
        keeps none.
      prefix_folder: where prefixes are kept on disk besides, for when memory dropped them or the
        engine was restarted; "" keeps none there. Other models' are never read.
      prefix_disk: most bytes in that folder.
      mesh: devices as (data, model): rows are split over `data`, heads and widths over `model`.
      devices: places of target and drafter in `jax.devices()`. If they differ, the drafter has a
        device of its own, with copies of the target's embedding and head.
      queue: most requests that wait for a row; more are refused with QueueFullError.
      stop_slots: most stop tokens a request may name.
      call_odds: every step also reports how likely the target finds a tool call where it ends, by
        which recovery tells a stall from an answer. False leaves it out of the programs: recovery
        then judges by punctuation alone.
      min_survival: drafts that a drafter with a confidence head gives less than this chance to
        be kept are not verified; 0 verifies all.
      memory_limit: bytes the engine may use; the device's free memory by default.
    """

    rows: int = 1
    max_length: int = 0
    block: int = 0
    chunk: int = 0
    dtype: Dtype = "auto"
    weights: Weights = "float"
    stored: Stored = ()
    order: Order = "auto"
    kv_dtype: KvDtype = "auto"
    kernels: Kernels = "auto"
    exact: bool = True
    rings: bool = True
    taps_at: TapsAt = "auto"
    lookahead: int = 1
    rounds: int = 0
    prefix_cache: int = 0
    prefix_folder: str | os.PathLike[str] = ""  # a str once made
    prefix_disk: int = 1 << 33
    mesh: tuple[int, int] = (1, 1)
    devices: tuple[int, int] = (0, 0)
    queue: int = 1024
    stop_slots: int = 8
    call_odds: bool = True
    min_survival: float = 0.0
    memory_limit: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, as_number(getattr(self, field.name)))
        auto = {"max_length": 2, "block": 2, "chunk": 1, "rounds": 1, "memory_limit": 1}
        least = {
            "rows": 1,
            "prefix_cache": 0,
            "prefix_disk": 1,
            "queue": 1,
            "stop_slots": 1,
        } | auto
        for name, low in least.items():
            value = getattr(self, name)
            if type(value) is not int or (value < low and not (value == 0 and name in auto)):
                zero = ", or 0 for the default" if name in auto else ""
                raise PlanError(f"{name} is {value!r}; expected an integer of at least {low}{zero}")
        for name in ("exact", "rings", "call_odds"):
            if type(value := getattr(self, name)) is not bool:
                raise PlanError(f"{name} is {value!r}; expected True or False")
        if self.lookahead not in (0, 1):
            raise PlanError(f"lookahead is {self.lookahead!r}; expected 0 or 1")
        if isinstance(self.prefix_folder, os.PathLike):
            object.__setattr__(self, "prefix_folder", os.fspath(self.prefix_folder))
        if not isinstance(self.prefix_folder, str) or (
            self.prefix_folder and not self.prefix_cache
        ):
            raise PlanError(
                f"prefix_folder is {self.prefix_folder!r} and prefix_cache {self.prefix_cache};"
                " expected a path, and bytes of memory for what is read from it"
            )
        mesh = self.mesh
        if not isinstance(mesh, tuple | list) or [type(n) for n in mesh] != [int, int]:
            raise PlanError(f"mesh is {mesh!r}; expected two integers, (data, model)")
        object.__setattr__(self, "mesh", tuple(mesh))  # JSON has lists
        if min(mesh) < 1 or self.rows % mesh[0]:
            raise PlanError(
                f"mesh is {mesh!r} for {self.rows} rows; expected integers of at least 1, the"
                " first a divisor of the rows"
            )
        places = self.devices
        if not isinstance(places, tuple | list) or [type(n) for n in places] != [int, int]:
            raise PlanError(f"devices is {places!r}; expected two integers, (target, drafter)")
        object.__setattr__(self, "devices", tuple(places))
        apart = self.two_devices
        if min(places) < 0 or (max(places) and not apart) or (apart and max(mesh) > 1):
            raise PlanError(
                f"devices is {places!r} and mesh {mesh!r}; expected (0, 0), or two different"
                " devices and mesh (1, 1). The environment chooses which device is the first"
                " (CUDA_VISIBLE_DEVICES)"
            )
        survival = self.min_survival
        if type(survival) not in (int, float) or not 0 <= survival <= 1:
            raise PlanError(f"min_survival is {survival!r}; expected a number from 0 to 1")
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise PlanError(f"{name} is {value!r}; expected one of {', '.join(known)}")

    def to_json(self) -> str:
        """The plan as one JSON object; `from_json` is the inverse."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan written by `to_json`; unknown fields are refused."""
        try:
            fields = json.loads(text)
        except (ValueError, TypeError) as error:
            raise PlanError(f"the plan is not JSON ({error}); write it by `to_json`") from error
        if not isinstance(fields, dict):
            raise PlanError(f"the plan is {fields!r}; expected one JSON object")
        known = {f.name for f in dataclasses.fields(cls)}
        if extra := sorted(set(fields) - known):
            raise PlanError(f"unknown plan fields {extra}; known are {sorted(known)}")
        return cls(**fields | {"stored": _tuples(fields.get("stored", ()))})

    @property
    def resolved(self) -> bool:
        """Whether no choice is left to `compiler.resolve`."""
        chosen = (self.max_length, self.block, self.chunk, self.rounds, self.memory_limit)
        return 0 not in chosen and "auto" not in (self.dtype, self.order)

    @property
    def two_devices(self) -> bool:
        """Whether target and drafter have a device each."""
        return self.devices[0] != self.devices[1]

    @property
    def widest(self) -> int:
        """Tokens of the widest call; caches keep this much room past the longest sequence."""
        return max(self.chunk, self.block)

    @property
    def fed_rows(self) -> int:
        """Rows that a prefill call feeds: one, so that a prompt costs what it is long.

        All of them where rows are split over devices, or the drafter has a device of its own.
        """
        return self.rows if self.two_devices or self.mesh[0] > 1 else 1

    @property
    def slots(self) -> int:
        """Slots of a plain cache; `dynamic_update_slice` would clamp a write past its end."""
        return -(-(self.max_length + self.widest) // 16) * 16

    def ring_slots(self, window: int | None) -> int | None:
        """Slots of a sliding layer's ring, or None where a plain cache is no larger (R4)."""
        if window is None or not self.rings:
            return None
        slots = -(-(window + self.widest) // 16) * 16
        return slots if slots < self.slots else None


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def as_number(value: Any) -> Any:
    """A number of NumPy's as Python's, in pairs too; anything else as it is."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    return tuple(map(as_number, value)) if isinstance(value, tuple | list) else value
