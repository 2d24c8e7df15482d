"""Results of groups of work, computed by threads and saved in order, one JSON line per group."""

import json
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dflash_jax.train.files import sound
from dflash_jax.train.loop import TrainingStopped, append_lines, stop_flag


def results(
    path: Path,
    sizes: Sequence[int],
    work: Callable[[int], list[Any]],
    *,
    workers: int,
    label: str,
    progress: Callable[[], None] = lambda: None,
) -> Generator[list[Any]]:
    """Yield the result of each group: those stored in `path`, then new ones, saved first.

    Args:
      sizes: number of items of each group's result.
      work: computes a group by its number; called in threads.
      label: the stage, for messages.
      progress: called after each new group.

    Raises:
      CheckpointError: `path` is damaged, or the disk is full.
      TrainingStopped: a signal arrived; finished groups are saved and the same call resumes.
    """
    done = stored(path, sizes)
    yield from done
    path.parent.mkdir(parents=True, exist_ok=True)
    pool = ThreadPoolExecutor(workers)
    with stop_flag() as flag:
        try:
            submitted = [pool.submit(work, i) for i in range(len(done), len(sizes))]
            for number, group in enumerate(submitted, len(done) + 1):
                items = group.result()
                append_lines(path, [json.dumps(items)])
                progress()
                if flag.raised:
                    raise TrainingStopped(
                        f"{label} stopped at group {number} of {len(sizes)}; state saved"
                    )
                yield items
        finally:
            pool.shutdown(cancel_futures=True)


def stored(path: Path, sizes: Sequence[int]) -> list[list[Any]]:
    """Return the groups saved so far, without an incomplete last line.

    Args:
      sizes: sizes of all groups.

    Raises:
      CheckpointError: the file is damaged.
    """
    if not path.is_file():
        return []
    with sound(path):
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            path.write_text(whole, encoding="utf-8")
        groups = [json.loads(line) for line in whole.splitlines()]
        if [*map(len, groups)] != list(sizes[: len(groups)]):
            raise ValueError("its groups have other sizes")
    return groups
