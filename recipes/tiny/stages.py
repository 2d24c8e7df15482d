"""Stages of the shipped pair: each reads earlier results from the folder and adds one."""

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path

import jax
from tokenizers import Tokenizer

from dflash_jax.config import TargetConfig
from dflash_jax.graph.build import jit
from dflash_jax.models import qwen3
from dflash_jax.train import export, loop, optimizer, rows
from dflash_jax.train import target as pretraining
from dflash_jax.train.files import saved_as
from recipes.tiny import documents, vocabulary
from recipes.tiny.corpus import conversation, stdlib
from recipes.tiny.corpus.world import Conversation
from recipes.tiny.presets import LONGEST, Preset

RESULT = {
    "corpus": "corpus.json",
    "tokenizer": "tokenizer.json",
    "target": "target",
    "answers": "answers.npz",
    "drafter": "drafter",
    "heldout": "heldout.jsonl",
    "evaluation": "results.json",
    "result": "tiny",
}
TOKENIZER_SHARE = 0.5
WEIGHT_DECAY = 0.1


@dataclasses.dataclass(frozen=True)
class Work:
    """The folder of a build, its preset, and the callback for progress lines."""

    out: Path
    preset: Preset
    report: Callable[[str], None]

    def path(self, stage: str) -> Path:
        """Return the path of a stage's result."""
        return self.out / RESULT[stage]

    def tokenizer(self) -> Tokenizer:
        """Return the trained tokenizer."""
        return Tokenizer.from_file(str(self.path("tokenizer")))

    def identity(self, stage: str) -> str:
        """Return the identity of a stage's saved training states."""
        return json.dumps([stage, dataclasses.asdict(self.preset)], sort_keys=True)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training text of one phase before tokenisation."""

    conversations: tuple[Conversation, ...]
    sources: tuple[str, ...]


def read_corpus(work: Work) -> list[Corpus]:
    """Return the result of the corpus stage, by phase."""
    found = []
    for stored in json.loads(work.path("corpus").read_text(encoding="utf-8")):
        made = (Conversation(tuple(m), tuple(t), thinking) for m, t, thinking in stored["chats"])
        found.append(Corpus(tuple(made), tuple(stored["sources"])))
    return found


def corpus(work: Work) -> None:
    """Write seeded conversations and library sources of every phase to one JSON file."""
    stored = []
    for i, phase in enumerate(work.preset.phases):
        seed = work.preset.seed + i
        chats = conversation.training_conversations(
            seed, phase.conversations, phase.agent_share, phase.renamed_share
        )
        stored.append(
            {
                "chats": [[c.messages, c.tools, c.thinking] for c in chats],
                "sources": stdlib.training_sources(phase.code_characters),
            }
        )
    with saved_as(work.path("corpus")) as partial:
        partial.write_text(json.dumps(stored), encoding="utf-8")


def tokenizer(work: Work) -> None:
    """Train the tokenizer on the first phase's sources and half of its conversations."""
    text = read_corpus(work)[0]
    share = text.conversations[: round(TOKENIZER_SHARE * len(text.conversations))]
    texts = [*(vocabulary.training_text(made) for made in share), *text.sources]
    with saved_as(work.path("tokenizer")) as partial:
        vocabulary.train(texts, work.preset.vocabulary).save(str(partial))


def token_rows(work: Work, i: int) -> tuple[rows.TokenRows, ...]:
    """Return a phase's text as packed token rows, chats and code in random order."""
    text, made, buckets = read_corpus(work)[i], work.tokenizer(), work.preset.phases[i].buckets
    chats = documents.conversations(made, map(vocabulary.training_text, text.conversations))
    everything = [*chats, *documents.sources(made, text.sources, buckets[0].length)]
    random.Random(work.preset.seed + i).shuffle(everything)
    fill = vocabulary.token_id(made, vocabulary.END_OF_TEXT)
    return tuple(rows.pack(everything, buckets, fill=fill))


def target(work: Work) -> None:
    """Train the target from scratch, phase by phase, and export it with its tokenizer."""
    preset, made = work.preset, work.tokenizer()
    pad = vocabulary.token_id(made, vocabulary.END_OF_TEXT)
    ends = vocabulary.token_id(made, vocabulary.TURN_END), pad
    first = preset.target_config(ends, preset.phases[0].layers)
    params = pretraining.initial(qwen3.build(first), first, preset.seed)
    for i, phase in enumerate(preset.phases):
        params = trained(work, preset.target_config(ends, phase.layers), params, i)
    with saved_as(work.path("target"), folder=True) as partial:
        export.target(partial, preset.target_config(ends), jax.device_get(params), pad=pad)
        vocabulary.save(made, partial, LONGEST)


def trained(work: Work, config: TargetConfig, params: dict, i: int) -> dict:
    """Return the parameters after phase `i`, which may add layers.

    Each phase starts with a new optimizer state.
    """
    phase, model = work.preset.phases[i], qwen3.build(config)
    params = pretraining.deepened(params, config.num_layers)
    maker = optimizer.build(phase.schedule, decay=WEIGHT_DECAY)
    run = loop.TrainingRun(
        path=work.out / f"target.{i}",
        steps=phase.schedule.steps,
        save_every=phase.schedule.save_every,
        identity=work.identity(f"target {i}"),
        label=f"target {i + 1}",
    )
    state = pretraining.TrainState(params=params, optimizer=maker.init(params))
    if (finished := loop.finished(run, state)) is not None:
        return finished.params
    batches = rows.Batches(phase.buckets, token_rows(work, i), work.preset.seed + i)
    step = jit(pretraining.step(model, config, maker, phase.given_weight), donate=(0,))

    def advance(state: pretraining.TrainState, number: int):
        _, batch = batches.at(number)
        return step(state, batch.tokens, batch.wanted, batch.real)

    return loop.fit(run, state, advance, report=work.report).params
