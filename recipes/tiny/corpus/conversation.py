"""Assembles exchanges and agent transcripts into conversations, for training or held out.

In some the people get other names, so that a model learns to copy a name: with a few dozen names a
small model guesses; with names it has never seen it must look.

A conversation belongs to the held-out side when its last question's hash says so; training
conversations contain no such question at all. The two sides are disjoint by construction.
"""

import json
import random
import re

from recipes.tiny.corpus import agents, smalltalk, tasks
from recipes.tiny.corpus.agents import offer
from recipes.tiny.corpus.world import Conversation, Exchange, facts, is_held_out

MAKERS = (*smalltalk.MAKERS, *tasks.MAKERS)
AGENT_SHARE = 0.4  # of held-out conversations
CARELESS_SHARE = 0.12
SYSTEM_SHARE = 0.2
IDLE_TOOLS_SHARE = 0.06
NO_THINKING_SHARE = 0.1
STARTS = str.split("B D F G H J K L M N P R S T V W Z Br Ch Dr Kr St Tr")
VOWELS = str.split("a e i o u")
ENDS = str.split("n l r s ra li mo ta vin den rik sa na lo")
PEOPLE = re.compile(r"\b(?:" + "|".join(facts.names) + r")\b", re.IGNORECASE)


def questions(conversation: Conversation) -> list[str]:
    return [m["content"] for m in conversation.messages if m["role"] == "user"]


def typed(rng: random.Random, text: str) -> str:
    """A question as a person may type it: capital first, at times careless."""
    if rng.random() > CARELESS_SHARE or "\n" in text:
        return text[0].upper() + text[1:]
    text = text[0].lower() + text[1:]
    return text.rstrip("?.!") if rng.random() < 0.7 else text


def exchange(rng: random.Random) -> Exchange:
    makers, weights = zip(*MAKERS, strict=True)
    return rng.choices(makers, weights)[0](rng)


def chat(rng: random.Random) -> Conversation:
    """One to four exchanges, at times with a system turn or with tools that nobody needs."""
    messages: list[dict] = []
    idle = rng.random() < IDLE_TOOLS_SHARE
    if rng.random() < SYSTEM_SHARE and (system := rng.choice(facts.systems)):
        messages.append({"role": "system", "content": system})
    for _ in range(rng.choices((1, 2, 3, 4), (60, 22, 12, 6))[0]):
        item = exchange(rng)
        messages.append({"role": "user", "content": typed(rng, item.user)})
        answer = {"role": "assistant", "content": item.answer}
        messages.append(answer | ({"reasoning_content": item.thought} if item.thought else {}))
    thinking = rng.random() > NO_THINKING_SHARE
    if not thinking:
        messages[-1].pop("reasoning_content", None)
    return Conversation(tuple(messages), offer(rng) if idle else (), thinking)


def conversation(rng: random.Random, agent_share: float) -> Conversation:
    return agents.transcript(rng) if rng.random() < agent_share else chat(rng)


def training_conversations(
    seed: int, count: int, agent_share: float = AGENT_SHARE, renamed_share: float = 0.0
) -> list[Conversation]:
    """`count` conversations without any held-out question; in some the people are renamed."""
    rng = random.Random(f"training {seed}")
    names = random.Random(f"names {seed}")
    kept: list[Conversation] = []
    while len(kept) < count:
        made = conversation(rng, agent_share)
        if names.random() < renamed_share:
            made = renamed(names, made)
        if not any(is_held_out(text) for text in questions(made)):
            kept.append(made)
    return kept


def held_out_conversations(seed: int, count: int) -> list[Conversation]:
    """`count` conversations that stop at a held-out question, each question once."""
    rng = random.Random(f"held out {seed}")
    seen: set[str] = set()
    kept: list[Conversation] = []
    while len(kept) < count:
        made = conversation(rng, AGENT_SHARE)
        asked = questions(made)
        if not is_held_out(asked[0]) or asked[0] in seen:
            continue
        seen.add(asked[0])
        kept.append(opened(rng, made))
    return kept


def opened(rng: random.Random, whole: Conversation) -> Conversation:
    """The conversation cut before one of its assistant messages, mostly the first."""
    turns = [i for i, m in enumerate(whole.messages) if m["role"] == "assistant"]
    cut = turns[0] if rng.random() < 0.6 else rng.choice(turns)
    return Conversation(whole.messages[:cut], whole.tools, whole.thinking)


def new_name(rng: random.Random) -> str:
    """A name: half of the time a usual one, else put together from syllables."""
    if rng.random() < 0.5:
        return rng.choice(facts.more_names)
    return "".join(map(rng.choice, (STARTS, VOWELS, ENDS)))


def renamed(rng: random.Random, made: Conversation) -> Conversation:
    """The conversation with every person renamed, the same person the same way throughout."""
    people: dict[str, str] = {}

    def other(match: re.Match[str]) -> str:
        found = match.group()
        if found.capitalize() not in people:
            people[found.capitalize()] = new_name(rng)
        name = people[found.capitalize()]
        if found[0].isupper():
            return name
        return name.lower() if match.string[match.end() :].startswith("@") else found

    text = PEOPLE.sub(other, json.dumps(made.messages, ensure_ascii=False))
    return Conversation(tuple(json.loads(text)), made.tools, made.thinking)
