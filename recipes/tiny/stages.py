"""Stages of the shipped pair: each reads earlier results from the folder and adds one.

The first ones make the target; then come its answers, the drafter, their evaluation and the result.
"""

import dataclasses
import json
import platform
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tokenizers import Tokenizer

from dflash_jax.config import TargetConfig
from dflash_jax.errors import ConfigError
from dflash_jax.families import llama_net
from dflash_jax.graph.build import jit
from dflash_jax.loading import load_target
from dflash_jax.target_model import TargetModel
from dflash_jax.trainer import evaluate, loop, optimizer, regenerate, rows, run, training
from dflash_jax.trainer import target as pretraining
from dflash_jax.trainer.files import saved_as, write_json
from recipes import model_card
from recipes.tiny import vocabulary
from recipes.tiny.corpus import conversation, stdlib
from recipes.tiny.corpus.world import HELD_OUT_SHARE, Conversation
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
    """A build: its folder, its preset, and the callback for lines of progress."""

    out: Path
    preset: Preset
    report: Callable[[str], None]

    def path(self, stage: str) -> Path:
        return self.out / RESULT[stage]

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.path("tokenizer")))

    def identity(self, stage: str) -> str:
        return json.dumps([stage, dataclasses.asdict(self.preset)], sort_keys=True)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training text of one phase before tokenisation."""

    conversations: tuple[Conversation, ...]
    sources: tuple[str, ...]


def read_corpus(work: Work) -> list[Corpus]:
    """Return the result of the corpus stage, by phase."""
    phases = []
    for stored in json.loads(work.path("corpus").read_text(encoding="utf-8")):
        conversations = []
        for messages, tools, thinking in stored["chats"]:
            conversations.append(Conversation(tuple(messages), tuple(tools), thinking))
        phases.append(Corpus(tuple(conversations), tuple(stored["sources"])))
    return phases


def corpus(work: Work) -> None:
    """Write seeded conversations and library sources of every phase to one JSON file."""
    stored = []
    for i, phase in enumerate(work.preset.phases):
        seed = work.preset.seed + i
        chats = conversation.training_conversations(
            seed, phase.conversations, phase.agent_share, phase.renamed_share
        )
        sources = stdlib.training_sources(phase.code_characters)
        stored.append(
            {
                "chats": [[chat.messages, chat.tools, chat.thinking] for chat in chats],
                "sources": sources,
            }
        )
    with saved_as(work.path("corpus")) as partial:
        partial.write_text(json.dumps(stored), encoding="utf-8")


def tokenizer(work: Work) -> None:
    text = read_corpus(work)[0]
    share = text.conversations[: round(TOKENIZER_SHARE * len(text.conversations))]
    texts = [*map(vocabulary.training_text, share), *text.sources]
    with saved_as(work.path("tokenizer")) as partial:
        vocabulary.train(texts, work.preset.vocabulary).save(str(partial))


def token_rows(work: Work, i: int) -> tuple[rows.TokenRows, ...]:
    """Return a phase's text as packed token rows, chats and code in random order."""
    text = read_corpus(work)[i]
    tokenizer = work.tokenizer()
    buckets = work.preset.phases[i].buckets
    chats = vocabulary.chat_documents(tokenizer, map(vocabulary.training_text, text.conversations))
    code = vocabulary.source_documents(tokenizer, text.sources, buckets[0].length)
    documents = [*chats, *code]
    random.Random(work.preset.seed + i).shuffle(documents)
    fill = vocabulary.token_id(tokenizer, vocabulary.END_OF_TEXT)
    return tuple(rows.pack(documents, buckets, fill=fill))


def target(work: Work) -> None:
    """Train the target from scratch, phase by phase, and export it with its tokenizer."""
    preset = work.preset
    tokenizer = work.tokenizer()
    pad = vocabulary.token_id(tokenizer, vocabulary.END_OF_TEXT)
    ends = (vocabulary.token_id(tokenizer, vocabulary.TURN_END), pad)
    first = preset.target_config(ends, preset.phases[0].layers)
    params = pretraining.initial(llama_net.build(first), first, preset.seed)
    for i, phase in enumerate(preset.phases):
        params = trained(work, preset.target_config(ends, phase.layers), params, i)
    with saved_as(work.path("target"), folder=True) as partial:
        run.write_huggingface(
            partial,
            preset.target_config(ends),
            jax.device_get(params),
            bos_token_id=None,
            pad_token_id=pad,
        )
        vocabulary.save(tokenizer, partial, LONGEST)


def trained(work: Work, config: TargetConfig, params: dict, i: int) -> dict:
    """Return the parameters after phase `i`, which may add layers.

    Each phase starts with a new optimizer state.
    """
    phase = work.preset.phases[i]
    model = llama_net.build(config)
    params = pretraining.deepened(params, config.num_layers)
    maker = optimizer.build(phase.schedule, decay=WEIGHT_DECAY)
    settings = loop.TrainingRun(
        path=work.out / f"target.{i}",
        steps=phase.schedule.steps,
        save_every=phase.schedule.save_every,
        identity=work.identity(f"target {i}"),
        label=f"target {i + 1}",
    )
    state = pretraining.TrainState(params=params, optimizer=maker.init(params))
    finished = loop.finished(settings, state)
    if finished is not None:
        return finished.params
    batches = rows.Batches(phase.buckets, token_rows(work, i), work.preset.seed + i)
    step = jit(pretraining.step(model, config, maker, phase.given_weight), donate=(0,))

    def advance(state: pretraining.TrainState, number: int):
        _, batch = batches.at(number)
        return step(state, batch.tokens, batch.wanted, batch.real)

    return loop.fit(settings, state, advance, report=work.report).params


def trained_target(work: Work) -> TargetModel:
    """Load the exported target as an engine does: bfloat16 weights, float32 arithmetic."""
    return load_target(work.path("target"))


def prompts(work: Work) -> list[regenerate.AnswerPrompt]:
    """Return training conversations cut before an answer, and pieces of training sources."""
    preset = work.preset
    phases = read_corpus(work)
    tokenizer = work.tokenizer()
    recipe = preset.drafter
    rng = random.Random(f"prompts {preset.seed}")
    share = recipe.prompts // len(phases)
    cut: list[Conversation] = []
    for text in phases:
        cut += [conversation.opened(rng, whole) for whole in text.conversations[:share]]
    chats = vocabulary.chat_documents(tokenizer, map(vocabulary.prompt_text, cut))
    pieces = vocabulary.source_documents(tokenizer, phases[0].sources, recipe.text_prompt)
    code = rng.sample(pieces, min(recipe.text_prompts, len(pieces)))
    answered = [regenerate.AnswerPrompt(chat, recipe.new_tokens) for chat in chats]
    for piece in code:
        unwanted = rows.Document(piece.ids, np.zeros(len(piece.ids), bool))
        answered.append(regenerate.AnswerPrompt(unwanted, recipe.text_tokens))
    return answered


def transcripts(work: Work) -> list[rows.Document]:
    """Return training conversations that are longer than any answered row.

    Their assistant turns come from the generator and count only where the target agrees.
    """
    texts = map(vocabulary.training_text, read_corpus(work)[0].conversations)
    documents = vocabulary.chat_documents(work.tokenizer(), texts)
    longest = work.preset.drafter.answer_buckets[-1].length
    longer = [document for document in documents if len(document.ids) > longest]
    return longer[: work.preset.transcripts]


def answers(work: Work) -> None:
    """Write the target's greedy answers to training prompts, one per row."""
    recipe = work.preset.drafter
    fill = vocabulary.token_id(work.tokenizer(), vocabulary.END_OF_TEXT)
    documents = regenerate.answer(
        work.out / "answers.state.jsonl",
        regenerate.local_decoder(trained_target(work)),
        prompts(work),
        recipe.answer_buckets,
        report=work.report,
    )
    documents += transcripts(work)
    random.Random(work.preset.seed).shuffle(documents)
    rows.save(work.path("answers"), rows.one_per_row(documents, recipe.buckets, fill=fill))


def drafter_model(work: Work) -> None:
    """Train the drafter against the frozen target and export it."""
    fitted = training.fit(
        trained_target(work),
        work.preset.drafter,
        work.preset.mask_id,
        rows.load(work.path("answers")),
        work.out / "fit",
        identity=work.identity("drafter"),
        report=work.report,
    )
    with saved_as(work.path("drafter"), folder=True) as partial:
        run.write_huggingface(
            partial,
            fitted.config,
            fitted.params,
            max_position_embeddings=LONGEST,
            tie_word_embeddings=False,
        )


def held_out(work: Work) -> None:
    """Write the held-out prompts, after checking that none occurs in training text.

    Raises:
      ConfigError: a prompt also occurs in training text.
    """
    preset = work.preset
    phases = read_corpus(work)
    trained: set[str] = set()  # questions of training text
    sources: list[str] = []
    for text in phases:
        sources += text.sources
        for chat in text.conversations:
            trained.update(conversation.questions(chat))
    chats = conversation.held_out_conversations(preset.seed, preset.held_out_chat)
    code = stdlib.held_out_openings(preset.held_out_code, sources)
    asked = [conversation.questions(chat)[0] for chat in chats]
    known = [question for question in asked if question in trained]
    known += [piece for piece in code if any(piece in source for source in sources)]
    if known:
        raise ConfigError(
            f"{len(known)} held-out prompts also occur in training text, for example"
            f" {known[0][:60]!r}; change the split"
        )
    entries: list[dict[str, Any]] = [
        {
            "kind": "chat",
            "messages": chat.messages,
            "tools": chat.tools,
            "thinking": chat.thinking,
        }
        for chat in chats
    ]
    entries += [{"kind": "code", "text": piece} for piece in code]
    with saved_as(work.path("heldout")) as partial:
        lines = (json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
        partial.write_text("".join(lines), encoding="utf-8")


def evaluation(work: Work) -> None:
    """Measure the acceptance length on the held-out prompts by decoding them."""
    results = evaluate.evaluate(
        evaluate.engine_of(work.path("target"), work.path("drafter")),
        work.path("heldout"),
        max_tokens=work.preset.drafter.held_out_tokens,
        report=work.report,
    )
    for kind in evaluate.KINDS:
        if kind in results:
            work.report(f"{kind}: {evaluate.summary(results[kind])}")
    with saved_as(work.path("evaluation")) as partial:
        write_json(partial, results)


def result(work: Work) -> None:
    """Write the shipped folder: target, drafter, held-out prompts, results and model card."""
    with saved_as(work.path("result"), folder=True) as partial:
        for name in ("target", "drafter"):
            shutil.copytree(work.path(name), partial / name)
        for name in ("heldout", "evaluation"):
            shutil.copy(work.path(name), partial)
        measured = read(work.path("evaluation"))
        seconds = read(work.out / "timings.json")
        text = model_card(
            "tiny",
            preset=work.preset,
            target=work.preset.target,
            drafter=work.preset.drafter,
            python=platform.python_version(),
            share=HELD_OUT_SHARE,
            measured=measured,
            seconds=seconds,
            sizes=sizes(partial),
        )
        (partial / "README.md").write_text(text, encoding="utf-8")


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of every file by its path inside the folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
