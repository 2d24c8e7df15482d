"""Second user turns: the target answers a turn, then writes the user's next one."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.engine.sampling_params import SamplingParams
from dflash_jax.graph.keys import Variant
from dflash_jax.target_model import TargetModel
from dflash_jax.trainer.data import Example, answer_options, token_ids
from dflash_jax.trainer.decoding import EnginePool, decode
from dflash_jax.trainer.duplicates import DuplicateFilter
from dflash_jax.trainer.files import saved_as, sound, write_json
from dflash_jax.trainer.groups import StageProgress, in_threads, results, stored
from dflash_jax.trainer.prompt_kinds import FOLLOW_UP
from dflash_jax.trainer.recipes import Bucket, Recipe
from dflash_jax.trainer.self_written import CHUNK, GROUP, WORDS, TurnMaker, user_header

FILE = f"turns.{FOLLOW_UP}.jsonl"
REPORT = f"turns.{FOLLOW_UP}.json"


def write_follow_ups(
    out: Path,
    model: TargetModel,
    turns: Sequence[Example],
    recipe: Recipe,
    report: Callable[[str], None],
    avoided: Sequence[str] = (),
) -> list[Example]:
    """Return conversations, of which a share got the target's answer and a second user turn.

    They are chosen by hash. One stays as it is if its answer does not end within `new_tokens`, or
    if the next turn cannot be used. Finished groups are saved.

    Args:
      turns: conversations of one user turn.
      avoided: texts that no second turn may resemble.

    Raises:
      CheckpointError, TrainingStopped: see `groups.results`.
    """
    tokenizer = model.tokenizer
    assert tokenizer is not None
    maker = TurnMaker(tokenizer, user_header(model, recipe), recipe, FOLLOW_UP)
    longest = recipe.answer_buckets[-1]
    length = min(longest.length, model.config.max_length) - recipe.new_tokens  # of the last answer
    most = length - recipe.new_tokens - maker.room
    chosen = [
        i
        for i, turn in enumerate(turns)
        if random.Random(f"follow-up {recipe.seed} {_words(turn)}").random() < recipe.follow_ups
        and len(token_ids(turn, tokenizer)) <= most
    ]
    if not chosen:
        report("continuing no conversation: follow_ups, or the longest of answer_buckets, is small")
        return [*turns]
    bucket = Bucket(length=length, rows=longest.rows)
    size = bucket.rows * GROUP
    parts = [chosen[start : start + size] for start in range(0, len(chosen), size)]
    asked = [[turns[i] for i in part] for part in parts]
    stop = tokenizer if maker.header.stop else None
    pool = EnginePool(
        model, Variant.SAMPLED, chunk=CHUNK, tokenizer=stop, weights=recipe.target_weights
    )
    path = out / FILE
    sizes = [*map(len, parts)]
    done = len(stored(path, sizes))
    progress = StageProgress(FOLLOW_UP, len(parts), "groups", report, done=done, every=0)
    compute = in_threads(lambda i: _group(pool, bucket, maker, asked[i]), pool.count(bucket))
    groups = [*results(path, sizes, compute, label=FOLLOW_UP, progress=progress)]
    conversations = [*turns]
    kept = 0
    alike = DuplicateFilter(avoided)
    with sound(path):
        items = itertools.chain.from_iterable(groups)
        for i, (answer, answered, ids, ended) in zip(chosen, items, strict=True):
            text, problem = maker.read(_words(turns[i]), ids, ended)
            if answered and problem is None and not alike.find(text):
                conversations[i] = _continued(turns[i], tokenizer.decode(answer), text)
                kept += 1
    report(f"continuing {kept:,} of {len(turns):,} conversations")
    with saved_as(out / REPORT) as partial:
        write_json(partial, {"written": len(chosen), "kept": kept})
    return conversations


def _words(turn: Example) -> str:
    return turn.messages[0]["content"]


def _continued(turn: Example, answer: str, text: str) -> Example:
    assistant = {"role": "assistant", "content": answer}
    user = {"role": "user", "content": text}
    return dataclasses.replace(turn, messages=(*turn.messages, assistant, user), kind=FOLLOW_UP)


def _group(
    pool: EnginePool, bucket: Bucket, maker: TurnMaker, turns: Sequence[Example]
) -> list[list[Any]]:
    """Return an answer to each turn and the user's next turn: token ids, and whether they end."""
    recipe = maker.recipe
    tokenizer = maker.tokenizer
    requests = []
    for turn in turns:
        _, temperature, seed = answer_options(recipe, turn)
        if temperature is None:
            temperature = recipe.temperature
        params = SamplingParams(max_tokens=recipe.new_tokens, temperature=temperature, seed=seed)
        requests.append(([*token_ids(turn, tokenizer)], params))
    with pool.engine(bucket) as engine:
        answers = decode(engine, requests)
        items: list[list[Any]] = []
        asked = {}
        for i, (turn, answer) in enumerate(zip(turns, answers, strict=True)):
            answered = answer.finish_reason == "stop"
            key = _words(turn)
            items.append([answer.token_ids, answered, [], not maker.opening(key).continued])
            if not answered or items[i][3]:
                continue
            told = _continued(turn, tokenizer.decode(answer.token_ids), WORDS).messages
            text, _, _ = tokenizer.render_marked(told).partition(WORDS)
            before = tokenizer.encode(text, specials=False)
            prompt, params = maker.request(key, before)
            if len(prompt) + recipe.turn_tokens <= bucket.length:
                asked[i] = prompt, params
        for i, written in zip(asked, decode(engine, [*asked.values()]), strict=True):
            items[i][2:] = [written.token_ids, written.finish_reason == "stop"]
    return items
