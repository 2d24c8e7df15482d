"""Formats whose codes of one, two or four bits index a table of values.

Facts from ggml-common.h and ggml-quants.c. Each decoder fills `out` [N, weights of a block].
"""

import numpy as np

from dflash_jax.converters.quants.legacy import half, interleave, nibbles

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the e2m1 values: the stored exponent is one lower to match.
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _tables(values: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return the signed values of the low and the high nibble of each byte."""
    codes = np.arange(256)
    signed = np.array(values, np.int8)
    return signed[codes & 15].tobytes(), signed[codes >> 4].tobytes()


def _runs(bits: int, values: tuple[int, ...]) -> np.ndarray:
    """Return the signed values of each byte's codes, lowest first, as one word."""
    codes = np.arange(256)[:, None] >> np.arange(0, 8, bits) & (1 << bits) - 1
    return np.array(values, np.int8)[codes].view(f"u{8 // bits}")[:, 0]


SIGN_RUNS, TWO_BIT_RUNS = _runs(1, (-1, 1)), _runs(2, (-1, 0, 1, 2))
IQ4_TABLES, E2M1_TABLES = _tables(IQ4_VALUES), _tables(E2M1_DOUBLED)


def q1_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """w = d, or -d where the bit is not set, 128 weights to a block."""
    out.reshape(-1)[...] = SIGN_RUNS[blocks[:, 2:]].reshape(-1).view(np.int8)
    out *= half(blocks, 0)


def q2_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """w = d * (q - 1), 64 weights to a block, four neighbours to a byte."""
    out.reshape(-1)[...] = TWO_BIT_RUNS[blocks[:, 2:]].reshape(-1).view(np.int8)
    out *= half(blocks, 0)


def iq4_nl(blocks: np.ndarray, out: np.ndarray) -> None:
    """w = d * value[q], 32 weights to a block."""
    out.reshape(-1)[...] = _look_up(IQ4_TABLES, blocks[:, 2:])
    out *= half(blocks, 0)


def iq4_xs(blocks: np.ndarray, out: np.ndarray) -> None:
    """w = d * (sc - 32) * value[q], 256 weights to a block, a six-bit scale for every 32."""
    out.reshape(-1)[...] = _look_up(IQ4_TABLES, blocks[:, 8:])
    low, high = nibbles(blocks[:, 4:8])
    scale = np.stack([low, high], axis=-1).reshape(-1, 8)
    top = blocks[:, 2:4].view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scale |= top.astype(np.uint8) << 4
    scale -= 32
    groups = out.reshape(-1, 8, 32)
    groups *= (half(blocks, 0) * scale.view(np.int8).astype(np.float32))[:, :, None]


def mxfp4(blocks: np.ndarray, out: np.ndarray) -> None:
    """w = 2^(e - 128) * doubled value[q], 32 weights to a block."""
    out.reshape(-1)[...] = _look_up(E2M1_TABLES, blocks[:, 1:])
    out *= halved_power(blocks[:, :1])


def nvfp4(blocks: np.ndarray, out: np.ndarray) -> None:
    """w = scale / 2 * doubled value[q], 64 weights to a block, a scale byte for every 16."""
    packed = blocks[:, 4:].tobytes()
    parts = [np.frombuffer(packed.translate(table), np.int8) for table in E2M1_TABLES]
    out.reshape(-1)[...] = interleave(parts, 8)
    groups = out.reshape(-1, 4, 16)
    groups *= _HALVED_SCALES[blocks[:, :4]][:, :, None]


def _halved_scale(code: int) -> float:
    """Half of an E4M3 number whose sign is left out; the code of all ones is 0."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if code == 0x7F:
        return 0.0
    return mantissa * 2.0**-10 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 11)


_HALVED_SCALES = np.array([_halved_scale(code) for code in range(256)], np.float32)


def halved_power(exponent: np.ndarray) -> np.ndarray:
    """2^(e - 128) as float32, exact also where it is subnormal (e of 0 and 1)."""
    return np.ldexp(np.float32(1), exponent.astype(np.int32) - 128)


def _look_up(tables: tuple[bytes, bytes], packed: np.ndarray) -> np.ndarray:
    """In every 16 bytes: the values of the low nibbles, then of the high ones; flat."""
    raw = packed.tobytes()
    parts = [np.frombuffer(raw.translate(table), np.int8) for table in tables]
    return interleave(parts, 16)
