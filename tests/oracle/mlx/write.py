"""Writes the vectors of this folder: matrices that MLX quantised, and what it makes of them.

    pip install "mlx[cpu]"
    python tests/oracle/mlx/write.py

Tests need no MLX. vectors.safetensors holds, by width and group, the weights, scales and biases
that `mx.quantize` returns for the matrix `values`, and the numbers of `mx.dequantize`.
"""

from pathlib import Path

import mlx.core as mx

WIDTHS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


def main() -> None:
    mx.random.seed(0)
    values = mx.random.normal((3, 128)) * mx.array([0.02, 1.0, 0.0])[:, None]
    found = {"values": values}
    for name, dtype in DTYPES.items():
        for bits in WIDTHS:
            for group in GROUPS:
                parts = mx.quantize(values.astype(dtype), group, bits)
                at = f"{name}.{bits}.{group}"
                for key, part in zip(("weight", "scales", "biases"), parts, strict=True):
                    found[f"{at}.{key}"] = part
                exact = [part.astype(mx.float32) for part in parts[1:]]
                found[f"{at}.numbers"] = mx.dequantize(parts[0], *exact, group, bits)
    mx.save_safetensors(str(Path(__file__).parent / "vectors.safetensors"), found)


if __name__ == "__main__":
    main()
