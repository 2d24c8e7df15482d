"""Files and folders that appear whole or not at all."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def saved_as(path: Path, *, folder: bool = False) -> Iterator[Path]:
    """A partial file or folder to write to, renamed to `path` once the block has succeeded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    remove(partial)
    if folder:
        partial.mkdir()
    try:
        yield partial
    except BaseException:
        remove(partial)
        raise
    if folder:
        remove(path)
    partial.replace(path)


def remove(path: Path) -> None:
    """Removes a file or a folder if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
