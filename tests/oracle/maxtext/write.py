"""Write the vectors of this folder: parameters and logits of MaxText models with random weights.

Run with maxtext 0.2.3 on a CPU, by `python tests/oracle/maxtext/write.py`; tests need the files
only. The files here were written with jax 0.10.2 on Python 3.11, below the bound that the package
declares. The folder `checkpoint` is written by MaxText's own checkpoint manager.
"""

import os
import shutil
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
from flax import linen
from jax.sharding import Mesh
from maxtext.common import checkpointing
from maxtext.configs import pyconfig
from maxtext.models import models
from maxtext.utils import maxtext_utils
from safetensors.numpy import save_file

ROWS, LENGTH, VOCAB = 2, 12, 61
HERE = Path(__file__).parent
SIZES = {
    "run_name": "vectors",
    "enable_checkpointing": False,
    "base_emb_dim": 16,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "base_num_decoder_layers": 2,
    "base_mlp_dim": 24,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "mlp_activations": "['silu','linear']",
    "enable_dropout": False,
    "logits_via_embedding": False,
    "normalization_layer_epsilon": 1e-5,
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
    "attention": "dot_product",
    "max_target_length": LENGTH,
    "per_device_batch_size": ROWS,
}
LLAMA = {"decoder_block": "llama2", "rope_max_timescale": 500_000}
QWEN3 = {
    "decoder_block": "qwen3",
    "use_qk_norm": True,
    "logits_via_embedding": True,
    "normalize_embedding_logits": False,
    "rope_max_timescale": 1_000_000,
}
GEMMA3 = {
    "decoder_block": "gemma3",
    "model_name": "gemma3-4b",
    "override_model_config": True,
    "base_num_decoder_layers": 8,  # one repetition of six, and two more
    "mlp_activations": "['gelu','linear']",
    "logits_via_embedding": True,
    "sliding_window_size": 5,
    "normalization_layer_epsilon": 1e-6,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama3": LLAMA | {"scan_layers": False},
    "llama3_scanned": LLAMA | {"scan_layers": True},
    "llama3_1_scanned": LLAMA | {"scan_layers": True, "rope_type": "llama3.1"},
    "mistral_scanned": {
        "decoder_block": "mistral",
        "scan_layers": True,
        "rope_max_timescale": 1_000_000,
    },
    "qwen2": {"decoder_block": "qwen2", "attention_bias": True, "scan_layers": False},
    "qwen3": QWEN3 | {"scan_layers": False},
    "qwen3_scanned": QWEN3 | {"scan_layers": True},
    "gemma3": GEMMA3 | {"scan_layers": False},
    "gemma3_scanned": GEMMA3 | {"scan_layers": True},
}


def main() -> None:
    rng = np.random.default_rng(0)
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    for name, fields in MODELS.items():
        options = [f"{key}={value}" for key, value in (SIZES | fields).items()]
        config = pyconfig.initialize(["", str(base), *options])
        mesh = Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
        model = models.transformer_as_linen(config, mesh, None, "train")
        tokens = rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
        positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
        inputs = (jnp.asarray(tokens), positions, jnp.ones(tokens.shape, jnp.int32))
        keys = {key: jax.random.key(i) for i, key in enumerate(("params", "dropout", "aqt"))}
        with mesh:
            variables = model.init(keys, *inputs, enable_dropout=False)
        variables = linen.meta.unbox(variables)

        # The initial norms are all ones, and would hide that two were exchanged. A tied head is
        # multiplied in bfloat16, which is exact if the table is rounded before.
        def moved(path: Any, x: Any, tied: bool = config.logits_via_embedding) -> Any:
            x = x + 0.1 * rng.standard_normal(x.shape)
            rounded = tied and path[-1].key == "embedding"
            return jnp.asarray(x, jnp.bfloat16 if rounded else jnp.float32).astype(jnp.float32)

        variables = jax.tree_util.tree_map_with_path(moved, variables)
        with mesh:
            logits = model.apply(variables, *inputs, enable_dropout=False)
        leaves = jax.tree_util.tree_leaves_with_path(variables)
        arrays = {
            jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
            for path, leaf in leaves
        }
        more = {"tokens": tokens, "logits": np.asarray(logits, np.float32)}
        save_file(arrays | more, HERE / f"{name}.safetensors")
        print(name, len(arrays))
        if name == "llama3_scanned":
            save(variables)


def save(variables: Any) -> None:
    folder = HERE / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    manager = checkpointing.create_orbax_checkpoint_manager(str(folder), True, False, 1)
    state = maxtext_utils.init_decode_state(None, variables)
    checkpointing.save_checkpoint(manager, 0, state)
    manager.wait_until_finished()


if __name__ == "__main__":
    main()
