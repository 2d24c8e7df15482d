"""The later stages: on-policy answers, the drafter, held-out prompts, evaluation, the result."""

import functools
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from dflash_jax.compiler import jit
from dflash_jax.config import DrafterConfig, TargetConfig, read_target_config
from dflash_jax.errors import ConfigError
from dflash_jax.models import qwen3
from dflash_jax.models.dflash import DFlash
from dflash_jax.train import (
    card,
    documents,
    drafter,
    evaluate,
    export,
    loop,
    optimizer,
    regenerate,
    rows,
    vocabulary,
)
from dflash_jax.train.corpus import conversation, stdlib
from dflash_jax.train.files import saved_as
from dflash_jax.train.stages import Work, read_corpus
from dflash_jax.train.target import TrainState

CODE_PROMPT = 96  # tokens
ANSWER_LIMIT = 128  # tokens of a held-out answer
WEIGHT_DECAY = 0.01
READ_TOKENS = 4096  # of the target at a time


def trained_target(work: Work) -> tuple[TargetConfig, nn.Module, dict]:
    """The exported target, read back as an engine would: bfloat16 weights, float32 arithmetic."""
    from converters.load import load_target

    config = read_target_config(work.path("target"))
    params = load_target(work.path("target"), config, "float32")
    return config, qwen3.build(config), jax.device_put(params)


def prompts(work: Work) -> list[regenerate.Prompt]:
    """Training conversations cut before one of their answers, and pieces of training sources."""
    preset, phases, made = work.preset, read_corpus(work), work.tokenizer()
    rng = random.Random(f"prompts {preset.seed}")
    share = preset.chat_prompts // len(phases)
    whole = [c for text in phases for c in text.conversations[:share]]
    cut = [conversation.opened(rng, c) for c in whole]
    chats = documents.conversations(made, map(vocabulary.prompt_text, cut))
    pieces = documents.sources(made, phases[0].sources, CODE_PROMPT)
    code = rng.sample(pieces, min(preset.code_prompts, len(pieces)))
    given = [rows.Document(d.ids, np.zeros(len(d.ids), bool)) for d in code]
    return [regenerate.Prompt(d, preset.chat_tokens) for d in chats] + [
        regenerate.Prompt(d, preset.code_tokens) for d in given
    ]


def transcripts(work: Work) -> list[rows.Document]:
    """Training conversations longer than any answered row, as they are.

    Their assistant turns are the generator's; only where the target agrees do they count.
    """
    texts = map(vocabulary.training_text, read_corpus(work)[0].conversations)
    made = documents.conversations(work.tokenizer(), texts)
    longest = work.preset.answer_buckets[-1].length
    return [d for d in made if len(d.ids) > longest][: work.preset.transcripts]


def answers(work: Work) -> None:
    """The target's greedy answers to training prompts, one to a row."""
    config, model, params = trained_target(work)
    fill = vocabulary.token_id(work.tokenizer(), vocabulary.END_OF_TEXT)
    found = regenerate.answer(
        work.out / "answers.state.json",
        model,
        config,
        params,
        prompts(work),
        work.preset.answer_buckets,
        fill=fill,
        tell=work.tell,
    )
    found += transcripts(work)
    random.Random(work.preset.seed).shuffle(found)
    rows.save(work.path("answers"), rows.apart(found, work.preset.drafter_buckets, fill=fill))


def read_rows(
    work: Work, buckets: Sequence[rows.Rows], shape: DrafterConfig
) -> list[drafter.Reading]:
    """The target's reading of every row, in memory: taps as float16, half of a step's work."""
    config, target, frozen = trained_target(work)
    read = jit(functools.partial(drafter.reading, target, config, shape))
    found = []
    for bucket in buckets:
        step = max(READ_TOKENS // bucket.tokens.shape[1], 1)
        parts = []
        for start in range(0, len(bucket.tokens), step):
            tokens = bucket.tokens[start : start + step].astype(np.int32)
            padded = np.pad(tokens, ((0, step - len(tokens)), (0, 0)))
            part = jax.device_get(read(frozen, padded))
            half = tuple(tap[: len(tokens)].astype(np.float16) for tap in part.taps)
            parts.append((half, part.best[: len(tokens)]))
        taps: Any = tuple(
            np.concatenate(tap) for tap in zip(*(half for half, _ in parts), strict=True)
        )
        best: Any = np.concatenate([best for _, best in parts])
        found.append(drafter.Reading(taps, best))
    return found


def drafter_model(work: Work) -> None:
    """The drafter, trained against the frozen target and exported."""
    preset = work.preset
    config, target, frozen = trained_target(work)
    shape = preset.drafter_config()
    model = DFlash(shape)
    batches = rows.Batches(
        preset.drafter_buckets, tuple(rows.load(work.path("answers"))), preset.seed
    )
    maker = optimizer.build(preset.drafter_schedule, decay=WEIGHT_DECAY)
    step = drafter.step((target, model), shape, maker, decay=preset.decay, seed=preset.seed)
    program = jit(step, donate=(0,), static_argnums=(5,))
    first = preset.drafter_buckets[0].length
    readings = read_rows(work, batches.rows, shape)

    def advance(state: TrainState, number: int):
        i, chosen = batches.chosen(number)
        batch, read = batches.at(number)[1], readings[i]
        kept = drafter.Reading(tuple(tap[chosen] for tap in read.taps), read.best[chosen])
        count = preset.anchors * preset.drafter_buckets[i].length // first
        return program(state, frozen, (batch.tokens, batch.wanted), kept, np.int32(number), count)

    params = drafter.initial(model, shape, preset.seed)
    schedule = preset.drafter_schedule
    state = loop.fit(
        loop.Run(
            path=work.out / "drafter.state.safetensors",
            steps=schedule.steps,
            save_every=schedule.save_every,
            identity=work.identity("drafter"),
            label="drafter",
        ),
        TrainState(params=params, optimizer=maker.init(params)),
        advance,
        tell=work.tell,
    )
    with saved_as(work.path("drafter"), folder=True) as partial:
        export.drafter(partial, shape, jax.device_get(state.params), longest=config.max_length)


def held_out(work: Work) -> None:
    """Held-out prompts, checked to be absent from everything that was trained on.

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
    """Acceptance length on the held-out prompts by real decoding."""
    found = evaluate.evaluate(
        work.path("target"),
        work.path("drafter"),
        work.path("heldout"),
        max_tokens=ANSWER_LIMIT,
        tell=work.tell,
    )
    with saved_as(work.path("evaluation")) as partial:
        vocabulary.write_json(partial, found)


def result(work: Work) -> None:
    """The folder to ship: target, drafter, held-out prompts, results and model card."""
    with saved_as(work.path("result"), folder=True) as partial:
        for name in ("target", "drafter"):
            shutil.copytree(work.path(name), partial / name)
        for name in ("heldout", "evaluation"):
            shutil.copy(work.path(name), partial)
        measured = read(work.path("evaluation"))
        seconds = read(work.out / "timings.json")
        text = card.text(work.preset, measured, seconds, sizes(partial))
        (partial / "README.md").write_text(text, encoding="utf-8")


def read(path: Path) -> dict:
    """A JSON object."""
    return json.loads(path.read_text(encoding="utf-8"))


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file, by its path inside the folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
