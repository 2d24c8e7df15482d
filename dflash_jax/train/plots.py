"""Plots of a training run. Needs matplotlib, the extra `plot`."""

import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

SMOOTH = 40  # maximum steps of the moving mean


def curves(log: Path, out: Path) -> Path:
    """Plot loss and simulated acceptance length by step from log.jsonl; return `out`."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    steps = np.asarray([line["step"] for line in lines])
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axis, name, title in zip(
        figure.subplots(1, 2),
        ("loss", "simulated"),
        ("loss", "simulated acceptance length (tau)"),
        strict=True,
    ):
        values = np.asarray([line[name] for line in lines])
        width = max(1, min(SMOOTH, len(values) // 10))
        mean = np.convolve(values, np.full(width, 1 / width), "valid")
        axis.plot(steps, values, color="0.8", linewidth=0.8)
        axis.plot(steps[width - 1 :], mean, color="tab:blue")
        axis.set(xlabel="step", title=title)
        axis.grid(alpha=0.3)
    figure.savefig(out, dpi=120)
    return out
