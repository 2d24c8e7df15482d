"""Programs kept on disk. A process of its own: a run of tests has its cache already."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_jax.testing import QUICK_COMPILE

CASE = """
import logging, sys
from pathlib import Path
import jax
from dflash_jax.graph.cache import enable_compilation_cache

logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
folder = Path(sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
enable_compilation_cache(folder)

def compiled():
    jax.clear_caches()
    jax.jit(lambda x: x + 1).lower(1.0).compile()

compiled()
[entry] = folder.glob("*-cache")
whole = entry.read_bytes()
entry.write_bytes(whole[: len(whole) // 2])
compiled()
assert len(entry.read_bytes()) > len(whole) / 2
compiled()
"""


POISON = """
import logging, os, sys
from pathlib import Path
import jax
from dflash_jax.graph.cache import enable_compilation_cache

logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
folder = Path(sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
enable_compilation_cache(folder)

def one(x):
    return x + 1

def two(x):
    return x * 7

def results():
    jax.clear_caches()
    return [float(jax.jit(f).lower(1.0).compile()(5.0)) for f in (one, two)]

assert results() == [6, 35]
entries = [next(folder.glob(f"jit_{name}-*-cache")) for name in ("one", "two")]
whole = [entry.read_bytes() for entry in entries]
flipped = bytearray(whole[0])
flipped[-9] ^= 1
poison = [
    whole[::-1],  # each is the other program
    [os.urandom(len(whole[0])), b""],
    [bytes(flipped), whole[1][:-1]],
    [whole[0][:60], whole[1] + whole[0]],
]
for contents in poison:
    for entry, content in zip(entries, contents):
        entry.write_bytes(content)
    assert results() == [6, 35], contents
    # Compiled again, and kept: the next process reads them.
    assert all(content.startswith(b"dflash_jax entry") for content in map(Path.read_bytes, entries))
    assert results() == [6, 35]
"""


@pytest.mark.exhaustive
def test_no_poisoned_entry_is_executed(tmp_path: Path) -> None:
    done = python(POISON, tmp_path / "xla")
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert done.stdout.count("was damaged, and is made again") >= 6


def python(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that knows nothing of the tests' own cache."""
    known = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "DFLASH_"))}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(
        command, env=known | environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.exhaustive
def test_a_half_written_program_is_removed_and_written_again(tmp_path: Path) -> None:
    done = python(CASE, tmp_path / "xla")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("was damaged, and is made again") == 1
    assert "Warning" not in done.stderr
    assert (tmp_path / "xla").stat().st_mode & 0o777 == 0o700


FOLDER = """
import json, sys, warnings
import jax
from dflash_jax.graph.cache import use_compilation_cache

arguments, own = json.loads(sys.argv[1])
if own:
    jax.config.update("jax_compilation_cache_dir", own)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    found = [use_compilation_cache(*arguments) for _ in range(2)]
names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
assert found[0] == found[1]
print(json.dumps([found[0] and str(found[0]), *(jax.config.values[n] for n in names), len(said)]))
"""


def chosen(
    *arguments: object, own: Path | None = None, **environment: object
) -> tuple[str | None, str | None, float, int]:
    """The folder that is returned, JAX's, its threshold, and how many warnings there were."""
    given = json.dumps([arguments, own and str(own)])
    done = python(FOLDER, given, **{name: str(value) for name, value in environment.items()})
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


@pytest.mark.exhaustive
def test_the_default_folder_is_the_user_s_and_the_environment_has_its_say(tmp_path: Path) -> None:
    home = {"XDG_CACHE_HOME": tmp_path}
    default = str(tmp_path / "dflash_jax" / "xla")
    assert chosen(**home) == (default, default, 0.1, 0)
    assert chosen(DFLASH_COMPILATION_CACHE="on", **home) == (default, default, 0.1, 0)
    assert chosen(DFLASH_COMPILATION_CACHE="off", **home) == (None, None, 1.0, 0)
    other = str(tmp_path / "other")
    assert chosen(DFLASH_COMPILATION_CACHE=other, **home) == (other, other, 0.1, 0)


@pytest.mark.exhaustive
def test_an_argument_goes_before_the_environment(tmp_path: Path) -> None:
    default, off = str(tmp_path / "dflash_jax" / "xla"), {"DFLASH_COMPILATION_CACHE": "off"}
    assert chosen(True, XDG_CACHE_HOME=tmp_path, **off)[0] == default
    assert chosen(False, XDG_CACHE_HOME=tmp_path)[:2] == (None, None)
    assert chosen(str(tmp_path / "own"), **off)[0] == str(tmp_path / "own")


@pytest.mark.exhaustive
def test_a_folder_and_a_threshold_that_jax_was_given_stay(tmp_path: Path) -> None:
    own = tmp_path / "own"
    for arguments in ((), (True,), (False,), (str(tmp_path / "own"),)):
        assert chosen(*arguments, own=own) == (str(own), str(own), 1.0, 0)
    patient = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "7"}
    assert chosen(True, XDG_CACHE_HOME=tmp_path, **patient)[2] == 7
    assert not own.exists()
    assert not (tmp_path / "own").exists()


@pytest.mark.exhaustive
def test_a_folder_that_cannot_be_written_is_a_warning_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    folder, given, _, warned = chosen(XDG_CACHE_HOME=tmp_path / "file")
    assert (folder, given) == (None, None)
    assert warned == 2  # one a call


@pytest.mark.exhaustive
def test_a_folder_that_others_may_write_to_is_replaced_by_a_private_one(tmp_path: Path) -> None:
    shared, temporary = tmp_path / "shared", tmp_path / "temporary"
    for folder in (shared, temporary):
        folder.mkdir()
        folder.chmod(0o1777)
    own = temporary / f"dflash_jax-{os.geteuid()}" / "xla"
    given = {"DFLASH_COMPILATION_CACHE": shared, "TMPDIR": temporary}
    assert chosen(**given) == (str(own), str(own), 0.1, 1)  # said once
    assert own.stat().st_mode & 0o777 == 0o700
    assert list(shared.iterdir()) == []


PLANTED = """
import logging, os, sys
from pathlib import Path
import jax
from dflash_jax.graph.cache import enable_compilation_cache

logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
enable_compilation_cache(Path(sys.argv[1]))
jax.jit(lambda x: x + 1).lower(1.0).compile()
"""


@pytest.mark.exhaustive
def test_entries_that_are_no_files_of_the_user_are_compiled_again(tmp_path: Path) -> None:
    """A link and a pipe, which JAX would read, or wait for, and entries that all may change."""
    folder = tmp_path / "xla"
    assert python(PLANTED, folder).returncode == 0
    [entry] = folder.glob("*-cache")
    outside = tmp_path / "outside"
    entry.rename(outside)
    kept = outside.read_bytes()
    for plant in (
        lambda: entry.symlink_to(outside),
        lambda: os.mkfifo(entry),
        lambda: (entry.write_bytes(kept), entry.chmod(0o666)),
    ):
        plant()
        done = python(PLANTED, folder)
        assert done.returncode == 0, done.stderr
        assert f"{entry} is made again: " in done.stdout
        assert entry.is_file()
        assert not entry.is_symlink()
        assert outside.read_bytes() == kept
        entry.unlink()


HOMELESS = """
import sys
from pathlib import Path
import jax

def nobody():
    raise RuntimeError("Could not determine home directory.")

Path.home = nobody
import dflash_jax as dj
from dflash_jax.cli.options import use_compilation_cache

use_compilation_cache()
dj.load(sys.argv[1], None)
assert jax.config.values["jax_compilation_cache_dir"] is None
"""


@pytest.mark.exhaustive
def test_without_a_folder_models_load_and_one_line_says_so(oracle: Path) -> None:
    done = python(HOMELESS, oracle / "drafters" / "target_small", XDG_CACHE_HOME="")
    assert done.returncode == 0, done.stderr
    command, warned = (line for line in done.stderr.splitlines() if "Could not determine" in line)
    says = "compiled programs are not kept between processes (Could not determine home directory.)"
    assert command.startswith(f"dflash-jax: {says}; set DFLASH_COMPILATION_CACHE to a folder")
    assert warned.startswith(f"<string>:14: UserWarning: {says}")  # where `load` was called


TWICE = """
import sys
import dflash_jax as dj

target, drafter = sys.argv[1:]
engine = dj.load(target, drafter, plan=dj.Plan(max_length=96, chunk=16, block=2))
print(engine.generate([1, 2, 3], max_tokens=4).token_ids)
"""


@pytest.mark.exhaustive
def test_a_second_process_reads_what_the_first_one_compiled(tmp_path: Path, oracle: Path) -> None:
    models = [oracle / "drafters" / name for name in ("target_qwen3", "v1_trained")]
    native = Path(os.environ["XDG_CACHE_HOME"]) / "dflash_jax" / "native"  # of all tests
    quick = {"XLA_FLAGS": " ".join(QUICK_COMPILE), "DFLASH_NATIVE": str(native)}
    quick |= {"XDG_CACHE_HOME": str(tmp_path)}
    logged = quick | {"JAX_LOGGING_LEVEL": "DEBUG"}
    first = python(TWICE, *models, **logged)
    assert first.returncode == 0, first.stderr
    programs = tmp_path / "dflash_jax" / "xla" / "programs"
    kept = {path.name for path in programs.iterdir()}
    assert {name.rpartition(".")[2] for name in kept} == {"note", "program"}
    second = python(TWICE, *models, **logged)
    assert second.stdout == first.stdout
    for name in ("prefill_sampled", "speculative_sampled"):  # in what JAX says when it compiles
        assert name in first.stderr
        assert name not in second.stderr
    assert kept == {path.name for path in programs.iterdir()}
