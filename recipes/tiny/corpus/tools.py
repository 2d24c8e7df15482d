"""Tool descriptions in the OpenAI function shape, and calls."""

import random

from recipes.tiny.corpus.world import facts


def function(name: str, description: str, /, **parameters: str) -> dict:
    """A tool whose parameters are all required; each value is a JSON type name."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(parameters),
            },
        },
    }


CATALOG = {name: function(name, text, **kinds) for name, (text, kinds) in facts.tools.items()}

VERBS = str.split("get set find open close check update count fetch delete start stop")
NOUNS = str.split("user order lamp ticket invoice room song task price book light alarm")
FIELDS = str.split("id name count level color size amount label key value")


def invented(rng: random.Random) -> tuple[dict, dict]:
    """A made-up tool and arguments that fit it, so that names are copied rather than learnt."""
    name = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"
    keys = rng.sample(FIELDS, rng.randint(1, 2))
    kinds = {key: rng.choice(("string", "integer")) for key in keys}
    arguments = {
        key: rng.randint(1, 99) if kind == "integer" else rng.choice(NOUNS)
        for key, kind in kinds.items()
    }
    verb, noun = name.split("_")
    return function(name, f"{verb.capitalize()} a {noun}.", **kinds), arguments


def offer(rng: random.Random, *needed: str) -> tuple[dict, ...]:
    """The needed tools among a few others, in random order."""
    others = [name for name in CATALOG if name not in needed]
    names = [*needed, *rng.sample(others, rng.choice((0, 0, 1, 2)))]
    rng.shuffle(names)
    return tuple(CATALOG[name] for name in names)


def call(name: str, arguments: dict) -> dict:
    """One entry of an assistant message's `tool_calls`."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
