"""Data of another run: its turns, answers, rows and features, for another drafter."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from dflash_jax.errors import ConfigError
from dflash_jax.train import self_written
from dflash_jax.train.files import differences, saved_as, sound
from dflash_jax.train.recipes import DSPARK, KL, MIX
from dflash_jax.train.saved import full

ROWS, FEATURES = "rows.npz", "features"
FILES = (self_written.FILE, self_written.REPORT, "answers.jsonl", ROWS)
# What decides rows, and what decides features as well.
OF_RUN = ("target", "data", "self_written")
OF_ROWS = ("seed", "dtype", "target_weights", "answers", "prompts", "text_prompts",
           "given", "new_tokens", "text_tokens", "text_prompt", "temperature", "answer_buckets",
           "turn_tokens", "turn_temperature", "turn_scripts")  # fmt: skip
OF_FEATURES = ("features", "taps", "tap_count")


def check(source: Path, about: dict[str, Any]) -> None:
    """Check that the data of a run serve another one.

    Args:
      source: folder of the run that has the data.
      about: the settings of the run that wants them.

    Raises:
      ConfigError: `source` has no rows yet, or was made with other settings that decide them.
    """
    if not (source / ROWS).is_file():
        raise ConfigError(
            f"{source} has no {ROWS} to reuse; give the folder of a run whose answers are finished"
        )
    with sound(source / "run.json"):
        recorded = json.loads((source / "run.json").read_text(encoding="utf-8"))
        have, want = (_deciding(x, OF_ROWS) for x in (recorded, json.loads(json.dumps(about))))
    if changed := differences(have, want):
        raise ConfigError(
            f"the data of {source} were made with other settings ({'; '.join(changed)}); give the"
            " same, or train without --reuse"
        )


def take(source: Path, out: Path, about: dict[str, Any]) -> None:
    """Copy the data of a run that passed `check`; features that fit are linked, not copied.

    Raises:
      CheckpointError: they cannot be written.
    """
    try:
        _take(source, out, about)
    except OSError as error:
        raise full(out, error) from error


def _take(source: Path, out: Path, about: dict[str, Any]) -> None:
    for name in FILES:
        if (source / name).is_file() and not (out / name).is_file():
            with saved_as(out / name) as partial:
                shutil.copyfile(source / name, partial)
    recorded = json.loads((source / "run.json").read_text(encoding="utf-8"))
    have, want = (_features(x) for x in (recorded, json.loads(json.dumps(about))))
    if have != want or not (source / FEATURES).is_dir() or (out / FEATURES).is_dir():
        return
    with saved_as(out / FEATURES, folder=True) as partial:
        for path in sorted((source / FEATURES).iterdir()):
            if not path.name.startswith("."):  # half-written
                _link(path, partial / path.name)


def _link(source: Path, path: Path) -> None:
    """Give a file a second name; copy it where the file system has no links."""
    try:
        os.link(source, path)
    except OSError:
        shutil.copyfile(source, path)


def _features(about: dict[str, Any]) -> list[Any]:
    recipe = about["recipe"]
    return [
        *(recipe[name] for name in OF_FEATURES),
        recipe["loss"] in (KL, MIX),
        recipe["kind"] == DSPARK and recipe.get("confidence_head", True),
    ]


def _deciding(about: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    recipe = about["recipe"]
    lengths = [bucket["length"] for bucket in recipe["buckets"]]  # their rows decide batches only
    found = {f"recipe.{name}": recipe[name] for name in names}
    return {name: about[name] for name in OF_RUN} | found | {"recipe.buckets": lengths}
