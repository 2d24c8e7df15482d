"""Write the vectors of this folder: parameters and logits of Gemma 3 models with random weights.

Run with gemma 3.3.0 on a CPU, by `python tests/oracle/gemma/write.py`; tests need the files only.
The files here were written with jax 0.8.1, kauldron 1.3.0 and typeguard 4.4.0. The folder
`checkpoint` is in the flat layout of published checkpoints, written by the library's own functions.
"""

import os
import shutil
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from gemma import gm
from gemma.gm.ckpts import _checkpoint
from gemma.gm.nn import _config, _gemma
from orbax import checkpoint as ocp
from safetensors.numpy import save_file

HERE = Path(__file__).parent
VOCAB, LAYERS = 61, 8


def configured(**changes: Any) -> _config.TransformerConfig:
    fields: dict[str, Any] = {
        "num_embed": VOCAB,
        "embed_dim": 16,
        "hidden_dim": 24,
        "num_heads": 4,
        "head_dim": 8,
        "num_kv_heads": 2,
        "final_logit_softcap": None,
        "use_post_attn_norm": True,
        "use_post_ffw_norm": True,
        "attention_types": _config.make_attention_layers_types(
            pattern=_gemma.GEMMA3_ATTENTION_PATTERN, num_layers=LAYERS
        ),
        "sliding_window_size": 5,
        "transpose_gating_einsum": True,
        "use_qk_norm": True,
        "local_base_frequency": 10_000,
        "global_base_frequency": 1_000_000,
        "global_scale_factor": 8.0,
    }
    return _config.TransformerConfig(**fields | changes)


CONFIGS = {"gemma3": configured(), "gemma3_all_heads": configured(num_kv_heads=4)}


def main() -> None:
    jax.config.update("jax_default_matmul_precision", "highest")
    rng = np.random.default_rng(0)
    for name, config in CONFIGS.items():
        model = gm.nn.Transformer(config=config, dtype=jnp.float32)
        tokens = rng.integers(1, VOCAB, (2, 12)).astype(np.int32)  # 0 is padding, and masked
        params = model.init(jax.random.key(0), jnp.asarray(tokens))["params"]
        # The initial norms are all zeros, and would hide that two were exchanged.
        params = jax.tree.map(
            lambda x: jnp.asarray(x + 0.1 * rng.standard_normal(x.shape), jnp.float32), params
        )
        logits = model.apply({"params": params}, jnp.asarray(tokens)).logits
        leaves = jax.tree_util.tree_leaves_with_path(params)
        arrays = {
            jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
            for path, leaf in leaves
        }
        more = {"tokens": tokens, "logits": np.asarray(logits)}
        save_file(arrays | more, HERE / f"{name}.safetensors")
        print(name, len(arrays))
    # The last one again, as published.
    shutil.rmtree(HERE / "checkpoint", ignore_errors=True)
    writer = ocp.StandardCheckpointer()
    writer.save(HERE / "checkpoint", _checkpoint._nested_to_flat(params))
    writer.wait_until_finished()


if __name__ == "__main__":
    main()
