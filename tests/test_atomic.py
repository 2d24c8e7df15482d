"""Writes are atomic even if the process is killed, and leftovers are removed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_jax.errors import CheckpointError
from dflash_jax.utils import atomic
from dflash_jax.utils.atomic import new_path

ORACLE = Path(__file__).parent / "oracle"
# Fork a process for each step: imports take seconds, and forks fail once tensorstore was used.
# Conversions are killed at a random time, or at one of the steps that Python reports (files opened,
# made, renamed and removed).
KILLED = """
import json, os, random, shutil, signal, sys, time
from pathlib import Path
from dflash_jax.converters.convert import convert
from dflash_jax.converters.models import open_model
import orbax.checkpoint

source, home, to, replaces, count = json.loads(sys.argv[1])
home, random = Path(home), random.Random(3)
STEPS = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.listdir", "os.scandir")
report = home / "report"

def forked(work):
    child = os.fork()
    if child:
        return child
    try:
        report.write_text(str(work()))
    finally:
        os._exit(0)

def answer(work):
    report.unlink(missing_ok=True)
    os.waitpid(forked(work), 0)
    return report.read_text()

def converted(place, dtype, kill_at_step=0):
    steps = [0]
    def count_steps(event, _):
        if event in STEPS:
            steps[0] += 1
            if steps[0] == kill_at_step:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count_steps)
    convert(open_model(source), place, to=to, dtype=dtype, overwrite=True)
    return steps[0]

def state(place):
    if not os.path.lexists(place):
        return "absent"
    model = open_model(place)
    model.check()
    model.load("float32")
    if to != "gguf":
        json.loads((place / "conversion.json").read_text())
    return model.config.dtype

def fresh(i):
    place = home / f"x{i}{ending}"
    if replaces:
        (shutil.copy if ending else shutil.copytree)(home / f"first{ending}", place)
    return place

ending = ".gguf" if to == "gguf" else ""
answer(lambda: converted(home / f"first{ending}", "float32"))
began, place = time.monotonic(), fresh(0)
steps = int(answer(lambda: converted(place, "float16")))
took = time.monotonic() - began
late = [steps - i for i in range(6)]  # writing the manifest, renaming, removing what was there
points = [(0, random.uniform(0, took)) for _ in range(count)]
points += [(step, 60) for step in (*random.sample(range(1, steps), count), *late)]
found = []
for i, (step, seconds) in enumerate(points, 1):
    place = fresh(i)
    child, end = forked(lambda: converted(place, "float16", step)), time.monotonic() + seconds
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.001)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    left = len(list(home.glob(".*")))
    came = answer(lambda: state(place))
    answer(lambda: converted(place, "float16"))
    found.append([came, left, len(list(home.glob(".*"))), answer(lambda: state(place))])
print(json.dumps(found))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize(
    "to", ["orbax", *(pytest.param(to, marks=pytest.mark.soak) for to in ("safetensors", "gguf"))]
)
def test_a_killed_conversion_leaves_what_was_there_or_a_whole_model(
    tmp_path: Path, to: str, replaces: bool
) -> None:
    source = str(ORACLE / "drafters" / "v2")
    given = json.dumps([source, str(tmp_path), to, replaces, 3])
    command = [sys.executable, "-W", "ignore", "-c", KILLED, given]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    states = {state for state, *_ in found}
    assert states == ({"float32", "float16"} if replaces else {"absent", "float16"})
    assert any(left for _, left, *_ in found)
    assert all(end == [0, "float16"] for end in (each[2:] for each in found))


def dead() -> int:
    """Return the id of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def left_by(pid: int, place: Path, *, kind: str = "partial") -> Path:
    folder = place.parent / f".{place.name}.{kind}-{pid}-abcd0123"
    folder.mkdir()
    (folder / "weights").write_text("half")
    return folder


def write(place: Path, text: str, *, overwrite: bool = False) -> None:
    with new_path(place, overwrite=overwrite) as at:
        at.mkdir()
        (at / "config.json").write_text(text)


def test_only_leftovers_of_killed_processes_with_the_same_name_are_removed(tmp_path: Path) -> None:
    place = tmp_path / "model"
    gone = [left_by(dead(), place), left_by(dead(), place, kind="old")]
    file = tmp_path / f".model.partial-{dead()}-abcd0123f"
    file.write_text("a GGUF file")
    kept = [left_by(dead(), tmp_path / "model2"), left_by(dead(), tmp_path / "mode")]
    kept += [left_by(os.getpid(), place), left_by(1, place)]
    (tmp_path / ".model.partial-notes").mkdir()
    kept.append(tmp_path / ".model.partial-notes")
    link = tmp_path / f".model.partial-{dead()}-ffff"
    link.symlink_to(kept[0])
    write(place, "{}")
    assert not [path for path in (*gone, file) if path.exists()]
    assert all(path.exists() for path in kept)


def test_a_process_with_a_reused_id_is_another_process(tmp_path: Path) -> None:
    folder = left_by(1, tmp_path / "model")
    os.utime(folder, (1, 1))  # older than any running process
    write(tmp_path / "model", "{}")
    assert not folder.exists()


HOLDS = """
import sys, pathlib
from dflash_jax.utils.atomic import new_path
with new_path(pathlib.Path(sys.argv[1]), overwrite=True) as at:
    at.mkdir()
    (at / "config.json").write_text("theirs")
    print("writes", flush=True)
    sys.stdin.readline()
"""


def test_files_of_running_processes_are_kept(tmp_path: Path) -> None:
    place = tmp_path / "model"
    command = [sys.executable, "-c", HOLDS, str(place)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "writes\n"
        [folder] = tmp_path.glob(".model.partial-*")
        # As by a process of another container, whose id means nothing here, long ago.
        strange = folder.rename(tmp_path / f".model.partial-{dead()}-{folder.name[-8:]}")
        os.utime(strange, (1, 1))
        write(place, "ours")
        assert (strange / "new" / "config.json").read_text() == "theirs"
        strange.rename(folder)
        other.stdin.write("\n")
    assert other.returncode == 0
    assert (place / "config.json").read_text() == "theirs"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_replaced_file_exists_until_the_new_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(atomic, "_exchange", lambda *_: False)
    place = tmp_path / "model"
    write(place, "first")
    write(place, "second", overwrite=True)
    assert (place / "config.json").read_text() == "second"
    with pytest.raises(CheckpointError, match="exists"):
        write(place, "third")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_model_moved_away_by_a_killed_process_is_restored(tmp_path: Path) -> None:
    place = tmp_path / "model"
    write(place, "first")
    folder = left_by(dead(), place)
    place.rename(folder / "old")
    with pytest.raises(CheckpointError, match="exists"), new_path(place, overwrite=False):
        pass
    with pytest.raises(ZeroDivisionError), new_path(place, overwrite=True):
        _ = 1 / 0
    assert (place / "config.json").read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_contents_are_flushed_before_they_get_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, seen = tmp_path / "model", []
    real, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        seen.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        seen.append("renamed")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    write(place, "{}")
    assert seen == ["config.json", "new", "renamed", tmp_path.name]


def test_destinations_with_long_names_have_separate_temporary_files(tmp_path: Path) -> None:
    long = "a" * 200
    folder = left_by(dead(), tmp_path / atomic._stem(tmp_path / f"{long}1"))
    write(tmp_path / f"{long}2", "{}")
    assert folder.exists()
    write(tmp_path / f"{long}1", "{}")
    assert not folder.exists()
