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
AGENT_SHARE = 0.4  # share of held-out conversations that are agents'
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
    """Return a question as a person may type it: capital first, at times careless."""
    if rng.random() > CARELESS_SHARE or "\n" in text:
        return text[0].upper() + text[1:]
    text = text[0].lower() + text[1:]
    if rng.random() < 0.7:
        text = text.rstrip("?.!")
    return text


def exchange(rng: random.Random) -> Exchange:
    makers, weights = zip(*MAKERS, strict=True)
    return rng.choices(makers, weights)[0](rng)


def chat(rng: random.Random) -> Conversation:
    """Return one to four exchanges, at times with a system turn or with tools nobody needs."""
    messages: list[dict] = []
    has_idle_tools = rng.random() < IDLE_TOOLS_SHARE
    if rng.random() < SYSTEM_SHARE:
        system = rng.choice(facts.systems)
        if system:
            messages.append({"role": "system", "content": system})
    [count] = rng.choices((1, 2, 3, 4), (60, 22, 12, 6))
    for _ in range(count):
        item = exchange(rng)
        messages.append({"role": "user", "content": typed(rng, item.user)})
        answer = {"role": "assistant", "content": item.answer}
        if item.thought:
            answer["reasoning_content"] = item.thought
        messages.append(answer)
    thinking = rng.random() > NO_THINKING_SHARE
    if not thinking:
        messages[-1].pop("reasoning_content", None)
    tools = offer(rng) if has_idle_tools else ()
    return Conversation(tuple(messages), tools, thinking)


def conversation(rng: random.Random, agent_share: float) -> Conversation:
    if rng.random() < agent_share:
        return agents.transcript(rng)
    return chat(rng)


def training_conversations(
    seed: int, count: int, agent_share: float = AGENT_SHARE, renamed_share: float = 0.0
) -> list[Conversation]:
    """Return conversations without any held-out question; in some the people are renamed."""
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
    """Return conversations that stop at a held-out question, each question once."""
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
    """Return a conversation cut before one of its assistant messages, mostly the first."""
    turns = [at for at, message in enumerate(whole.messages) if message["role"] == "assistant"]
    cut = turns[0] if rng.random() < 0.6 else rng.choice(turns)
    return Conversation(whole.messages[:cut], whole.tools, whole.thinking)


def new_name(rng: random.Random) -> str:
    """Return a name: half of the time a usual one, else one of syllables."""
    if rng.random() < 0.5:
        return rng.choice(facts.more_names)
    return "".join(map(rng.choice, (STARTS, VOWELS, ENDS)))


def renamed(rng: random.Random, made: Conversation) -> Conversation:
    """Return a conversation with every person renamed, each the same way throughout."""
    new_names: dict[str, str] = {}

    def replacement(match: re.Match[str]) -> str:
        person = match.group()
        if person.capitalize() not in new_names:
            new_names[person.capitalize()] = new_name(rng)
        name = new_names[person.capitalize()]
        if person[0].isupper():
            return name
        is_address = match.string[match.end() :].startswith("@")
        return name.lower() if is_address else person

    text = PEOPLE.sub(replacement, json.dumps(made.messages, ensure_ascii=False))
    return Conversation(tuple(json.loads(text)), made.tools, made.thinking)
