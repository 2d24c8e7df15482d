"""The official PyTorch package `dflash` 0.1.0 with the same weights, timed by its clock.

Needs `pip install torch==2.13.0 transformers==5.15.0 dflash==0.1.0`. Only its
clock, which requires CUDA, is replaced, and, for forced acceptance, the logits of its drafter after
the full forward pass and head have run.
"""

import time
from typing import Any

import dflash.model as package
import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.modes import Run
from dflash_jax.config import AttentionConfig
from dflash_jax.converters.names import published
from dflash_jax.converters.tree_source import TreeSource
from dflash_jax.engine.engine import Engine

SURE = 1e4  # added to the logit of a scripted token


class Official:
    """Target and drafter of an engine as PyTorch modules, by default float32 on a CPU."""

    def __init__(self, engine: Engine, *, device: str = "cpu", dtype: str = "float32"):
        torch.set_num_threads(1)
        self.device = device
        kind = getattr(torch, dtype)
        package._cuda_time = self._clock
        self._busy: list[float] = []
        config = _config(engine.graph.config)
        drafter = engine.graph.drafter_config
        torch.set_default_dtype(kind)
        with torch.device(device):
            self.target = Qwen3ForCausalLM(config).to(kind).eval()
            self.drafter = _Forced(_config(drafter)).to(kind).eval()
        torch.set_default_dtype(torch.float32)
        _fill(self.target, engine.params["target"], engine.graph.config, prefix="model.")
        _fill(self.drafter, engine.params["drafter"], drafter, prefix="")

    def generate(
        self,
        prompt: list[int],
        *,
        max_tokens: int,
        stop_ids: tuple[int, ...] = (),
        script: list[int] | None = None,
        block: int | None = None,
    ) -> Run:
        """Run `dflash_generate` greedily; a block of 1 is its plain decoding."""
        self._busy.clear()
        self.drafter.script = None if script is None else torch.tensor(script, device=self.device)
        out = package.dflash_generate(
            self.drafter,
            self.target,
            torch.tensor([prompt], device=self.device),
            max_tokens,
            list(stop_ids) or None,
            block_size=block,
            return_stats=True,
        )
        return Run(
            out.output_ids[0, len(prompt) :].tolist(),
            list(out.acceptance_lengths),
            out.time_to_first_token,
            out.time_per_output_token * out.num_output_tokens,
            self._busy[-1] - self._busy[-2],
        )

    def _clock(self) -> float:
        """Return the time for the package, and record CPU seconds."""
        if self.device != "cpu":
            torch.cuda.synchronize()
        self._busy.append(time.process_time())
        return time.perf_counter()


class _Forced(package.DFlashDraftModel):
    """The package's drafter, with logits replaced by `script` if there is one."""

    script: torch.Tensor | None = None

    def forward(self, position_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self._end = int(position_ids[0, -1]) + 1
        return super().forward(position_ids, **kwargs)

    def compute_logits(self, hidden: torch.Tensor, output_head: Any) -> torch.Tensor:
        logits = super().compute_logits(hidden, output_head)
        if self.script is not None:
            places = torch.arange(self._end - logits.shape[1], self._end, device=logits.device)
            said = self.script[places.clamp(max=len(self.script) - 1)]
            every = torch.arange(logits.shape[1], device=logits.device)
            logits[0, every, said] += SURE
        return logits


def _config(config: AttentionConfig) -> Qwen3Config:
    fields = published.fields(config, "float32")
    fields |= {"rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta}}
    for name in ("architectures", "model_type", "rope_theta", "rope_scaling"):
        fields.pop(name)
    return Qwen3Config(**fields, attn_implementation="sdpa")


def _fill(module: torch.nn.Module, params: Any, config: AttentionConfig, *, prefix: str) -> None:
    """Copy our weights into a module, which takes all of them; a tied head may be missing."""
    source = TreeSource(params, config)
    tensors = {
        name if name == "lm_head.weight" else prefix + name: torch.from_numpy(
            np.array(source.read(name), np.float32)
        )
        for name in source.names()
    }
    missing, unexpected = module.load_state_dict(tensors, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
