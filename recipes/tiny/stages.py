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

import jax
import numpy as np
from tokenizers import Tokenizer

from dflash_jax.config import TargetConfig
from dflash_jax.errors import ConfigError
from dflash_jax.graph.build import jit
from dflash_jax.loading import load_target
from dflash_jax.models import llama
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
    """The folder of a build, its preset, and the callback for progress lines."""

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
    text = read_corpus(work)[0]
    share = text.conversations[: round(TOKENIZER_SHARE * len(text.conversations))]
    texts = [*(vocabulary.training_text(made) for made in share), *text.sources]
    with saved_as(work.path("tokenizer")) as partial:
        vocabulary.train(texts, work.preset.vocabulary).save(str(partial))


def token_rows(work: Work, i: int) -> tuple[rows.TokenRows, ...]:
    """Return a phase's text as packed token rows, chats and code in random order."""
    text, made, buckets = read_corpus(work)[i], work.tokenizer(), work.preset.phases[i].buckets
    chats = vocabulary.chat_documents(made, map(vocabulary.training_text, text.conversations))
    everything = [*chats, *vocabulary.source_documents(made, text.sources, buckets[0].length)]
    random.Random(work.preset.seed + i).shuffle(everything)
    fill = vocabulary.token_id(made, vocabulary.END_OF_TEXT)
    return tuple(rows.pack(everything, buckets, fill=fill))


def target(work: Work) -> None:
    """Train the target from scratch, phase by phase, and export it with its tokenizer."""
    preset, made = work.preset, work.tokenizer()
    pad = vocabulary.token_id(made, vocabulary.END_OF_TEXT)
    ends = vocabulary.token_id(made, vocabulary.TURN_END), pad
    first = preset.target_config(ends, preset.phases[0].layers)
    params = pretraining.initial(llama.build(first), first, preset.seed)
    for i, phase in enumerate(preset.phases):
        params = trained(work, preset.target_config(ends, phase.layers), params, i)
    with saved_as(work.path("target"), folder=True) as partial:
        fields = {"bos_token_id": None, "pad_token_id": pad}
        config = preset.target_config(ends)
        run.write_huggingface(partial, config, jax.device_get(params), **fields)
        vocabulary.save(made, partial, LONGEST)


def trained(work: Work, config: TargetConfig, params: dict, i: int) -> dict:
    """Return the parameters after phase `i`, which may add layers.

    Each phase starts with a new optimizer state.
    """
    phase, model = work.preset.phases[i], llama.build(config)
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
    if (finished := loop.finished(settings, state)) is not None:
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
    preset, phases, made = work.preset, read_corpus(work), work.tokenizer()
    recipe = preset.drafter
    rng = random.Random(f"prompts {preset.seed}")
    share = recipe.prompts // len(phases)
    whole = [c for text in phases for c in text.conversations[:share]]
    cut = [conversation.opened(rng, c) for c in whole]
    chats = vocabulary.chat_documents(made, map(vocabulary.prompt_text, cut))
    pieces = vocabulary.source_documents(made, phases[0].sources, recipe.text_prompt)
    code = rng.sample(pieces, min(recipe.text_prompts, len(pieces)))
    given = [rows.Document(d.ids, np.zeros(len(d.ids), bool)) for d in code]
    return [regenerate.AnswerPrompt(d, recipe.new_tokens) for d in chats] + [
        regenerate.AnswerPrompt(d, recipe.text_tokens) for d in given
    ]


def transcripts(work: Work) -> list[rows.Document]:
    """Return training conversations that are longer than any answered row.

    Their assistant turns come from the generator and count only where the target agrees.
    """
    texts = map(vocabulary.training_text, read_corpus(work)[0].conversations)
    made = vocabulary.chat_documents(work.tokenizer(), texts)
    longest = work.preset.drafter.answer_buckets[-1].length
    return [d for d in made if len(d.ids) > longest][: work.preset.transcripts]


def answers(work: Work) -> None:
    """Write the target's greedy answers to training prompts, one per row."""
    recipe = work.preset.drafter
    fill = vocabulary.token_id(work.tokenizer(), vocabulary.END_OF_TEXT)
    found = regenerate.answer(
        work.out / "answers.state.jsonl",
        regenerate.local_decoder(trained_target(work)),
        prompts(work),
        recipe.answer_buckets,
        report=work.report,
    )
    found += transcripts(work)
    random.Random(work.preset.seed).shuffle(found)
    rows.save(work.path("answers"), rows.one_per_row(found, recipe.buckets, fill=fill))


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
        fields = {"max_position_embeddings": LONGEST, "tie_word_embeddings": False}
        run.write_huggingface(partial, fitted.config, fitted.params, **fields)


def held_out(work: Work) -> None:
    """Write the held-out prompts, after checking that none occurs in training text.

    Raises:
      ConfigError: a prompt also occurs in training text.
    """
    preset, phases = work.preset, read_corpus(work)
    whole = [c for text in phases for c in text.conversations]
    trained = {question for c in whole for question in conversation.questions(c)}
    chats = conversation.held_out_conversations(preset.seed, preset.held_out_chat)
    sources = [source for text in phases for source in text.sources]
    code = stdlib.held_out_openings(preset.held_out_code, sources)
    known = [conversation.questions(c)[0] for c in chats if conversation.questions(c)[0] in trained]
    known += [piece for piece in code if any(piece in source for source in sources)]
    if known:
        raise ConfigError(
            f"{len(known)} held-out prompts also occur in training text, for example"
            f" {known[0][:60]!r}; change the split"
        )
    entries = [
        {"kind": "chat", "messages": c.messages, "tools": c.tools, "thinking": c.thinking}
        for c in chats
    ] + [{"kind": "code", "text": piece} for piece in code]
    with saved_as(work.path("heldout")) as partial:
        lines = (json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
        partial.write_text("".join(lines), encoding="utf-8")


def evaluation(work: Work) -> None:
    """Measure the acceptance length on the held-out prompts by decoding them."""
    found = evaluate.evaluate(
        evaluate.engine_of(work.path("target"), work.path("drafter")),
        work.path("heldout"),
        max_tokens=work.preset.drafter.held_out_tokens,
        report=work.report,
    )
    for kind in filter(found.__contains__, evaluate.KINDS):
        work.report(f"{kind}: {evaluate.summary(found[kind])}")
    with saved_as(work.path("evaluation")) as partial:
        write_json(partial, found)


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
