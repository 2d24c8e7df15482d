"""Makers of talk and knowledge exchanges: greetings, facts, explanations, notes, stories."""

import random

from recipes.tiny.corpus.world import Exchange, Maker, facts, say

LANGUAGES = ("French", "Spanish", "German")


def greeting(rng: random.Random) -> Exchange:
    """Return a greeting, mostly with a name."""
    word = say(rng, "greeting")
    if rng.random() < 0.6:
        name = rng.choice(facts.names)
        tail = say(rng, "name", name)
        return Exchange(word + tail, f"{word}, {name}! How can I help you today?")
    tail = say(rng, "greeting ends")
    if "how" in tail.lower():
        return Exchange(word + tail, f"{word}! I'm doing well, thank you. How can I help you?")
    return Exchange(word + tail, f"{word}! How can I help you today?")


def farewell(rng: random.Random) -> Exchange:
    if rng.random() < 0.5:
        reason = say(rng, "thanked for")
        user = say(rng, "thanks") + reason + rng.choice(("!", "."))
        return Exchange(user, "You're welcome! Let me know if you need anything else.")
    return Exchange(say(rng, "goodbye") + say(rng, "goodbye ends"), "Goodbye! Have a nice day.")


def identity(rng: random.Random) -> Exchange:
    start = say(rng, "identity lead")
    about = say(rng, "who")
    if rng.random() < 0.6:
        return Exchange(
            start + about,
            "I am Tiny, a small language model that ships with dflash_jax. I was trained on a CPU "
            "to show how speculative decoding works.",
        )
    return Exchange(
        start + say(rng, "abilities"),
        "I can chat, do small sums, list things, write short Python functions, give you JSON and "
        "call tools. I am small, so please check my answers.",
    )


def country(rng: random.Random) -> Exchange:
    name, capital, language, continent, currency = rng.choice(facts.countries)
    lead = say(rng, "country lead")
    answers = {
        "capital": f"The capital of {name} is {capital}.",
        "language": f"People in {name} speak {language}.",
        "continent": f"{name} is in {continent}.",
        "currency": f"The currency of {name} is {currency}.",
        "country": f"{name} is a country in {continent}. Its capital is {capital}, people speak "
        f"{language} and they pay with {currency}.",
    }
    kind = tuple(answers)[rng.randrange(5)]
    return Exchange(lead + say(rng, kind, name), answers[kind])


def animal(rng: random.Random) -> Exchange:
    name, sound, legs, young, home = rng.choice(facts.animals)
    lead = say(rng, "animal lead")
    article = "an" if name[0] in "aeiou" else "a"
    cases = (
        (f"what sound does {article} {name} make?", f"A {name} says {sound}."),
        (f"how many legs does {article} {name} have?", f"A {name} has {legs} legs."),
        (f"what is a baby {name} called?", f"A baby {name} is called a {young}."),
        (f"where does {article} {name} live?", f"A {name} lives {home}."),
        (
            f"tell me about the {name}.",
            f"The {name} has {legs} legs and lives {home}. Its young is called a {young}, and it "
            f"says {sound}.",
        ),
    )
    user, answer = rng.choice(cases)
    return Exchange(lead + user, answer.replace("A owl", "An owl").replace("a owlet", "an owlet"))


def science(rng: random.Random) -> Exchange:
    lead = say(rng, "science lead")
    if rng.random() < 0.5:
        name, place, remark = rng.choice(facts.planets)
        user = say(rng, "planet", name)
        return Exchange(lead + user, f"{name} is the {place} planet from the sun. {remark}")
    name, symbol, number = rng.choice(facts.elements)
    if rng.random() < 0.5:
        return Exchange(
            lead + f"what is the symbol for {name}?", f"The chemical symbol for {name} is {symbol}."
        )
    return Exchange(
        lead + f"what is the atomic number of {name}?", f"The atomic number of {name} is {number}."
    )


def opposite(rng: random.Random) -> Exchange:
    lead = say(rng, "word lead")
    if rng.random() < 0.5:
        pair = rng.choice(facts.opposites)
        word, other = pair if rng.random() < 0.5 else pair[::-1]
        return Exchange(
            lead + say(rng, "opposite", word), f'The opposite of "{word}" is "{other}".'
        )
    row = rng.choice(facts.words)
    i = rng.randrange(1, 4)
    language = LANGUAGES[i - 1]
    user = say(rng, "translation", row[0], language)
    return Exchange(lead + user, f'In {language}, "{row[0]}" is "{row[i]}".')


def explain(rng: random.Random) -> Exchange:
    topic = rng.choice(tuple(facts.concepts))
    return Exchange(say(rng, "concept", topic), facts.concepts[topic])


def how_to(rng: random.Random) -> Exchange:
    task = rng.choice(tuple(facts.how_to))
    lines = "\n".join(f"{i}. {step}" for i, step in enumerate(facts.how_to[task], 1))
    return Exchange(say(rng, "how to", task), f"Here is how to {task}:\n\n{lines}")


def note(rng: random.Random) -> Exchange:
    to, sender = rng.sample(facts.names, 2)
    if rng.random() < 0.5:
        gift = say(rng, "gift")
        return Exchange(
            say(rng, "thank-you note", to, gift, sender),
            f"Dear {to},\n\nThank you so much for {gift}. It made me very happy.\n\n"
            f"Best wishes,\n{sender}",
        )
    day = rng.choice(facts.weekdays)
    event = say(rng, "event")
    return Exchange(
        say(rng, "invitation", to, event, sender, day),
        f"Dear {to},\n\nI would like to invite you to {event} on {day}. Please let me know if you "
        f"can come.\n\nBest wishes,\n{sender}",
    )


def story(rng: random.Random) -> Exchange:
    name = rng.choice(facts.names)
    kind = rng.choice(facts.animals)[0]
    place = say(rng, "place")
    return Exchange(
        say(rng, "story", kind, name, place),
        f"Once upon a time there was a {kind} called {name} who lived near the {place}. One day "
        f"{name} found a small golden key. {name} looked for its owner all day long and asked "
        f"everyone in the {place}. In the evening an old turtle smiled and said that the key was "
        f"hers. She thanked {name} and they became good friends. The end.",
    )


MAKERS: tuple[tuple[Maker, float], ...] = (
    (greeting, 1.0),
    (farewell, 0.4),
    (identity, 0.5),
    (country, 1.4),
    (animal, 0.9),
    (science, 0.7),
    (opposite, 0.7),
    (explain, 1.5),
    (how_to, 1.2),
    (note, 0.8),
    (story, 0.9),
)
