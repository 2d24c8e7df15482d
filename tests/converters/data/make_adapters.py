"""Makes adapters/NAME: PEFT adapters of oracle targets, and the logits after merging.

    pip install torch==2.13.0 transformers==5.15.* peft==0.21.2
    python make_adapters.py

logits.npy holds the last positions of what `merge_and_unload` computes in float32.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
TARGETS = HERE.parents[1] / "oracle" / "targets"
TOKENS, KEPT = 12, 4  # of the prompt, and positions whose logits are kept
ADAPTERS: dict[str, dict[str, Any]] = {
    "patterns.llama3": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"down_proj": 2, r"layers\.[01]\.self_attn\.v_proj": 3},
        "alpha_pattern": {"1.self_attn.q_proj": 3, "^model.layers.2.mlp.down_proj": 5},
        "modules_to_save": ["norm"],  # the norms of layers end so too
    },
    "all_linear.qwen3": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": "all-linear",
        "use_rslora": True,
    },
    "embedding.qwen3": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["embed_tokens", "o_proj"],
        "fan_in_fan_out": True,  # of no effect on Linear layers
    },
}


def make(name: str, options: dict[str, Any]) -> None:
    base = TARGETS / name.split(".")[1]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(3)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
    for path, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) * 0.1
            assert re.search("lora_|modules_to_save", path), path
    place = HERE / "adapters" / name
    adapted.save_pretrained(place, save_embedding_layers=False)
    (place / "README.md").unlink(missing_ok=True)
    path = place / "adapter_config.json"
    config = json.loads(path.read_text()) | {"base_model_name_or_path": name.split(".")[1]}
    config["target_modules"] = sorted(config["target_modules"])  # a set in peft
    path.write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    ids = load_file(base / "vectors.safetensors")["input_ids"][:1, :TOKENS]
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)(ids).logits
        logits = adapted.merge_and_unload()(ids).logits
    np.save(place / "logits.npy", logits[0, -KEPT:].numpy())
    print(name, "moves logits by", float((logits - plain).abs().max()))


if __name__ == "__main__":
    for name, options in ADAPTERS.items():
        make(name, options)
