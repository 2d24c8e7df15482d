"""Check that MaxText loads what `dflash-jax convert --to maxtext` wrote, with the vectors' logits.

Run with maxtext 0.2.3 by `python tests/oracle/maxtext/check.py NAME FOLDER`, where NAME is one of
`write.MODELS` and FOLDER was converted from its arrays; Linen and NNX models are both tried.
"""

import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import maxtext
import numpy as np
import write  # pyrefly: ignore
from maxtext.configs import pyconfig
from maxtext.utils import model_creation_utils
from safetensors.numpy import load_file


def main(name: str, folder: Path) -> None:
    arrays = load_file(write.HERE / f"{name}.safetensors")
    tokens = jnp.asarray(arrays["tokens"])
    positions = jnp.broadcast_to(jnp.arange(write.LENGTH), tokens.shape)
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    for pure in (False, True)[: 1 + write.MODELS[name]["scan_layers"]]:  # unscanned NNX differs
        fields: dict[str, Any] = write.SIZES | write.MODELS[name]
        fields |= {"pure_nnx": pure, "pure_nnx_decoder": pure, "enable_nnx": True}
        fields |= {"load_parameters_path": folder / "0" / "items", "enable_checkpointing": True}
        fields |= {"base_output_directory": folder.parent, "skip_jax_distributed_system": True}
        options = [f"{key}={value}" for key, value in fields.items()]
        config = pyconfig.initialize(["", str(base), *options])
        model, _ = model_creation_utils.from_pretrained(config)
        found = model(tokens, positions, jnp.ones(tokens.shape, jnp.int32), enable_dropout=False)
        np.testing.assert_allclose(found, arrays["logits"], rtol=0, atol=1e-4)
        print(name, "pure NNX" if pure else "Linen decoder", "agrees")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve())
