"""The target's own greedy answers to training prompts, in batches: what a drafter learns from."""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from dflash_jax.compiler import jit
from dflash_jax.config import TargetConfig
from dflash_jax.state import LayerCache
from dflash_jax.train.files import saved_as
from dflash_jax.train.loop import Stopped, stop_flag
from dflash_jax.train.presets import Bucket
from dflash_jax.train.rows import Document
from dflash_jax.train.target import blank_caches

SLACK = 8  # cache slots past the longest row: a write may be wider than one token


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Token ids to continue; `wanted` marks earlier assistant tokens among them."""

    document: Document
    new_tokens: int

    @property
    def room(self) -> int:
        """Tokens that prompt and answer may take together."""
        return len(self.document.ids) + self.new_tokens


def greedy(
    model: nn.Module,
    config: TargetConfig,
    params: dict,
    prompts: Int[Array, "B S"],
    lengths: Int[Array, " B"],
    limit: Int[Array, ""],
) -> Int[Array, "B S"]:
    """The rows with each prompt continued until an end token or `limit` new tokens.

    Args:
      prompts: right-padded; at least `limit` places of padding.
    """
    rows, slots = prompts.shape
    variables = {"params": params}
    ends = jnp.asarray(config.eos_token_ids)
    index = jnp.arange(rows)

    def best(hidden: Array) -> Int[Array, " B"]:
        logits: Any = model.apply(variables, hidden, method=model.logits)
        return jnp.argmax(logits, axis=-1)

    start = jnp.zeros(rows, jnp.int32)
    out: Any = model.apply(variables, prompts, blank_caches(config, rows, slots + SLACK), start)
    first = best(out.hidden[index, lengths - 1])

    def going(carry: tuple) -> Bool[Array, ""]:
        _, _, step, done, _ = carry
        return (step < limit) & ~done.all()

    def turn(carry: tuple[Array, tuple[LayerCache, ...], Array, Array, Array]) -> tuple:
        token, caches, step, done, tokens = carry
        place = lengths + step
        tokens = tokens.at[index, place].set(jnp.where(done, tokens[index, place], token))
        done |= jnp.isin(token, ends)
        out: Any = model.apply(variables, token[:, None], caches, place)
        return best(out.hidden[:, 0]), out.caches, step + 1, done, tokens

    carry = (first, out.caches, jnp.int32(0), jnp.zeros(rows, bool), prompts)
    return jax.lax.while_loop(going, turn, carry)[4]


def answer(
    path: Path,
    model: nn.Module,
    config: TargetConfig,
    params: dict,
    prompts: Sequence[Prompt],
    buckets: Sequence[Bucket],
    *,
    fill: int,
    tell: Callable[[str], None],
) -> list[Document]:
    """Every prompt with its answer, the answer wanted; kept in `path` as far as it got.

    Raises:
      Stopped: a signal came; what is done is saved and the same call goes on from there.
    """
    program = jit(functools.partial(greedy, model, config))
    batches = grouped(prompts, buckets)
    done = json.loads(path.read_text()) if path.is_file() else []
    found = [stored for batch in done for stored in batch]
    with stop_flag() as flag:
        for i in range(len(done), len(batches)):
            bucket, chosen = batches[i]
            done.append(continued(program, params, [prompts[j] for j in chosen], bucket, fill))
            found += done[-1]
            if flag.raised or i % 20 == 19:
                write(path, done)
                tell(f"answers {i + 1}/{len(batches)} batches")
            if flag.raised:
                raise Stopped(f"answers stopped at batch {i + 1} of {len(batches)}; state saved")
    write(path, done)
    order = [j for _, chosen in batches for j in chosen]
    return [joined(prompts[j], ids) for j, ids in zip(order, found, strict=True)]


def write(path: Path, batches: list[list[list[int]]]) -> None:
    """Saves the answers so far."""
    with saved_as(path) as partial:
        partial.write_text(json.dumps(batches))


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
            for start in range(0, len(members), bucket.rows):
                groups.append((bucket, members[start : start + bucket.rows]))
    return groups


def continued(
    program: Callable[..., Array],
    params: dict,
    prompts: Sequence[Prompt],
    bucket: Bucket,
    fill: int,
) -> list[list[int]]:
    """The answers to one batch; a short batch is filled up with its first prompt."""
    rows = np.full((bucket.rows, bucket.length), fill, np.int32)
    lengths = np.zeros(bucket.rows, np.int32)
    for i in range(bucket.rows):
        ids = prompts[i if i < len(prompts) else 0].document.ids
        rows[i, : len(ids)], lengths[i] = ids, len(ids)
    limit = prompts[0].new_tokens
    tokens = np.asarray(program(params, rows, lengths, np.int32(limit)))
    answers = []
    for i in range(len(prompts)):
        ids = tokens[i, lengths[i] : lengths[i] + limit].tolist()
        answers.append(ids[: ids.index(fill)] if fill in ids else ids)
    return answers


def joined(prompt: Prompt, answer: Sequence[int]) -> Document:
    """Prompt and answer as one document."""
    ids = np.concatenate([prompt.document.ids, np.asarray(answer, np.uint16)])
    wanted = np.concatenate([prompt.document.wanted, np.ones(len(answer), bool)])
    return Document(ids, wanted)
