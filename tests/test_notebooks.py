"""Every notebook runs from top to bottom on a CPU; none is committed with outputs."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CHEAP = ("01_quickstart",)

# Packages of `pip install -e '.[train,plot]'`, which the README asks for.
KNOWN = ("dflash_jax", "jax", "matplotlib", "numpy", "recipes")

# Run the code cells in one namespace, as a kernel does, and draw without a display.
RUN = """
import json, sys
cells = json.load(open(sys.argv[1], encoding="utf-8"))["cells"]
space = {"__name__": "__main__"}
for i, cell in enumerate(cells):
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"cell {i}", "exec"), space)
"""


def cases() -> list:
    soak = pytest.mark.soak
    return [pytest.param(p, id=p.stem, marks=() if p.stem in CHEAP else soak) for p in NOTEBOOKS]


def test_seven_notebooks_are_there_without_outputs():
    assert len(NOTEBOOKS) == 7
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        assert code, path
        assert not [c for c in code if c["outputs"] or c["execution_count"]], path


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_needs_no_more_than_the_readme_says(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    nodes = [node for text in code for node in ast.walk(ast.parse(text))]
    named = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    named |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    tops = {name.partition(".")[0] for name in named}
    assert tops - sys.stdlib_module_names <= set(KNOWN)


@pytest.mark.parametrize("path", cases())
def test_a_notebook_runs_to_its_end(path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install '.[plot]'")
    ended = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", RUN, str(path)],
        cwd=ROOT,
        env=os.environ | {"MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
