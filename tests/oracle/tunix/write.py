"""Write the vectors of this folder: parameters and logits of Tunix models with random weights.

Run with google-tunix 0.1.7, by `python tests/oracle/tunix/write.py`; tests need the files only.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file
from tunix.models.llama3 import model as llama3
from tunix.models.qwen3 import model as qwen3

SIZES = {
    "num_layers": 2,
    "vocab_size": 61,
    "embed_dim": 16,
    "hidden_dim": 24,
    "num_heads": 4,
    "head_dim": 8,
    "num_kv_heads": 2,
    "rope_theta": 1_000_000,  # what its layers use
    "norm_eps": 1e-5,
}
MODELS: dict[str, Any] = {
    "qwen3": lambda rngs: qwen3.Qwen3(qwen3.ModelConfig(**SIZES), rngs=rngs),
    "llama3": lambda rngs: llama3.Llama3(llama3.ModelConfig(**SIZES, weight_tying=True), rngs=rngs),
}


def main() -> None:
    jax.config.update("jax_default_matmul_precision", "highest")
    rng = np.random.default_rng(0)
    for name, make in MODELS.items():
        model = make(nnx.Rngs(0))
        state = nnx.state(model, nnx.Param)
        # The initial norms are all ones, and would hide that two were exchanged.
        state = jax.tree.map(
            lambda x: jnp.asarray(x + 0.1 * rng.standard_normal(x.shape), jnp.float32), state
        )
        nnx.update(model, state)
        tokens = rng.integers(0, SIZES["vocab_size"], (2, 12)).astype(np.int32)
        positions = jnp.broadcast_to(jnp.arange(12), tokens.shape)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((12, 12), bool)), (2, 12, 12))
        logits, _ = model(jnp.asarray(tokens), positions, None, mask)
        leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(state))
        arrays = {
            jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
            for path, leaf in leaves
        }
        more = {"tokens": tokens, "logits": np.asarray(logits)}
        save_file(arrays | more, Path(__file__).with_name(f"{name}.safetensors"))
        print(name, {key: array.shape for key, array in arrays.items()})


if __name__ == "__main__":
    main()
