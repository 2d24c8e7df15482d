"""Makers of talk and knowledge exchanges: greetings, facts, explanations, notes, stories."""

import random

from recipes.tiny.corpus import knowledge, world
from recipes.tiny.corpus.exchange import Exchange, Maker


def greeting(rng: random.Random) -> Exchange:
    """A greeting, half of the time with a name."""
    word = rng.choice(("Hello", "Hi", "Hey", "Good morning", "Good evening", "Hi there"))
    if rng.random() < 0.6:
        name = rng.choice(world.NAMES)
        tail = rng.choice((f", I'm {name}.", f", my name is {name}.", f"! I am {name}."))
        return Exchange(word + tail, f"{word}, {name}! How can I help you today?")
    tail = rng.choice(("!", ".", "", ", how are you?", "! How are you today?", ", are you there?"))
    if "how" in tail.lower():
        return Exchange(word + tail, f"{word}! I'm doing well, thank you. How can I help you?")
    return Exchange(word + tail, f"{word}! How can I help you today?")


def farewell(rng: random.Random) -> Exchange:
    """Thanks or a goodbye."""
    if rng.random() < 0.5:
        reason = rng.choice(("", " for the help", " so much", ", that was useful", ", great"))
        user = rng.choice(("Thanks", "Thank you", "Many thanks")) + reason + rng.choice(("!", "."))
        return Exchange(user, "You're welcome! Let me know if you need anything else.")
    user = rng.choice(("Bye", "Goodbye", "See you", "Good night")) + rng.choice(
        ("!", ".", " for now!", " and thanks!", ", see you soon.")
    )
    return Exchange(user, "Goodbye! Have a nice day.")


def identity(rng: random.Random) -> Exchange:
    """Who the assistant is and what it can do."""
    start = rng.choice(("", "Hello! ", "Hi, ", "Tell me, ", "Please say: ", "So, "))
    about = rng.choice(("who are you?", "what is your name?", "what are you?", "who made you?"))
    if rng.random() < 0.6:
        return Exchange(
            start + about,
            "I am Tiny, a small language model that ships with dflash_jax. I was trained on a CPU "
            "to show how speculative decoding works.",
        )
    about = rng.choice(("what can you do?", "how can you help me?", "what do you know?"))
    return Exchange(
        start + about,
        "I can chat, do small sums, list things, write short Python functions, give you JSON and "
        "call tools. I am small, so please check my answers.",
    )


def country(rng: random.Random) -> Exchange:
    """A fact about a country."""
    name, capital, language, continent, currency = rng.choice(world.COUNTRIES)
    lead = rng.choice(("", "Please tell me: ", "Do you know: ", "Quick question: ", "Hi! "))
    kind = rng.randrange(5)
    if kind == 0:
        user = rng.choice(("what is the capital of {}?", "which city is the capital of {}?"))
        return Exchange(lead + user.format(name), f"The capital of {name} is {capital}.")
    if kind == 1:
        user = rng.choice(("what language do people speak in {}?", "which language is used in {}?"))
        return Exchange(lead + user.format(name), f"People in {name} speak {language}.")
    if kind == 2:
        user = rng.choice(("where is {}?", "on which continent is {}?"))
        return Exchange(lead + user.format(name), f"{name} is in {continent}.")
    if kind == 3:
        user = rng.choice(("what money do they use in {}?", "what is the currency of {}?"))
        return Exchange(lead + user.format(name), f"The currency of {name} is {currency}.")
    user = rng.choice(("tell me about {}.", "what do you know about {}?", "describe {}."))
    return Exchange(
        lead + user.format(name),
        f"{name} is a country in {continent}. Its capital is {capital}, people speak {language} "
        f"and they pay with {currency}.",
    )


def animal(rng: random.Random) -> Exchange:
    """A fact about an animal."""
    name, sound, legs, young, home = rng.choice(world.ANIMALS)
    lead = rng.choice(("", "Please tell me: ", "Do you know: ", "My son asks: ", "Hey, "))
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
    """A fact about a planet or an element."""
    lead = rng.choice(("", "Please tell me: ", "Do you know: ", "Quick question: "))
    if rng.random() < 0.5:
        name, place, remark = rng.choice(world.PLANETS)
        user = rng.choice((f"tell me about {name}.", f"what is {name}?", f"where is {name}?"))
        return Exchange(lead + user, f"{name} is the {place} planet from the sun. {remark}")
    name, symbol, number = rng.choice(world.ELEMENTS)
    if rng.random() < 0.5:
        return Exchange(
            lead + f"what is the symbol for {name}?", f"The chemical symbol for {name} is {symbol}."
        )
    return Exchange(
        lead + f"what is the atomic number of {name}?", f"The atomic number of {name} is {number}."
    )


def opposite(rng: random.Random) -> Exchange:
    """The opposite of a word, or a translation."""
    lead = rng.choice(("", "Please tell me: ", "Help me with a word: ", "Hi, "))
    if rng.random() < 0.5:
        pair = rng.choice(world.OPPOSITES)
        word, other = pair if rng.random() < 0.5 else pair[::-1]
        user = rng.choice(
            (f'what is the opposite of "{word}"?', f"what is the opposite of {word}?")
        )
        return Exchange(lead + user, f'The opposite of "{word}" is "{other}".')
    row = rng.choice(world.WORDS)
    i = rng.randrange(1, 4)
    language = ("French", "Spanish", "German")[i - 1]
    user = rng.choice(
        (f'how do you say "{row[0]}" in {language}?', f'translate "{row[0]}" into {language}.')
    )
    return Exchange(lead + user, f'In {language}, "{row[0]}" is "{row[i]}".')


def explain(rng: random.Random) -> Exchange:
    """An explanation of a concept."""
    topic = rng.choice(tuple(knowledge.CONCEPTS))
    user = rng.choice(
        (
            "What is {}?",
            "Explain {} to me.",
            "Can you explain {}?",
            "Please explain {} in simple words.",
            "What does {} mean?",
            "Tell me what {} is.",
            "Explain {} briefly.",
            "I don't understand {}. Can you help?",
            "In two sentences, what is {}?",
            "How would you explain {} to a child?",
        )
    )
    return Exchange(user.format(topic), knowledge.CONCEPTS[topic])


def how_to(rng: random.Random) -> Exchange:
    """Numbered instructions."""
    task = rng.choice(tuple(knowledge.HOW_TO))
    user = rng.choice(
        (
            "How do I {}?",
            "How can I {}?",
            "Tell me how to {}.",
            "Give me steps to {}.",
            "I want to {}. What should I do?",
            "What is the best way to {}?",
            "Explain how to {} step by step.",
            "Can you show me how to {}?",
        )
    )
    steps = [f"{i}. {step}" for i, step in enumerate(knowledge.HOW_TO[task], 1)]
    lines = "\n".join(steps)
    return Exchange(user.format(task), f"Here is how to {task}:\n\n{lines}")


def note(rng: random.Random) -> Exchange:
    """A short note or invitation written for the user."""
    to, sender = rng.sample(world.NAMES, 2)
    if rng.random() < 0.5:
        gift = rng.choice(("the book", "the flowers", "your help", "the lovely dinner", "the cake"))
        user = rng.choice(
            (
                f"Write a thank-you note to {to} for {gift} from {sender}.",
                f"Help {sender} thank {to} for {gift}.",
            )
        )
        return Exchange(
            user,
            f"Dear {to},\n\nThank you so much for {gift}. It made me very happy.\n\n"
            f"Best wishes,\n{sender}",
        )
    day = rng.choice(world.WEEKDAYS)
    event = rng.choice(("my birthday", "dinner", "a picnic", "a game night", "tea"))
    user = rng.choice(
        (
            f"Write an invitation from {sender} to {to} for {event} on {day}.",
            f"Invite {to} to {event} on {day}. I am {sender}.",
        )
    )
    return Exchange(
        user,
        f"Dear {to},\n\nI would like to invite you to {event} on {day}. Please let me know if you "
        f"can come.\n\nBest wishes,\n{sender}",
    )


def story(rng: random.Random) -> Exchange:
    """A short story about an animal with a name."""
    name = rng.choice(world.NAMES)
    kind = rng.choice(world.ANIMALS)[0]
    place = rng.choice(("river", "forest", "village", "mountain", "garden", "sea"))
    user = rng.choice(
        (
            "Tell me a short story about a {kind} called {name} and a {place}.",
            "Write a story about {name} the {kind} who lives near a {place}.",
            "I would like a story. The hero is {name}, a {kind} from the {place}.",
        )
    )
    return Exchange(
        user.format(kind=kind, name=name, place=place),
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
