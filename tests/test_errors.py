"""Error messages that name remedies, such as extras to install."""

import ast
import sys
import tomllib
from pathlib import Path

import pytest

from dflash_jax.cli import main
from dflash_jax.engine.structured.grammars import Grammars
from dflash_jax.errors import RequestError, install_hint

ROOT = Path(__file__).parents[1]
SOURCES = [
    path for top in ("dflash_jax", "converters", "recipes") for path in (ROOT / top).rglob("*.py")
]


def hinted(path: Path) -> set[str]:
    """Return the extras named by a file's calls of `install_hint`."""
    calls = [n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Call)]
    return {ast.literal_eval(c.args[0]) for c in calls if ast.unparse(c.func) == "install_hint"}


def test_every_hint_to_install_is_one_function_and_names_an_extra_that_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = set().union(*map(hinted, SOURCES))
    assert {"serve", "train", "plot", "hub", "structured"} <= extras
    assert extras <= set(project["optional-dependencies"])
    assert install_hint("serve") == "install the extra from the checkout: pip install -e '.[serve]'"
    name = project["name"]
    assert not [path for path in SOURCES if f"{name}[" in path.read_text("utf-8")]


@pytest.mark.parametrize(
    ("command", "absent", "extra"),
    [
        (["serve"], "uvicorn", "'.[serve]'"),
        (["train", "--out", "run", "--preset", "none"], "optax", "'.[train]'"),
        (["train", "--out", "run", "--preset", "none"], "rich", "'.[train]'"),
        (["train", "--out", "run", "--ray", "local"], "ray", "'.[ray]'"),
    ],
)
def test_a_command_without_its_packages_says_how_to_install_them(
    command: list[str],
    absent: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [n for n in sys.modules if n.partition(".")[0] == absent]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "dflash_jax.server.run", raising=False)
    monkeypatch.setitem(sys.modules, absent, None)
    assert main(command) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert f"install the extra from the checkout: pip install -e {extra}" in line
    assert not list(tmp_path.iterdir())


def test_structured_output_without_its_package_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"needs llguidance; install .*'\.\[structured\]'"):
        Grammars(object(), 8, [1]).make({"choice": ["a"]})  # pyrefly: ignore
