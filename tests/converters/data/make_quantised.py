"""Makes quantised/*.safetensors: linear layers packed by the libraries that publish such folders.

    pip install torch==2.13.0 transformers==5.15.* compressed-tensors==0.20.0
    pip install --no-deps autoawq==0.2.9 auto-gptq==0.7.1 gptqmodel==7.7.0
    pip install pypcre logbar device-smi threadpoolctl
    python make_quantised.py
    pip install --no-deps compressed-tensors==0.11.0 frozendict
    python make_quantised.py  # the remaining file, compressed_order

A file NAME.BASE is layer 0 of an oracle target, packed; layers 1 and 2 stay as they are. It holds
the logits that transformers computes in float32 with the decoded weights. Other files are one
matrix and its decoded values. `config` in a file's metadata is its quantization_config.

Weights are rounded to codes first, so that each library packs known integers; the decoded values
are codes minus zero points times scales in float32, which each library's own decoding confirms.
The packages are loaded without their top modules, which import much that packing does not need.
"""

import importlib.metadata
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

SITE = Path(importlib.util.find_spec("torch").origin).parents[1]
for name in ("awq", "awq.modules", "awq.modules.linear", "auto_gptq", "auto_gptq.nn_modules",
             "auto_gptq.nn_modules.qlinear", "gptqmodel", "gptqmodel.models",
             "gptqmodel.nn_modules"):  # fmt: skip
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(SITE / name.replace(".", "/"))]
sys.modules["gptqmodel"].DEBUG_ON = False

from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear  # noqa: E402
from awq.modules.linear.gemm import WQLinear_GEMM  # noqa: E402
from awq.modules.linear.gemv import WQLinear_GEMV  # noqa: E402
from awq.utils.packing_utils import dequantize_gemm  # noqa: E402
from gptqmodel.nn_modules.qlinear.torch import TorchLinear  # noqa: E402

HERE = Path(__file__).resolve().parent
TARGETS = HERE.parents[1] / "oracle" / "targets"
TOKENS, KEPT = 12, 4  # of the prompt, and positions whose logits are kept
Tensors = dict[str, torch.Tensor]


@dataclass
class Codes:
    """Codes [out, in], scales and zero points [out, G], and the group of each input."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    order: torch.Tensor
    bits: int
    group: int

    @property
    def decoded(self) -> torch.Tensor:
        """(code - zero) * scale, float32 [out, in]."""
        spread = self.codes - self.zeros[:, self.order]
        return spread.float() * self.scales.float()[:, self.order]

    @property
    def linear(self) -> torch.nn.Linear:
        """A layer whose weights are exactly the decoded ones."""
        out, into = self.codes.shape
        found = torch.nn.Linear(into, out, bias=False)
        found.weight.data = self.decoded
        return found


def rounded(
    weight: torch.Tensor,
    bits: int,
    group: int,
    *,
    symmetric: bool,
    dtype: torch.dtype = torch.float16,
    act_order: bool = False,
) -> Codes:
    """Round weights [out, in] to the nearest codes; one group of all inputs if `group` is -1."""
    out, into = weight.shape
    size = into if group == -1 else group
    order = torch.arange(into) // size
    if act_order:
        order = order[torch.randperm(into, generator=torch.Generator().manual_seed(into))]
    groups = weight[:, torch.argsort(order, stable=True)].reshape(out, -1, size)
    most = 2**bits - 1
    if symmetric:
        scales = groups.abs().amax(-1) * 2 / most
        zeros = torch.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = (high - low) / most
        zeros = torch.round(-low / scales).clamp(0, most).int()
    scales = scales.to(dtype)
    codes = torch.round(weight / scales.float()[:, order]) + zeros[:, order]
    return Codes(codes.clamp(0, most).int(), scales, zeros.int(), order.int(), bits, size)


def confirm(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs.float(), rtol=2e-7, atol=0)


def awq(c: Codes) -> Tensors:
    packed = WQLinear_GEMM.from_linear(
        c.linear, c.bits, c.group, scales=c.scales.T.contiguous(), zeros=c.zeros.T.contiguous()
    )
    found = dict(packed.state_dict())
    scales = found["scales"].float()
    theirs = dequantize_gemm(found["qweight"], found["qzeros"], scales, c.bits, c.group)
    confirm(c.decoded, theirs.T)
    return found


def awq_gemv(c: Codes) -> Tensors:
    """Not confirmed: only CUDA code decodes it."""
    packed = WQLinear_GEMV.from_linear(c.linear, c.bits, c.group, scales=c.scales, zeros=c.zeros)
    return dict(packed.state_dict())


def gptq(c: Codes) -> Tensors:
    out, into = c.codes.shape
    packed = QuantLinear(c.bits, c.group, into, out, bias=False)
    packed.pack(c.linear, c.scales.float(), c.zeros.float(), c.order)
    packed.scales = packed.scales.float()
    confirm(c.decoded, packed(torch.eye(into)).T)
    packed.scales = packed.scales.half()
    return dict(packed.state_dict())


def gptq_v2(c: Codes) -> Tensors:
    out, into = c.codes.shape
    packed = TorchLinear(
        bits=c.bits, group_size=c.group, sym=False, desc_act=True, in_features=into,
        out_features=out,
    )  # fmt: skip
    packed.pack_original(c.linear, c.scales.float(), c.zeros.float(), c.order)
    packed.post_init()
    found = {name: packed.state_dict()[name] for name in ("qweight", "qzeros", "scales", "g_idx")}
    packed.scales, packed.dequant_dtype = packed.scales.float(), torch.int32
    confirm(c.decoded, packed.dequantize_weight().T)
    return found


def gptq_v1_borrowed(c: Codes) -> Tensors:
    """As gptqmodel writes version 1: one is subtracted from every field of a word at once.

    A zero point of 0 borrows from the next field. The constant is that of
    `convert_gptq_v2_to_v1_format_module`, which is not imported: it needs all of gptqmodel.
    """
    assert (c.zeros == 0).any(), "no zero point borrows"
    found = gptq_v2(c)
    return found | {"qzeros": found["qzeros"] - 0x11111111}


def compressed(c: Codes) -> Tensors:
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor

    middle = 2 ** (c.bits - 1)
    symmetric = bool((c.zeros == middle).all())
    strategy = "channel" if c.scales.shape[1] == 1 else "group"
    weights = QuantizationArgs(
        num_bits=c.bits, type="int", symmetric=symmetric, strategy=strategy,
        group_size=c.group if strategy == "group" else None,
    )  # fmt: skip
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    state = {"weight": c.decoded, "weight_scale": c.scales.float()}
    state["weight_zero_point"] = (c.zeros - middle).to(torch.int8)
    found = PackedQuantizationCompressor.compress(state, scheme)
    confirm(c.decoded, PackedQuantizationCompressor.decompress(found, scheme)["weight"])
    return found | {"weight_scale": c.scales}


def compressed_order(c: Codes) -> Tensors:
    """As version 0.11 does; 0.20 neither writes nor reads groups in the order of activations."""
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import (
        PackedQuantizationCompressor as Compressor,
    )

    scale, zeros = c.scales.float(), (c.zeros - 2 ** (c.bits - 1)).to(torch.int8)
    weights = QuantizationArgs(
        num_bits=c.bits, type="int", symmetric=False, strategy="group", group_size=c.group,
        actorder="group",
    )  # fmt: skip
    packed = Compressor().compress_weight(c.decoded, scale, weights, zeros, c.order)
    confirm(
        c.decoded, dequantize(c.codes - 2 ** (c.bits - 1), scale, zeros, weights, g_idx=c.order)
    )
    return packed | {"weight_scale": c.scales, "weight_g_idx": c.order}


def awq_config(version: str, group: int) -> dict[str, Any]:
    ignored = ["layers.1.", "layers.2.", "lm_head"]
    return {
        "quant_method": "awq", "bits": 4, "group_size": group, "version": version,
        "zero_point": True, "modules_to_not_convert": ignored,
    }  # fmt: skip


def gptq_config(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": group, "damp_percent": 0.1,
        "desc_act": False, "sym": True, "lm_head": False, "true_sequential": True,
    } | more  # fmt: skip


def compressed_config(bits: int, group: int, symmetric: bool, actorder: str | None = None) -> Any:
    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "actorder": actorder,
        "strategy": "channel" if group == -1 else "group", "dynamic": False,
        "group_size": None if group == -1 else group, "observer": "minmax",
    }  # fmt: skip
    scheme = {"weights": weights, "targets": ["Linear"], "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "quantization_status": "compressed", "config_groups": {"group_0": scheme},
        "ignore": ["lm_head", r"re:.*layers\.[12]\..*"], "kv_cache_scheme": None,
    }  # fmt: skip


def model(name: str, base: str, config: Any, pack: Callable[[Codes], Tensors], **how: Any) -> None:
    """Write layer 0 of a target, and the logits of the target with its decoded weights."""
    made = AutoModelForCausalLM.from_pretrained(TARGETS / base, dtype=torch.float32)
    tensors: Tensors = {}
    for path, module in made.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers.0." in path:
            codes = rounded(module.weight.data, **how)
            module.weight.data = codes.decoded
            tensors |= {f"{path}.{key}": value for key, value in pack(codes).items()}
    ids = load_file(TARGETS / base / "vectors.safetensors")["input_ids"][:1, :TOKENS]
    with torch.no_grad():
        tensors["logits"] = made(ids).logits[0, -KEPT:]
    write(f"{name}.{base}", tensors, config)


def matrix(
    name: str, config: Any, pack: Callable[[Codes], Tensors], *, shift: float = 0.0, **how: Any
) -> None:
    """Write one random matrix and its decoded values."""
    rng = np.random.default_rng(5)
    weight = torch.tensor(rng.standard_normal((32, 64)).astype(np.float32) * 0.1 + shift)
    codes = rounded(weight, **how)
    tensors = {f"proj.{key}": value for key, value in pack(codes).items()}
    write(name, tensors | {"decoded": codes.decoded}, config)


def write(name: str, tensors: Tensors, config: Any) -> None:
    path = HERE / "quantised" / f"{name}.safetensors"
    kept = {key: value.contiguous() for key, value in tensors.items()}
    save_file(kept, path, metadata={"config": json.dumps(config)})
    print(f"{path.name}: {path.stat().st_size} bytes")


def main() -> None:
    four = {"bits": 4, "group": 32}
    if importlib.metadata.version("compressed-tensors").startswith("0.11."):
        ordered = compressed_config(4, 32, symmetric=False, actorder="group")
        how = four | {"symmetric": False, "act_order": True}
        model("compressed_order", "qwen3", ordered, compressed_order, **how)
        return
    model("awq", "llama3", awq_config("gemm", 32), awq, **four, symmetric=False)
    model("awq_gemv", "qwen3", awq_config("gemv", 32), awq_gemv, **four, symmetric=False)
    model("gptq", "llama3", gptq_config(4, 32), gptq, **four, symmetric=True)
    v2 = gptq_config(4, 32, desc_act=True, sym=False, checkpoint_format="gptq_v2")
    model("gptq_v2", "qwen3", v2, gptq_v2, **four, symmetric=False, act_order=True)
    plain = compressed_config(4, 32, symmetric=True)
    model("compressed", "llama3", plain, compressed, **four, symmetric=True, dtype=torch.bfloat16)
    for bits, group, symmetric in ((2, 32, True), (3, -1, False), (8, 32, True)):
        config = gptq_config(bits, group, sym=symmetric)
        matrix(f"gptq_{bits}", config, gptq, bits=bits, group=group, symmetric=symmetric)
    borrowed = gptq_config(4, 32, sym=False)
    matrix("gptq_borrowed", borrowed, gptq_v1_borrowed, **four, symmetric=False, shift=0.25)
    for bits, symmetric in ((3, False), (4, False), (8, True)):
        config = compressed_config(bits, -1, symmetric)
        how = {"bits": bits, "group": -1, "symmetric": symmetric}
        matrix(f"compressed_{bits}", config, compressed, **how)


if __name__ == "__main__":
    main()
