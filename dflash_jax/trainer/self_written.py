"""User turns that the target writes itself: prompts without a data set.

A chat model that is given its template up to the user's words writes a plausible user turn
(Magpie: Xu et al. 2024, arXiv 2406.08464). Turns are sampled; turn i draws with a seed of its own,
so it does not depend on the turns that are decoded next to it.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.engine.sampling_params import SamplingParams
from dflash_jax.errors import ConfigError, RequestError
from dflash_jax.graph.keys import Variant
from dflash_jax.target_model import TargetModel
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.trainer import prompt_kinds
from dflash_jax.trainer.data import Example
from dflash_jax.trainer.decoding import EnginePool, decode
from dflash_jax.trainer.duplicates import DuplicateFilter
from dflash_jax.trainer.files import saved_as, sound, write_json
from dflash_jax.trainer.groups import StageProgress, in_threads, results, stored
from dflash_jax.trainer.prompt_kinds import Opening
from dflash_jax.trainer.recipes import Bucket, Recipe

FILE = "turns.jsonl"
REPORT = "turns.json"
FILES = "turns*.json*"  # all of them
MOST_TRIES = 4  # turns written for each that is wanted, at most
GROUP = 4  # turns of a group, in multiples of the rows; a finished group is saved
CHUNK = 8  # tokens of a prefill: short, since all but the last few tokens are a cached prefix
WORDS = "dflashuserwords"  # stands for the user's words in the template
FEWEST_CHARACTERS = 8
OPENING_TOKENS = 64  # at most, of an opening that the target continues
SCRIPT_SHARE = 0.9  # share of a turn's letters that belong to its scripts
ANY = "any"


@dataclasses.dataclass(frozen=True)
class UserHeader:
    """What precedes the user's words in the chat template, and what ends them."""

    ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    stop: str | None = None  # if no special token ends them


def user_header(model: TargetModel, recipe: Recipe) -> UserHeader:
    """Return the start of a conversation, up to the user's words.

    Raises:
      ConfigError: the target has no chat template, or one that does not show the user's words, or
        the recipe names an unknown script.
    """
    check_scripts(recipe.turn_scripts)
    tokenizer = model.tokenizer
    if tokenizer is None or tokenizer.template is None:
        raise ConfigError(
            f"self-written turns need a chat template, and the target has no"
            f" {'tokenizer' if tokenizer is None else 'template'}; give prompts or texts of your"
            ' own with --data FILE, as lines of {"prompt": ...} or {"text": ...}'
        )
    try:
        text = tokenizer.render([{"role": "user", "content": WORDS}])
    except RequestError as error:
        raise ConfigError(f"the target cannot write user turns: {error}") from error
    before, marker, after = text.partition(WORDS)
    if not marker or not before:
        raise ConfigError(
            "the chat template has nothing before the user's words, so the target cannot be made to"
            ' write them; give prompts of your own with --data FILE, as lines of {"prompt": ...}'
        )
    ids = tuple(tokenizer.encode(before, specials=False))
    following = tokenizer.encode(after.strip(), specials=False)
    ends = model.config.eos_token_ids
    if not following or following[0] in ends:
        return UserHeader(ids, ends)
    if not tokenizer.decode(following[:1]):  # a special token
        return UserHeader(ids, (*ends, following[0]))
    return UserHeader(ids, ends, after.strip().splitlines()[0])


def turn_seed(seed: int, key: int | str) -> int:
    """Return the seed of a turn: a hash, so that runs with neighbouring seeds share none."""
    return int.from_bytes(hashlib.sha256(f"turn {seed} {key}".encode()).digest()[:4], "big")


def write_turns(
    out: Path,
    model: TargetModel,
    count: int,
    recipe: Recipe,
    report: Callable[[str], None],
    avoided: Sequence[str] = (),
) -> list[Example]:
    """Return conversations that begin with different user turns of the target.

    There are `count`, or fewer if it repeats itself too often. Those of different kinds alternate.
    Finished groups are saved in `turns.jsonl`, or `turns.KIND.jsonl` of a mixture, the numbers of
    kept and dropped turns in `turns.json`.

    Args:
      avoided: texts that no turn may resemble.

    Raises:
      ConfigError: no turn can be used.
      CheckpointError, TrainingStopped: see `groups.results`.
    """
    header = user_header(model, recipe)
    assert model.tokenizer is not None
    text = None if header.stop is None else model.tokenizer
    weights = recipe.target_weights
    pool = EnginePool(model, Variant.SAMPLED, chunk=CHUNK, tokenizer=text, weights=weights)
    alike = DuplicateFilter(texts=avoided)
    filters = []
    for kind, wanted in prompt_kinds.counts(recipe.mixture, count).items():
        maker = TurnMaker(model.tokenizer, header, recipe, kind)
        filters.append(TurnFilter(maker, wanted, alike))
        _write(out / (f"turns.{kind}.jsonl" if kind else FILE), pool, filters[-1], report)
    if not any(kept.turns for kept in filters):
        reasons = "; ".join(kept.reasons for kept in filters)
        raise ConfigError(
            f"none of the turns that the target wrote can be used ({reasons}); look at"
            f" {out / 'turns*.jsonl'}, change turn_tokens or turn_scripts, or give prompts of your"
            " own with --data FILE"
        )
    layers = itertools.zip_longest(*(kept.conversations for kept in filters))
    turns = [turn for layer in layers for turn in layer if turn is not None]
    figures = {kept.maker.kind: kept.summary for kept in filters}
    with saved_as(out / REPORT) as partial:
        write_json(partial, figures if recipe.mixture else figures[""])
    return turns


def _write(path: Path, pool: EnginePool, kept: "TurnFilter", report: Callable[[str], None]) -> None:
    """Have the target write the turns of a kind, until enough are kept."""
    maker = kept.maker
    count = kept.wanted
    bucket = Bucket(length=maker.room, rows=maker.recipe.answer_buckets[0].rows)
    size = bucket.rows * GROUP
    sizes = [size] * -(-MOST_TRIES * count // size)
    before = stored(path, sizes)
    for group in before:
        kept.take(path, group)
    if kept.wanted:
        work = functools.partial(_group, pool, bucket, maker)
        label = f"{maker.kind} turns".strip()
        progress = StageProgress(label, count, "kept", report, done=len(kept.turns))
        groups = results(path, sizes, in_threads(work, pool.count(bucket)), label=label)
        with contextlib.closing(groups):
            for group in itertools.islice(groups, len(before), None):
                progress(kept.take(path, group))
                if not kept.wanted:
                    break
    report(str(kept))


def _group(pool: EnginePool, bucket: Bucket, maker: "TurnMaker", number: int) -> list[Any]:
    """Return the turns of a group: token ids after the opening, and whether they have an end."""
    size = bucket.rows * GROUP
    numbers = range(number * size, number * size + size)
    asked = {i: maker.request(i) for i in numbers if maker.opening(i).continued}
    with pool.engine(bucket) as engine:
        answers = decode(engine, [*asked.values()])
    turns: dict[int, list[Any]] = {}
    for i, answer in zip(asked, answers, strict=True):
        turns[i] = [answer.token_ids, answer.finish_reason == "stop"]
    return [turns.get(i, [[], True]) for i in numbers]


@dataclasses.dataclass(frozen=True)
class TurnMaker:
    """Asks for the turns of a kind, and reads them; no kind means that no opening begins them."""

    tokenizer: Tokenizer
    header: UserHeader
    recipe: Recipe
    kind: str

    @property
    def room(self) -> int:
        """Maximum tokens of the header, an opening and the rest of a turn."""
        opening = OPENING_TOKENS if self.kind else 0
        return len(self.header.ids) + opening + self.recipe.turn_tokens

    def opening(self, key: int | str) -> Opening:
        """Return the opening of a turn."""
        return prompt_kinds.opening(self.kind, self.recipe.seed, key)

    def opening_ids(self, key: int | str) -> list[int]:
        """Return the token ids of an opening, at most `OPENING_TOKENS`."""
        return self.tokenizer.encode(self.opening(key).text, specials=False)[:OPENING_TOKENS]

    def request(
        self, key: int | str, before: Sequence[int] = ()
    ) -> tuple[list[int], SamplingParams]:
        """Return the prompt and the options by which the target continues an opening.

        Args:
          before: token ids before the user's words, in place of those of the header.
        """
        seed = self.recipe.seed
        params = SamplingParams(
            max_tokens=self.recipe.turn_tokens,
            temperature=self.recipe.turn_temperature,
            seed=turn_seed(seed, f"{self.kind} {key}" if self.kind else key),
            stop_token_ids=self.header.stop_ids,
            stop=self.header.stop,
        )
        return [*(before or self.header.ids), *self.opening_ids(key)], params

    def read(self, key: int | str, ids: list[int], ended: bool) -> tuple[str, str | None]:
        """Return the text of a turn, and why it cannot be used."""
        opening = self.opening(key)
        recipe = self.recipe
        if not opening.continued:
            return opening.text, None
        content = ids[:-1] if ids and ids[-1] in self.header.stop_ids else ids
        begun = self.opening_ids(key)
        whole = [*begun, *content]
        text = self.tokenizer.decode(whole).strip()
        if not ended:
            return text, f"not ended within {recipe.turn_tokens} tokens"
        if len(text) < FEWEST_CHARACTERS:
            return text, f"empty or shorter than {FEWEST_CHARACTERS} characters"
        if begun and text == self.tokenizer.decode(begun).strip():
            return text, "not continued"
        if self.tokenizer.raw(whole).strip() != text or not is_readable(text):
            return text, "with special tokens or unreadable characters"
        if ANY not in recipe.turn_scripts and not is_written_in(text, recipe.turn_scripts):
            return text, f"not in {' or '.join(recipe.turn_scripts)} letters (turn_scripts)"
        return text, None


class TurnFilter:
    """Keeps the first usable turns of a kind, and counts the others by reason."""

    def __init__(self, maker: TurnMaker, count: int, alike: "DuplicateFilter"):
        self.maker = maker
        self.turns: list[str] = []
        self.dropped: collections.Counter[str] = collections.Counter()
        self._count = count
        self._alike = alike

    @property
    def conversations(self) -> list[Example]:
        """The kept turns as conversations."""
        kind = self.maker.kind
        return [Example(({"role": "user", "content": x},), kind=kind) for x in self.turns]

    @property
    def wanted(self) -> int:
        """Number of turns that are still wanted."""
        return self._count - len(self.turns)

    @property
    def reasons(self) -> str:
        """The numbers of dropped turns by reason, as text."""
        return "; ".join(f"{n:,} {reason}" for reason, n in self.dropped.most_common())

    @property
    def written(self) -> int:
        """Number of turns that were looked at."""
        return len(self.turns) + self.dropped.total()

    @property
    def summary(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return {"written": self.written, "kept": len(self.turns), "dropped": dict(self.dropped)}

    def __str__(self) -> str:
        short = f" instead of {self._count:,}" if self.wanted else ""
        of = f"{self.written:,} self-written {self.maker.kind}".strip()
        line = f"keeping {len(self.turns):,}{short} of {of} turns"
        return f"{line}: {self.reasons}" if self.dropped else line

    def take(self, path: Path, group: list[Any]) -> int:
        """Take the turns of a group until there are enough; return the number of kept ones.

        Raises:
          CheckpointError: the group, read from `path`, is damaged.
        """
        before = len(self.turns)
        with sound(path):
            for ids, ended in group:
                if not self.wanted:
                    break
                text, reason = self.maker.read(self.written, ids, ended)
                if reason is None and (likeness := self._alike.add(text)):
                    reason = likeness.value
                if reason is None:
                    self.turns.append(text)
                else:
                    self.dropped[reason] += 1
        return len(self.turns) - before


def is_readable(text: str) -> bool:
    """Return whether a text has no broken, private or control characters but line breaks."""
    kinds = (unicodedata.category(c) for c in text if c not in "\n\t\r\ufffd")
    return "\ufffd" not in text and not {"Cc", "Co", "Cn", "Cs"}.intersection(kinds)


def is_written_in(text: str, scripts: Sequence[str]) -> bool:
    """Return whether nearly all letters of a text belong to the scripts."""
    letters = [_script(c) for c in text if c.isalpha()]
    own = [script for script in letters if script in scripts]
    return len(own) >= SCRIPT_SHARE * len(letters)


@functools.lru_cache(maxsize=1 << 16)
def _script(letter: str) -> str:
    """Return the first word of a letter's Unicode name: latin, cyrillic, cjk, hiragana, ..."""
    return unicodedata.name(letter, "unknown").split()[0].lower()


def check_scripts(scripts: Sequence[str]) -> None:
    """Raise ConfigError for a script that no letter has."""
    known = {_script(chr(i)) for i in range(1 << 16) if chr(i).isalpha()}
    if unknown := [x for x in scripts if x not in known and x != ANY]:
        raise ConfigError(
            f"turn_scripts has {unknown[0]!r}; expected {ANY}, or first words of the Unicode names"
            " of letters, such as latin, cyrillic, greek, cjk, hiragana, katakana, hangul, arabic"
        )
