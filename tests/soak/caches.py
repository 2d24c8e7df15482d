"""Attacks on caches, and accidents to them: `python -m tests.soak.caches` prints what each does.

As root, there is another user, `nobody`; other users see the rows that need one as skipped. Two
minutes on two cores. With a checkout of another version as the working directory, as in `cd OLD &&
PYTHONPATH=. python NEW/tests/soak/caches.py`, the rows are those of that version.
"""

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

NOBODY = 65534
PROCESSES = 8
STUB = """#!/bin/sh
test "$1" = --version && { echo stub; exit 0; }
while test "$1" != -o; do shift; done
echo "$2" >> "$0.log"
sleep 300 & echo $! >> "$0.children"
sleep 2
echo made > "$2"
kill $!
"""  # a compiler that takes two seconds, and starts a process, as g++ starts cc1plus
EVIL = """
#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void run(void) { close(open("%s", O_CREAT | O_WRONLY, 0600)); }
"""
PREFIX = """
import os, sys
from pathlib import Path
import numpy as np
from dflash_jax.engine.prefix.disk import PrefixDisk
os.umask(0o22)
options = {"chunk": 4, "budget": 1 << 20, "identity": "0" * 32, "kinds": [("float32", (2,))]}
try:
    disk = PrefixDisk(Path(sys.argv[1]), **options)
    disk.keep((11, 12, 13, 14, 15), {4: [np.ones(2, np.float32)]})
    disk.flush()
except Exception as error:
    print(type(error).__name__, error)
"""
XLA = """
import sys, warnings
import jax
from dflash_jax.graph.cache import use_compilation_cache
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    print(use_compilation_cache())
jax.jit(lambda x: x + 1).lower(1.0).compile()
"""


def run(*command: object, **variables: object) -> "subprocess.CompletedProcess[str]":
    """Run a command that finds no compiled kernels but those of its variables."""
    known = {k: v for k, v in os.environ.items() if not k.startswith(("DFLASH_", "JAX_", "CXX"))}
    variables = {k: str(v) for k, v in variables.items()}
    return subprocess.run(
        [str(word) for word in command],
        env=known | variables,
        capture_output=True,
        text=True,
        timeout=900,
    )


class Caches:
    """A folder to work in, with kernels that were compiled once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.marker = folder / "ran"
        self.made = folder / "made"
        done = self.load(self.made)
        if done.returncode:
            raise RuntimeError(f"there are no native kernels to try: {done.stderr}")
        (folder / "evil.c").write_text(EVIL % self.marker)
        compiler = shutil.which("cc") or "cc"
        command = (compiler, "-shared", "-fPIC", "-o", folder / "evil.so", folder / "evil.c")
        subprocess.run([*map(str, command)], check=True)

    def load(self, folder: Path) -> "subprocess.CompletedProcess[str]":
        """Load the native kernels as every engine does, with a folder for compiled ones."""
        command = (sys.executable, "-m", "dflash_jax", "native")
        return run(*command, DFLASH_NATIVE=folder, TMPDIR=self.folder)

    @contextlib.contextmanager
    def copied(self) -> Iterator[tuple[Path, Path]]:
        """Yield a copy of the folder of kernels, and the library in it."""
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            copy = Path(shutil.copytree(self.made, Path(name) / "native"))
            [library] = copy.glob("*.so")
            yield copy, library

    def planted(self, owner: int, mode: int) -> str:
        """A library of another user, under the name that is looked for."""
        with self.copied() as (folder, library):
            library.unlink()
            evil = self.folder / "evil.so"
            *key, last = library.stem.split("-")
            if len(last) == 64:  # names end with the digest of contents
                key = [*key, hashlib.sha256(evil.read_bytes()).hexdigest()]
            else:
                key = [*key, last]
            planted = folder / f"{'-'.join(key)}.so"
            shutil.copy(evil, planted)
            for path in (planted, folder):
                os.chown(path, owner, owner)
            planted.chmod(0o755)
            folder.chmod(mode)
            self.marker.unlink(missing_ok=True)
            done = self.load(folder)
            executed = "EXECUTED" if self.marker.exists() else "not executed"
            return f"{executed}; {outcome(done, folder)}"

    def spoilt(self, change: Callable[[Path], object]) -> str:
        """A library that was damaged."""
        with self.copied() as (folder, library):
            change(library)
            first, second = self.load(folder), self.load(folder)
            return f"{outcome(first, folder)}; then {outcome(second, folder)}"

    def linked(self) -> str:
        """A link to a library of another folder."""
        with self.copied() as (folder, library):
            library.rename(folder.parent / "elsewhere.so")
            library.symlink_to(folder.parent / "elsewhere.so")
            done = self.load(folder)
            followed = "followed" if library.is_symlink() else "replaced"
            return f"{followed}; {outcome(done, folder)}"

    def first_use(self) -> str:
        """Eight processes that need the kernels at the same time."""
        with self.stub() as (compiler, folder), contextlib.ExitStack() as stack:
            command = [sys.executable, "-m", "dflash_jax", "native"]
            variables = os.environ | {"CXX": str(compiler), "DFLASH_NATIVE": str(folder)}
            options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            running = [
                stack.enter_context(subprocess.Popen(command, env=variables, **options))
                for _ in range(PROCESSES)
            ]
            for process in running:
                process.wait(300)
            count = len(Path(f"{compiler}.log").read_text().splitlines())
            return f"{count} compilers started; {self.survivors(compiler)}"

    def killed(self, victim: str) -> str:
        """The process that compiles, or its compiler, is killed."""
        with self.stub() as (compiler, folder):
            last = "sleep 1; kill -9 $$" if victim == "compiler" else "sleep 60"
            compiler.write_text(STUB.replace("sleep 2\n", f"{last}\n"))
            variables = os.environ | {"CXX": str(compiler), "DFLASH_NATIVE": str(folder)}
            command = [sys.executable, "-m", "dflash_jax", "native"]
            with subprocess.Popen(command, env=variables, stderr=subprocess.DEVNULL) as process:
                children = Path(f"{compiler}.children")
                end = time.monotonic() + 120
                while not children.exists() and time.monotonic() < end:
                    time.sleep(0.05)
                time.sleep(0.5)
                if victim == "process":
                    process.send_signal(signal.SIGKILL)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    return f"the process waits for ever; {self.survivors(compiler)}"
            return self.survivors(compiler)

    @contextlib.contextmanager
    def stub(self) -> Iterator[tuple[Path, Path]]:
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            compiler = Path(name) / "cxx"
            compiler.write_text(STUB)
            compiler.chmod(0o755)
            yield compiler, Path(name) / "native"

    def survivors(self, compiler: Path) -> str:
        """Count the children of compilers that still run some seconds later, and end them."""
        words = Path(f"{compiler}.children").read_text().split()
        end = time.monotonic() + 10
        while any(map(runs, words)) and time.monotonic() < end:
            time.sleep(0.1)
        alive = [word for word in words if runs(word)]
        for word in alive:
            with contextlib.suppress(OSError):
                os.kill(int(word), signal.SIGKILL)
        return f"{len(alive)} of their children still ran" if alive else "no child was left"

    def prefixes(self, mode: int) -> str:
        """The prompts in a prefix folder: who can read them."""
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            folder = Path(name) / "prefixes"
            folder.mkdir()
            home = folder / "prefixes"
            home.mkdir()
            home.chmod(mode)
            done = run(sys.executable, "-c", PREFIX, folder)
            entries = list(home.iterdir())
            if not entries:
                return f"nothing is written: {done.stdout.strip()[:60]}"
            file_mode = entries[0].stat().st_mode & 0o777
            who = "everybody" if file_mode & 0o4 else "the user alone"
            return f"{who} can read the entries; mode {file_mode:o}"

    def programs(self, mode: int) -> str:
        """The folder of XLA's programs, if others may write there."""
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            folder = Path(name) / "xla"
            folder.mkdir()
            folder.chmod(mode)
            done = run(sys.executable, "-c", XLA, DFLASH_COMPILATION_CACHE=folder, TMPDIR=name)
            used = "used" if done.stdout.strip() == str(folder) else "another folder is used"
            return f"{used}; {len(list(folder.glob('*-cache')))} programs in it"


def runs(process: str) -> bool:
    """Return whether a process has not ended, by its number."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def outcome(done: "subprocess.CompletedProcess[str]", folder: Path) -> str:
    if done.returncode < 0:
        return f"the process dies by {signal.Signals(-done.returncode).name}"
    if done.returncode:
        return "no kernels"
    path = Path(done.stdout.strip())
    return "kernels" if path.is_relative_to(folder) else "kernels of a private folder"


def rows(caches: Caches) -> dict[str, Callable[[], str]]:
    """Return what is tried, by name."""
    half = lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])  # noqa: E731
    found: dict[str, Callable[[], str]] = {}
    if os.geteuid() == 0:
        found["library planted in a folder of nobody"] = lambda: caches.planted(NOBODY, 0o755)
        found["library planted by nobody, folder 1777"] = lambda: caches.planted(NOBODY, 0o1777)
    found |= {
        "library planted, folder 777": lambda: caches.planted(os.geteuid(), 0o777),
        "library cut in half": lambda: caches.spoilt(half),
        "library empty": lambda: caches.spoilt(lambda path: path.write_bytes(b"")),
        "library that all may write": lambda: caches.spoilt(lambda path: path.chmod(0o666)),
        "library that is a link": caches.linked,
        "eight processes at first use": caches.first_use,
        "process that compiles killed": lambda: caches.killed("process"),
        "compiler killed": lambda: caches.killed("compiler"),
        "prefix folder, umask 022": lambda: caches.prefixes(0o755),
        "prefix folder that all may write": lambda: caches.prefixes(0o777),
        "XLA's programs, folder 1777": lambda: caches.programs(0o1777),
    }
    return found


def main() -> None:
    """Print a row for each."""
    with tempfile.TemporaryDirectory() as name:
        caches = Caches(Path(name))
        for title, attempt in rows(caches).items():
            print(f"{title:40} {attempt()}", flush=True)


if __name__ == "__main__":
    main()
