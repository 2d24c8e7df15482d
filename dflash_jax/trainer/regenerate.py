"""The target's own answers to training prompts, decoded by the engine in batches."""

import dataclasses
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import numpy as np

from dflash_jax.engine.engine import Engine
from dflash_jax.engine.sampling_params import SamplingParams
from dflash_jax.errors import ConfigError
from dflash_jax.graph.keys import Variant
from dflash_jax.plan import Weights
from dflash_jax.target_model import TargetModel
from dflash_jax.trainer.decoding import EnginePool, Taps, decode
from dflash_jax.trainer.feature_store import FeatureStore
from dflash_jax.trainer.files import sound
from dflash_jax.trainer.groups import StageProgress, in_threads, results, stored
from dflash_jax.trainer.recipes import Bucket
from dflash_jax.trainer.rows import Document

TURNS = 4  # prompts per group, in multiples of the rows; a finished group is saved


@dataclasses.dataclass(frozen=True)
class AnswerPrompt:
    """Token ids to continue; `wanted` marks earlier assistant tokens.

    Attributes:
      line: index of its example.
      temperature, seed: options of the answer; by default those of its group.
    """

    document: Document
    new_tokens: int
    line: int = 0
    temperature: float | None = None
    seed: int = 0

    @property
    def room(self) -> int:
        """Maximum tokens of prompt and answer together."""
        return len(self.document.ids) + self.new_tokens

    def params(self, of_group: SamplingParams) -> SamplingParams:
        """Return the options of its answer."""
        if self.temperature is None:
            return of_group
        return of_group.with_options(temperature=self.temperature, seed=self.seed)


@dataclasses.dataclass(frozen=True)
class Recording:
    """Records the target's taps while it answers, so that no second pass has to compute them.

    Attributes:
      longest: tokens of the longest row; longer documents are cut as the rows are.
    """

    store: FeatureStore
    layer_ids: tuple[int, ...]
    longest: int

    def decode(
        self, engine: Engine, name: str, asked: Sequence["AnswerPrompt"], params: SamplingParams
    ) -> list[list[int]]:
        """Return greedy answers, and save their features as a part of the store.

        Raises:
          CheckpointError: the disk is full.
        """
        taps: dict[int, np.ndarray] = {}

        def ended(number: int, read: Taps) -> None:
            taps[number] = self.store.bits(read()[:, : self.longest])

        requests = [(prompt.document.ids.tolist(), params) for prompt in asked]
        answers = [x.token_ids for x in decode(engine, requests, ended)]
        rows = [
            (joined(prompt, ids).ids[: self.longest], taps[i])
            for i, (prompt, ids) in enumerate(zip(asked, answers, strict=True))
        ]
        self.store.add_decoded(name, rows)
        return answers


@dataclasses.dataclass(frozen=True)
class AnswerGroup:
    """Prompts that an engine decodes together.

    Attributes:
      name: the same in every run.
    """

    name: str
    bucket: Bucket
    prompts: tuple[AnswerPrompt, ...]
    params: SamplingParams

    def decode(self, pool: EnginePool, recording: Recording | None = None) -> list[list[int]]:
        """Return the answers, decoded by an engine of the pool."""
        with pool.engine(self.bucket) as engine:
            if recording is not None:
                return recording.decode(engine, self.name, self.prompts, self.params)
            asked = [(x.document.ids.tolist(), x.params(self.params)) for x in self.prompts]
            return [x.token_ids for x in decode(engine, asked)]


Decoder = Callable[[Sequence[AnswerGroup]], Generator[list[list[int]]]]  # yields answers, in order


def local_decoder(
    model: TargetModel, recording: Recording | None = None, *, weights: Weights = "float"
) -> Decoder:
    """Return a function that decodes groups in threads of this process.

    Args:
      recording: where to save the target's taps; answers are greedy then.
      weights: see `EnginePool`.
    """

    def decoded(groups: Sequence[AnswerGroup]) -> Generator[list[list[int]]]:
        variant = Variant.SAMPLED if groups[0].params.temperature else Variant.GREEDY
        taps = recording.layer_ids if recording else ()
        pool = EnginePool(model, variant, taps=taps, weights=weights)
        workers = max(map(pool.count, {group.bucket for group in groups}))
        work = in_threads(lambda i: groups[i].decode(pool, recording), workers)
        yield from work(range(len(groups)))

    return decoded


def answer(
    path: Path,
    decoder: Decoder,
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
      CheckpointError: `path` is damaged, or the disk is full.
      TrainingStopped: a signal arrived; finished groups are saved and the same call resumes.
    """
    members = grouped(prompts, buckets)
    if not members:
        raise ConfigError(
            f"none of {len(prompts)} prompts fits: the longest bucket holds"
            f" {max(b.length for b in buckets)} tokens of prompt and answer; raise answer_buckets"
            " or lower new_tokens"
        )
    if left := len(prompts) - sum(len(numbers) for _, numbers in members):
        report(
            f"{left} of {len(prompts)} prompts skipped: with their answers they are longer than"
            f" {max(b.length for b in buckets)} tokens, the longest of answer_buckets"
        )
    groups = []
    for i, (bucket, numbers) in enumerate(members):
        params = SamplingParams(
            max_tokens=prompts[numbers[0]].new_tokens,
            temperature=temperature,
            seed=(seed + i) % 2**32,
            speculative=False,
        )
        asked = tuple(prompts[j] for j in numbers)
        groups.append(AnswerGroup(f"{i:06}", bucket, asked, params))
    sizes = [len(group.prompts) for group in groups]
    done = len(stored(path, sizes))
    progress = StageProgress("answers", len(groups), "groups", report, done=done, every=0)

    def compute(numbers: range) -> Generator[list[list[int]]]:
        return decoder(groups[numbers.start :])

    groups_of_answers = results(path, sizes, compute, label="answers", progress=progress)
    answers = [ids for group in groups_of_answers for ids in group]
    asked = [prompt for group in groups for prompt in group.prompts]
    with sound(path):
        return [joined(prompt, ids) for prompt, ids in zip(asked, answers, strict=True)]


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
