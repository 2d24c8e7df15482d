"""Atomic files and folders of a training run."""

import contextlib
import json
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_jax.errors import CheckpointError, ConfigError

DAMAGED = (OSError, EOFError, ValueError, TypeError, LookupError, AttributeError,
           zipfile.BadZipFile)  # fmt: skip

QUICK = ("rows.npz", "about.json")  # files of a run that are made in seconds from its data


def claim(folder: Path, note: str, about: dict[str, Any]) -> None:
    """Record the settings of a run in its folder, or check them against the recorded ones.

    A folder that holds only the record may be reused with other settings.

    Args:
      note: name of the file with the settings.
      about: the settings that decide the results.

    Raises:
      ConfigError: the folder belongs to other settings, holds other files, or cannot be written.
    """
    path = folder / note
    wanted = json.loads(json.dumps(about))
    try:
        others = folder.is_dir() and any(inside.name != note for inside in folder.iterdir())
        if others and not path.is_file():
            raise ConfigError(f"{folder} holds other files; give a new folder, or one of a run")
        if not others:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(path, wanted)
        recorded = json.loads(path.read_text(encoding="utf-8"))
        changed = differences(recorded, wanted)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made or written ({error.strerror}); give another --out"
        ) from error
    except (ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path} is damaged ({error}); give another --out, or remove the folder"
        ) from error
    if recorded != wanted:
        raise ConfigError(
            f"{folder} was begun with other settings ({'; '.join(changed)}); give the same again,"
            " another --out, or remove the folder"
        )


@contextlib.contextmanager
def unless_refused(folder: Path, note: str) -> Iterator[None]:
    """Remove the folder of a run that the block begins and refuses with ConfigError.

    Parents that the block made are removed, too. Answers and the like, which took long to make,
    stay.

    Args:
      note: name of the file with the settings of a run, which shows that it was begun before.
    """
    if (folder / note).exists():
        yield
        return
    folder = folder.absolute()
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except ConfigError:
        files = [path for path in folder.rglob("*") if not path.is_dir()]
        if folder.is_dir() and {path.name for path in files} <= {note, *QUICK}:
            for path in folder.iterdir():
                remove(path)
            for path in made:  # the innermost first
                with contextlib.suppress(OSError):  # it holds another run meanwhile
                    path.rmdir()
        raise


def differences(old: dict[str, Any], new: dict[str, Any], inside: str = "") -> list[str]:
    """Return each setting that differs, with both values."""
    changes: list[str] = []
    for name in sorted(old.keys() | new.keys()):
        before = old.get(name)
        now = new.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            changes += differences(before, now, f"{inside}{name}.")
        elif before != now:
            changes.append(f"{inside}{name} was {json.dumps(before)}, is {json.dumps(now)}")
    return changes


def write_json(path: Path, value: Any) -> None:
    """Write JSON with two-space indent and a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def sound(path: Path) -> Iterator[None]:
    """Raise CheckpointError if reading `path` in the block shows that it is damaged."""
    try:
        yield
    except DAMAGED as error:
        raise CheckpointError(
            f"{path} is damaged ({' '.join(str(error).split())[:200]}); remove it, and the same"
            " command makes it again"
        ) from error


@contextlib.contextmanager
def saved_as(path: Path, *, folder: bool = False) -> Iterator[Path]:
    """Yield a temporary file or folder, renamed to `path` when the block succeeds."""
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
    """Remove a file or a folder if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
