"""Makers of agent transcripts: tasks solved by a loop of tool calls and tool responses.

A tool turn often opens with a preamble that ends in a colon. After a response that was cut off,
the agent may stop right after the preamble: the stall that a recovery rule has to detect.

Tools are described in the OpenAI function shape.
"""

import dataclasses
import json
import random
from collections.abc import Callable

from recipes.tiny.corpus.tasks import source
from recipes.tiny.corpus.world import Conversation, facts, say


def function(name: str, description: str, /, **parameters: str) -> dict:
    """Return a tool whose parameters are all required; each value is a JSON type name."""
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
    """Return a made-up tool and arguments that fit it: its names are copied rather than learnt."""
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
    """Return the needed tools among a few others, in random order."""
    others = [name for name in CATALOG if name not in needed]
    names = [*needed, *rng.sample(others, rng.choice((0, 0, 1, 2)))]
    rng.shuffle(names)
    return tuple(CATALOG[name] for name in names)


def call(name: str, arguments: dict) -> dict:
    """Return one entry of an assistant message's `tool_calls`."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TRUNCATED = "[output truncated]"
STALL_AFTER_TRUNCATED = 0.7
PREAMBLE_SHARE = 0.5


@dataclasses.dataclass
class Script:
    """A transcript in the making.

    Attributes:
      stalled: the agent stopped after a preamble, and nothing follows.
    """

    rng: random.Random
    tools: tuple[dict, ...]
    messages: list[dict]
    stalled: bool = False

    def use(self, name: str, arguments: dict, preamble: str, response: str) -> None:
        """Add a tool call and its response, or the stall that replaces them."""
        if self.stalled:
            return
        last = self.messages[-1]
        cut = last["role"] == "tool" and last["content"].endswith(TRUNCATED)
        if cut and self.rng.random() < STALL_AFTER_TRUNCATED:
            self.messages.append({"role": "assistant", "content": preamble})
            if self.rng.random() < 0.5:
                self.stalled = True
                return
            self.messages.append({"role": "user", "content": "Please continue."})
            preamble = ""
        elif not cut and self.rng.random() > PREAMBLE_SHARE:
            preamble = ""
        calls = [call(name, arguments)]
        self.messages.append({"role": "assistant", "content": preamble, "tool_calls": calls})
        self.messages.append({"role": "tool", "name": name, "content": response})

    def say(self, content: str) -> None:
        if not self.stalled:
            self.messages.append({"role": "assistant", "content": content})


def script(rng: random.Random, tools: tuple[dict, ...], user: str) -> Script:
    """Return a transcript with nothing but the user's task, at times after a system message."""
    messages = []
    system = rng.choice(facts.systems)
    if system:
        messages.append({"role": "system", "content": system})
    messages.append({"role": "user", "content": user})
    return Script(rng, tools, messages)


def steps(rng: random.Random, longest: int) -> int:
    """Return the number of tool turns of a looping task: mostly few, at times up to `longest`."""
    if rng.random() < 0.75:
        return rng.randint(2, 4)
    return rng.randint(5, longest)


def weather(rng: random.Random) -> Script:
    count = 1 if rng.random() < 0.5 else steps(rng, 12)
    cities = rng.sample(facts.cities, count)
    names = ", ".join(cities)
    user = say(rng, "agent: weather", names)
    run = script(rng, offer(rng, "get_weather"), user)
    lines = []
    for city in cities:
        degrees = rng.randint(2, 34)
        sky = say(rng, "sky")
        response = json.dumps({"city": city, "degrees": degrees, "sky": sky})
        run.use("get_weather", {"city": city}, f"Let me check the weather in {city}:", response)
        lines.append(f"{city}: {degrees} degrees and {sky}")
    if count == 1:
        run.say(f"It is {degrees} degrees and {sky} in {cities[0]} right now.")
    else:
        run.say("Here is the weather:\n\n" + "\n".join(f"- {line}" for line in lines))
    return run


def sums(rng: random.Random) -> Script:
    count = steps(rng, 8) - 1
    terms = [
        (rng.randint(2, 99), rng.choice(("+", "-", "*")), rng.randint(2, 99)) for _ in range(count)
    ]
    texts = [f"{a} {sign} {b}" for a, sign, b in terms]
    user = say(rng, "agent: sums", " and ".join(texts))
    run = script(rng, offer(rng, "calculator"), user)
    results = []
    for (a, sign, b), text in zip(terms, texts, strict=True):
        value = {"+": a + b, "-": a - b, "*": a * b}[sign]
        run.use("calculator", {"expression": text}, "Let me calculate that:", str(value))
        results.append(f"{text} = {value}")
    if count == 1:
        run.say(f"The result is {results[0]}.")
    else:
        run.say("\n".join(results))
    return run


STEMS = str.split("app config main notes server client test report data setup index model")
SETTINGS = str.split("port timeout retries workers limit width height depth")


def file_text(rng: random.Random) -> tuple[str, str, int]:
    """Return the text of a small settings file, the key that is asked for, and its value."""
    keys = rng.sample(SETTINGS, 3)
    values = [rng.randint(1, 99) for _ in keys]
    text = "\n".join(f"{key} = {value}" for key, value in zip(keys, values, strict=True))
    return text, keys[1], values[1]


def read_setting(rng: random.Random) -> Script:
    name = f"{rng.choice(STEMS)}.toml"
    text, key, value = file_text(rng)
    user = say(rng, "agent: setting", key, name)
    run = script(rng, offer(rng, "read_file", "list_dir"), user)
    if rng.random() < 0.35:
        run.use("read_file", {"path": name}, "Let me check the file:", "Error: file not found")
        run.use(
            "list_dir", {"path": "."}, "Let me look at the directory:", f"README.md\nsrc/{name}"
        )
        name = f"src/{name}"
    run.use("read_file", {"path": name}, "Let me check the file:", text)
    run.say(f"In {name}, {key} is set to {value}.")
    return run


def read_all(rng: random.Random) -> Script:
    """Return a task to read every file of a folder, with outputs that may be cut off."""
    names = [f"{stem}.txt" for stem in rng.sample(STEMS, steps(rng, 11))]
    folder = say(rng, "folder")
    user = say(rng, "agent: read all", folder)
    run = script(rng, offer(rng, "list_dir", "read_file"), user)
    listed = "\n".join(names)
    run.use("list_dir", {"path": folder}, f"Let me look at {folder}:", listed)
    lines = []
    for name in names:
        owner = rng.choice(facts.names)
        thing = rng.choice(facts.things)
        text = f"{owner} counted {rng.randint(2, 60)} {thing}."
        if rng.random() < 0.12:
            text += f" {owner} wrote the numbers down and checked them again.\n{TRUNCATED}"
        run.use("read_file", {"path": f"{folder}/{name}"}, f"Now let me read {name}:", text)
        lines.append(f"- {name}: {owner} and the {thing}")
    run.say(f"I read {len(names)} files:\n\n" + "\n".join(lines))
    return run


def fix_bug(rng: random.Random) -> Script:
    purpose = rng.choice([key for key, row in facts.functions.items() if "return " in row[2]])
    name, parameters, body = facts.functions[purpose]
    path = f"{rng.choice(STEMS)}.py"
    good = source(name, parameters, body) + "\n"
    bad = source(name, parameters, body.replace("return ", "retrun ", 1)) + "\n"
    user = say(rng, "agent: bug", path)
    run = script(rng, offer(rng, "bash", "read_file", "write_file"), user)
    test = {"command": f"python -m pytest -q test_{path}"}
    failure = f"{path}: SyntaxError: invalid syntax\n1 failed"
    if rng.random() < 0.3:
        failure += f"\n{TRUNCATED}"
    run.use("bash", test, "I'll run the tests first:", failure)
    run.use("read_file", {"path": path}, "Let me check the file:", bad)
    written = {"path": path, "content": good}
    run.use("write_file", written, "I see a typo. Let me fix it:", f"Wrote {path}")
    run.use("bash", test, "Now I'll run the tests again:", "1 passed")
    run.say(f"I fixed a typo in {path}: `return` was misspelled. The tests pass now.")
    return run


def write_files(rng: random.Random) -> Script:
    purposes = rng.sample(tuple(facts.functions), rng.randint(1, 3))
    wanted = [(facts.functions[purpose], purpose) for purpose in purposes]
    ask = " and ".join(f"{row[0]}.py with a function that {purpose}" for row, purpose in wanted)
    user = say(rng, "agent: write", ask)
    run = script(rng, offer(rng, "write_file"), user)
    for (name, parameters, body), _ in wanted:
        content = source(name, parameters, body) + "\n"
        arguments = {"path": f"{name}.py", "content": content}
        run.use("write_file", arguments, f"I'll write {name}.py:", f"Wrote {name}.py")
    paths = " and ".join(f"{row[0]}.py" for row, _ in wanted)
    run.say(f"I created {paths}.")
    return run


def shell(rng: random.Random) -> Script:
    name = f"{rng.choice(STEMS)}.{rng.choice(('py', 'txt', 'log'))}"
    lines = rng.randint(3, 400)
    cases = (
        (f"How many lines does {name} have?", f"wc -l {name}", f"{lines} {name}",
         f"{name} has {lines} lines."),
        (f"How many times does error occur in {name}?", f"grep -c error {name}", str(lines),
         f"The word error occurs {lines} times in {name}."),
        ("Which branch am I on?", "git branch --show-current", name.split(".")[0],
         f"You are on the branch {name.split('.')[0]}."),
        (f"Delete {name}.", f"rm {name}", "", f"I deleted {name}."),
        (f"Make a folder called {name.split('.')[0]}.", f"mkdir {name.split('.')[0]}", "",
         f"I made the folder {name.split('.')[0]}."),
    )  # fmt: skip
    user, command, response, answer = rng.choice(cases)
    run = script(rng, offer(rng, "bash"), user)
    run.use("bash", {"command": command}, "Let me run a command:", response or "(no output)")
    run.say(answer)
    return run


def search(rng: random.Random) -> Script:
    kind = rng.randrange(3)
    if kind == 0:
        country, capital, *_ = rng.choice(facts.countries)
        run = script(rng, offer(rng, "search"), f"Search for the capital of {country}.")
        result = f"{capital} is the capital of {country}."
        query = {"query": f"capital of {country}"}
        run.use("search", query, "Let me search for that:", result)
        run.say(f"The capital of {country} is {capital}.")
        return run
    if kind == 1:
        city = rng.choice(facts.cities)
        time = f"{rng.randint(10, 23)}:{rng.randint(10, 59)}"
        run = script(rng, offer(rng, "get_time"), f"What time is it in {city}?")
        run.use("get_time", {"city": city}, "Let me look up the time:", time)
        run.say(f"It is {time} in {city}.")
        return run
    english, *others = rng.choice(facts.words)
    i = rng.randrange(3)
    language = ("French", "Spanish", "German")[i]
    user = f"Use the translate tool: what is {english} in {language}?"
    run = script(rng, offer(rng, "translate"), user)
    arguments = {"text": english, "language": language}
    run.use("translate", arguments, "Let me translate it:", others[i])
    run.say(f"In {language}, {english} is {others[i]}.")
    return run


def email(rng: random.Random) -> Script:
    to = rng.choice(facts.names)
    day = rng.choice(facts.weekdays)
    event = say(rng, "email event")
    user = say(rng, "agent: email", to, event, day)
    run = script(rng, offer(rng, "send_email"), user)
    arguments = {
        "to": f"{to.lower()}@example.com",
        "subject": f"{event.capitalize()} on {day}",
        "body": f"Dear {to}, are you free for {event} on {day}? Best wishes",
    }
    run.use("send_email", arguments, "I'll send the email now:", "sent")
    run.say(f"I sent {to} an email about {event} on {day}.")
    return run


def made_up(rng: random.Random) -> Script:
    """Return a task with a tool that exists in this conversation only."""
    tool, arguments = invented(rng)
    name = tool["function"]["name"]
    values = " and ".join(f"{key} {value}" for key, value in arguments.items())
    user = say(rng, "agent: made up", name, values)
    run = script(rng, (*offer(rng), tool), user)
    if rng.random() < 0.8:
        status = "ok"
        answer = f"Done. {name} returned ok."
    else:
        status = "failed"
        answer = f"{name} failed. Shall I try again?"
    run.use(name, arguments, f"Let me call {name}:", json.dumps({"status": status}))
    run.say(answer)
    return run


MAKERS: tuple[tuple[Callable[[random.Random], Script], float], ...] = (
    (weather, 1.6),
    (sums, 0.9),
    (read_setting, 1.0),
    (read_all, 1.3),
    (fix_bug, 1.2),
    (write_files, 1.0),
    (shell, 1.2),
    (search, 1.1),
    (email, 0.7),
    (made_up, 1.2),
)


def transcript(rng: random.Random) -> Conversation:
    makers, weights = zip(*MAKERS, strict=True)
    run = rng.choices(makers, weights)[0](rng)
    return Conversation(tuple(run.messages), run.tools)
