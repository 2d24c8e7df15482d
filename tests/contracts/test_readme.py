"""The code blocks of README.md and docs/ run as written, on the shipped pair; commands parse."""

import importlib.util
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest

import dflash_jax as dj
from benchmarks import documents, pictures
from dflash_jax import loading
from dflash_jax.cli import main, parser
from dflash_jax.cli.train import default_preset
from dflash_jax.engine.engine import Engine
from dflash_jax.ray import given_options, scaling_options
from dflash_jax.server.run import ServerConfig
from dflash_jax.trainer.recipes import recipe
from tests.server.conftest import LiveServer, run_server

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[2]
# Pages with files of other programs. tests/server/test_operating.py tries those of the first one.
OTHERS = ("operating.md", "agents.md")
DOCS = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in OTHERS]
PAGES = (ROOT / "README.md", *DOCS)
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in PAGES}
URL = "http://127.0.0.1:8000"
# That of tests/server/test_agents.py: programs are compiled once for both.
PLAN = dj.Plan(max_length=1024, prefix_cache=2**26)
# Models that no checkout has, and shipped ones that replace them here.
STAND_INS = {
    "path/to/Qwen3-8B-DFlash-b16": "tiny",
    "path/to/Qwen3-8B": "tiny",
    "runs/qwen/drafter": "tiny/drafter",
}


class Block(NamedTuple):
    """A fenced block of code."""

    page: str
    language: str
    text: str


BLOCKS = [
    Block(page, *found)
    for page, text in TEXTS.items()
    for found in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
]
PYTHON, SHELL = (
    [block for block in BLOCKS if (block.language, URL in block.text) == (kind, False)]
    for kind in ("python", "sh")
)
SCREENS, CONFIGS, TABLES = (
    [block for block in BLOCKS if block.language == kind] for kind in ("text", "yaml", "toml")
)
REQUESTS = [block.text for block in BLOCKS if block.language == "sh" and URL in block.text]
[CLIENT] = [block.text for block in BLOCKS if block.language == "python" and URL in block.text]
COMMANDS = [(block.page, line) for block in SHELL for line in block.text.splitlines()]
INLINE = {page: re.findall(r"`dflash-jax ([^`]+)`", text) for page, text in TEXTS.items()}


def with_stand_ins(text: str) -> str:
    for path, name in STAND_INS.items():
        text = text.replace(path, name)
    return text


def printed(text: str) -> list[str]:
    """Return the output that comments after calls of `print` name, after their last semicolon."""
    comments = re.findall(r"^ *print\(.*\)  # (.*)$", text, re.MULTILINE)
    return [comment.split("; ")[-1] for comment in comments]


def named(blocks: list[Block]) -> list[Any]:
    return [pytest.param(block.text, id=f"{block.page}-{i}") for i, block in enumerate(blocks)]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return dj.load("tiny", plan=PLAN)


@pytest.fixture(scope="module")
def live(engine: Engine) -> Iterator[LiveServer]:
    found = run_server(lambda: engine, ServerConfig(port=0, drain=1))
    yield found
    found.stop()


def test_every_block_is_of_a_kind_that_these_tests_run() -> None:
    assert sum(text.count("```") for text in TEXTS.values()) == 2 * len(BLOCKS)
    kinds = (PYTHON, SHELL, SCREENS, CONFIGS, TABLES, REQUESTS, [CLIENT])
    assert len(BLOCKS) == sum(map(len, kinds))
    assert len(PYTHON) >= 7
    assert REQUESTS
    programs = {line.split()[0] for _, line in COMMANDS}
    assert programs <= {"make", "pip", "dflash-jax", "python", "serve"}


@pytest.mark.parametrize("text", named(PYTHON))
def test_python_runs_and_prints_what_its_comments_say(
    text: str,
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def shared(target: str, drafter: str = "own", *, plan: dj.Plan | None = None) -> Engine:
        """One engine for all blocks, after all that `load` does before it reads weights."""
        pair = loading.open_pair(target, drafter)
        pair.planned(plan or dj.Plan())
        return engine

    def unmeasured(*names: str, **options: Any) -> Engine:
        """An engine that compiles no programs for what it might measure."""
        made = loading.load(*names, **options)
        made.measures_drafting = False
        return made

    if "import ray" in text:
        pytest.skip("run by tests/soak/test_ray.py, where Ray is installed")
    monkeypatch.chdir(tmp_path)
    # These change their engine, or need another plan.
    words = ("update_params", ".export(", "report_top", "exact=False")
    own = any(word in text for word in words)
    monkeypatch.setattr(dj, "load", unmeasured if own else shared)
    space: dict[str, Any] = {}
    with jax.numpy_dtype_promotion("standard" if own else jax.config.jax_numpy_dtype_promotion):
        exec(compile(with_stand_ins(text), "block", "exec"), space)
    out = capsys.readouterr().out
    if "# [B, T, V]" not in text:  # shapes by name
        assert not [comment for comment in printed(text) if comment not in out]
    if "engine.submit(prompt, max_tokens=64):" in text:
        assert "1. red" in space["result"].text
        assert out.count(space["result"].text) == 2  # whole, then streamed
    if "answers" in space:
        assert len(space["answers"]) == 4
        assert space["answer"].text in ("red", "blue")


def test_an_openai_client_has_its_agent_answered(
    live: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    space: dict[str, Any] = {}
    exec(compile(CLIENT.replace(URL, live.url), "block", "exec"), space)
    space["client"].close()
    assert "tool" in [message["role"] for message in space["talk"]]
    assert printed(CLIENT) == [capsys.readouterr().out.strip()]


def test_the_terminal_of_the_picture_shows_what_the_model_answers(engine: Engine) -> None:
    result = documents.read("terminal")
    assert result["command"] == documents.SHOWN
    assert result["command"] in TEXTS["README.md"]
    cells = pictures.colour_cells(result["output"])
    text = "".join(cell.letter for cell in cells if cell.kind != "rejected")
    prompt = shlex.split(result["command"])[2]
    answer = engine.chat([{"role": "user", "content": prompt}], max_tokens=64).text
    assert text.startswith(answer)


@pytest.mark.parametrize("text", REQUESTS)
def test_curl_streams_an_answer(text: str, live: LiveServer) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = ["sh", "-ec", text.replace(URL, live.url)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.startswith("data: {")
    assert found.stdout.endswith("data: [DONE]\n\n")
    assert "red" in found.stdout


@pytest.mark.parametrize("page", dict.fromkeys(page for page, _ in COMMANDS))
def test_commands_of_blocks_exist_and_cheap_ones_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (line for where, line in COMMANDS if where == page):
        check_command(*shlex.split(with_stand_ins(command), comments=True))


def check_command(program: str, *words: str) -> None:
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        assert set(words) <= set(targets)
    elif program == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        extras = re.findall(r"\.\[([\w,]+)\]", " ".join(words))
        names = {name for extra in extras for name in extra.split(",")}
        assert names <= set(project["optional-dependencies"])
    elif program == "serve":
        assert words[:2] == ("run", "dflash_jax.ray:app")
        given_options(dict(word.split("=") for word in words[2:]), {})
    elif program == "python":
        assert words[0] == "-m"
        assert importlib.util.find_spec(words[1])
    elif words[0] in ("export", "convert", "compare", "inspect") and "--imatrix" not in words:
        assert main(words) == 0
        assert words[0] not in ("export", "convert") or Path(words[2]).exists()
    elif words[0] == "generate" and not {"--target", "--drafter"} & set(words):
        assert main(words) == 0
    elif words == ("serve",):
        assert main([*words, "--check"]) == 0
    else:
        options = parser().parse_args(words)
        if words[0] == "train":
            recipe(options.preset or default_preset(options.target), options.settings)


@pytest.mark.parametrize("text", named(CONFIGS))
def test_configurations_have_options_that_exist(text: str) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    for application in yaml.safe_load(text).get("applications", ()):
        assert application["import_path"] == "dflash_jax.ray:app"
        options, scaling = given_options(application["args"], {})
        scaling_options(scaling, options.plan.rows)


@pytest.mark.parametrize("page", [page for page, found in INLINE.items() if found])
def test_commands_in_running_text_parse(page: str) -> None:
    for command in INLINE[page]:
        words = shlex.split(command)
        if words[1:] in (["--help"], ["--help-all"]) or len(words) == 1:
            with pytest.raises(SystemExit) as ended:
                parser().parse_args([words[0], "--help"])
            assert ended.value.code == 0
        else:
            parser().parse_args(words)


def test_there_are_commands_in_running_text() -> None:
    assert sum(" " in command for found in INLINE.values() for command in found) >= 8


@pytest.mark.parametrize("page", TEXTS)
def test_settings_and_modules_that_pages_name_exist(page: str) -> None:
    for settings in re.findall(r"--set \w+=\w+(?: --set \w+=\w+)*", TEXTS[page]):
        if "KEY=VALUE" not in settings:
            recipe("tiny-cpu", settings.removeprefix("--set ").split(" --set "))
    for name in re.findall(r"--preset ([\w-]+)", TEXTS[page]):
        recipe(name, [])
    for module in re.findall(r"\b(?:python -m |`)(benchmarks\.\w+|converters)\b", TEXTS[page]):
        assert importlib.util.find_spec(module)
