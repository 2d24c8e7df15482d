"""Makers of small tasks with one right answer: sums, lists, JSON, units, dates, words."""

import json
import random

from recipes.tiny.corpus import world
from recipes.tiny.corpus.exchange import Exchange, Maker


def arithmetic(rng: random.Random) -> Exchange:
    """A sum, difference or product of one-digit numbers: few enough to know by heart."""
    kind = rng.randrange(3)
    if kind == 0:
        a, b = rng.randint(1, 9), rng.randint(1, 9)
        signs, word, value = ("+", "plus"), "plus", a + b
    elif kind == 1:
        a = rng.randint(2, 9)
        b = rng.randint(1, a)
        signs, word, value = ("-", "minus"), "minus", a - b
    else:
        a, b = rng.randint(2, 9), rng.randint(2, 5)
        signs, word, value = ("*", "times"), "times", a * b
    sign = rng.choice(signs)
    lead = rng.choice(("", "", "Please tell me: ", "Quick question: ", "Hi! "))
    user = rng.choice(
        (
            f"what is {a} {sign} {b}?",
            f"calculate {a} {sign} {b}.",
            f"how much is {a} {sign} {b}?",
            f"{a} {sign} {b}?",
        )
    )
    return Exchange(lead + user, f"{a} {word} {b} is {value}.")


def word_problem(rng: random.Random) -> Exchange:
    """A one-step problem, solved in a reasoning block."""
    name, thing = rng.choice(world.NAMES), rng.choice(world.THINGS)
    a, b = rng.randint(2, 9), rng.randint(2, 6)
    ask = rng.choice(
        (f"How many {thing} does {name} have now?", f"How many {thing} are there now?")
    )
    return Exchange(
        f"{name} has {a} {thing} and gets {b} more. {ask}",
        f"{name} has {a + b} {thing} now.",
        f"{name} starts with {a} {thing}. {b} more come in.\n{a} + {b} = {a + b}.",
    )


def listing(rng: random.Random) -> Exchange:
    """The first few members of a category as a numbered or plain list."""
    category = rng.choice(tuple(world.LISTS))
    count = rng.randint(2, 8)
    members = world.LISTS[category][:count]
    number = rng.choice((str(count), world.NUMBER_WORDS[count]))
    if rng.random() < 0.7:
        user = rng.choice(
            (
                f"List {number} {category}.",
                f"Give me {number} {category}.",
                f"Can you list {number} {category}?",
                f"Please write a list of {number} {category}.",
            )
        )
        lines = "\n".join(f"{i}. {member}" for i, member in enumerate(members, 1))
        return Exchange(user, f"Here are {number} {category}:\n\n{lines}")
    user = rng.choice((f"Name {number} {category}.", f"Name {number} {category} in one line."))
    return Exchange(user, f"{number.capitalize()} {category}: {', '.join(members)}.")


def json_record(rng: random.Random) -> Exchange:
    """A JSON object with the fields that the user names."""
    name, city = rng.choice(world.NAMES), rng.choice(world.CITIES)
    age, job = rng.randint(18, 70), rng.choice(world.JOBS)
    kind = rng.randrange(3)
    if kind == 0:
        record = {"name": name, "age": age, "city": city}
        what = f"a person named {name}, aged {age}, from {city}"
    elif kind == 1:
        record = {"name": name, "job": job, "hobby": rng.choice(world.HOBBIES)}
        what = f"{name}, who is a {job} and likes {record['hobby']}"
    else:
        thing = rng.choice(world.THINGS)
        record = {"item": thing, "count": age, "city": city}
        what = f"an order of {age} {thing} to {city}"
    user = rng.choice(
        ("Give me JSON for {}.", "Write a JSON object for {}.", "Make a JSON record of {}.")
    )
    return Exchange(user.format(what), f"```json\n{json.dumps(record, indent=2)}\n```")


def units(rng: random.Random) -> Exchange:
    """A conversion between two units."""
    big, small, factor = rng.choice(
        (
            ("kilometers", "meters", 1000),
            ("meters", "centimeters", 100),
            ("kilograms", "grams", 1000),
            ("liters", "milliliters", 1000),
            ("centimeters", "millimeters", 10),
            ("euros", "cents", 100),
            ("dozens", "pieces", 12),
            ("weeks", "days", 7),
            ("hours", "minutes", 60),
        )
    )
    n = rng.randint(2, 9 if factor % 10 == 0 else 5)
    user = rng.choice(
        (
            f"Convert {n} {big} to {small}.",
            f"How many {small} are {n} {big}?",
            f"What is {n} {big} in {small}?",
            f"{n} {big} in {small}, please.",
        )
    )
    return Exchange(user, f"{n} {big} are {n * factor} {small}.")


def calendar(rng: random.Random) -> Exchange:
    """A question about days of the week or months."""
    lead = rng.choice(("", "Please tell me: ", "Quick question: ", "Hi! "))
    kind = rng.randrange(4)
    i = rng.randrange(7)
    day = world.WEEKDAYS[i]
    if kind == 0:
        after = rng.random() < 0.5
        other = world.WEEKDAYS[(i + (1 if after else -1)) % 7]
        word = "after" if after else "before"
        return Exchange(f"{lead}what day comes {word} {day}?", f"The day {word} {day} is {other}.")
    if kind == 1:
        n = rng.randint(2, 6)
        user = f"{lead}today is {day}. What day is it in {n} days?"
        return Exchange(user, f"In {n} days it will be {world.WEEKDAYS[(i + n) % 7]}.")
    j = rng.randrange(12)
    month = world.MONTHS[j]
    if kind == 2:
        return Exchange(
            f"{lead}how many days does {month} have?", f"{month} has {world.MONTH_DAYS[j]} days."
        )
    following = world.MONTHS[(j + 1) % 12]
    return Exchange(
        f"{lead}which month comes after {month}?", f"The month after {month} is {following}."
    )


def words(rng: random.Random) -> Exchange:
    """Counting, picking or laying out a few words."""
    pool = world.LISTS[rng.choice(("fruits", "animals", "colors", "trees", "drinks"))]
    chosen = rng.sample(pool, rng.randint(3, 5))
    joined = ", ".join(chosen)
    cases = (
        ("How many words are in this list: {}?", f"There are {len(chosen)} words in the list."),
        ("What is the first word here: {}?", f"The first word is {chosen[0]}."),
        ("What is the last word here: {}?", f"The last word is {chosen[-1]}."),
        ("Make a bullet list of: {}.", "\n".join(f"- {word}" for word in chosen)),
        ("Number these: {}.", "\n".join(f"{i}. {word}" for i, word in enumerate(chosen, 1))),
    )
    user, answer = rng.choice(cases)
    return Exchange(user.format(joined), answer)


def repeat(rng: random.Random) -> Exchange:
    """Words from anywhere, said again: what teaches a small model to look back and copy."""
    pools = (*world.LISTS.values(), world.NAMES, world.CITIES, world.JOBS, world.HOBBIES)
    chosen = " ".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(3, 9)))
    lead = rng.choice(("Repeat after me:", "Please repeat:", "Say this again:", "Echo this:"))
    return Exchange(f"{lead} {chosen}", chosen)


def summary(rng: random.Random) -> Exchange:
    """A one-sentence summary of a short report."""
    name, city = rng.choice(world.NAMES), rng.choice(world.CITIES)
    job, hobby = rng.choice(world.JOBS), rng.choice(world.HOBBIES)
    day = rng.choice(world.WEEKDAYS)
    text = (
        f"{name} works as a {job} in {city}. Every {day} {name} gets up early, drinks a cup of "
        f"coffee and spends the morning with {hobby}. The neighbors often come along."
    )
    lead = rng.choice(("Summarize this:", "Give me a short summary:", "Sum this up in one line:"))
    return Exchange(
        f"{lead} {text}", f"{name}, a {job} in {city}, enjoys {hobby} every {day} with neighbors."
    )


def table(rng: random.Random) -> Exchange:
    """A Markdown table of people and cities."""
    people = rng.sample(world.NAMES, rng.randint(2, 4))
    cities = rng.sample(world.CITIES, len(people))
    pairs = ", ".join(f"{p} from {c}" for p, c in zip(people, cities, strict=True))
    rows = "\n".join(f"| {p} | {c} |" for p, c in zip(people, cities, strict=True))
    lead = rng.choice(("Make a table of", "Show as a Markdown table:", "Put in a table:"))
    return Exchange(f"{lead} {pairs}.", f"| Name | City |\n| --- | --- |\n{rows}")


MAKERS: tuple[tuple[Maker, float], ...] = (
    (arithmetic, 1.5),
    (word_problem, 1.2),
    (listing, 1.6),
    (json_record, 1.5),
    (units, 1.0),
    (calendar, 1.0),
    (words, 1.0),
    (repeat, 1.6),
    (summary, 0.9),
    (table, 0.7),
)
