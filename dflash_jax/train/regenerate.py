"""The target's own answers to training prompts, written by the engine, many side by side."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dflash_jax.compiler import Plan
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import ConfigError
from dflash_jax.loading import TargetModel, resolve_here
from dflash_jax.train.loop import Stopped, stop_flag
from dflash_jax.train.recipe import Bucket
from dflash_jax.train.rows import Document

TURNS = 4  # prompts of a group, in multiples of the rows; a finished group is saved


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Token ids to continue; `wanted` marks earlier assistant tokens among them."""

    document: Document
    new_tokens: int

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
      Stopped: a signal came; what is done is saved and the same call goes on from there.
    """
    groups = grouped(prompts, buckets)
    if not groups:
        raise ConfigError(
            f"none of {len(prompts)} prompts fits: the longest bucket holds"
            f" {max(b.length for b in buckets)} tokens of prompt and answer; raise answer_buckets"
            " or lower new_tokens"
        )
    done = stored(path)
    engines: dict[Bucket, Engine] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with stop_flag() as flag, path.open("a", encoding="utf-8") as file:
        for i in range(len(done), len(groups)):
            bucket, members = groups[i]
            if bucket not in engines:
                engines = {bucket: opened(model, bucket)}
            results = engines[bucket].generate_many(
                [prompts[j].document.ids.tolist() for j in members],
                max_tokens=prompts[members[0]].new_tokens,
                temperature=temperature,
                seed=seed + i,
            )
            done.append([result.token_ids for result in results])
            file.write(json.dumps(done[-1]) + "\n")
            file.flush()
            tell(f"answers {i + 1}/{len(groups)} groups")
            if flag.raised and i + 1 < len(groups):
                raise Stopped(f"answers stopped at group {i + 1} of {len(groups)}; state saved")
    order = [j for _, members in groups for j in members]
    answers = [ids for group in done for ids in group]
    return [joined(prompts[j], ids) for j, ids in zip(order, answers, strict=True)]


def opened(model: TargetModel, bucket: Bucket) -> Engine:
    """An engine without drafter for the prompts of a bucket."""
    plan = Plan(
        rows=bucket.rows,
        max_length=min(bucket.length, model.config.max_length),
        dtype=model.dtype,
        exact=False,
    )
    plan = resolve_here(plan, model.config, None)
    return Engine(model.config, None, {"target": model.params}, plan)


def stored(path: Path) -> list[list[list[int]]]:
    """The groups saved so far; half a last line, of a killed process, is dropped."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return [json.loads(line) for line in whole.splitlines()]


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
