"""Pictures of the documents: lines, colours, sizes. That they are up to date is a contract."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks import documents, pictures
from benchmarks.pictures import COLUMNS, WIDTH, Bar

SVG = "{http://www.w3.org/2000/svg}"
OUTPUT = "Yes\x1b[32m, it is\x1b[0m\x1b[2;9m a < b\x1b[0m so.\n\nThe end.\n"


def elements(picture: str, kind: str) -> list[ElementTree.Element]:
    return [*ElementTree.fromstring(picture).iter(f"{SVG}{kind}")]


def test_a_terminal_shows_a_command_and_the_colours_of_its_output() -> None:
    drawn = elements(pictures.terminal("run", OUTPUT), "text")
    texts = [(text.get("class"), (text.text or "").replace("\xa0", " ")) for text in drawn]
    assert texts == [
        ("plain", "$ run"),
        ("plain", "Yes"),
        ("drafted", ", it is"),
        ("rejected", " a < b"),
        ("plain", " so."),
        ("plain", "The end."),
    ]
    heights = [float(text.get("y", 0)) for text in drawn]
    assert heights[1] == heights[4]
    assert heights[5] - heights[4] == 2 * pictures.LINE  # an empty line between them


def test_long_lines_are_broken_after_spaces_and_long_words_anywhere() -> None:
    text = f"{'word ' * 12}{'x' * 60}"
    lines = pictures.wrapped([*pictures.colour_cells(text)])
    parts = ["".join(cell.letter for cell in line) for line in lines]
    assert "".join(parts) == text
    assert [len(part) for part in parts] == [45, 15, 48, 12]
    assert max(len(part.rstrip()) for part in parts) <= COLUMNS


@pytest.mark.parametrize("several", [False, True])
def test_charts_stay_inside_their_picture_and_have_two_sets_of_colours(several: bool) -> None:
    bars = [Bar("a", 2.0, "2.00", "drafted"), Bar("b", 4.0, "4.00 (1.00x)", "target")]
    groups = {"first & last": bars if several else bars[1:]}
    drawn = pictures.chart("Speed", groups, "A note. " * 20, mark=1.0)
    height = float(ElementTree.fromstring(drawn).get("viewBox", "").split()[3])
    for box in elements(drawn, "rect"):
        assert float(box.get("x", 0)) + float(box.get("width", 0)) < WIDTH
        assert float(box.get("y", 0)) + float(box.get("height", 0)) < height
    assert all(float(text.get("y", 0)) < height for text in elements(drawn, "text"))
    assert drawn.count("prefers-color-scheme: dark") == 1
    lengths = [
        float(box.get("width", 0)) for box in elements(drawn, "rect") if box.get("rx") != "8"
    ]
    assert lengths[-1] == max(lengths)


def test_a_table_that_no_result_has_is_named(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("<!-- table: nothing -->\n<!-- end -->\n")
    with pytest.raises(SystemExit, match=r"page\.md has a table 'nothing'; expected one of"):
        documents.page(path)
