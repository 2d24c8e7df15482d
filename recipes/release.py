"""Check a release: `python -m recipes.release [--tag v0.1.0]`. Nothing is published.

One rule for versions: the first heading of CHANGELOG.md is `[Unreleased]` or the version in
dflash_jax/version.py, and versions descend. A tag needs the second.
"""

import argparse
import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

from dflash_jax.errors import DFlashError
from dflash_jax.kernels.native.compiling import LEVELS
from dflash_jax.utils.processor import features
from dflash_jax.version import __version__

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
KERNELS = "dflash_jax/kernels/native/compiled"  # in the wheel for Linux on x86-64
HEADING = re.compile(r"^## (?:\[(Unreleased)\]|\[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d))$")


class ReleaseError(DFlashError):
    """The repository is not what a release needs."""


def check_versions(changelog: str, version: str, tag: str | None = None) -> None:
    """Check that the changelog, the package and a tag name the same version.

    Args:
      changelog: text of CHANGELOG.md.
      version: version of the package.
      tag: tag of the release, "v" and the version; None if there is none yet.

    Raises:
      ReleaseError: they disagree, or a heading is not understood.
    """
    headings = []
    for line in changelog.splitlines():
        if not line.startswith("## "):
            continue
        heading = HEADING.match(line)
        if heading is None:
            expected = "## [Unreleased] or ## [1.2.3] - 2026-01-31"
            raise ReleaseError(f"CHANGELOG.md has the heading {line!r}; expected {expected}")
        headings.append(heading)
    if not headings:
        raise ReleaseError("CHANGELOG.md has no heading of a version")
    if any(match[1] for match in headings[1:]):
        raise ReleaseError("[Unreleased] is not the first heading of CHANGELOG.md")
    released = [match for match in headings if match[2]]
    numbers = [_numbers(match[2]) for match in released]
    dates = [datetime.date.fromisoformat(match[3]) for match in released]
    if numbers != sorted(set(numbers), reverse=True) or dates != sorted(dates, reverse=True):
        raise ReleaseError("the versions of CHANGELOG.md do not descend")
    newest = released[0][2] if released else None
    if (headings[0][2] and version != newest) or (newest and _numbers(version) < numbers[0]):
        raise ReleaseError(
            f"the package has version {version}, and CHANGELOG.md begins with {newest}; change"
            " dflash_jax/version.py, or put [Unreleased] above"
        )
    if tag is not None and (tag != f"v{version}" or newest != version or headings[0][1]):
        raise ReleaseError(
            f"the tag {tag} is not v{version} with [{version}] as the first heading of"
            " CHANGELOG.md; change the tag, the version or the heading"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def build() -> tuple[Path, list[Path]]:
    """Build the source archive, and from it a pure wheel and, where it can, one with kernels.

    Returns:
      The archive, and the wheels, the one for this machine first.

    Raises:
      ReleaseError: a wheel is not that of the checkout, or there are no kernels.
    """
    shutil.rmtree(DIST, ignore_errors=True)
    _run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", DIST)
    [archive] = DIST.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(archive, folder, filter="data")
        [source] = Path(folder).iterdir()
        for kernels in ("0", "1") if _has_kernels() else ("0",):
            command = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", DIST)
            _run(*command, cwd=source, HATCH_BUILD_HOOKS_ENABLE=kernels)
    wheels = sorted(DIST.glob("*.whl"), key=_is_pure)
    for wheel in wheels:
        _check_wheel(wheel)
    expected = 2 if _has_kernels() else 1
    if len(wheels) != expected:
        raise ReleaseError(f"{wheels[0].name} has no compiled kernels; install a C++ compiler")
    return archive, wheels


def _is_pure(wheel: Path) -> bool:
    return wheel.stem.endswith("-any")


def _check_wheel(wheel: Path) -> None:
    """Check that a wheel has every file of the checkout, and its kernels unless it is pure."""
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if name.startswith("dflash_jax/")}
    package = ROOT / "dflash_jax"
    expected = {
        f"dflash_jax/{path.relative_to(package).as_posix()}"
        for folder in (package, package / "converters")  # a link, which rglob does not follow
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    } | {"dflash_jax/py.typed"}
    if not _is_pure(wheel):
        expected |= {f"{KERNELS}/{level.name}.so" for level in LEVELS}
    if missing := sorted(expected - names):
        raise ReleaseError(f"{wheel.name} lacks {', '.join(missing[:5])}")


def try_wheel(wheel: Path) -> None:
    """Install a wheel into a clean environment, and generate text outside the checkout.

    No compiler is in reach, and no cache: the kernels can only be those of the wheel.

    Raises:
      ReleaseError: the command of the wheel has another version, other kernels, or no output.
    """
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder) / "venv", with_pip=True)
        binaries = Path(folder) / "venv" / "bin"
        _run(binaries / "python", "-m", "pip", "install", wheel, cwd=folder)
        command = binaries / "dflash-jax"
        bare = {"PATH": str(binaries), "CXX": "", "XDG_CACHE_HOME": f"{folder}/cache"}
        version = _run(command, "--version", cwd=folder, capture=True)
        if version.split() != ["dflash-jax", __version__]:
            raise ReleaseError(f"the command of the wheel has version {version!r}")
        usable = []
        if _has_kernels():
            usable = [level.name for level in LEVELS if level.needs <= features()]
        for level in usable or ["off"]:
            if usable:
                variables = bare | {"DFLASH_NATIVE": level}
                path = _run(command, "native", cwd=folder, capture=True, **variables)
                if not path.strip().endswith(f"{KERNELS}/{level}.so"):
                    raise ReleaseError(f"the kernels for {level} are {path.strip()}")
            arguments = ("generate", "Hello", "--max-tokens", "64")
            text = _run(command, *arguments, cwd=folder, capture=True, **bare)
            if not text.strip():
                raise ReleaseError("the command of the wheel generated no text")
            print(f"kernels {level}: {text}")


def _has_kernels() -> bool:
    """Return whether wheels for this machine have compiled kernels."""
    return (sys.platform, platform.machine()) == ("linux", "x86_64")


def _run(
    *command: str | Path, cwd: str | Path = ROOT, capture: bool = False, **variables: str
) -> str:
    """Run a command that does not see the checkout; return its output if `capture`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= variables
    output = subprocess.PIPE if capture else None
    ended = subprocess.run(command, cwd=cwd, env=environment, stdout=output, text=True, check=False)
    if ended.returncode:
        raise ReleaseError(f"{' '.join(map(str, command))} ended with {ended.returncode}")
    return ended.stdout or ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the versions, build all files, try a wheel, and run the packaging tests."""
    parser = argparse.ArgumentParser(prog="python -m recipes.release", description=main.__doc__)
    parser.add_argument("--tag", help="tag of the release, such as v0.1.0")
    tag = parser.parse_args(arguments).tag or None
    try:
        check_versions((ROOT / "CHANGELOG.md").read_text("utf-8"), __version__, tag)
        archive, wheels = build()
        try_wheel(wheels[0])
        _run(sys.executable, "-m", "pytest", "-n", "0", "tests/test_packaging.py")
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    print(f"{', '.join(path.name for path in (archive, *wheels))} are in {DIST}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
