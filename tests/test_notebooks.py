"""Every notebook runs from top to bottom on a CPU, and is committed with its outputs."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CHEAP = ("01_quickstart",)

# Packages of `pip install -e '.[train,plot]'`, which the README asks for.
KNOWN = ("dflash_jax", "flax", "jax", "matplotlib", "numpy", "optax", "recipes")

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


def test_nine_notebooks_are_there():
    assert len(NOTEBOOKS) == 9


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_the_outputs_of_one_run_from_top_to_bottom(path):
    """`make notebooks` stores them."""
    text = path.read_text(encoding="utf-8")
    assert len(text) <= 300_000
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    kinds = {output["output_type"] for output in outputs}
    assert kinds <= {"stream", "display_data", "execute_result"}
    shown = json.dumps([output for output in outputs if "image/png" not in output.get("data", {})])
    assert not re.search(r"/(root|home|work|Users)/|Traceback|Warning", shown)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_needs_no_more_than_the_readme_says(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    nodes = [node for text in code for node in ast.walk(ast.parse(text))]
    named = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    named |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    tops = {name.partition(".")[0] for name in named}
    assert tops - sys.stdlib_module_names <= set(KNOWN)


@pytest.mark.exhaustive
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
