"""The picture of a run, run.svg, which is drawn again while it trains: its curves by step.

Colours follow `prefers-color-scheme`. The same log gives the same bytes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

WIDTH = 440  # of a curve with its title, in units of the picture
HEIGHT = 150
LEFT = 52  # margins around a curve
RIGHT = 14
TOP = 30
BOTTOM = 24
POINTS = 60  # of a line at most; each is a mean of steps
BARS = "▁▂▃▄▅▆▇█"
TITLES = {
    "loss": "loss",
    "simulated": "acceptance length at random places",
    "simulated_chained": "acceptance length where decoding would draft",
    "held_out": "acceptance length of held-out prompts",
}
STYLE = """\
<style>
text { font: 12px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #59636e; }
.back { fill: #f6f8fa; } .title { fill: #1f2328; } .grid { stroke: #d0d7de; }
.line { fill: none; stroke: #0969da; stroke-width: 1.6; } .band { fill: #0969da; opacity: .18; }
@media (prefers-color-scheme: dark) {
text { fill: #9198a1; } .back { fill: #0d1117; } .title { fill: #e6edf3; }
.grid { stroke: #3d444d; } .line { stroke: #58a6ff; } .band { fill: #58a6ff; }
}
</style>"""

Lines = Sequence[Mapping[str, float]]


def picture(log: Lines, steps: int) -> str:
    """Return the picture of a run as SVG.

    Args:
      log: metrics of each step, in order.
      steps: of the whole run, the width of the picture.
    """
    curves = [name for name in TITLES if any(name in line for line in log)]
    parts = []
    for i, name in enumerate(curves):
        inside = "".join(curve([line for line in log if name in line], name, steps))
        parts.append(f'<g transform="translate(0 {i * HEIGHT})">{inside}</g>')
    height = max(len(curves), 1) * HEIGHT + 8
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="560">'
    back = f'<rect class="back" width="{WIDTH}" height="{height}" rx="6"/>'
    return "\n".join([head, STYLE, back, *parts, "</svg>"]) + "\n"


def curve(lines: Lines, name: str, steps: int) -> Iterator[str]:
    """Yield the elements of one curve: title, grid with numbers, band and line."""
    at, values = means(lines, name)
    bounds = [f"{name}_low", f"{name}_high"]
    bounded = all(bound in line for line in lines for bound in bounds)
    edges = [means(lines, bound)[1] for bound in bounds] if bounded else []
    every = np.concatenate([values, *edges])
    low = float(every.min())
    spread = float(every.max()) - low or 1.0

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / max(steps, 1)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / spread

    def points(steps: np.ndarray, values: np.ndarray) -> str:
        return " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in zip(steps, values, strict=True))

    yield f'<text class="title" x="{LEFT}" y="20">{TITLES[name]}: {values[-1]:.3f}</text>'
    for value in (low, low + spread / 2, low + spread):
        line = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"'
        yield f'<line class="grid" {line}/>'
        yield f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.2f}</text>'
    yield f'<text x="{LEFT}" y="{HEIGHT - 6}">0</text>'
    yield f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{steps:,} steps</text>'
    if edges:
        around = points(np.concatenate([at, at[::-1]]), np.concatenate([edges[0], edges[1][::-1]]))
        yield f'<polygon class="band" points="{around}"/>'
    yield f'<polyline class="line" points="{points(at, values)}"/>'


def means(lines: Lines, name: str, points: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and values of a metric, each the mean of neighbouring steps."""
    steps = np.asarray([line["step"] for line in lines], float)
    values = np.asarray([line[name] for line in lines], float)
    count = math.ceil(len(lines) / math.ceil(len(lines) / points))
    groups = (np.array_split(array, count) for array in (steps, values))
    at, height = (np.asarray([group.mean() for group in split]) for split in groups)
    return at, height


def bars(log: Lines, name: str, width: int = 12) -> str:
    """Return a metric's curve as a line of text; empty with fewer than two points."""
    lines = [line for line in log if name in line]
    if len(lines) < 2:
        return ""
    _, values = means(lines, name, width)
    spread = values.max() - values.min() or 1.0
    heights = (values - values.min()) / spread * (len(BARS) - 1)
    return "".join(BARS[round(float(height))] for height in heights)
