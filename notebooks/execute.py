"""Run notebooks from top to bottom, and store their outputs: `make notebooks`.

    python notebooks/execute.py [NOTEBOOK ...]

A notebook is replaced when all of its cells have run. Needs the packages nbclient and ipykernel.
"""

import asyncio
import base64
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

HERE = Path(__file__).parent
LARGEST = 300_000  # bytes of a notebook
PATIENCE = 1200  # seconds for a cell


def execute(path: Path) -> None:
    """Run a notebook in the folder of the checkout, and store it with its outputs.

    Raises:
      CellExecutionError: a cell fails.
      ValueError: the notebook with its outputs is too large.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=PATIENCE,
        kernel_name="python3",
        resources={"metadata": {"path": str(HERE.parent)}},
        record_timing=False,
    )
    asyncio.run(client.async_execute())
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # random ones would change with every run
        cell.get("metadata", {}).clear()
        if cell.cell_type == "code":
            cell.outputs = [_cleaned(output) for output in _merged(cell.outputs)]
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    text = nbformat.writes(notebook) + "\n"
    if len(text) > LARGEST:
        raise ValueError(f"{path.name} would have {len(text):,} bytes; at most {LARGEST:,}")
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _merged(outputs: list[Any]) -> list[Any]:
    """Return outputs without standard error, which has progress and timings; streams joined."""
    kept: list[Any] = []
    for output in outputs:
        if output.output_type == "stream":
            if output.name == "stderr":
                continue
            if kept and kept[-1].output_type == "stream":
                kept[-1].text += output.text
                continue
        kept.append(output)
    return kept


def _cleaned(output: Any) -> Any:
    """Return an output without the text that stands for a picture, and without paths."""
    if "data" in output:
        if "image/png" in output.data:
            output.data = {"image/png": _small(output.data["image/png"])}
        output.metadata = {}
    elif output.output_type == "stream":
        for folder, name in ((str(HERE.parent), "."), (tempfile.gettempdir(), "/tmp")):
            output.text = output.text.replace(folder, name)
    return output


def _small(png: str) -> str:
    """Return a PNG in base64 with at most 256 colours, to keep notebooks small."""
    import io

    from PIL import Image  # of matplotlib

    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    out = io.BytesIO()
    picture.quantize(256).save(out, "PNG", optimize=True)
    return base64.b64encode(out.getvalue()).decode() + "\n"


def main(names: list[str]) -> int:
    """Execute the named notebooks, or all."""
    paths = [Path(name) for name in names] or sorted(HERE.glob("*.ipynb"))
    os.environ.setdefault("PYTHONHASHSEED", "0")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])
    )
    for path in paths:
        print(path.name, end=" ", flush=True)
        try:
            execute(path)
        except (CellExecutionError, ValueError) as error:
            print(f"failed\n{error}")
            return 1
        print(f"{path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
