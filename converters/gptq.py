"""Write matrices in GPTQ's format, without its algorithm: 4 bits, symmetric, scales by search.

Codes are those nearest to the weights, with the scales of least squares that blocks of GGUF have.
GPTQ's algorithm, which moves the errors of a row to its later weights, needs inputs of the model.
Facts: auto-gptq 0.7.1, gptqmodel 7.7.0; `hf_grouped` describes and reads the layout.
"""

from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_jax.converters.formats.quants.encoders import scaled
from dflash_jax.converters.formats.quants.search import Codes
from dflash_jax.converters.formats.safetensors import Planned
from dflash_jax.converters.formats.source import TensorSource
from dflash_jax.converters.hf_grouped import GPTQ, WORD
from dflash_jax.errors import CheckpointError, ConfigError

BITS = 4
PER_WORD = WORD // BITS
GROUPS = (32, 64, 128)
MIDDLE = 8  # the code of zero
ZERO_WORD = 0x77777777  # zero points of eight outputs, each stored as one less
LAYERS = ("layers.", "model.layers.")  # canonical, and in a folder
WEIGHT = "weight"
CHUNK = 1 << 20  # weights that are quantised at a time


@dataclass(frozen=True)
class GptqForm:
    """How the matrices of layers are quantised; embedding and head stay floats."""

    bits: int = BITS
    group: int = 128
    library = "pt"

    def check(self) -> None:
        """Check the numbers.

        Raises:
          ConfigError: such a form is not written.
        """
        if self.bits != BITS or self.group not in GROUPS:
            raise ConfigError(
                f"GPTQ weights of {self.bits} bits in groups of {self.group}: written are {BITS}"
                f" bits, in groups of {', '.join(map(str, GROUPS))}"
            )

    @property
    def fields(self) -> dict[str, Any]:
        """The settings in config.json."""
        settings = {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group,
            "sym": True,
            "desc_act": False,
            "lm_head": False,
            "checkpoint_format": "gptq",
        }
        return {"quantization_config": settings}

    def takes(self, planned: Planned) -> bool:
        """Return whether a tensor is quantised: the matrices of layers, all of them."""
        own = planned.name.startswith(LAYERS) and planned.name.endswith(f".{WEIGHT}")
        return own and len(planned.shape) == 2

    def planned(self, tensor: Planned) -> list[Planned]:
        """Return the tensors that a quantised matrix becomes.

        Raises:
          ConfigError: the matrix does not consist of whole groups and words.
        """
        out, into = tensor.shape
        if into % self.group or out % PER_WORD:
            raise ConfigError(
                f"{tensor.name} [{out}, {into}] has no groups of {self.group} inputs and words of"
                f" {PER_WORD} outputs; give a --q-group-size of {' or '.join(map(str, GROUPS))}"
                " that divides its inputs, or write a .gguf file"
            )
        stem = tensor.name.removesuffix(WEIGHT)
        codes, scales, zeros, order = (f"{stem}{part}" for part in GPTQ.tensors)
        groups = into // self.group
        whole = np.dtype(np.int32)
        return [
            Planned(codes, whole, (into // PER_WORD, out)),
            Planned(zeros, whole, (groups, out // PER_WORD)),
            Planned(scales, np.dtype(np.float16), (groups, out)),
            Planned(order, whole, (into,)),
        ]

    def quantise(
        self, tensors: TensorSource, name: str, dtype: np.dtype, pool: Executor
    ) -> list[np.ndarray]:
        """Return the tensors that a matrix becomes, whatever the dtype of the others.

        Raises:
          CheckpointError: a weight is not finite, or too large for scales in float16.
        """
        del dtype
        out, into = tensors.shape(name)
        words = np.empty((into // PER_WORD, out), np.int32)
        scales = np.empty((into // self.group, out), np.float16)
        step = max(1, CHUNK // into)

        def run(start: int) -> None:
            rows = slice(start, min(start + step, out))
            values = tensors.read_rows(name, rows).astype(np.float32)
            words[:, rows], scales[:, rows] = self._quantised(values, name)

        for _ in pool.map(run, range(0, out, step)):
            pass
        zeros = np.full((len(scales), out // PER_WORD), ZERO_WORD, np.int32)
        order = np.arange(into, dtype=np.int32) // np.int32(self.group)
        return [words, zeros, scales, order]

    def _quantised(self, values: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return words [in words, rows] and scales [groups, rows] of float32 rows."""
        message = (
            f"{name} holds values that are NaN, infinite or too large for float16 scales; fetch"
            " the weights again, or choose another format"
        )
        if not np.isfinite(values).all():
            raise CheckpointError(message)
        try:
            scale, signed = scaled(values.reshape(-1, self.group), None, Codes(-MIDDLE, MIDDLE - 1))
        except OverflowError:
            raise CheckpointError(message) from None
        codes = (signed + np.uint8(MIDDLE)).reshape(len(values), -1)
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        return packed.view("<i4").T, scale.reshape(len(values), -1).T
