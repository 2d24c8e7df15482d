"""Prefixes on disk: read after eviction or restart, or else fed again."""

import dataclasses
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import dflash_jax.engine.prefix.disk as prefix_disk
from dflash_jax import Plan
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.prefix.disk import PrefixDisk
from dflash_jax.errors import PlanError, RequestError
from dflash_jax.graph import Graph
from dflash_jax.networks import build_graph
from dflash_jax.testing import random_engine, tiny_drafter, tiny_hybrid, tiny_target
from dflash_jax.utils.store import Store

CHUNK = 16
# Sampling at this temperature depends on single bits of the state.
SAMPLED: dict[str, Any] = {
    "max_tokens": 12,
    "temperature": 2.0,
    "seed": 5,
}
PROMPT = np.random.default_rng(7).integers(0, 251, 3 * CHUNK + 4).tolist()
OTHER = np.random.default_rng(8).integers(0, 251, 3 * CHUNK + 4).tolist()


def opened(engine: Engine, folder: Path, **fields: Any) -> Engine:
    """Return an engine as after a restart: the same models, and prefixes on disk only."""
    fields = {"prefix_cache": 1 << 20, "prefix_folder": str(folder)} | fields
    plan = dataclasses.replace(engine.plan, **fields)
    made = Engine(Graph(engine.graph.pair, plan), engine.params)
    made.core.runner.compiled.executables = (
        engine.core.runner.executables
    )  # the prefix programs are added
    return made


def disk(engine: Engine) -> PrefixDisk:
    assert engine.core.runner.prefixes
    assert engine.core.runner.prefixes.disk
    return engine.core.runner.prefixes.disk


def entries(folder: Path) -> list[Path]:
    """Return the entries, the one that was used last at the end."""
    return sorted(folder.glob("prefixes/*"), key=lambda entry: entry.lstat().st_mtime_ns)


def path_of(disk: PrefixDisk, prompt: Sequence[int]) -> Path:
    """Return the path of the entry of a prompt's last chunk."""
    return disk._store._path(disk._keys(tuple(prompt), "")[-1])


@pytest.fixture(scope="module")
def truth(tiny: Engine) -> list[int]:
    return tiny.generate(PROMPT, **SAMPLED).token_ids


@pytest.fixture
def folder(tiny: Engine, truth: list[int], tmp_path: Path) -> Path:
    """A folder that holds the prompt's three chunks."""
    engine = opened(tiny, tmp_path)
    assert engine.generate(PROMPT, **SAMPLED).token_ids == truth
    engine.close()
    assert disk(engine).counters.written == 3
    return tmp_path


def test_prefixes_are_restored_after_eviction_and_restart(
    tiny: Engine, truth: list[int], folder: Path
) -> None:
    size = opened(tiny, folder).core.prefix_cache.segment_bytes  # type: ignore[union-attr]
    engine = opened(tiny, folder, prefix_cache=3 * size)
    for _ in range(2):
        again = engine.generate(PROMPT, **SAMPLED)
        assert (again.token_ids, again.stats.cached_tokens) == (truth, 3 * CHUNK)
        engine.generate(OTHER, max_tokens=2)  # takes all of the memory
    assert disk(engine).counters.read >= 6
    assert engine.core.prefix_cache
    assert engine.core.prefix_cache.counters.evictions >= 6


def test_prefixes_of_one_salt_serve_no_other_in_memory_or_on_disk(
    tiny: Engine, truth: list[int], tmp_path: Path
) -> None:
    salts = ("a", "b", "", "a", "\ud800")
    for cached in ([0, 0, 0, 48, 0], [48, 48, 48, 48, 48]):  # the second from disk
        engine = opened(tiny, tmp_path)
        for salt, count in zip(salts, cached, strict=True):
            result = engine.generate(PROMPT, cache_salt=salt, **SAMPLED)
            assert (result.token_ids, result.stats.cached_tokens) == (truth, count), salt
        engine.close()
    assert len(entries(tmp_path)) == 12
    with pytest.raises(RequestError, match="cache_salt is 3; expected a text"):
        tiny.generate(PROMPT, cache_salt=3)  # type: ignore[arg-type]


def test_a_failing_disk_costs_the_prefixes_but_no_request(
    tiny: Engine, truth: list[int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened(tiny, folder)

    def stale(real: Any) -> Any:
        def refuse(path: Any, *given: Any, **options: Any) -> Any:
            if str(path).startswith(str(folder)):
                raise OSError(errno.ESTALE, "Stale file handle")
            return real(path, *given, **options)

        return refuse

    for name in ("stat", "open", "scandir", "utime"):  # not `lstat`: the system still has the names
        monkeypatch.setattr(os, name, stale(getattr(os, name)))
    again = engine.generate(PROMPT, **SAMPLED)
    assert (again.token_ids, again.stats.cached_tokens) == (truth, 0)
    engine.close()


@pytest.fixture
def read_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder as on a read-only disk, for root as well, who may write where modes forbid it."""
    access = os.access

    def refuse(*given: Any, **options: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    def denied(path: Any, mode: int) -> bool:
        return access(path, mode) and not (mode & os.W_OK and str(path).startswith(str(folder)))

    for name in ("chmod", "mkdir", "unlink", "rmdir", "utime", "rename", "replace"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(os, "access", denied)
    return folder


def test_prefixes_are_read_from_a_read_only_disk_and_none_is_added(
    tiny: Engine, truth: list[int], read_only: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = opened(tiny, read_only)
    result = engine.generate(PROMPT, **SAMPLED)
    assert (result.token_ids, result.stats.cached_tokens) == (truth, 3 * CHUNK)
    for _ in range(3):
        engine.generate(OTHER, **SAMPLED)
        engine.core.prefix_cache.clear()  # type: ignore[union-attr]
    notices = [x for x in caplog.messages if "cannot be written to: prefixes are read" in x]
    assert len(notices) == 1
    engine.core.runner.prefixes.forget(tuple(PROMPT))  # type: ignore[union-attr]
    disk(engine).flush()
    forgotten = engine.generate(PROMPT, **SAMPLED)
    assert (forgotten.token_ids, forgotten.stats.cached_tokens) == (truth, 0)
    engine.close()
    assert len(entries(read_only)) == 3
    with pytest.raises(PlanError, match=r"Read-only file system\), and holds no prefixes"):
        opened(tiny, read_only / "other")


def test_p28_p30_damaged_and_foreign_entries_are_misses_and_removed(
    tiny: Engine, truth: list[int], folder: Path
) -> None:
    middle = entries(folder)[1]  # by time of last use
    other = entries(folder)[2].read_bytes()
    for contents in (other, other[: len(other) // 2], b"", bytes(10**6)):
        middle.write_bytes(contents)
        engine = opened(tiny, folder)
        result = engine.generate(PROMPT, **SAMPLED)
        assert (result.token_ids, result.stats.cached_tokens) == (truth, CHUNK)
        engine.close()  # writes the entry again, and those that continue it
        assert disk(engine).counters.spoiled == 1
    assert opened(tiny, folder).generate(PROMPT, **SAMPLED).stats.cached_tokens == 3 * CHUNK


def test_p29_other_weights_plans_models_and_compilers_have_other_entries(
    tiny: Engine, truth: list[int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = np.array(tiny.params["target"]["embed"])
    table[:, 250] += 1  # a single column of the weights
    params = tiny.params | {"target": tiny.params["target"] | {"embed": jax.device_put(table)}}
    other = opened(tiny, folder)
    other.update_params(params)
    assert other.generate(PROMPT, max_tokens=2).stats.cached_tokens == 0
    longer = dataclasses.replace(tiny.plan, max_length=112)
    graph, ours = tiny.graph, (tiny.graph, tiny.params)
    alone = build_graph(tiny.graph.config, None, tiny.plan)
    names = {
        prefix_disk.identity(*ours),
        prefix_disk.identity(Graph(graph.pair, longer), tiny.params),
        prefix_disk.identity(alone, {"target": tiny.params["target"]}),
        prefix_disk.identity(graph, params),
    }
    assert len(names) == 4
    queue = dataclasses.replace(tiny.plan, queue=3, prefix_cache=5)
    assert (
        prefix_disk.identity(Graph(graph.pair, queue), tiny.params) in names
    )  # these do not affect segments
    for settings in ("--xla_cpu_max_isa=AVX", "--xla_backend_optimization_level=0"):
        monkeypatch.setenv("XLA_FLAGS", settings)
        names.add(prefix_disk.identity(*ours))
    monkeypatch.setattr(prefix_disk, "processor", lambda: "another one")
    assert prefix_disk.identity(*ours) not in names
    assert len(names) == 6
    assert len(entries(folder)) == 6


def test_a_full_disk_costs_only_the_entry(
    tiny: Engine, truth: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    engine = opened(tiny, tmp_path)
    monkeypatch.setattr(Path, "replace", full)
    assert engine.generate(PROMPT, **SAMPLED).token_ids == truth
    engine.close()
    assert disk(engine).counters.failed == 1
    assert not entries(tmp_path)  # no partial entry remains
    monkeypatch.undo()
    hit = engine.generate(PROMPT, **SAMPLED)
    assert (hit.token_ids, hit.stats.cached_tokens) == (truth, 3 * CHUNK)


FULL = """
import logging, resource, sys, pathlib
import numpy as np
from dflash_jax.engine.prefix.disk import PrefixDisk

logging.basicConfig()
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # writes fail in the middle of a file
kinds = [("float32", (30_000,))] * 20
folder = pathlib.Path(sys.argv[1])
disk = PrefixDisk(folder, chunk=4, budget=1 << 30, identity="0" * 32, kinds=kinds)
for i in range(4):
    disk.keep([i] * 12, {end: [np.ones(30_000, np.float32)] * 20 for end in (4, 8)})
disk.flush()
print(disk.counters.failed)
"""


@pytest.mark.exhaustive
def test_a_disk_that_fills_up_during_a_write_logs_one_line(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "4\n"
    lines = ended.stderr.splitlines()
    assert len(lines) == 4, ended.stderr
    assert all("a prefix was not written to" in line for line in lines)
    assert not entries(tmp_path)


def test_the_folder_respects_its_budget_and_other_files(
    tiny: Engine, truth: list[int], folder: Path
) -> None:
    (folder / "notes").mkdir()
    (folder / "notes" / "mine.txt").write_text("x" * 10_000)
    size = max(entry.stat().st_size for entry in entries(folder))
    kept = {entry.name for entry in entries(folder)}
    engine = opened(tiny, folder, prefix_disk=4 * size + size // 2)
    engine.generate(OTHER, max_tokens=2)
    engine.close()
    left = entries(folder)
    assert sum(entry.stat().st_size for entry in left) <= 4 * size + size // 2
    assert len({entry.name for entry in left} - kept) == 3  # the newest
    assert (folder / "notes" / "mine.txt").is_file()
    found = opened(tiny, folder).generate(PROMPT, **SAMPLED)
    assert found.token_ids == truth
    assert found.stats.cached_tokens == CHUNK * len({entry.name for entry in left} & kept)


def test_ctrl_c_while_parameters_are_replaced_keeps_the_old_ones_and_their_prefixes(
    tiny: Engine, truth: list[int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(leaf: Any) -> str:
        raise KeyboardInterrupt

    engine = opened(tiny, folder)
    before = engine.params
    monkeypatch.setattr(prefix_disk, "_digest", stopped)
    with pytest.raises(KeyboardInterrupt):
        engine.update_params(dict(before))
    assert engine.params is before
    assert engine.generate(PROMPT, **SAMPLED).stats.cached_tokens == 3 * CHUNK


def test_a_relative_folder_does_not_move_with_the_working_directory(
    tiny: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = opened(tiny, Path("here"))
    monkeypatch.chdir("/")
    engine.generate(PROMPT, max_tokens=1)
    engine.close()
    assert len(entries(tmp_path / "here")) == 3


def test_engines_that_share_a_folder_share_its_budget(tmp_path: Path) -> None:
    named: dict[str, Any] = {"budget": 30_000, "identity": "0" * 32, "kinds": [("float32", (500,))]}
    disks = [PrefixDisk(tmp_path, chunk=2, **named) for _ in range(3)]
    for i in range(15):
        disks[i % 3].keep((i, 1, 2), {2: np.zeros(500, np.float32)})
        disks[i % 3].flush()
    assert 20_000 < sum(entry.stat().st_size for entry in entries(tmp_path)) < 40_000  # of 30,765


def test_a_forgotten_prefix_is_removed_from_disk_with_its_continuations(
    tiny: Engine, truth: list[int], folder: Path
) -> None:
    engine = opened(tiny, folder)
    branch = [*PROMPT[: 2 * CHUNK], *OTHER]
    engine.generate(branch, max_tokens=2)
    engine.close()
    assert engine.core.runner.prefixes
    engine.core.runner.prefixes.forget(tuple(PROMPT))
    engine.close()
    assert not entries(folder)
    fed = opened(tiny, folder).generate(PROMPT, **SAMPLED)
    assert (fed.token_ids, fed.stats.cached_tokens) == (truth, 0)


def test_what_continues_a_damaged_chunk_is_forgotten_with_it(tmp_path: Path) -> None:
    one = shared_disk(tmp_path)
    branch = [*PROMPT[: 2 * CHUNK], *OTHER[:CHUNK], 0]
    for prompt in (PROMPT, branch):
        one.keep(prompt, SEGMENTS)
    one.flush()
    assert len(entries(tmp_path)) == 4
    path_of(one, PROMPT[: 2 * CHUNK]).write_bytes(b"damaged")
    reading = one.read(PROMPT, 0, 9)
    assert reading
    assert [start for start, _ in reading.result()] == [0]
    one.flush()
    assert len(entries(tmp_path)) == 1


def test_other_rows_decode_while_the_disk_is_read(
    tiny3: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened(tiny3, folder)
    wanted = tiny3.generate_many([PROMPT, OTHER[:5]], max_tokens=8)
    engine.generate(PROMPT, max_tokens=1)
    engine.close()
    engine = opened(tiny3, folder)
    reader = disk(engine)._reader
    held = threading.Event()
    reader.submit(held.wait)
    slow, handle = engine.submit(PROMPT, max_tokens=8), engine.submit(OTHER[:5], max_tokens=8)
    while not handle.done:
        engine.advance()
    assert (slow.num_computed, handle.token_ids) == (0, wanted[1].token_ids)
    engine.advance()  # nothing to do but wait
    held.set()
    while not slow.done:
        engine.advance()
    assert (slow.token_ids, slow.stats.cached_tokens) == (wanted[0].token_ids, 3 * CHUNK)


def test_impossible_folders_and_budgets_are_refused(tiny: Engine, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="prefix_folder is 'x' and prefix_cache 0; expected a path"):
        Plan(prefix_folder="x")
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match=r"prefix_folder .*file/in cannot be made \(Not a direct"):
        opened(tiny, tmp_path / "file" / "in")
    with pytest.raises(PlanError, match="prefix_disk is 9 bytes, but one chunk of 16 tokens takes"):
        opened(tiny, tmp_path, prefix_disk=9)


KINDS = [("float32", (2, 8))]
SEGMENTS = {end: [np.full((2, 8), end, np.float32)] for end in range(CHUNK, len(PROMPT), CHUNK)}


def shared_disk(folder: Path) -> PrefixDisk:
    """Return the disk of one of several engines that share a folder."""
    return PrefixDisk(folder, chunk=CHUNK, budget=1 << 30, identity="0" * 32, kinds=KINDS)


def test_engines_of_a_process_may_write_the_same_prompt_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replace, together = Path.replace, threading.Barrier(2)

    def both(self: Path, target: Path) -> Path:
        together.wait(60)
        replaced = replace(self, target)
        together.wait(60)
        return replaced

    monkeypatch.setattr(Path, "replace", both)
    disks = [shared_disk(tmp_path) for _ in range(2)]
    for one in disks:
        one.keep(PROMPT, SEGMENTS)
    for one in disks:
        one.flush()
    assert caplog.text == ""
    assert [one.counters.failed for one in disks] == [0, 0]
    assert len(entries(tmp_path)) == len(SEGMENTS)
    reading = shared_disk(tmp_path).read(PROMPT, 0, 9)
    assert reading
    assert [start for start, _ in reading.result()] == [end - CHUNK for end in SEGMENTS]


def test_a_prompt_s_last_chunks_are_removed_first(tmp_path: Path) -> None:
    one = shared_disk(tmp_path)
    one.keep(PROMPT, SEGMENTS)
    one.flush()
    expected = [path_of(one, PROMPT[:end]) for end in sorted(SEGMENTS, reverse=True)]
    assert entries(tmp_path) == expected
    for path in expected:
        os.utime(path, (1, 1))
    reading = one.read(PROMPT, CHUNK, 9)  # the first chunk is in memory
    assert reading
    assert len(reading.result()) == 2
    assert entries(tmp_path) == expected


def test_a_failed_write_logs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no\n" + "and many more lines\n" * 50)

    monkeypatch.setattr(Store, "put", fail)
    one = shared_disk(tmp_path)
    one.keep(PROMPT, SEGMENTS)
    one.flush()
    [record] = caplog.records
    assert record.getMessage().endswith(": no")


@pytest.mark.soak
@pytest.mark.parametrize("fields", [{"dtype": "bfloat16"}, {"kv_dtype": "int8"}])
@pytest.mark.parametrize(
    "target",
    [
        tiny_target(num_layers=2, windows=(12, None)),
        tiny_hybrid(num_layers=2, recurrent=(True, False)),
    ],
    ids=["rings", "recurrent"],
)
def test_every_kind_of_segment_is_restored(target: Any, fields: Any, tmp_path: Path) -> None:
    drafter = tiny_drafter(target, target_layer_ids=(0,))
    plan = Plan(max_length=128, chunk=CHUNK, block=4, prefix_cache=1 << 20, **fields)
    prompt = [i % 97 for i in PROMPT]
    first = random_engine(target, drafter, plan)
    wanted = first.generate(prompt, max_tokens=12).token_ids
    engine = opened(first, tmp_path)
    engine.generate(prompt, max_tokens=1)
    engine.close()
    found = opened(first, tmp_path).generate(prompt, max_tokens=12)
    assert (found.token_ids, found.stats.cached_tokens) == (wanted, 3 * CHUNK)
