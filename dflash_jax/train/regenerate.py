"""The target's own answers to training prompts, decoded by the engine in batches."""

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
from dflash_jax.train.loop import TrainingStopped, stop_flag
from dflash_jax.train.recipe import Bucket
from dflash_jax.train.rows import Document
from dflash_jax.train.threads import parallel_calls

TURNS = 4  # prompts per group, in multiples of the rows; a finished group is saved
MOST_ENGINES = 4  # that decode concurrently


@dataclasses.dataclass(frozen=True)
class AnswerPrompt:
    """Token ids to continue; `wanted` marks earlier assistant tokens."""

    document: Document
    new_tokens: int
    line: int = 0  # index of its example

    @property
    def room(self) -> int:
        """Maximum tokens of prompt and answer together."""
        return len(self.document.ids) + self.new_tokens


def answer(
    path: Path,
    model: TargetModel,
    prompts: Sequence[AnswerPrompt],
    buckets: Sequence[Bucket],
    *,
    report: Callable[[str], None],
    temperature: float = 0.0,
    seed: int = 0,
) -> list[Document]:
    """Decode an answer to every prompt, saving finished groups in `path`.

    Returns:
      Prompts with their answers, the answers wanted.

    Raises:
      ConfigError: no prompt fits a bucket together with its answer.
      CheckpointError: `path` is damaged.
      TrainingStopped: a signal arrived; finished groups are saved and the same call resumes.
    """
    groups = grouped(prompts, buckets)
    if not groups:
        raise ConfigError(
            f"none of {len(prompts)} prompts fits: the longest bucket holds"
            f" {max(b.length for b in buckets)} tokens of prompt and answer; raise answer_buckets"
            " or lower new_tokens"
        )
    if left := len(prompts) - sum(len(members) for _, members in groups):
        report(
            f"{left} of {len(prompts)} prompts skipped: with their answers they are longer than"
            f" {max(b.length for b in buckets)} tokens, the longest of answer_buckets"
        )
    done = stored(path, [len(members) for _, members in groups])
    engines = AnswerEngines(model, Variant.SAMPLED if temperature else Variant.GREEDY)

    def write(i: int) -> list[list[int]]:
        bucket, members = groups[i]
        with engines.engine(bucket) as engine:
            results = engine.generate_many(
                [prompts[j].document.ids.tolist() for j in members],
                max_tokens=prompts[members[0]].new_tokens,
                temperature=temperature,
                seed=seed + i,
            )
        return [result.token_ids for result in results]

    path.parent.mkdir(parents=True, exist_ok=True)
    pool = ThreadPoolExecutor(max(map(engines.count, {bucket for bucket, _ in groups})))
    with stop_flag() as flag, path.open("a", encoding="utf-8") as file:
        try:
            submitted = [pool.submit(write, i) for i in range(len(done), len(groups))]
            for group in submitted:
                done.append(group.result())
                file.write(json.dumps(done[-1]) + "\n")
                file.flush()
                report(f"answers {len(done)}/{len(groups)} groups")
                if flag.raised:
                    raise TrainingStopped(
                        f"answers stopped at group {len(done)} of {len(groups)}; state saved"
                    )
        finally:
            pool.shutdown(cancel_futures=True)
    order = [j for _, members in groups for j in members]
    answers = [ids for group in done for ids in group]
    with sound(path):
        return [joined(prompts[j], ids) for j, ids in zip(order, answers, strict=True)]


class AnswerEngines:
    """A pool of engines without drafter, one bucket at a time, that share compiled programs."""

    def __init__(self, model: TargetModel, variant: Variant):
        self._model, self._variant = model, variant
        self._lock = threading.Lock()
        self._free: dict[Bucket, queue.SimpleQueue[Engine]] = {}

    def count(self, bucket: Bucket) -> int:
        """Return the number of concurrent engines: at most what a quarter of the memory holds."""
        plan = self._plan(bucket)
        each = budget(plan, self._model.config, None)
        room = plan.memory_limit // 4 // (each.caches + each.temporaries)
        return max(1, min(parallel_calls(MOST_ENGINES), room))

    @contextlib.contextmanager
    def engine(self, bucket: Bucket) -> Iterator[Engine]:
        """Yield a free engine of the bucket; the pool of another bucket is dropped."""
        with self._lock:
            if bucket not in self._free:
                self._free = {bucket: self._new_pool(bucket)}
            free = self._free[bucket]
        engine = free.get()
        try:
            yield engine
        finally:
            free.put(engine)

    def _new_pool(self, bucket: Bucket) -> "queue.SimpleQueue[Engine]":
        free: queue.SimpleQueue[Engine] = queue.SimpleQueue()
        model, plan, programs = self._model, self._plan(bucket), None
        for _ in range(self.count(bucket)):
            engine = Engine(model.config, None, {"target": model.params}, plan)
            if programs is None:
                engine.compile([self._variant])
                programs = engine.executables
            engine.compiled.executables = programs
            free.put(engine)
        return free

    def _plan(self, bucket: Bucket) -> Plan:
        config = self._model.config
        length = min(bucket.length, config.max_length)
        plan = Plan(rows=bucket.rows, max_length=length, dtype=self._model.dtype, exact=False)
        return resolve_here(plan, config, None)


def stored(path: Path, sizes: Sequence[int]) -> list[list[list[int]]]:
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


def grouped(
    prompts: Sequence[AnswerPrompt], buckets: Sequence[Bucket]
) -> list[tuple[Bucket, list[int]]]:
    """Group prompts by length, each in the shortest bucket that holds it with its answer.

    Prompts that fit no bucket are dropped.
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


def joined(prompt: AnswerPrompt, answer: Sequence[int]) -> Document:
    """Return prompt and answer as one document."""
    ids = np.concatenate([prompt.document.ids, np.asarray(answer, np.int32)])
    wanted = np.concatenate([prompt.document.wanted, np.ones(len(answer), bool)])
    return Document(ids, wanted)
