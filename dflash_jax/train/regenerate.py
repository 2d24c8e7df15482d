"""The target's own answers to training prompts, written by the engine, many side by side."""

import contextlib
import dataclasses
import json
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from dflash_jax.compiler.keys import Variant
from dflash_jax.compiler.memory import budget
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import ConfigError
from dflash_jax.loading import resolve_here
from dflash_jax.plan import Plan
from dflash_jax.target_model import TargetModel
from dflash_jax.train.files import sound
from dflash_jax.train.loop import Stopped, stop_flag
from dflash_jax.train.recipe import Bucket
from dflash_jax.train.rows import Document
from dflash_jax.train.threads import side_by_side

TURNS = 4  # prompts of a group, in multiples of the rows; a finished group is saved
WRITERS = 4  # engines that write at a time, at most


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Token ids to continue; `wanted` marks earlier assistant tokens among them."""

    document: Document
    new_tokens: int
    line: int = 0  # of the examples it was made from

    @property
    def room(self) -> int:
        """Tokens that prompt and answer may take together."""
        return len(self.document.ids) + self.new_tokens


def answer(
    path: Path,
    model: TargetModel,
    prompts: Sequence[Prompt],
    buckets: Sequence[Bucket],
    *,
    tell: Callable[[str], None],
    temperature: float = 0.0,
    seed: int = 0,
) -> list[Document]:
    """Every prompt with its answer, the answer wanted; kept in `path` as far as it got.

    Raises:
      ConfigError: no prompt leaves room for its answer.
      CheckpointError: what is kept in `path` is damaged.
      Stopped: a signal came; what is done is saved and the same call goes on from there.
    """
    groups = grouped(prompts, buckets)
    if not groups:
        raise ConfigError(
            f"none of {len(prompts)} prompts fits: the longest bucket holds"
            f" {max(b.length for b in buckets)} tokens of prompt and answer; raise answer_buckets"
            " or lower new_tokens"
        )
    if left := len(prompts) - sum(len(members) for _, members in groups):
        tell(
            f"{left} of {len(prompts)} prompts left out: with their answers they are longer than"
            f" {max(b.length for b in buckets)} tokens, the longest of answer_buckets"
        )
    done = stored(path, [len(members) for _, members in groups])
    writers = Writers(model, Variant.SAMPLED if temperature else Variant.GREEDY)

    def write(i: int) -> list[list[int]]:
        bucket, members = groups[i]
        with writers.engine(bucket) as engine:
            results = engine.generate_many(
                [prompts[j].document.ids.tolist() for j in members],
                max_tokens=prompts[members[0]].new_tokens,
                temperature=temperature,
                seed=seed + i,
            )
        return [result.token_ids for result in results]

    path.parent.mkdir(parents=True, exist_ok=True)
    pool = ThreadPoolExecutor(max(map(writers.count, {bucket for bucket, _ in groups})))
    with stop_flag() as flag, path.open("a", encoding="utf-8") as file:
        try:
            begun = [pool.submit(write, i) for i in range(len(done), len(groups))]
            for group in begun:
                done.append(group.result())
                file.write(json.dumps(done[-1]) + "\n")
                file.flush()
                tell(f"answers {len(done)}/{len(groups)} groups")
                if flag.raised:
                    raise Stopped(
                        f"answers stopped at group {len(done)} of {len(groups)}; state saved"
                    )
        finally:
            pool.shutdown(cancel_futures=True)
    order = [j for _, members in groups for j in members]
    answers = [ids for group in done for ids in group]
    with sound(path):
        return [joined(prompts[j], ids) for j, ids in zip(order, answers, strict=True)]


class Writers:
    """Engines without drafter that write answers at a time, each of a bucket.

    They share their programs.
    """

    def __init__(self, model: TargetModel, variant: Variant):
        self._model, self._variant = model, variant
        self._lock = threading.Lock()
        self._free: dict[Bucket, queue.SimpleQueue[Engine]] = {}

    def count(self, bucket: Bucket) -> int:
        """How many write at a time: no more than a quarter of the memory has room for."""
        plan = self._plan(bucket)
        each = budget(plan, self._model.config, None)
        room = plan.memory_limit // 4 // (each.caches + each.temporaries)
        return max(1, min(side_by_side(WRITERS), room))

    @contextlib.contextmanager
    def engine(self, bucket: Bucket) -> Iterator[Engine]:
        """One that nobody else uses; those of other buckets go when they are free."""
        with self._lock:
            if bucket not in self._free:
                self._free = {bucket: self._opened(bucket)}
            free = self._free[bucket]
        engine = free.get()
        try:
            yield engine
        finally:
            free.put(engine)

    def _opened(self, bucket: Bucket) -> "queue.SimpleQueue[Engine]":
        free: queue.SimpleQueue[Engine] = queue.SimpleQueue()
        model, plan, programs = self._model, self._plan(bucket), None
        for _ in range(self.count(bucket)):
            engine = Engine(model.config, None, {"target": model.params}, plan)
            if programs is None:
                engine.compile([self._variant])
                programs = engine.executables
            engine.executables = programs
            free.put(engine)
        return free

    def _plan(self, bucket: Bucket) -> Plan:
        config = self._model.config
        length = min(bucket.length, config.max_length)
        plan = Plan(rows=bucket.rows, max_length=length, dtype=self._model.dtype, exact=False)
        return resolve_here(plan, config, None)


def stored(path: Path, sizes: Sequence[int]) -> list[list[list[int]]]:
    """The groups saved so far; half a last line, of a killed process, is dropped.

    Args:
      sizes: of all groups.
    """
    if not path.is_file():
        return []
    with sound(path):
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            path.write_text(whole, encoding="utf-8")
        found = [json.loads(line) for line in whole.splitlines()]
        if [*map(len, found)] != list(sizes[: len(found)]):
            raise ValueError("groups of other sizes than were asked for")
    return found


def grouped(prompts: Sequence[Prompt], buckets: Sequence[Bucket]) -> list[tuple[Bucket, list[int]]]:
    """Prompts of like length together, each in the shortest bucket with room for the answer.

    Prompts that fit no bucket are left out.
    """
    groups: list[tuple[Bucket, list[int]]] = []
    order = sorted(range(len(prompts)), key=lambda i: (prompts[i].new_tokens, prompts[i].room))
    for bucket, shorter in zip(buckets, [0, *(b.length for b in buckets)], strict=False):
        for new_tokens in sorted({prompt.new_tokens for prompt in prompts}):
            members = [
                i
                for i in order
                if shorter < prompts[i].room <= bucket.length
                and prompts[i].new_tokens == new_tokens
            ]
            size = bucket.rows * TURNS
            for start in range(0, len(members), size):
                groups.append((bucket, members[start : start + size]))
    return groups


def joined(prompt: Prompt, answer: Sequence[int]) -> Document:
    """Prompt and answer as one document."""
    ids = np.concatenate([prompt.document.ids, np.asarray(answer, np.int32)])
    wanted = np.concatenate([prompt.document.wanted, np.ones(len(answer), bool)])
    return Document(ids, wanted)
