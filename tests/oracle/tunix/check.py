"""Check that Tunix loads what `dflash-jax convert --to tunix` wrote, with the vectors' logits.

Run with google-tunix 0.1.7 by `python tests/oracle/tunix/check.py NAME FOLDER`, where NAME is one
of `write.MODELS` and FOLDER was converted from its arrays.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import write  # pyrefly: ignore
from flax import nnx
from safetensors.numpy import load_file
from tunix.sft.checkpoint_manager import CheckpointManager


def main(name: str, folder: Path) -> None:
    jax.config.update("jax_default_matmul_precision", "highest")
    arrays = load_file(Path(__file__).with_name(f"{name}.safetensors"))
    model = write.MODELS[name](nnx.Rngs(1))
    CheckpointManager(str(folder)).maybe_restore(model)
    positions = jnp.broadcast_to(jnp.arange(12), arrays["tokens"].shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((12, 12), bool)), (2, 12, 12))
    logits, _ = model(jnp.asarray(arrays["tokens"]), positions, None, mask)
    np.testing.assert_allclose(logits, arrays["logits"], rtol=0, atol=1e-4)
    print(name, "agrees")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve())
