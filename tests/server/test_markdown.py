"""The page's Markdown, run by Node.js: hostile lines take linear time, and what they render as."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from dflash_jax.server.web_page import FOLDER

NODE = shutil.which("node")
SCRIPT = Path(__file__).with_name("markdown.mjs")
LENGTH = 100_000  # characters; quadratic time would be minutes
ENOUGH_S = 60
pytestmark = pytest.mark.skipif(NODE is None, reason="Node.js is not installed")

# Beginnings, repeated parts and ends of lines.
HOSTILE = [
    ("", "http:", ""), ("", "https://", ""), ("https://a", ".", "a"), ("", "https://!", ""),
    ("# a", " ", "b"), ("# ", " #", "b"), ("```", " ", "`"), ("[a](", " ", "x"),
    ("[a](b", " ", "x"), ("", '[a](b "', ""), ("", "[a](", ""), ("", "[", ""),
    ("[a](b", "(c)", ""), ("|a\n-", " ", "a"), ("|a\n|-", "- ", "a"), ("|a\n", "-|", "a"),
    ("* * *", " ", "a"), ("", "*a", ""), ("", "**a", ""), ("", "_", "a"), ("", "`", "a"),
    ("`", "``a", ""), ("", "~~", ""), ("", "\\", ""), ("", "> ", ""), ("", "- ", ""),
]  # fmt: skip


def rendered(*texts: str) -> list[dict]:
    """Return the number of elements and the tree of each text."""
    assert NODE is not None
    command = [NODE, str(SCRIPT), (FOLDER / "markdown.js").as_uri()]
    ended = subprocess.run(
        command, input=json.dumps(texts), capture_output=True, text=True, timeout=ENOUGH_S
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_hostile_lines_are_rendered_in_linear_time() -> None:
    lines = [a + part * (LENGTH // len(part)) + b for a, part, b in HOSTILE]
    for (*_, part, _), found in zip(HOSTILE, rendered(*lines), strict=True):
        assert found["elements"] < LENGTH, part


def test_a_table_has_no_more_cells_than_its_text() -> None:
    count = LENGTH // 6
    [found] = rendered("a|" * count + "\n" + "-|" * count + "\n" + "|\n" * count)
    assert found["elements"] < 5 * count


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("# a ##", "<h3>a</h3>"),
        ("# a#", "<h3>a#</h3>"),
        ("#  a  b ", "<h3>a  b</h3>"),
        ("## ##", "<h4>##</h4>"),
        ("```  js \nx\n```", "<pre><code>x</code></pre>"),
        ("[a]( https://b.example/ )", "<p><a href=https://b.example/>a</a></p>"),
        (
            "see https://b.example/c.",
            "<p>see <a href=https://b.example/c>https://b.example/c</a>.</p>",
        ),
        ("http: //x", "<p>http: //x</p>"),
        ("https://" + "a" * 3000, "<p>https://" + "a" * 300),
        (
            "|a|b|\n|:-|-:|\n|1|\n|2|3|4|",
            "<div><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td>"
            "<td colspan=1></td></tr><tr><td>2</td><td>3</td></tr></tbody></table></div>",
        ),
        ("a | b\n-|-\n1 | 2", "<div><table><thead><tr><th>a</th><th>b</th></tr></thead>"),
        ("a | b\n--", "<p>a | b<br></br>--</p>"),
    ],
)
def test_lines_render_as_before(text: str, tree: str) -> None:
    [found] = rendered(text)
    assert found["tree"].startswith(f"<main>{tree}")
