"""Writes the vectors of Ministral 3, Qwen3-Next and LFM2 in this folder.

    pip install torch transformers==5.15.0 safetensors
    python tests/oracle/targets/write.py [NAME ...]

For each family: a tiny model with random weights in float32, as transformers saves it
(config.json, model.safetensors), its config as published files spell it (config.hub.json), inputs
and outputs (vectors.safetensors), and how they were made (meta.json). Models are drawn until no
greedy token and no choice of an expert depends on rounding. Tests need neither package.
"""

import copy
import json
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache

HERE = Path(__file__).parent
LENGTHS = {"batch": 2, "seq": 48, "prefill": 32, "block": 8, "keep": 35, "long": 136}
LENGTHS |= {"prompt": 16, "greedy": 32}
FULL, LINEAR, CONV = "full_attention", "linear_attention", "conv"
BASE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 24,
    "max_position_embeddings": 1024,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}
# Name: class of the model, class and fields of its config, fields that published files spell
# otherwise; None removes one.
FAMILIES = {
    "ministral3": (
        "Ministral3ForCausalLM",
        "Ministral3Config",
        {
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "sliding_window": None,
            "rope_parameters": YARN,
        },
        {"rope_parameters": YARN | {"type": "yarn"}, "torch_dtype": "float32"},
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            "head_dim": 32,
            "intermediate_size": 40,
            "rms_norm_eps": 1e-6,
            "num_hidden_layers": 4,
            "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
            "linear_conv_kernel_dim": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 12,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
        },
        {
            "rope_parameters": None,
            "layer_types": None,
            "full_attention_interval": 4,
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000,
            "rope_scaling": None,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": False,
            "torch_dtype": "float32",
        },
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {
            "num_hidden_layers": 4,
            "layer_types": [CONV, CONV, FULL, CONV],
            "intermediate_size": 68,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 16,
            "conv_L_cache": 3,
            "conv_bias": False,
            "norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        {
            "rope_parameters": None,
            "rope_theta": 10000.0,
            "intermediate_size": None,
            "block_ff_dim": 68,
            "layer_types": None,
            "full_attn_idxs": [2],
            "tie_word_embeddings": None,
            "tie_embedding": True,
            "use_pos_enc": True,
            "torch_dtype": "float32",
        },
    ),
}


def randomize(model, generator):
    """Draw weights that let every term of the computation show in the output."""

    def normal(shape, std):
        return torch.randn(shape, generator=generator) * std

    def uniform(shape, low, high):
        return torch.rand(shape, generator=generator) * (high - low) + low

    tied = model.config.tie_word_embeddings
    for name, tensor in sorted(model.named_parameters()):
        shape, leaf = tensor.shape, name.rsplit(".", 1)[-1]
        if leaf == "A_log":
            new = uniform(shape, 0.05, 2.0).log()
        elif leaf == "dt_bias":
            new = uniform(shape, -3.0, 1.0)
        elif "norm" in name:
            new = tensor.data.mean() + normal(shape, 0.25)  # around 1, or 0 where 1 is added
        elif "conv1d" in name or "conv.conv" in name:
            new = normal(shape, 0.5)
        elif "embed_tokens" in name:
            new = normal(shape, 0.2 if tied else 0.5)
        elif name.startswith("lm_head") or "mlp.gate.weight" in name:
            new = normal(shape, 2 / math.sqrt(shape[1]))
        elif tensor.dim() == 3:
            new = normal(shape, 1 / math.sqrt(shape[2]))
        else:
            new = normal(shape, 1 / math.sqrt(shape[-1]))
        tensor.data.copy_(new)


class Capture:
    """Records the input of layer 0, the output of every layer and of the final norm."""

    def __init__(self, model):
        self.hidden, self.final, self.gap = {}, None, math.inf
        base, config = model.model, model.config
        base.layers[0].register_forward_pre_hook(self.first, with_kwargs=True)
        for i, layer in enumerate(base.layers):
            layer.register_forward_hook(self.output(i + 1))
        norm = base.embedding_norm if hasattr(base, "embedding_norm") else base.norm
        norm.register_forward_hook(self.normed)
        for module in model.modules():
            if type(module).__name__.endswith("Router"):
                module.register_forward_hook(self.lead(config.num_experts_per_tok))

    def first(self, module, args, kwargs):
        self.hidden = {0: (args[0] if args else kwargs["hidden_states"]).clone()}

    def output(self, index):
        def hook(module, args, out):
            self.hidden[index] = (out[0] if isinstance(out, tuple) else out).clone()

        return hook

    def normed(self, module, args, out):
        self.final = out.clone()

    def lead(self, chosen):
        """Return a hook that keeps the least lead of a chosen expert over the best other one."""

        def hook(module, args, out):
            ranked = out[0].sort(dim=-1, descending=True).values
            lead = (ranked[..., chosen - 1] - ranked[..., chosen]).min().item()
            self.gap = min(self.gap, lead)

        return hook

    def store(self, into, prefix):
        into |= {f"{prefix}hidden.{i}": value for i, value in self.hidden.items()}


def greedy(model, tokens, count):
    """Return a greedy continuation by whole passes, and the least lead of a best logit."""
    lead, start = math.inf, tokens.shape[1]
    for _ in range(count):
        logits = model(input_ids=tokens, use_cache=False).logits[:, -1]
        best = logits.topk(2, dim=-1).values
        lead = min(lead, (best[:, 0] - best[:, 1]).min().item())
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    return tokens[:, start:], lead


def noise(model, capture, ids, generator):
    """Return how far outputs move when every embedding moves by about a float32 rounding."""
    model(input_ids=ids, use_cache=False)
    before, table = dict(capture.hidden), model.get_input_embeddings().weight
    kept = table.data.clone()
    table.data.mul_(1 + 2e-7 * torch.randn(table.shape, generator=generator))
    model(input_ids=ids, use_cache=False)
    table.data.copy_(kept)
    return max((capture.hidden[i] - before[i]).abs().max().item() for i in before)


def states(cache, config):
    """Return the last inputs of convolutions and the recurrent states."""
    found, kinds = {}, getattr(config, "layer_types", None) or []
    kernel = getattr(config, "linear_conv_kernel_dim", getattr(config, "conv_L_cache", 0))
    for i, kind in enumerate(kinds):
        if kind in (LINEAR, CONV):
            layer = cache.layers[i]
            found[f"{i}.conv"] = layer.conv_states[0][..., -(kernel - 1) :].clone()
        if kind == LINEAR:
            found[f"{i}.recurrent"] = layer.recurrent_states[0].clone()
    return found


def incremental(model, capture, ids, out):
    """Prefill, verify a block with a wrong tail, roll back and go on; return the kept logits."""
    config, lengths = model.config, LENGTHS
    prefill, block, keep = lengths["prefill"], lengths["block"], lengths["keep"]
    recurrent = {LINEAR, CONV} & {*(getattr(config, "layer_types", None) or [])}
    cache = DynamicCache(config=config)
    cache.activate_past_recording()

    def run(tokens, start, cache):
        positions = torch.arange(start, start + tokens.shape[1])[None].expand(len(tokens), -1)
        options = {"position_ids": positions, "past_key_values": cache, "use_cache": True}
        return model(input_ids=tokens, **options).logits

    def keep_states(name):
        cache.crop(0)
        out.update({f"incr.{name}.state.{k}": v for k, v in states(cache, config).items()})

    logits = [run(ids[:, :prefill], 0, cache)]
    out["incr.prefill.logits"] = logits[0]
    keep_states("prefill")
    before, taken = copy.deepcopy(cache), keep - prefill
    draft = ids[:, prefill : prefill + block].clone()
    draft[:, taken:] = (draft[:, taken:] + 7) % config.vocab_size
    out["incr.block1.input_ids"] = draft
    out["incr.block1.logits"] = run(draft, prefill, cache)
    capture.store(out, "incr.block1.")
    logits.append(out["incr.block1.logits"][:, :taken])
    if recurrent:  # a rolled back state is the one before the block, and the kept tokens again
        cache = before
        run(ids[:, prefill:keep], prefill, cache)
        keep_states("rollback")
    else:
        cache.crop(taken - block)
    second = ids[:, keep : keep + block]
    out["incr.block2.input_ids"] = second
    out["incr.block2.logits"] = run(second, keep, cache)
    capture.store(out, "incr.block2.")
    logits.append(out["incr.block2.logits"])
    cache.crop(0)
    steps = []
    for at in range(keep + block, lengths["seq"]):
        steps.append(run(ids[:, at : at + 1], at, cache))
        cache.crop(0)
    out["incr.step.input_ids"] = ids[:, keep + block :]
    out["incr.step.logits"] = torch.cat(steps, dim=1)
    keep_states("end")
    return torch.cat(logits + steps, dim=1)


@torch.no_grad()
def compute(name, seed):
    """Return a random model, its inputs and outputs, and checks of them."""
    kind, config_kind, fields, _ = FAMILIES[name]
    generator = torch.Generator().manual_seed(seed)
    config = getattr(transformers, config_kind)(**BASE | fields)
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(transformers, kind)(config).float().eval()
    randomize(model, generator)
    shape, top = (LENGTHS["batch"], LENGTHS["seq"]), BASE["vocab_size"] - 8
    ids = torch.randint(3, top, shape, generator=generator)
    long = torch.randint(3, top, (1, LENGTHS["long"]), generator=generator)
    out, capture = {"input_ids": ids, "long.input_ids": long}, Capture(model)
    out["greedy.tokens"], lead = greedy(model, ids[:, : LENGTHS["prompt"]], LENGTHS["greedy"])
    whole = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    out |= {"logits": whole.logits, "final_norm": capture.final}
    capture.store(out, "")
    out["long.logits"] = model(input_ids=long, use_cache=False).logits
    checks = {
        "greedy_least_lead": lead,
        "greedy_distinct_tokens": min(len({*row.tolist()}) for row in out["greedy.tokens"]),
        "logits_std": whole.logits.std().item(),
        "noise_max_abs": noise(model, capture, ids, generator),
    }
    if capture.gap < math.inf:
        checks["router_least_gap"] = capture.gap
    clear = lead > 3e-3 and checks["noise_max_abs"] < 4e-5 and capture.gap > 3e-4
    if not clear or checks["greedy_distinct_tokens"] < 8:
        return None
    kept = incremental(model, capture, ids, out)
    checks["incremental_vs_full_max_abs"] = (kept - whole.logits).abs().max().item()
    assert checks["incremental_vs_full_max_abs"] < 1e-4, checks
    return model, out, checks


@torch.no_grad()
def reloaded(folder, out):
    """Return how far the stored model is from the one it was made from, by either config."""
    found = {}
    for spelling in ("config.json", "config.hub.json"):
        with tempfile.TemporaryDirectory() as place:
            shutil.copy(folder / spelling, Path(place) / "config.json")
            shutil.copy(folder / "model.safetensors", place)
            options = {"attn_implementation": "eager", "experts_implementation": "eager"}
            model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **options)
            logits = model.eval()(input_ids=out["input_ids"]).logits
            found[spelling] = (logits - out["logits"]).abs().max().item()
    assert max(found.values()) < 1e-5, found
    return {f"reloaded by {name}": error for name, error in found.items()}


def write(name):
    """Write the folder of a family."""
    seed, made = 0, None
    while made is None:
        seed, made = seed + 1, compute(name, seed)
    model, out, checks = made
    kind, _, fields, respelt = FAMILIES[name]
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, save_original_format=True)
    (folder / "generation_config.json").unlink(missing_ok=True)
    published = {"architectures": [kind], "model_type": model.config.model_type}
    published |= BASE | fields | respelt
    published = {k: v for k, v in published.items() if v is not None}
    (folder / "config.hub.json").write_text(json.dumps(published, indent=2) + "\n")
    whole = {k: v.int() if v.dtype == torch.int64 else v for k, v in out.items()}
    save_file({k: v.contiguous().clone() for k, v in whole.items()}, folder / "vectors.safetensors")
    meta = {
        "arch": name,
        "class": kind,
        "seed": seed - 1,
        "lengths": LENGTHS,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "checks": checks | reloaded(folder, out),
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for chosen in sys.argv[1:] or FAMILIES:
        write(chosen)
