"""Files written by an independent writer, run by the engine's own modules."""

import gguf
import numpy as np
import pytest
import safetensors.numpy
from gguf_families import write_family
from gguf_models import Q, write_target
from weight_files import ORACLE

from dflash_jax.converters.compare import compare
from dflash_jax.converters.models import open_model
from dflash_jax.target_model import TargetModel

TOLERANCE = 2e-4  # of the vectors, float32


def logits(path, ids):
    model = open_model(path, role="target")
    return np.asarray(
        TargetModel(model.config, model.load("float32"), "float32").forward(ids).logits
    )


DENSE = ("llama3", "qwen3")
NAMES = [
    *DENSE,
    "smollm3",
    "gemma3",
    "olmo2",
    "granite",
    "glm4",
    "phi3",
    "ministral3",
    "qwen3_next",
    "lfm2",
    "qwen3_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "gemma4_moe",
    "gpt_oss",
]


@pytest.mark.sample("llama3", "gemma3", "gemma4_moe", "gpt_oss", "qwen3_5", "phi3")
@pytest.mark.parametrize(
    "name",  # one is of two families that are here
    [pytest.param(n, marks=[pytest.mark.soak] * (n == "qwen3_5_moe")) for n in NAMES],
)
def test_a_gguf_target_computes_the_oracle_logits(tmp_path, name):
    folder = ORACLE / "targets" / name
    write = write_target if name in DENSE else write_family
    vectors = safetensors.numpy.load_file(folder / "vectors.safetensors")
    ids, expected = vectors["input_ids"], vectors["logits"]
    exact = open_model(write(folder, tmp_path / "f32.gguf"), role="target")
    model = TargetModel(exact.config, exact.load("float32"), "float32")
    ours = np.asarray(model.forward(ids).logits)
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE, rtol=0)
    quantised = open_model(write(folder, tmp_path / "q8.gguf", Q.Q8_0), role="target")
    model.params = quantised.load("float32")
    errors = [d.rms for d in compare(open_model(folder), quantised).tensors]
    predicted = np.linalg.norm(errors)  # independent errors add in squares
    difference = np.asarray(model.forward(ids).logits) - expected
    # To first order; states and routers amplify. A wrong transform gives an error above 1.
    factor = 2 if name in DENSE else 5
    assert np.linalg.norm(difference) / np.linalg.norm(expected) < factor * predicted < 0.35


def test_quantised_weights_compute_what_their_decoded_values_do(tmp_path):
    folder = ORACLE / "targets" / "llama3"
    ids = safetensors.numpy.load_file(folder / "vectors.safetensors")["input_ids"]
    path = write_target(folder, tmp_path / "q4.gguf", Q.Q4_0)
    decoded = safetensors.numpy.load_file(folder / "model.safetensors")
    for name, array in decoded.items():
        if array.ndim == 2:
            decoded[name] = gguf.quants.dequantize(gguf.quants.quantize(array, Q.Q4_0), Q.Q4_0)
    copy = tmp_path / "decoded"
    copy.mkdir()
    (copy / "config.json").write_text((folder / "config.json").read_text())
    safetensors.numpy.save_file(decoded, copy / "model.safetensors")
    np.testing.assert_array_equal(logits(path, ids), logits(copy, ids))
