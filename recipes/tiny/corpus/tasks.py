"""Makers of small tasks with one right answer: sums, lists, JSON, units, dates, words, code."""

import json
import random

from recipes.tiny.corpus.world import Exchange, Maker, facts, say

UNITS = (
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
ALIASES = ("solve", "compute", "helper", "my_function", "run", "work", "process", "task")


def arithmetic(rng: random.Random) -> Exchange:
    """Return a sum, difference or product of one-digit numbers: few enough to know by heart."""
    kind = rng.randrange(3)
    if kind == 0:
        a = rng.randint(1, 9)
        b = rng.randint(1, 9)
        signs = ("+", "plus")
        word = "plus"
        value = a + b
    elif kind == 1:
        a = rng.randint(2, 9)
        b = rng.randint(1, a)
        signs = ("-", "minus")
        word = "minus"
        value = a - b
    else:
        a = rng.randint(2, 9)
        b = rng.randint(2, 5)
        signs = ("*", "times")
        word = "times"
        value = a * b
    sign = rng.choice(signs)
    user = say(rng, "sum lead") + say(rng, "sum", f"{a} {sign} {b}")
    return Exchange(user, f"{a} {word} {b} is {value}.")


def word_problem(rng: random.Random) -> Exchange:
    """Return a problem of one step, solved in a reasoning block."""
    name = rng.choice(facts.names)
    thing = rng.choice(facts.things)
    a = rng.randint(2, 9)
    b = rng.randint(2, 6)
    ask = say(rng, "how many", thing, name)
    return Exchange(
        f"{name} has {a} {thing} and gets {b} more. {ask}",
        f"{name} has {a + b} {thing} now.",
        f"{name} starts with {a} {thing}. {b} more come in.\n{a} + {b} = {a + b}.",
    )


def listing(rng: random.Random) -> Exchange:
    category = rng.choice(tuple(facts.lists))
    count = rng.randint(2, 8)
    members = facts.lists[category][:count]
    number = rng.choice((str(count), facts.number_words[count]))
    if rng.random() < 0.7:
        user = say(rng, "list", number, category)
        lines = "\n".join(f"{i}. {member}" for i, member in enumerate(members, 1))
        return Exchange(user, f"Here are {number} {category}:\n\n{lines}")
    user = say(rng, "short list", number, category)
    return Exchange(user, f"{number.capitalize()} {category}: {', '.join(members)}.")


def json_record(rng: random.Random) -> Exchange:
    """Return an exchange about a JSON object with the fields that the user names."""
    name = rng.choice(facts.names)
    city = rng.choice(facts.cities)
    age = rng.randint(18, 70)
    job = rng.choice(facts.jobs)
    kind = rng.randrange(3)
    if kind == 0:
        record = {"name": name, "age": age, "city": city}
        what = f"a person named {name}, aged {age}, from {city}"
    elif kind == 1:
        record = {"name": name, "job": job, "hobby": rng.choice(facts.hobbies)}
        what = f"{name}, who is a {job} and likes {record['hobby']}"
    else:
        thing = rng.choice(facts.things)
        record = {"item": thing, "count": age, "city": city}
        what = f"an order of {age} {thing} to {city}"
    user = say(rng, "json", what)
    return Exchange(user, f"```json\n{json.dumps(record, indent=2)}\n```")


def units(rng: random.Random) -> Exchange:
    big, small, factor = rng.choice(UNITS)
    n = rng.randint(2, 9 if factor % 10 == 0 else 5)
    user = say(rng, "unit", n, big, small)
    return Exchange(user, f"{n} {big} are {n * factor} {small}.")


def calendar(rng: random.Random) -> Exchange:
    lead = say(rng, "calendar lead")
    kind = rng.randrange(4)
    i = rng.randrange(7)
    day = facts.weekdays[i]
    if kind == 0:
        after = rng.random() < 0.5
        other = facts.weekdays[(i + (1 if after else -1)) % 7]
        word = "after" if after else "before"
        return Exchange(f"{lead}what day comes {word} {day}?", f"The day {word} {day} is {other}.")
    if kind == 1:
        n = rng.randint(2, 6)
        user = f"{lead}today is {day}. What day is it in {n} days?"
        return Exchange(user, f"In {n} days it will be {facts.weekdays[(i + n) % 7]}.")
    j = rng.randrange(12)
    month = facts.months[j]
    if kind == 2:
        return Exchange(
            f"{lead}how many days does {month} have?", f"{month} has {facts.month_days[j]} days."
        )
    following = facts.months[(j + 1) % 12]
    return Exchange(
        f"{lead}which month comes after {month}?", f"The month after {month} is {following}."
    )


def words(rng: random.Random) -> Exchange:
    pool = facts.lists[rng.choice(("fruits", "animals", "colors", "trees", "drinks"))]
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
    """Return words from anywhere, said again: they teach a small model to look back and copy."""
    pools = (*facts.lists.values(), facts.names, facts.cities, facts.jobs, facts.hobbies)
    chosen = " ".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(3, 9)))
    lead = say(rng, "repeat")
    return Exchange(f"{lead} {chosen}", chosen)


def summary(rng: random.Random) -> Exchange:
    name = rng.choice(facts.names)
    city = rng.choice(facts.cities)
    job = rng.choice(facts.jobs)
    hobby = rng.choice(facts.hobbies)
    day = rng.choice(facts.weekdays)
    text = (
        f"{name} works as a {job} in {city}. Every {day} {name} gets up early, drinks a cup of "
        f"coffee and spends the morning with {hobby}. The neighbors often come along."
    )
    lead = say(rng, "summary")
    return Exchange(
        f"{lead} {text}", f"{name}, a {job} in {city}, enjoys {hobby} every {day} with neighbors."
    )


def table(rng: random.Random) -> Exchange:
    people = rng.sample(facts.names, rng.randint(2, 4))
    cities = rng.sample(facts.cities, len(people))
    pairs = ", ".join(f"{p} from {c}" for p, c in zip(people, cities, strict=True))
    rows = "\n".join(f"| {p} | {c} |" for p, c in zip(people, cities, strict=True))
    lead = say(rng, "table")
    return Exchange(f"{lead} {pairs}.", f"| Name | City |\n| --- | --- |\n{rows}")


def source(name: str, parameters: str, body: str) -> str:
    """Return the source text of a function, its body indented by four spaces."""
    lines = "\n".join("    " + line for line in body.split("\n"))
    return f"def {name}({parameters}):\n{lines}"


def write_function(rng: random.Random) -> Exchange:
    """Return a function written to order, at times under a name that the user chooses."""
    purpose = rng.choice(tuple(facts.functions))
    name, parameters, body = facts.functions[purpose]
    if rng.random() < 0.4:
        name = rng.choice((*ALIASES, name))
        user = say(rng, "named function", name, purpose)
    else:
        user = say(rng, "function", purpose)
    return Exchange(user, f"```python\n{source(name, parameters, body)}\n```")


def explain_function(rng: random.Random) -> Exchange:
    purpose = rng.choice(tuple(facts.functions))
    name, parameters, body = facts.functions[purpose]
    name = rng.choice((*ALIASES, name))
    lead = say(rng, "explain code")
    code = source(name, parameters, body)
    return Exchange(
        f"{lead}\n\n```python\n{code}\n```",
        f"The function `{name}` {purpose}. It is called as `{name}({parameters})`.",
    )


def shell(rng: random.Random) -> Exchange:
    purpose = rng.choice(tuple(facts.commands))
    user = say(rng, "shell", purpose)
    command = facts.commands[purpose]
    return Exchange(user, f"You can {purpose} with this command:\n\n```bash\n{command}\n```")


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
    (write_function, 2.6),
    (explain_function, 0.8),
    (shell, 0.8),
)
