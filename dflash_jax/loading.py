"""From a name to models in memory: a directory, a hub id, or "tiny" for the shipped pair.

With the command line the only place that imports `converters`, and only inside functions.
"""

import dataclasses
import functools
import importlib.resources
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.allocator import tune_allocator
from dflash_jax.compiler import Plan, jit, resolve
from dflash_jax.compiler.plan import Dtype
from dflash_jax.compiler.programs import build_pair, empty_state
from dflash_jax.config import (
    DrafterConfig,
    TargetConfig,
    check_pair,
    read_drafter_config,
    read_target_config,
)
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import CheckpointError, ConfigError, RequestError
from dflash_jax.tokenizer import Tokenizer

Source = str | os.PathLike[str]
SHIPPED = "tiny"
AUTO = "auto"


def load(
    target: Source = SHIPPED, drafter: Source | None = AUTO, *, plan: Plan | None = None
) -> Engine:
    """A ready engine.

    Args:
      target: a Hugging Face directory, a hub id, or "tiny" for the shipped pair.
      drafter: likewise; "auto" is the shipped drafter for "tiny" and none otherwise, None
        decodes without one.
      plan: what to decide differently from the defaults.

    Raises:
      ConfigError, CheckpointError: a model that cannot be run, or a pair that does not fit.
      PlanError: a plan that does not fit the models or the memory.
    """
    tune_allocator()
    target_path, target_config, drafter_path, drafter_config = describe(target, drafter)
    plan = resolve_here(plan or Plan(), target_config, drafter_config)
    from converters.load import load_drafter, load_target

    params = {"target": load_target(target_path, target_config, plan.dtype)}
    if drafter_path is not None and drafter_config is not None:
        params["drafter"] = load_drafter(drafter_path, drafter_config, plan.dtype)
    return Engine(
        target_config,
        drafter_config,
        jax.device_put(params),
        plan,
        tokenizer=Tokenizer.from_directory(target_path),
    )


def describe(
    target: Source, drafter: Source | None
) -> tuple[Path, TargetConfig, Path | None, DrafterConfig | None]:
    """Directories and configs of a pair, checked against each other; reads no weights."""
    if drafter == AUTO:
        drafter = SHIPPED if str(target) == SHIPPED else None
    target_path = locate(target, "target")
    target_config = read_target_config(target_path)
    if drafter is None:
        return target_path, target_config, None, None
    drafter_path = locate(drafter, "drafter")
    drafter_config = read_drafter_config(drafter_path)
    check_pair(target_config, drafter_config)
    return target_path, target_config, drafter_path, drafter_config


def resolve_here(plan: Plan, target: TargetConfig, drafter: DrafterConfig | None) -> Plan:
    """The plan, completed and checked for the default device."""
    device = jax.local_devices()[0]
    return resolve(plan, target, drafter, platform=device.platform, memory=free_memory(device))


def free_memory(device: jax.Device) -> int:
    """Bytes an engine may take: free memory of the device, or of the host for a CPU."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def locate(source: Source, role: str) -> Path:
    """The directory behind a name; raises CheckpointError with the remedy if there is none."""
    if str(source) == SHIPPED:
        return Path(str(importlib.resources.files("dflash_jax"))) / "data" / SHIPPED / role
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; give the {role}'s directory")
    if str(source).count("/") != 1 or str(source).startswith((".", "~", "/")):
        raise CheckpointError(
            f"there is no {role} at {path}; give a directory, a hub id like 'Qwen/Qwen3-8B',"
            f" or '{SHIPPED}'"
        )
    return _download(str(source), role)


def _download(repository: str, role: str) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        raise CheckpointError(
            f"{repository} is no directory here; to fetch the {role} from the hub install the"
            " extra: pip install 'dflash-jax[hub]'"
        ) from error
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository, allow_patterns=["*.json", "*.safetensors", "*.jinja"]
            )
        )
    except Exception as error:  # network, authorisation, unknown repository
        raise CheckpointError(
            f"the {role} {repository} could not be fetched from the hub: {error}"
        ) from error


@dataclasses.dataclass(frozen=True)
class ForwardOutput:
    """A whole forward pass, no cache kept."""

    logits: Float[Array, "B T V"]  # float32
    hidden: Float[Array, "L+1 B T D"]  # input of layer 0, then every layer's output


class TargetModel:
    """A target alone, for looking into it. Made by `load_target`."""

    def __init__(self, config: TargetConfig, params: dict[str, Any], dtype: Dtype):
        self.config, self.params, self.dtype = config, params, dtype
        self._forward = jit(functools.partial(_forward, config, dtype))

    def forward(self, ids: Sequence[Sequence[int]] | Int[Array, "B T"]) -> ForwardOutput:
        """Logits and hidden states of token ids [B, T], unpadded, at positions 0 .. T-1.

        The last hidden state is the last layer's output, before the final norm. Every new
        shape [B, T] is compiled once.

        Raises:
          RequestError: ids that are not [B, T] integers of the vocabulary.
        """
        tokens = np.asarray(ids)
        if tokens.ndim != 2 or tokens.size == 0 or not np.issubdtype(tokens.dtype, np.integer):
            raise RequestError(
                f"ids have shape {tokens.shape} and dtype {tokens.dtype}; expected integers [B, T]"
            )
        if tokens.min() < 0 or tokens.max() >= self.config.vocab_size:
            raise RequestError(
                f"ids run from {tokens.min()} to {tokens.max()}; the target knows 0 to"
                f" {self.config.vocab_size - 1}"
            )
        logits, hidden = self._forward(self.params, tokens.astype(np.int32))
        return ForwardOutput(logits, hidden)


def load_target(source: Source = SHIPPED, *, dtype: Dtype = "float32") -> TargetModel:
    """A target alone; `dtype` is float32, bfloat16 or float16."""
    tune_allocator()
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype is {dtype!r}; expected float32, bfloat16 or float16")
    path = locate(source, "target")
    config = read_target_config(path)
    from converters.load import load_target as read_weights

    return TargetModel(config, jax.device_put(read_weights(path, config, dtype)), dtype)


def _forward(
    config: TargetConfig, dtype: Dtype, params: dict[str, Any], tokens: Int[Array, "B T"]
) -> tuple[Float[Array, "B T V"], Float[Array, "L+1 B T D"]]:
    rows, width = tokens.shape
    plan = Plan(rows=rows, max_length=max(width, 2), block=2, chunk=1, dtype=dtype, rings=False)
    state = empty_state(plan, config, None)
    pair = build_pair(config, None)
    every = tuple(range(config.num_layers + 1))
    params = {"target": params}
    out = pair.target_call(params, tokens, state.target, state.position, taps=every)
    logits = pair.target_call(params, out.hidden, method="logits")
    return logits, jax.numpy.stack(out.taps)
