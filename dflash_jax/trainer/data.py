"""Training data: conversations, texts or token ids, one JSON object per line.

Lines become prompts, or documents that are learnt as given; `Usage` counts the others.
"""

import dataclasses
import hashlib
import itertools
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.errors import ConfigError, RequestError
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers.tool_schema import call_arguments
from dflash_jax.trainer import rows
from dflash_jax.trainer.recipes import GIVEN, MIXED, Recipe
from dflash_jax.trainer.regenerate import AnswerPrompt
from dflash_jax.trainer.rows import Document

HELD_OUT_SHARE = 16  # one line in this many is held out
FIRST_TURN_SHARE = 0.6  # share of conversations that are answered at their first turn
HIGHEST = 2**31 - 1  # token id that an array holds
SYSTEM = ("system", "developer")  # roles of instructions
FORMS = '{"messages": [...]}, {"prompt": "..."}, {"text": "..."} or {"ids": [...]}'


@dataclasses.dataclass(frozen=True)
class Example:
    """One line: a conversation, a plain text, or token ids to continue.

    Attributes:
      kind: kind of a prompt that the target wrote (`prompt_kinds`). It answers the last turn; its
        own earlier turns are learnt, too.
    """

    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    thinking: bool = True
    text: str = ""
    ids: tuple[int, ...] = ()
    kind: str = ""

    @property
    def held_out(self) -> bool:
        """Whether the hash of its opening words holds it out; never if it asks nothing."""
        if self.only_system:
            return False
        asked = next((m.get("content") for m in self.messages if m.get("role") == "user"), None)
        opening = json.dumps([asked, self.text[:200], self.ids[:64]], ensure_ascii=False)
        return hashlib.sha256(opening.encode(errors="replace")).digest()[0] % HELD_OUT_SHARE == 0

    @property
    def only_system(self) -> bool:
        """Whether it is a conversation in which nobody but the system speaks."""
        return bool(self.messages) and all(m["role"] in SYSTEM for m in self.messages)

    def contains(self, text: str) -> bool:
        """Return whether a text occurs anywhere in the messages, tools or plain text."""
        return text in f"{self.messages}{self.tools}{self.text}"

    def variables(self) -> dict[str, Any]:
        """Return the variables of the chat template, without the messages."""
        switch = {} if self.thinking else {"enable_thinking": False}
        return {"tools": list(self.tools) or None, **switch}

    def entry(self) -> dict[str, Any]:
        """Return the example as a line of held-out prompts."""
        if self.ids:
            return {"kind": "ids", "ids": list(self.ids)}
        if self.text:
            return {"kind": "code", "text": self.text}
        chat = {"messages": list(self.messages), "tools": list(self.tools)}
        return {"kind": self.kind or "chat", **chat, "thinking": self.thinking}


def read(path: Path) -> list[Example]:
    """Return the examples of a JSONL file.

    Raises:
      ConfigError: the file is missing or empty, or a line has none of the known forms.
    """
    if not path.is_file():
        raise ConfigError(f"there is no data at {path}; give a file of lines like {FORMS}")
    try:
        with path.open(encoding="utf-8-sig") as file:  # Windows editors write a byte order mark
            lines = list(enumerate(file, 1))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error}); save it so") from error
    examples = [example(line, f"{path}:{i}") for i, line in lines if line.strip()]
    if not examples:
        raise ConfigError(f"{path} has no lines; expected lines like {FORMS}")
    return examples


def line(prompt: Any) -> str:
    """Return a prompt as a line of a file of data."""
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    elif isinstance(prompt, list | tuple | np.ndarray):
        conversation = len(prompt) > 0 and isinstance(prompt[0], Mapping)
        prompt = {"messages" if conversation else "ids": prompt}

    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, np.ndarray | np.generic) else repr(value)

    return json.dumps(prompt, default=plain)


def example(line: str, where: str) -> Example:
    """Return the example of a JSON line.

    Args:
      where: the line's place, for errors.

    Raises:
      ConfigError: it has none of the known forms.
    """
    try:
        fields = json.loads(line)
        match fields:
            case {"messages": [_, *_]}:
                return _conversation(fields)
            case {"prompt": str(prompt)} if prompt:
                return Example(({"role": "user", "content": prompt},))
            case {"text": str(text)} if text:
                return Example(text=text)
            case {"ids": [_, *_] as ids}:
                if odd := [i for i in ids if type(i) is not int or not 0 <= i <= HIGHEST]:
                    raise ValueError(f"{str(odd[0])[:40]} is no token id")
                return Example(ids=tuple(ids))
            case _:
                raise ValueError("none of the known forms")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} cannot be used ({error}); expected {FORMS}") from error


def _conversation(fields: dict[str, Any]) -> Example:
    messages = fields["messages"]
    thinking = fields.get("thinking", True)
    tools = [] if fields.get("tools") is None else fields["tools"]
    if not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError("a message has no role")
    for role in (m["role"] for m in messages):
        if not isinstance(role, str):
            raise ValueError(f"a role is {str(role)[:40]}, not a text")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"tools are {str(tools)[:40]}, not a list of objects")
    if not isinstance(thinking, bool):
        raise ValueError(f"thinking is {str(thinking)[:40]}, not true or false")
    return Example(_with_one_system(map(_called, messages)), tuple(tools), thinking)


def _with_one_system(messages: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return messages as the server gives them to templates.

    The role `developer` is OpenAI's newer name of `system`; neighbours of that role become one.
    """
    result: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "developer":
            message = message | {"role": "system"}
        before = result[-1].get("content") if result and result[-1]["role"] == "system" else None
        content = message.get("content")
        if message["role"] == "system" and isinstance(before, str) and isinstance(content, str):
            result[-1] = message | {"content": f"{before}\n\n{content}"}
        else:
            result.append(message)
    return tuple(result)


def _called(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with the arguments of its calls parsed from JSON text.

    OpenAI's API writes arguments as text, and the server parses them for the template.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return message | {"tool_calls": [_parsed(call) for call in calls]}


def _parsed(call: Any) -> Any:
    match call:
        case {"function": {"arguments": str(arguments)} as function}:
            return {**call, "function": {**function, "arguments": call_arguments(arguments)[0]}}
    return call


def split_by_answers(
    examples: Sequence[Example], recipe: Recipe
) -> tuple[list[Example], list[Example]]:
    """Split into examples that the target answers and examples that are learnt as given."""
    chats = [example for example in examples if example.messages]
    texts = [example for example in examples if not example.messages]
    if recipe.answers == GIVEN:
        return [], list(examples)
    if recipe.answers == MIXED:
        return texts, chats
    if recipe.given:
        random.Random(f"given {recipe.seed}").shuffle(chats)
        asked = chats[: recipe.prompts]
        rest = chats[recipe.prompts :]
        return [*asked, *texts], rest[: recipe.given]
    return list(examples), []


def fingerprint(examples: Sequence[Example]) -> str:
    """Return a short hash of the examples."""
    whole = hashlib.sha256()
    for example in examples:
        fields = {name: x for name, x in vars(example).items() if x or name != "kind"}
        whole.update(json.dumps(fields, sort_keys=True).encode())
    return whole.hexdigest()[:16]


def cut_at_turns(example: Example, rng: random.Random) -> list[Example]:
    """Return the conversation cut before each of its assistant turns, in random order.

    The first turn comes first in `FIRST_TURN_SHARE` of conversations.
    """
    turns = assistant_turns(example)
    if example.kind or not turns:
        return [example] if turns else []
    rest = turns[1:]
    rng.shuffle(rest)
    turns = [turns[0], *rest]
    if rng.random() > FIRST_TURN_SHARE:
        rng.shuffle(turns)
    return [dataclasses.replace(example, messages=example.messages[:i]) for i in turns]


def assistant_turns(example: Example) -> list[int]:
    """Return the indices of messages that the assistant wrote or would write next."""
    turns = [i for i, m in enumerate(example.messages) if m["role"] == "assistant" and i]
    if example.messages[-1]["role"] != "assistant" and not example.only_system:
        turns.append(len(example.messages))
    return turns


def prompts(
    examples: Sequence[Example],
    tokenizer: Tokenizer | None,
    recipe: Recipe,
    ends: Sequence[int] = (),
) -> list[AnswerPrompt]:
    """Return the prompts for the target, at most as many as the recipe asks for.

    Every conversation contributes one turn before any contributes two. Each prompt carries the
    index of its example.

    Args:
      ends: token ids that end a turn.

    Raises:
      ConfigError: there is nothing to answer.
    """
    rng = random.Random(f"prompts {recipe.seed}")
    order = list(range(len(examples)))
    rng.shuffle(order)
    rounds: list[list[tuple[Example, int]]] = []
    texts: list[tuple[Document, int]] = []
    for line in order:
        example = examples[line]
        if example.messages:
            for i, cut in enumerate(cut_at_turns(example, rng)):
                if i == len(rounds):
                    rounds.append([])
                rounds[i].append((cut, line))
        elif len(texts) < recipe.text_prompts:
            texts += [(piece, line) for piece in _pieces(example, tokenizer, recipe.text_prompt)]
    chosen = [*itertools.chain.from_iterable(rounds)][: recipe.prompts]
    longest = recipe.answer_buckets[-1].length
    result = []
    for cut, line in chosen:
        document = _asked(cut, tokenizer, ends)
        tokens, temperature, seed = answer_options(recipe, cut)
        if len(document.ids) + tokens > longest:
            tokens = recipe.new_tokens
        result.append(AnswerPrompt(document, tokens, line, temperature, seed))
    result += [
        AnswerPrompt(x, recipe.text_tokens, line) for x, line in texts[: recipe.text_prompts]
    ]
    if not result:
        raise ConfigError(
            f"none of {len(examples)} lines gives the target anything to answer: a conversation"
            " needs a message before the assistant's and prompts above 0, a text or ids need"
            " text_prompts above 0; answers=given learns them as given"
        )
    return result


def answer_options(recipe: Recipe, example: Example) -> tuple[int, float | None, int]:
    """Return the maximum tokens, the temperature and the seed of the answer to an example.

    The temperature is None if the recipe has one for all answers.
    """
    rng = random.Random(f"answer {recipe.seed} {json.dumps(example.messages)}")
    greedy = rng.random()
    long = rng.random()
    seed = rng.getrandbits(32)
    tokens = recipe.long_tokens if long < recipe.long_share else recipe.new_tokens
    if not recipe.greedy_share:
        return tokens, None, seed
    return tokens, 0.0 if greedy < recipe.greedy_share else recipe.temperature, seed


def _asked(example: Example, tokenizer: Tokenizer | None, ends: Sequence[int]) -> Document:
    """Return a prompt; in one of a kind, the assistant's earlier turns are wanted."""
    whole = _given(token_ids(example, tokenizer))
    if example.kind and len(example.messages) > 1:
        earlier = dataclasses.replace(example, messages=example.messages[:-1])
        for turn in as_given([earlier], tokenizer, ends, len(whole.ids)):
            if _continues(whole, turn):
                whole.wanted[: len(turn.ids)] |= turn.wanted
    return whole


def _pieces(example: Example, tokenizer: Tokenizer | None, length: int) -> list[Document]:
    """Return prompts of `length` tokens, each after the start token if the tokenizer adds one.

    A text that is too short is one prompt.
    """
    opening, ids = split_start_token(example, tokenizer)
    pieces = [piece.ids for piece in rows.pieces(ids, length)]
    return [_given([*opening, *piece]) for piece in pieces or [ids]]


def split_start_token(
    example: Example, tokenizer: Tokenizer | None
) -> tuple[list[int], np.ndarray]:
    """Return the start token, if the tokenizer adds one, and the ids of the text."""
    ids = list(token_ids(example, tokenizer))
    opening: list[int] = []
    if example.text and tokenizer is not None:
        bare = tokenizer.encode(example.text, specials=False)
        start = len(ids) - len(bare)
        if ids[start:] == bare:
            opening = ids[:start]
        ids = bare
    return opening, np.asarray(ids, np.int32)


def held_out(
    examples: Sequence[Example], tokenizer: Tokenizer | None, recipe: Recipe
) -> list[dict[str, Any]]:
    """Return the held-out prompts as lines for the final measurement.

    Raises:
      ConfigError: a prompt cannot be encoded, which is reported before training.
    """
    rng = random.Random(f"held out {recipe.seed}")
    entries = []
    for example in examples[: recipe.held_out]:
        if example.messages:
            for cut in cut_at_turns(example, rng)[:1]:
                token_ids(cut, tokenizer)
                entries.append(cut.entry())
        elif example.text and tokenizer is not None:
            ids = tokenizer.encode(example.text, specials=False)
            cut = ids[: max(len(ids) - recipe.text_tokens, recipe.text_prompt)]
            text = example.text if len(ids) <= 4 * recipe.text_prompt else tokenizer.decode(cut)
            entries.append(dataclasses.replace(example, text=text).entry())
        else:
            entries.append(example.entry())
    return entries


def token_ids(example: Example, tokenizer: Tokenizer | None) -> Sequence[int]:
    """Return the token ids of an example's prompt.

    Raises:
      ConfigError: the example is text and the target ships no tokenizer, or the chat template
        rejects it.
    """
    if example.ids:
        return example.ids
    if tokenizer is None:
        raise ConfigError('the target ships no tokenizer; give data as lines of {"ids": [...]}')
    if example.text:
        return tokenizer.encode(example.text)
    return tokenizer.encode(rendered(example, len(example.messages), tokenizer), specials=False)


def rendered(example: Example, count: int, tokenizer: Tokenizer, *, opens_turn: bool = True) -> str:
    """Render the first `count` messages of a conversation.

    Args:
      opens_turn: whether the start of an assistant turn follows.
    """
    messages = example.messages[:count]
    variables = example.variables()
    if not opens_turn:
        variables["add_generation_prompt"] = False
    try:
        return tokenizer.render_marked(messages, **variables)
    except RequestError as error:
        begins = json.dumps(messages[0], ensure_ascii=False)[:80]
        raise ConfigError(f"{error}; that is the conversation that begins {begins}") from error


def _given(ids: Sequence[int] | np.ndarray) -> Document:
    return Document(np.asarray(ids, np.int32), np.zeros(len(ids), bool))


def as_given(
    examples: Sequence[Example], tokenizer: Tokenizer | None, ends: Sequence[int], longest: int
) -> list[Document]:
    """Return conversations and texts as documents, with assistant turns wanted.

    A conversation is one document, unless its template rewrites earlier turns. Tokens that differ
    from the target's own choice are not learnt, but they end the places that count.

    Args:
      ends: token ids that end a turn.
      longest: longer texts are cut into pieces.
    """
    documents = []
    for example in examples:
        if not example.messages:
            opening, ids = split_start_token(example, tokenizer)
            size = max(longest - len(opening), 1)
            for start in range(0, len(ids), size):
                part = np.asarray([*opening, *ids[start : start + size]], np.int32)
                documents.append(Document(part, np.ones(len(part), bool)))
            continue
        if tokenizer is None:
            token_ids(example, tokenizer)  # raises an error unless the example has ids
        turns: list[Document] = []
        for i, message in enumerate(example.messages):
            if message["role"] == "assistant" and i and tokenizer is not None:
                for turn in _turn(example, i, tokenizer, ends):
                    earlier = turns[-1:]
                    if earlier and _continues(turn, earlier[0]):
                        turn.wanted[: len(earlier[0].ids)] |= earlier[0].wanted
                        turns.pop()
                    turns.append(turn)
        documents += turns
    return documents


def _continues(turn: Document, earlier: Document) -> bool:
    return np.array_equal(turn.ids[: len(earlier.ids)], earlier.ids)


def _turn(example: Example, i: int, tokenizer: Tokenizer, ends: Sequence[int]) -> list[Document]:
    """Return the conversation up to an assistant turn, rendered with and without that turn."""
    prompt = rendered(example, i, tokenizer)
    whole = rendered(example, i + 1, tokenizer, opens_turn=False)
    # Some templates close the reasoning of an opened turn and omit it from finished turns.
    openings = [prompt, rendered(dataclasses.replace(example, thinking=True), i, tokenizer)]
    reply = next((whole[len(text) :] for text in openings if whole.startswith(text)), None)
    if reply is None:
        return []  # the template rewrites history here
    before = tokenizer.encode(prompt, specials=False)
    ids = tokenizer.encode(whole, specials=False)
    if ids[: len(before)] != before:  # a token spans the boundary, or the prompt is no prefix
        ids = [*before, *tokenizer.encode(reply, specials=False)]
    final = range(len(ids) - 1, len(before) - 1, -1)
    last = next((j for j in final if ids[j] in ends), len(ids) - 1)
    tokens = np.asarray(ids[: last + 1], np.int32)
    return [Document(tokens, np.arange(len(tokens)) >= len(before))]


class Usage:
    """Numbers of the lines of a run's data, and of those it skips by reason; `str` has them."""

    def __init__(self, lines: int):
        self.lines = lines
        self.left_out: dict[str, int] = {}

    def leave_out(self, count: int, reason: str) -> None:
        """Count skipped lines."""
        if count:
            self.left_out[reason] = self.left_out.get(reason, 0) + count

    def __bool__(self) -> bool:
        """Return whether any line was skipped."""
        return bool(self.left_out)

    def __str__(self) -> str:
        used = self.lines - sum(self.left_out.values())
        reasons = "; ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())
        line = f"using {used:,} of {self.lines:,} lines"
        return f"{line}: {reasons}" if reasons else line

    def hold_out(self, count: int, measured: int) -> None:
        """Count held-out lines, and how many of them the measurement uses."""
        rest = f", the first {measured:,} of them (held_out)" if measured < count else ""
        self.leave_out(count, f"held out to measure on, 1 in {HELD_OUT_SHARE} by hash{rest}")

    def answer(
        self, asked: Sequence[Example], prompts: Sequence[AnswerPrompt], recipe: Recipe
    ) -> None:
        """Count the lines that the target does not answer.

        Args:
          asked: the candidate lines.
          prompts: their prompts, from `data.prompts`.
        """
        longest = recipe.answer_buckets[-1].length
        chosen = {prompt.line for prompt in prompts}
        short = {prompt.line for prompt in prompts if prompt.room <= longest}
        rest = [example for i, example in enumerate(asked) if i not in chosen]
        texts = [example for example in rest if not example.messages]
        silent = [x for x in rest if x.messages and not assistant_turns(x)]
        self.leave_out(len(silent), "with nothing for the assistant to answer")
        more = len(rest) - len(texts) - len(silent)
        self.leave_out(more, f"more than the recipe asks for (prompts={recipe.prompts})")
        self.leave_out(
            len(texts), f"more than the recipe continues (text_prompts={recipe.text_prompts})"
        )
        self.leave_out(
            len(chosen - short),
            f"longer than {longest} tokens with their answers, the longest of answer_buckets",
        )
