"""Gives the people of a conversation other names, so that a model learns to copy a name.

With a few dozen names a small model guesses; with names it has never seen it must look.
"""

import json
import random
import re

from recipes.tiny.corpus.exchange import Conversation
from recipes.tiny.corpus.world import NAMES, words

MORE_NAMES = words(
    "Tom Anna Peter Maria John Lucy Sarah Kate Mark Nina Omar Eva Jack Lily Noah Emily James Laura "
    "Simon Alex Chloe Daniel Sophie Oscar Ruth Victor Wendy Ahmed Bella Carlos Diana Erik Fatima "
    "George Helen Igor Jane Kevin Linda Martin Nadia Oliver Paula Quinn Robert Susan Tim Ursula "
    "Walter Xenia Yusuf Zelda Amir Bianca Cyril Dora Elias Freya Gita Henry Ines Jim Kira Lars "
    "Monica Nora Otto Petra Ravi Stella Theo Una Viktor Willow Yan Zack"
)
STARTS = words("B D F G H J K L M N P R S T V W Z Br Ch Dr Kr St Tr")
VOWELS = words("a e i o u")
ENDS = words("n l r s ra li mo ta vin den rik sa na lo")
PEOPLE = re.compile(r"\b(?:" + "|".join(NAMES) + r")\b", re.IGNORECASE)


def invented(rng: random.Random) -> str:
    """A name: half of the time a usual one, else put together from syllables."""
    if rng.random() < 0.5:
        return rng.choice(MORE_NAMES)
    return "".join(map(rng.choice, (STARTS, VOWELS, ENDS)))


def renamed(rng: random.Random, made: Conversation) -> Conversation:
    """The conversation with every person renamed, the same person the same way throughout."""
    people: dict[str, str] = {}

    def other(match: re.Match[str]) -> str:
        found = match.group()
        if found.capitalize() not in people:
            people[found.capitalize()] = invented(rng)
        name = people[found.capitalize()]
        if found[0].isupper():
            return name
        return name.lower() if match.string[match.end() :].startswith("@") else found

    text = PEOPLE.sub(other, json.dumps(made.messages, ensure_ascii=False))
    return Conversation(tuple(json.loads(text)), made.tools, made.thinking)
