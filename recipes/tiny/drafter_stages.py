"""Later stages of the shipped pair: on-policy answers, drafter, evaluation, result."""

import json
import random
import shutil
from pathlib import Path

import numpy as np

from dflash_jax.errors import ConfigError
from dflash_jax.loading import load_target
from dflash_jax.target_model import TargetModel
from dflash_jax.train import evaluate, export, regenerate, rows, training
from dflash_jax.train.files import saved_as, write_json
from recipes.tiny import card, documents, vocabulary
from recipes.tiny.corpus import conversation, stdlib
from recipes.tiny.presets import LONGEST
from recipes.tiny.stages import Work, read_corpus


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
    chats = documents.conversations(made, map(vocabulary.prompt_text, cut))
    pieces = documents.sources(made, phases[0].sources, recipe.text_prompt)
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
    made = documents.conversations(work.tokenizer(), texts)
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
    config, params = training.fit(
        trained_target(work),
        work.preset.drafter,
        work.preset.mask_id,
        rows.load(work.path("answers")),
        work.out / "fit",
        identity=work.identity("drafter"),
        report=work.report,
    )
    with saved_as(work.path("drafter"), folder=True) as partial:
        export.drafter(partial, config, params, longest=LONGEST)


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
        work.path("target"),
        work.path("drafter"),
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
        text = card.text(work.preset, measured, seconds, sizes(partial))
        (partial / "README.md").write_text(text, encoding="utf-8")


def read(path: Path) -> dict:
    """Return the JSON object in a file."""
    return json.loads(path.read_text(encoding="utf-8"))


def sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of every file by its path inside the folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
