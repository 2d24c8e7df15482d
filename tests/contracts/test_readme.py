"""The README's code blocks run as they are written, on the shipped pair; its commands parse."""

import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import dflash_jax as dj
from dflash_jax import loading
from dflash_jax.cli import main, parser
from dflash_jax.engine.engine import Engine
from dflash_jax.server.run import ServerConfig
from dflash_jax.train.recipes import recipe
from tests.server.conftest import LiveServer, run_server

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
URL = "http://127.0.0.1:8000"
# That of tests/server/test_agents.py: programs are compiled once for both.
PLAN = dj.Plan(max_length=1024, prefix_cache=2**26)
# Models that no checkout has, and those that take their places.
STAND_INS = {
    "path/to/Qwen3-8B-DFlash-b16": "tiny",
    "path/to/Qwen3-8B": "tiny",
    "runs/mine/drafter": "tiny/drafter",
}


class Block(NamedTuple):
    """A fenced block of code."""

    language: str
    text: str


BLOCKS = [
    Block(*found)
    for found in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
]
PYTHON, SHELL, REQUESTS = (
    [block.text for block in BLOCKS if (block.language, URL in block.text) == kind]
    for kind in (("python", False), ("sh", False), ("sh", True))
)
[CLIENT] = [block.text for block in BLOCKS if block.language == "python" and URL in block.text]
COMMANDS = [line for text in SHELL for line in text.splitlines()]


def standing_in(text: str) -> str:
    for path, name in STAND_INS.items():
        text = text.replace(path, name)
    return text


def printed(text: str) -> list[str]:
    """Return the output that comments after calls of `print` name, after their last semicolon."""
    comments = re.findall(r"^ *print\(.*\)  # (.*)$", text, re.MULTILINE)
    return [comment.split("; ")[-1] for comment in comments]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return dj.load("tiny", plan=PLAN)


@pytest.fixture(scope="module")
def live(engine: Engine) -> Iterator[LiveServer]:
    found = run_server(lambda: engine, ServerConfig(port=0, drain=1))
    yield found
    found.stop()


def test_every_block_is_of_a_kind_that_these_tests_run() -> None:
    assert README.count("```") == 2 * len(BLOCKS)
    assert len(BLOCKS) == len(PYTHON) + len(SHELL) + len(REQUESTS) + 1
    assert len(PYTHON) >= 3
    assert REQUESTS
    assert all(line.split()[0] in ("make", "pip", "dflash-jax") for line in COMMANDS)


@pytest.mark.parametrize("text", PYTHON, ids=[f"block{i}" for i in range(len(PYTHON))])
def test_python_runs_and_prints_what_its_comments_say(
    text: str, engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shared(target: str, drafter: str = "auto", *, plan: dj.Plan | None = None) -> Engine:
        """One engine for all blocks, after all that `load` does before it reads weights."""
        pair = loading.open_pair(target, drafter)
        loading.resolve_here(plan or dj.Plan(), *pair.configs)
        return engine

    monkeypatch.setattr(dj, "load", shared)
    space: dict[str, Any] = {}
    exec(compile(standing_in(text), "README.md", "exec"), space)
    out = capsys.readouterr().out
    assert not [comment for comment in printed(text) if comment not in out]
    if "answers" in space:
        assert "1. red" in space["result"].text
        assert out.count(space["result"].text) == 2  # whole, then streamed
        assert len(space["answers"]) == 4
        assert space["answer"].text in ("red", "blue")


def test_an_openai_client_has_its_agent_answered(
    live: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    space: dict[str, Any] = {}
    exec(compile(CLIENT.replace(URL, live.url), "README.md", "exec"), space)
    space["client"].close()
    assert "tool" in [message["role"] for message in space["talk"]]
    assert printed(CLIENT) == [capsys.readouterr().out.strip()]


@pytest.mark.parametrize("text", REQUESTS)
def test_curl_streams_an_answer(text: str, live: LiveServer) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = ["sh", "-ec", text.replace(URL, live.url)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.startswith("data: {")
    assert found.stdout.endswith("data: [DONE]\n\n")
    assert "red" in found.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_a_block_exist_and_cheap_ones_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, *words = shlex.split(standing_in(command), comments=True)
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        assert set(words) <= set(targets)
    elif program == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        extras = re.findall(r"\.\[([\w,]+)\]", command)
        assert set(",".join(extras).split(",")) <= set(project["optional-dependencies"])
    elif words[0] == "export":
        monkeypatch.chdir(tmp_path)
        assert main(words) == 0
        assert (tmp_path / words[2]).is_file()
    else:
        options = parser().parse_args(words)
        if words[0] == "train":
            recipe(options.preset, options.settings)


def test_commands_in_running_text_parse() -> None:
    commands = re.findall(r"`dflash-jax ([^`]+)`", README)
    whole = [shlex.split(command) for command in commands if " " in command]  # the rest are names
    assert len(whole) >= 4
    for words in whole:
        parser().parse_args(words)
