"""Makers of coding exchanges: short Python functions, their explanation, shell commands."""

import random

from recipes.tiny.corpus import knowledge
from recipes.tiny.corpus.exchange import Exchange, Maker

# what it does -> (usual name, parameters, body)
FUNCTIONS: dict[str, tuple[str, str, str]] = {
    "adds two numbers": ("add", "a, b", "return a + b"),
    "subtracts two numbers": ("subtract", "a, b", "return a - b"),
    "multiplies two numbers": ("multiply", "a, b", "return a * b"),
    "returns the square of a number": ("square", "n", "return n * n"),
    "returns the cube of a number": ("cube", "n", "return n * n * n"),
    "checks whether a number is even": ("is_even", "n", "return n % 2 == 0"),
    "checks whether a number is odd": ("is_odd", "n", "return n % 2 == 1"),
    "returns the larger of two numbers": ("larger", "a, b", "return a if a > b else b"),
    "returns the absolute value of a number": ("absolute", "n", "return n if n >= 0 else -n"),
    "returns the average of a list": (
        "average",
        "values",
        "if not values:\n    return 0.0\nreturn sum(values) / len(values)",
    ),
    "sums a list": (
        "total",
        "values",
        "result = 0\nfor value in values:\n    result += value\nreturn result",
    ),
    "finds the largest value in a list": (
        "largest",
        "values",
        "best = values[0]\nfor value in values:\n    if value > best:\n        best = value\n"
        "return best",
    ),
    "finds the smallest value in a list": (
        "smallest",
        "values",
        "best = values[0]\nfor value in values:\n    if value < best:\n        best = value\n"
        "return best",
    ),
    "reverses a string": ("reverse", "text", "return text[::-1]"),
    "checks whether a word is a palindrome": (
        "is_palindrome",
        "text",
        "text = text.lower()\nreturn text == text[::-1]",
    ),
    "counts the vowels in a string": (
        "count_vowels",
        "text",
        'return sum(1 for char in text.lower() if char in "aeiou")',
    ),
    "counts the words in a text": ("count_words", "text", "return len(text.split())"),
    "returns the factorial of a number": (
        "factorial",
        "n",
        "result = 1\nfor i in range(2, n + 1):\n    result *= i\nreturn result",
    ),
    "returns the n-th Fibonacci number": (
        "fibonacci",
        "n",
        "a, b = 0, 1\nfor _ in range(n):\n    a, b = b, a + b\nreturn a",
    ),
    "checks whether a number is prime": (
        "is_prime",
        "n",
        "if n < 2:\n    return False\nfor i in range(2, int(n**0.5) + 1):\n    if n % i == 0:\n"
        "        return False\nreturn True",
    ),
    "removes duplicates from a list": (
        "unique",
        "values",
        "seen = []\nfor value in values:\n    if value not in seen:\n        seen.append(value)\n"
        "return seen",
    ),
    "sorts a list of words by length": ("by_length", "words", "return sorted(words, key=len)"),
    "counts how often each word occurs": (
        "word_counts",
        "text",
        "counts = {}\nfor word in text.split():\n    counts[word] = counts.get(word, 0) + 1\n"
        "return counts",
    ),
    "flattens a list of lists": (
        "flatten",
        "rows",
        "return [value for row in rows for value in row]",
    ),
    "reads a file and returns its lines": (
        "read_lines",
        "path",
        "with open(path) as file:\n    return file.read().splitlines()",
    ),
    "writes text to a file": (
        "write_text",
        "path, text",
        'with open(path, "w") as file:\n    file.write(text)',
    ),
    "greets a person by name": ("greet", "name", 'return f"Hello, {name}!"'),
    "converts Celsius to Fahrenheit": ("to_fahrenheit", "celsius", "return celsius * 9 / 5 + 32"),
    "swaps the keys and values of a dictionary": (
        "invert",
        "mapping",
        "return {value: key for key, value in mapping.items()}",
    ),
    "returns the greatest common divisor of two numbers": (
        "gcd",
        "a, b",
        "while b:\n    a, b = b, a % b\nreturn a",
    ),
}

ALIASES = ("solve", "compute", "helper", "my_function", "run", "work", "process", "task")


def source(name: str, parameters: str, body: str) -> str:
    """The source text of a function, its body indented by four spaces."""
    lines = "\n".join("    " + line for line in body.split("\n"))
    return f"def {name}({parameters}):\n{lines}"


def write_function(rng: random.Random) -> Exchange:
    """A function written to order, at times under a name that the user gives."""
    purpose = rng.choice(tuple(FUNCTIONS))
    name, parameters, body = FUNCTIONS[purpose]
    if rng.random() < 0.4:
        name = rng.choice((*ALIASES, name))
        user = rng.choice(
            (
                f"Write a function called {name} that {purpose}.",
                f"I need a Python function named {name} that {purpose}.",
                f"Define {name}, a function that {purpose}.",
            )
        )
    else:
        user = rng.choice(
            (
                f"Write a function that {purpose}.",
                f"Write a Python function that {purpose}.",
                f"Can you write a function that {purpose}?",
                f"Please give me a function that {purpose}.",
                f"Show me Python code that {purpose}.",
                f"I need a function that {purpose}.",
            )
        )
    return Exchange(user, f"```python\n{source(name, parameters, body)}\n```")


def explain_function(rng: random.Random) -> Exchange:
    """What a given function does."""
    purpose = rng.choice(tuple(FUNCTIONS))
    name, parameters, body = FUNCTIONS[purpose]
    name = rng.choice((*ALIASES, name))
    lead = rng.choice(("What does this do?", "Explain this code:", "Explain this function:"))
    code = source(name, parameters, body)
    return Exchange(
        f"{lead}\n\n```python\n{code}\n```",
        f"The function `{name}` {purpose}. It is called as `{name}({parameters})`.",
    )


def shell(rng: random.Random) -> Exchange:
    """A shell command for a purpose."""
    purpose = rng.choice(tuple(knowledge.COMMANDS))
    user = rng.choice(
        (
            "How do I {} in the shell?",
            "Which command do I use to {}?",
            "Give me a command to {}.",
            "What is the bash command to {}?",
            "How can I {} from the terminal?",
        )
    )
    return Exchange(
        user.format(purpose),
        f"You can {purpose} with this command:\n\n```bash\n{knowledge.COMMANDS[purpose]}\n```",
    )


MAKERS: tuple[tuple[Maker, float], ...] = (
    (write_function, 2.6),
    (explain_function, 0.8),
    (shell, 0.8),
)
