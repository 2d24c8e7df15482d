"""Contents of the wheel, and the one import name of the converters."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Import every module of the converters; print their names, and files loaded twice.
SURVEY = """
import importlib, json, os, pkgutil, sys
import dflash_jax.converters as ours

for found in pkgutil.walk_packages(ours.__path__, ours.__name__ + "."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
files = {}
for name, module in sys.modules.items():
    if (file := getattr(module, "__file__", None)) and "converters" in file:
        files.setdefault(os.path.realpath(file), []).append((name, id(module)))
names = sorted(name for found in files.values() for name, _ in found)
twice = [found for found in files.values() if len({copy for _, copy in found}) > 1]
print(json.dumps({"names": names, "twice": twice, "file": ours.__file__}))
"""
CLASH = "a user's own module of the name converters"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of a wheel, packed by hatchling if it is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    if importlib.util.find_spec("hatchling"):
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder / "dist"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
        [built] = (folder / "dist").glob("*.whl")
        with zipfile.ZipFile(built) as file:
            file.extractall(folder / "site")
        return folder / "site"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, folder / "site" / package, ignore=skip)  # follows links
    return folder / "site"


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a clean environment with the wheel and its dependencies."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/*/site-packages")
    for part in wheel.iterdir():
        part.rename(packages / part.name)
    # Plain folders, whose .pth files, such as that of an editable install, are not read.
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(others) + "\n")
    return folder / "bin" / "python"


def run(python: str | Path, *arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [python, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


def modules() -> list[str]:
    """Return the import names of the converters' files."""
    names = []
    for path in (ROOT / "converters").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] != "__main__":
            names.append(".".join(("dflash_jax", *parts)).removesuffix(".__init__"))
    return sorted(names)


@pytest.mark.exhaustive
def test_a_wheel_installs_one_package_with_the_converters_in_it(python: Path) -> None:
    [packages] = python.parents[1].glob("lib/*/site-packages")
    tops = {p.name for p in packages.iterdir() if not p.name.endswith((".dist-info", ".pth"))}
    assert tops == {"dflash_jax"}
    assert not [p for p in packages.rglob("*") if p.is_symlink()]
    ours = packages / "dflash_jax" / "converters"
    stored = {p.relative_to(ours) for p in ours.rglob("*") if p.suffix in (".py", ".npz")}
    folder = ROOT / "converters"
    kept = {p.relative_to(folder) for p in folder.rglob("*") if p.suffix in (".py", ".npz")}
    assert stored == kept
    page = Path("dflash_jax", "server", "page")
    names = [sorted(p.name for p in (top / page).iterdir()) for top in (packages, ROOT)]
    assert names[0] == names[1]


@pytest.mark.exhaustive
def test_an_installed_wheel_leaves_the_name_converters_to_its_user(
    python: Path, tmp_path: Path
) -> None:
    (tmp_path / "converters.py").write_text(f"TEXT = {CLASH!r}\n")
    done = run(python, "-c", f"{SURVEY}\nimport converters\nprint(converters.TEXT)", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    line, text = done.stdout.splitlines()
    found = json.loads(line)
    assert text == CLASH
    assert found["names"] == modules()
    assert found["twice"] == []
    assert str(python.parents[1]) in found["file"]


@pytest.mark.sample("the module")
@pytest.mark.parametrize(
    "command",
    [
        ["-m", "dflash_jax", "inspect", "tiny/drafter", "--json"],
        ["-m", "dflash_jax.converters", "inspect", "tiny/drafter", "--json"],
    ],
    ids=["the command", "the module"],
)
@pytest.mark.exhaustive
def test_an_installed_wheel_runs_the_commands_about_weight_files(
    command: list[str], python: Path, tmp_path: Path
) -> None:
    done = run(python, *command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["role"] == "drafter"


@pytest.mark.exhaustive
def test_modules_of_a_user_decode_losslessly_with_an_installed_wheel(
    python: Path, tmp_path: Path
) -> None:
    shutil.copy(ROOT / "tests" / "graph" / "own_modules.py", tmp_path)
    done = run(python, "own_modules.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["Bigram", "Heads", "Heads"]


@pytest.mark.exhaustive
def test_the_graph_example_of_the_readme_runs_with_an_installed_wheel(
    python: Path, tmp_path: Path
) -> None:
    examples = (ROOT / "README.md").read_text("utf-8").split("```python\n")[1:]
    [example] = [code.split("```")[0] for code in examples if "dj.Graph(" in code]
    assert "dflash_jax." not in example.replace("import dflash_jax as dj", "")
    done = run(python, "-c", f"{example}\nprint(dj.__file__, out.done.all())", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(python.parents[1]))
    assert done.stdout.endswith("True\n")


def test_a_checkout_imports_the_converters_under_one_name(tmp_path: Path) -> None:
    done = run(sys.executable, "-c", SURVEY, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["names"], found["twice"]) == (modules(), [])
    refused = run(sys.executable, "-c", "import converters.models", cwd=ROOT)
    assert "import dflash_jax.converters instead" in refused.stderr.splitlines()[-1]


def test_running_the_folder_of_a_checkout_runs_the_modules_of_the_package() -> None:
    running = "import contextlib, io, runpy, sys\nsys.argv = ['-m', '--help']\n"
    running += "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
    running += "    runpy.run_module('converters', run_name='__main__', alter_sys=True)\n"
    done = run(sys.executable, "-c", running + SURVEY, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["names"] == sorted([*modules(), "converters"])
    assert found["twice"] == []  # `converters` is the same module as `dflash_jax.converters`


@pytest.mark.exhaustive
def test_an_installed_wheel_reports_where_the_shipped_corpus_is(
    python: Path, tmp_path: Path
) -> None:
    pytest.importorskip("optax", reason="optax is not installed: pip install '.[train]'")
    pytest.importorskip("rich", reason="rich is not installed: pip install '.[train]'")
    done = run(python, "-m", "dflash_jax", "train", "--out", "run", cwd=tmp_path)
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith(
        "dflash-jax: ConfigError: the corpus of the shipped pair is generated by"
    )
    assert "Traceback" not in done.stderr
