"""Pictures of the documents as SVG: a terminal with drafts in colour, and bar charts.

A picture is one file with a background of its own. Its colours follow `prefers-color-scheme`, and
it is narrow, so that its text can be read on a phone. Drawing reads neither clocks nor fonts: the
same figures give the same bytes.
"""

import itertools
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from dflash_jax.show import ANSI

COLUMNS = 48  # of a terminal
CELL = 8.4  # width of its letters, in units of the picture
WIDTH = 440  # of every picture, in the same units
SHOWN = 560  # pixels of a picture where the page has room
MARGIN = 18
LINE = 21  # of a terminal
NAMES = 152  # where bars begin, beside their names
KINDS = {codes: kind for kind, codes in ANSI.items()}  # by the codes of a terminal
COLOURS = {  # on a light and on a dark page
    "back": ("#f6f8fa", "#0d1117"),
    "edge": ("#d0d7de", "#3d444d"),
    "plain": ("#1f2328", "#e6edf3"),
    "quiet": ("#59636e", "#9198a1"),
    "drafted": ("#1a7f37", "#3fb950"),
    "target": ("#0969da", "#58a6ff"),
    "forced": ("#9a6700", "#d29922"),
    "rejected": ("#6e7781", "#848d97"),
}
FONTS = """\
text { font: 14px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
.terminal text { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.title { font-weight: 600; font-size: 15px; }
.note { font-size: 12px; }
.rejected { text-decoration: line-through; }"""


class Cell(NamedTuple):
    """A letter of a terminal."""

    letter: str
    kind: str  # a name of `COLOURS`


class Bar(NamedTuple):
    """A bar of a chart.

    Attributes:
      name: what it stands for, in the legend of charts with several bars a group.
      value: its length.
      text: written at its end.
      kind: a name of `COLOURS`.
    """

    name: str
    value: float
    text: str
    kind: str


def terminal(command: str, output: str) -> str:
    """Return the picture of a terminal in which a command was run.

    Args:
      output: what it printed, with codes for colours.
    """
    cells = [Cell(letter, "plain") for letter in f"$ {command}\n"]
    cells += colour_cells(output.rstrip())
    lines: list[list[Cell]] = [[]]
    for cell in cells:
        if cell.letter == "\n":
            lines.append([])
        else:
            lines[-1].append(cell)
    y = 54
    dots = [f'<circle class="edge" cx="{MARGIN + 4 + 16 * i}" cy="20" r="5"/>' for i in range(3)]
    parts = [*dots, '<g class="terminal">']
    for line in lines:
        for part in wrapped(line):
            parts += line_elements(part, y)
            y += LINE
    return picture(y, f"$ {command}", [*parts, "</g>"])


def colour_cells(output: str) -> Iterator[Cell]:
    """Yield the letters that a command printed, each with its colour."""
    kind = "plain"
    for part in re.split(r"(\x1b\[[\d;]*m)", output):
        if part.startswith("\x1b"):
            kind = KINDS.get(part[2:-1], "plain")
            continue
        for letter in part:
            yield Cell(letter, kind)


def wrapped(cells: Sequence[Cell]) -> Iterator[Sequence[Cell]]:
    """Yield a line in parts that fit into the terminal, broken after spaces where it has any."""
    rest = cells
    while len(rest) > COLUMNS:
        spaces = [i for i, cell in enumerate(rest[: COLUMNS + 1]) if cell.letter == " "]
        end = spaces[-1] + 1 if spaces else COLUMNS
        yield rest[:end]
        rest = rest[end:]
    yield rest


def line_elements(line: Sequence[Cell], y: int) -> Iterator[str]:
    """Yield the elements of a terminal's line; each begins in its column, whatever the font."""
    column = 0
    for kind, group in itertools.groupby(line, lambda cell: cell.kind):
        text = "".join(cell.letter for cell in group)
        if text.strip():
            spaced = escape(text.replace(" ", "\N{NO-BREAK SPACE}"))
            place = f'x="{MARGIN + CELL * column:g}" y="{y}" textLength="{CELL * len(text):g}"'
            yield f'<text class="{kind}" {place}>{spaced}</text>'
        column += len(text)


def chart(
    title: str, groups: Mapping[str, Sequence[Bar]], notes: str, *, mark: float | None = None
) -> str:
    """Return a bar chart, with a legend if a group has several bars.

    Args:
      groups: bars of each name on the left.
      notes: written below it.
      mark: a value at which there is a line.
    """
    parts = []
    y = 34
    for line in textwrap.wrap(title, 44):
        parts.append(f'<text class="title plain" x="{MARGIN}" y="{y}">{escape(line)}</text>')
        y += 20
    several = max(len(bars) for bars in groups.values()) > 1
    if several:
        parts += legend_elements(next(iter(groups.values())), y + 4)
        y += 22
    top = y
    height = 15 if several else 22
    every = [bar for bars in groups.values() for bar in bars]
    longest = max(bar.value for bar in every)
    room = WIDTH - MARGIN - NAMES - 8 - 7 * max(len(bar.text) for bar in every)
    for name, bars in groups.items():
        middle = y + (height * len(bars) - 3) / 2 + 5
        parts.append(f'<text class="plain" x="{MARGIN}" y="{middle:g}">{escape(name)}</text>')
        for bar in bars:
            size = f'width="{room * bar.value / longest:.1f}" height="{height - 3}" rx="2"'
            parts.append(f'<rect class="{bar.kind}" x="{NAMES}" y="{y}" {size}/>')
            x = NAMES + room * bar.value / longest + 6
            text = f'x="{x:.1f}" y="{y + height / 2 + 3:g}">{escape(bar.text)}'
            parts.append(f'<text class="plain note" {text}</text>')
            y += height
        y += 9
    if mark is not None:
        x = NAMES + room * mark / longest
        parts.append(f'<path class="line" d="M{x:.1f} {top - 3}V{y - 6}"/>')
    y += 14
    for line in textwrap.wrap(notes, 62, break_on_hyphens=False):
        parts.append(f'<text class="quiet note" x="{MARGIN}" y="{y}">{escape(line)}</text>')
        y += 17
    return picture(y, title, parts)


def legend_elements(bars: Sequence[Bar], y: int) -> Iterator[str]:
    """Yield a square and a name for each bar of a group."""
    for number, bar in enumerate(bars):
        x = MARGIN + 110 * number
        yield f'<rect class="{bar.kind}" x="{x}" y="{y - 11}" width="12" height="12" rx="2"/>'
        yield f'<text class="plain note" x="{x + 18}" y="{y}">{escape(bar.name)}</text>'


def picture(height: int, title: str, elements: Sequence[str]) -> str:
    """Return a picture with a background.

    Args:
      title: what it shows, for those who do not see it.
    """
    shown = f'width="{SHOWN}" height="{round(SHOWN * height / WIDTH)}"'
    size = f'viewBox="0 0 {WIDTH} {height}"'
    edge = f'width="{WIDTH - 1}" height="{height - 1}" rx="8"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {shown} {size} role="img">',
        f"<title>{escape(title)}</title>",
        "<style>",
        FONTS,
        *rules(0),
        "@media (prefers-color-scheme: dark) {",
        *rules(1),
        "}",
        "</style>",
        f'<rect class="back" x="0.5" y="0.5" {edge}/>',
        *elements,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def rules(page: int) -> list[str]:
    """Return the colours in CSS, on a light page (0) or on a dark one (1)."""
    colours = {name: pair[page] for name, pair in COLOURS.items()}
    fills = [f".{name} {{ fill: {colour}; }}" for name, colour in colours.items()]
    edge = colours["edge"]
    line = colours["quiet"]
    return [*fills, f".back {{ stroke: {edge}; }}", f".line {{ stroke: {line}; }}"]
