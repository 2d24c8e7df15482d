"""Healthy texts with repetitions, and sick ones that only repeat.

All are generated from seeds. `HEALTHY` has texts of the kinds that agents write: tables, dumps,
literals, drawings, logs. `SICK` has a beginning and a unit that is repeated until a limit.
"""

import base64
import json
import math
import random
from collections.abc import Callable, Iterator

NAMES = ("alder", "birch", "cedar", "elm", "fir", "hazel", "larch", "maple", "oak", "rowan")


def fenced(text: str, language: str = "") -> str:
    return f"The file is:\n\n```{language}\n{text.rstrip()}\n```\n\nThat is all of it.\n"


def table(columns: int, rows: int, width: int) -> str:
    line = lambda cells: "| " + " | ".join(cells) + " |\n"  # noqa: E731
    head = line([f"c{i}".ljust(width) for i in range(columns)])
    rule = "|" + "|".join(["-" * (width + 2)] * columns) + "|\n"
    cells = [[f"{r * c}".ljust(width) for c in range(columns)] for r in range(rows)]
    return head + rule + "".join(map(line, cells))


def xxd(data: bytes) -> str:
    lines = []
    for at in range(0, len(data), 16):
        part = data[at : at + 16]
        pairs = " ".join(part[i : i + 2].hex() for i in range(0, len(part), 2))
        shown = "".join(chr(b) if 32 <= b < 127 else "." for b in part)
        lines.append(f"{at:08x}: {pairs:<39}  {shown}\n")
    return "".join(lines)


def c_array(data: bytes, columns: int) -> str:
    lines = [
        "    " + " ".join(f"0x{b:02x}," for b in data[at : at + columns]) + "\n"
        for at in range(0, len(data), columns)
    ]
    return f"static const uint8_t image[{len(data)}] = {{\n{''.join(lines)}}};\n"


def contents() -> str:
    entries = [(name.title(), 3 + 7 * i) for i, name in enumerate(NAMES)]
    return "".join(f"{name} {'.' * (70 - len(name))} {page}\n" for name, page in entries)


def board(size: int, rng: random.Random) -> str:
    cells = [["."] * size for _ in range(size)]
    for _ in range(5):
        cells[rng.randrange(size)][rng.randrange(size)] = "#"
    return "".join(" ".join(row) + "\n" for row in cells)


def logs(rng: random.Random) -> str:
    at, lines = 0.0, []
    for _ in range(120):
        at += rng.random()
        lines.append(f"2031-05-17T08:{int(at) // 60:02}:{at % 60:06.3f}Z INFO worker idle\n")
    return "".join(lines)


def svg() -> str:
    points = [(50 + 40 * math.cos(i / 7), 50 + 40 * math.sin(i / 7)) for i in range(90)]
    path = " ".join(f"L{x:.2f},{y:.2f}" for x, y in points)
    stairs = "h1v1" * 20
    return (
        f'<svg viewBox="0 0 100 100"><path d="M90,50 {path} z"/><path d="M0 0{stairs}z"/></svg>\n'
    )


def minified(rng: random.Random) -> str:
    bodies = [f"{rng.choice('abcdef')}.{rng.choice('xyz')}({i},{i % 3})" for i in range(80)]
    return "!function(e,t){" + ",".join(bodies) + "}(window,document);" + "}" * 20 + ";\n"


def healthy(seed: int = 0) -> Iterator[tuple[str, str]]:
    """Return texts by name; a seed changes sizes and contents."""
    rng = random.Random(seed)
    size = lambda low, high: rng.randint(low, high)  # noqa: E731
    yield "wide table", table(size(20, 40), 6, 1)
    yield "table of wide columns", table(4, 8, size(30, 60))
    yield "short table rule", "|" + " --- |" * size(20, 60) + "\n"
    yield "sparse table", "| name | mon | tue | wed |\n" + "| |  |  |  |\n" * size(8, 14)
    yield "table of marks", "| check | a | b |\n" + "| ok | yes | yes |\n" * size(6, 11)
    yield "csv of empty cells", "".join(f"{i}{',' * size(20, 30)}\n" for i in range(30))
    yield "csv of equal cells", "".join(f"2031-01-{i:02},open,0,0,0,open\n" for i in range(1, 29))
    yield "base64 of zeros", base64.encodebytes(bytes(size(100, 400))).decode()
    yield "base64 of zeros in a line", base64.b64encode(bytes(size(60, 250))).decode()
    yield "base64", base64.encodebytes(rng.randbytes(size(800, 2000))).decode()
    yield "base64 in a fence", fenced(base64.encodebytes(bytes(200)).decode())
    yield "hex dump of a zero page", xxd(bytes(size(500, 2000)))
    yield "hex dump", fenced(xxd(rng.randbytes(600)))
    yield "hex of zeros", "00" * size(60, 150) + "\n"
    yield "rows of hex zeros", ("00 " * 16 + "\n") * size(6, 12)
    yield "c array of zeros", fenced(c_array(bytes(size(60, 128)), 12), "c")
    yield "c array", fenced(c_array(rng.randbytes(256), 8), "c")
    yield "bytes of zeros", fenced("KEY = b'" + "\\x00" * size(32, 64) + "'\n", "python")
    yield "svg path", fenced(svg(), "svg")
    yield "dot leaders", contents()
    yield "spaced leaders", "".join(f"{n} {'. ' * size(30, 60)}{i}\n" for i, n in enumerate(NAMES))
    yield "ascii board", fenced(board(size(8, 16), rng))
    yield (
        "box",
        fenced("┌" + "─" * 60 + "┐\n" + ("│" + " " * 60 + "│\n") * 6 + "└" + "─" * 60 + "┘\n"),
    )
    yield "progress bar", "[" + "#" * size(40, 120) + "." * 40 + "]\n"
    yield "array of zeros", json.dumps([0] * size(40, 120)) + "\n"
    yield "array of zeros, indented", json.dumps({"bins": [0] * size(30, 80)}, indent=2) + "\n"
    yield "array of nulls", json.dumps([None] * size(40, 120)) + "\n"
    yield "matrix of zeros", fenced(("0.0 " * size(8, 12) + "\n") * 10)
    yield (
        "identity matrix",
        "".join(" ".join("1" if r == c else "0" for c in range(16)) + "\n" for r in range(16)),
    )
    yield "digits", "1/3 = 0." + "3" * size(60, 200) + "...\n"
    yield "power of ten", "1" + "0" * size(30, 120) + "\n"
    yield "zeros in groups", "0,0," * size(20, 60) + "0\n"
    yield "minified script", minified(rng)
    yield "separators", ("=" * 78 + "\nPart\n" + "-" * 78 + "\n") * 3
    yield "long separator", "#" + "-" * size(100, 400) + "\n"
    yield "starred banner", "/" + "*" * size(60, 160) + "/\n"
    yield "dna repeats", "ATG" + "CAG" * size(20, 60) + "TAA\n"
    yield "melody", "C4 D4 E4 C4 " * 4 + "E4 F4 G2 " * 4 + "G4 A4 G4 F4 E4 C4 " * 3 + "\n"
    yield "drum pattern", ("x--- x--- x--- x-x-\n") * size(4, 10)
    yield "log of equal lines", logs(rng)
    yield "indented braces", "".join("  " * i + "}\n" for i in range(30, 0, -1))
    yield (
        "initial list",
        fenced("grid = [\n" + "    [0, 0, 0, 0, 0, 0, 0, 0],\n" * 8 + "]\n", "python"),
    )
    yield "no-ops", fenced("start:\n" + "    nop\n" * size(10, 30) + "    ret\n", "asm")
    yield "blank lines", "Chapter one" + "\n" * size(20, 60) + "Chapter two\n"
    yield "indentation", "x = [\n" + " " * size(100, 300) + "1,\n]\n"
    yield "refrain", ("Oh the river runs down, and the river runs on,\n" * 2 + "Sing it.\n") * 4
    yield "emphasis", "No, no, no, no, no, no! Never, never, never, never again.\n" * 2
    yield "entities", "<td>" + "&nbsp;" * size(20, 40) + "</td>\n"
    yield "list of equal items", "".join(f"{i}. Check the valve.\n" for i in range(1, 40))
    yield "lorem", ("In no event shall the holder be liable for any claim. " * 3 + "\n") * 2


SICK: tuple[tuple[str, str, str], ...] = (
    ("a sentence of 10 words", "Done.\n", "I will look at the file once more and see. "),
    ("a short promise", "", "Checking now. "),
    ("one word", "The answer is", " very"),
    ("a line", "", "Next step.\n"),
    ("two sentences", "", "The build fails again. I will clean the folder and build it again.\n"),
    (
        "a paragraph",
        "",
        "It seems that the server did not answer in time, so the client gave up and "
        "closed its side. To find out why, we have to read the log of the server first.\n\n",
    ),
    ("exclamation", "Great", "!"),
    ("newlines", "Here it is:", "\n"),
    ("spaces and newlines", "Here:", " \n"),
    ("a question", "", "Shall I go on? "),
    ("a list item", "Steps:\n", "- Open the settings page and press save.\n"),
    ("a bold list item", "Steps:\n", "- **Save** the page, then open it again.\n"),
    ("a heading", "", "## Summary\n\nThe change is complete.\n\n"),
    ("an apology", "", "I'm sorry, I made a mistake. Let me correct it.\n"),
    ("a path in a sentence", "", "Let me read `src/app/main.py` to see how it starts.\n"),
    ("a thought", "<think>\n", "Wait, maybe I should count them again. "),
    ("an alternation", "", "Yes. No. "),
    ("an emoji", "Well done ", "\N{PARTY POPPER}"),
    ("words without spaces", "", "\u597d\u7684\uff0c\u6211\u6765\u770b\u770b\u3002"),
    ("German", "", "Ich sehe mir die Datei noch einmal an. "),
    ("a statement", "```python\n", "    total += value\n"),
    ("a print", "```python\n", 'print("done")\n'),
    ("a comment", "```python\n", "# TODO: handle the error\n"),
    ("a row of a table", "| a | b |\n|---|---|\n", "| Anna Berg | Oslo office | open |\n"),
    ("an import", "```python\n", "import os\n"),
    ("a zero", "The sum is 0.", "0"),
    ("a pair of digits", "```json\n[", "0, 1, "),
    ("a backslash escape", 'x = "', "\\n"),
    ("a dash", "", "-"),
    ("an open brace", "```json\n", "{"),
    ("a colon", "Let me see", ":"),
    ("a tag", "<div>\n", "<br/>\n"),
)


COUNTED: tuple[tuple[str, str], ...] = (
    ("a sentence", "I have now read part {i} of the file. "),
    ("a line", "Attempt {i} failed, so I try it once more.\n"),
    ("two sentences", "Step {i} is complete. Now I will look at the next one. "),
    ("a bold line", "**Step {i}:** the file is read again.\n"),
    ("German", "Versuch {i} schlug fehl. "),
)


def long_data() -> Iterator[tuple[str, str]]:
    """Return data by name that repeats itself for long, also within calls and fences."""
    rows = "2024-01-01,0,0,0,OK\n" * 60
    escaped = json.dumps(rows)
    yield "rows in a call", _call(escaped)
    yield "equal rows in a call", _call(json.dumps("a,b,c,d\n" * 90))
    yield "rows in a fence", fenced("2024-01-01,0,0,0,OK\n" * 60)
    yield "rows", "date,a,b,c,state\n" + "2024-01-01,0,0,0,OK\n" * 60
    yield "items", "The list:\n\n" + "- item\n" * 120
    yield "a zero table", "| a | b |\n|---|---|\n" + "| 0 | 0 |\n" * 70
    yield "nulls", "[" + "null, " * 180 + "null]\n"
    yield "a refrain", ("Down the river we go,\nHey ho, hey ho\nAll the way home\n") * 14
    yield "statements in a fence", fenced("    total += value\n" * 120, "python")
    yield "numbered items", "".join(f"{i}. Check the valve.\n" for i in range(1, 200))
    yield "a log", "".join(f"[{i}] worker {i} is idle now\n" for i in range(1, 150))
    yield "objects", "".join(f'{{"id": {i}, "name": "worker", "ok": true}}\n' for i in range(90))
    yield "counted lines in a fence", fenced("".join(f"Line {i} of it.\n" for i in range(150)))
    yield (
        "counted lines in a call",
        _call(json.dumps("".join(f"Line {i} of the file.\n" for i in range(150)))),
    )
    yield "fields", "".join(f"Temperature: {i} degrees\n" for i in range(150))


def _call(content: str) -> str:
    arguments = f'{{"path": "a.csv", "content": {content}}}'
    return f'<tool_call>\n{{"name": "write_file", "arguments": {arguments}}}\n</tool_call>'


def sick(beginning: str, unit: str, encode: Callable[[str], list[int]], limit: int) -> list[int]:
    """Return the ids of a loop, up to a limit."""
    copies = unit
    while len(ids := encode(beginning + copies)) < limit:
        copies += copies
    return ids[:limit]
