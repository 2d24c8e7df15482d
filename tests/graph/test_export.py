"""Programs in one file, which run without the code of their models."""

import contextlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer as Core
from tokenizers import models

import dflash_jax as dj
from dflash_jax.engine.engine import Engine
from dflash_jax.graph import export
from dflash_jax.graph.abstract import by_path
from dflash_jax.testing import random_engine, tiny_drafter, tiny_target
from dflash_jax.tokenizer import Tokenizer

PROMPT = list(range(5, 42))
TARGET = tiny_target(num_layers=2, vocab_size=96)
DRAFTER = tiny_drafter(TARGET, target_layer_ids=(0,), num_layers=1, windows=(12,), causal=(False,))
PLAN = dj.Plan(max_length=64, block=4, chunk=16, rows=2, kernels="xla")
NAMES = ("prefill", "plain", "speculative", "prefill[sampled]", "speculative[sampled]")
ALONE = """
import importlib.abc, json, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        blocked = ("dflash_jax.networks", "dflash_jax.nn", "dflash_jax.engine")
        if name.startswith(blocked) or name.endswith("_net"):
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
import dflash_jax as dj

graph = dj.load_exported(sys.argv[1])
programs, params, found = graph.compile(), graph.place_params(), []
for temperature in (0.0, 1.0):
    for step in ("plain", "speculative") if not temperature else ("speculative",):
        rules = graph.rules(temperature=temperature, seed=3)
        prompt = json.loads(sys.argv[2])
        state, out = programs.prefill(params, graph.init_state(), prompt, row=1, rules=rules)
        tokens = out.tokens[1]
        while not out.done.all():
            state, out = getattr(programs, step)(params, state, rules=rules)
            tokens += out.tokens[1]
        found.append(tokens)
print(json.dumps([found, graph.tokenizer.decode([5]), graph.plan.to_json()]))
"""


@pytest.fixture(scope="module")
def engine() -> Engine:
    return random_engine(TARGET, DRAFTER, PLAN, seed=1)


@pytest.fixture(scope="module")
def path(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("exported") / "step"
    core = Core(models.BPE(vocab={chr(256 + i): i for i in range(96)}, merges=[]))
    tokenizer = Tokenizer(core, None, {})
    engine.graph.export(place, names=NAMES, params=engine.params, tokenizer=tokenizer)
    return place


@pytest.fixture
def copy(path: Path, tmp_path: Path) -> Path:
    place = tmp_path / "copy"
    place.write_bytes(path.read_bytes())
    return place


def decode(graph: Any, params: Any) -> list[int]:
    programs = graph.compile(("prefill", "speculative"))
    state, out = programs.prefill(params, graph.init_state(), PROMPT)
    tokens = out.tokens[0]
    while not out.done.all():
        state, out = programs.speculative(params, state)
        tokens += out.tokens[0]
    return tokens


@pytest.mark.exhaustive
def test_a_process_without_the_models_code_decodes_the_engines_tokens(
    engine: Engine, path: Path
) -> None:
    command = [sys.executable, "-c", ALONE, str(path), json.dumps(PROMPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert not done.returncode, done.stderr
    found, text, plan = json.loads(done.stdout)
    options: dict[str, Any] = {"max_tokens": PLAN.max_length - len(PROMPT), "ignore_eos": False}
    greedy = engine.generate(PROMPT, **options).token_ids
    sampled = engine.generate(PROMPT, temperature=1.0, seed=4, **options).token_ids  # 3 + row 1
    assert found == [greedy, greedy, sampled]
    assert (text, plan) == (chr(261), engine.plan.to_json())


@pytest.mark.exhaustive
def test_parameters_may_be_given_by_trees_of_floats_or_by_path(engine: Engine, path: Path) -> None:
    graph, other = dj.load_exported(path), random_engine(TARGET, DRAFTER, PLAN, seed=2)
    trees = jax.tree.map(np.asarray, other.params, is_leaf=lambda x: hasattr(x, "__array__"))
    wanted = decode(other.graph, other.params)
    for given in (other.params, trees, by_path(other.params)):
        assert decode(graph, graph.place_params(given)) == wanted
    assert decode(graph, graph.place_params()) == decode(engine.graph, engine.params)


@pytest.mark.exhaustive
def test_parameters_that_do_not_fit_are_refused_by_name(
    engine: Engine, path: Path, tmp_path: Path
) -> None:
    graph, target = dj.load_exported(path), engine.params["target"]
    for given, message in (
        ("x", "the parameter  is no array; give trees by role"),
        ({"target": target}, r"the parameter drafter/.* is missing; expected float32\["),
        (engine.params | {"more": np.zeros(3)}, r"more is float64\[3\]; expected none"),
        (engine.params | {"target": target | {"norm": np.zeros(3)}}, r"\[3\]; expected float32\["),
        (engine.params | {"target": target | {"norm": np.zeros(32, int)}}, r"norm is int64\[32\]"),
    ):
        with pytest.raises(dj.PlanError, match=message):
            graph.place_params(given)
    with pytest.raises(dj.PlanError, match="the parameter"):
        engine.graph.export(tmp_path / "x", params={"target": target})
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_every_program_is_in_the_file(engine: Engine, tmp_path: Path) -> None:
    engine.graph.export(tmp_path / "all")
    graph = dj.load_exported(tmp_path / "all")
    assert list(graph._programs) == list(engine.graph.programs())
    for key, program in graph._programs.items():
        own = engine.graph.programs()[key]
        shapes = [[x.shape for x in jax.tree.leaves(p.arguments)] for p in (own, program)]
        assert sorted(shapes[0]) == sorted(shapes[1]), key
    with pytest.raises(dj.PlanError, match="the file has no parameters; give them, or export"):
        graph.place_params()
    assert decode(graph, graph.place_params(engine.params)) == decode(engine.graph, engine.params)
    with pytest.raises(dj.PlanError, match="'x' is no program of the file; known are"):
        graph.compile(("x",))


def change_manifest(path: Path, **changes: Any) -> None:
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    files["manifest.json"] = json.dumps(json.loads(files["manifest.json"]) | changes).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2, "version": "9.1"}, "written by dflash_jax 9.1 with jax .*; export it again"),
        ({"interface": {}}, "whose programs have other inputs than those of dflash_jax"),
        ({"programs": [3]}, "is missing or no whole file of Graph"),
        ({"state": None, "programs": ["x"]}, "is missing or no whole file of Graph"),
        ({"platform": "tpu"}, "is for tpu, and JAX runs on cpu here; export it on such a device"),
    ],
)
def test_files_of_other_versions_and_platforms_are_refused(
    copy: Path, changes: dict[str, Any], message: str
) -> None:
    change_manifest(copy, **changes)
    with pytest.raises(dj.CheckpointError, match=message):
        dj.load_exported(copy)


@pytest.mark.exhaustive
def test_damaged_and_missing_files_are_refused(copy: Path, tmp_path: Path) -> None:
    whole = copy.read_bytes()
    place = re.search(rb"programs/0", whole).end() + 1000
    for content in (
        *(whole[:size] for size in (0, 100, len(whole) // 2, len(whole) - 1)),
        whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :],
    ):
        copy.write_bytes(content)
        with pytest.raises(dj.CheckpointError, match="missing or no whole file of Graph"):
            dj.load_exported(copy)
    with pytest.raises(dj.CheckpointError, match="missing or no whole file"):
        dj.load_exported(tmp_path / "none")
    with pytest.raises(dj.CheckpointError, match="missing or no whole file"):
        dj.load_exported(tmp_path)


def rewritten(path: Path, compression: int = zipfile.ZIP_STORED, **files: bytes) -> None:
    """Write an archive again, with other contents of some members."""
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in contents.items():
            archive.writestr(name, files.get(name.replace("/", "_").split(".")[0], content))


def test_members_that_grow_are_refused_before_they_are_read(copy: Path) -> None:
    rewritten(copy, zipfile.ZIP_DEFLATED, manifest=b" " * (1 << 26) + b"{}")
    assert copy.stat().st_size < 1 << 24
    with pytest.raises(dj.CheckpointError, match=r"whole file .*manifest.json is compressed"):
        dj.load_exported(copy)


def test_members_that_share_bytes_or_occur_twice_are_refused(copy: Path) -> None:
    with zipfile.ZipFile(copy, "a") as archive:
        archive.filelist.append(archive.getinfo("manifest.json"))
        archive._didModify = True  # pyrefly: ignore[missing-attribute]
    with pytest.raises(dj.CheckpointError, match=r"whole file .*a member occurs twice"):
        dj.load_exported(copy)


def hostile(target: str, **attributes: Any) -> bytes:
    """Return a program that calls code of XLA by name."""

    def run(x: jax.Array) -> Any:
        return jax.ffi.ffi_call(target, x, has_side_effect=True)(x, **attributes)

    checks = [jax.export.DisabledSafetyCheck.custom_call(target)]
    made = jax.export.export(jax.jit(run), disabled_checks=checks)(
        jax.ShapeDtypeStruct((4, 4), "f4")
    )
    return bytes(made.serialize())


@pytest.mark.parametrize("target", ["xla_ffi_python_cpu_callback", "lapack_spotrf_ffi", "a b"])
def test_programs_that_call_code_by_name_are_told(copy: Path, target: str) -> None:
    rewritten(copy, programs_0=hostile(target, index=np.uint64(0x4141414141414141)))
    assert re.fullmatch("a call of .* in programs/0", export.checked(str(copy))[0])


def test_programs_that_call_code_by_name_are_refused(copy: Path) -> None:
    rewritten(copy, programs_0=hostile("x", index=np.uint64(0x4141414141414141)))
    words = "copy contains a call of .* in programs/0, which Graph.export never writes; get the"
    with pytest.raises(dj.CheckpointError, match=words):
        dj.load_exported(copy)


def test_programs_that_passed_are_not_checked_again(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checks: list[Path] = []

    def run(command: list[str], **options: Any) -> Any:
        checks.append(copy)
        return SimpleNamespace(returncode=0, stdout=json.dumps(export.checked(command[-1])))

    monkeypatch.setattr(subprocess, "run", run)
    for count, change in ((1, {}), (1, {}), (1, {"stored": False}), (1, {})):
        change_manifest(copy, **change)
        assert dj.load_exported(copy)
        assert len(checks) == count
    whole = copy.read_bytes()
    for count, name in ((2, "jax"), (3, "jaxlib")):
        with monkeypatch.context() as other:
            other.setattr(f"{name}.__version__", "0.0.1")
            assert dj.load_exported(copy)
        assert len(checks) == count
    with zipfile.ZipFile(copy) as archive:
        swapped = archive.read("programs/1")
    rewritten(copy, programs_0=hostile("x", index=np.uint64(1)))
    with pytest.raises(dj.CheckpointError, match=r"contains a call of .* in programs/0"):
        dj.load_exported(copy)
    rewritten(copy, programs_0=swapped)
    monkeypatch.setattr(export, "checked", lambda path: ["", ["0" * 64]])
    with pytest.raises(dj.CheckpointError, match="was changed while it was read; load it again"):
        dj.load_exported(copy)
    copy.write_bytes(whole)
    assert dj.load_exported(copy)
    assert len(checks) == 5
    (tmp_path / "cache/dflash_jax/checked").chmod(0o777)
    with pytest.raises(dj.CheckpointError, match="changed while"):  # its records are not believed
        dj.load_exported(copy)
    assert len(checks) == 6


def test_triangular_systems_are_allowed_in_shapes_that_fit_only() -> None:
    def solved(a: Any, b: Any) -> Any:
        return jax.lax.linalg.triangular_solve(a, b, left_side=True, lower=True)

    shapes = (jax.ShapeDtypeStruct((2, n, m), "f4") for n, m in ((4, 4), (4, 7)))
    text = jax.export.export(jax.jit(solved))(*shapes).mlir_module()
    assert export.TRIANGULAR in text
    assert export.forbidden(text) == ""
    small = text.replace(
        "(tensor<2x4x4xf32>, tensor<2x4x7xf32>) ->", "(tensor<4x4xf32>, tensor<2x4x7xf32>) ->"
    )
    assert small != text
    assert "shapes that do not fit" in export.forbidden(small)
    assert "infeed" in export.forbidden('%0 = "stablehlo.infeed"(%1)')


@pytest.mark.exhaustive
def test_no_mutation_of_a_file_raises_anything_but_a_named_error(copy: Path) -> None:
    """Contents are changed with checksums that fit, as an attacker would."""
    whole = copy.read_bytes()
    rng = np.random.default_rng(0)
    with zipfile.ZipFile(copy) as archive:
        parts = {name: archive.read(name) for name in ("manifest.json", "programs/0")}
    for name, content in parts.items():
        for _ in range(8 if name == "programs/0" else 40):
            at, length = int(rng.integers(len(content))), int(rng.integers(1, 9))
            changed = content[:at] + rng.bytes(length) + content[at + length :]
            copy.write_bytes(whole)
            rewritten(copy, **{name.replace("/", "_").split(".")[0]: changed})
            with contextlib.suppress(dj.errors.DFlashError):
                dj.load_exported(copy)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "changes",
    [
        {"state": [[[1 << 40], "float32"]]},
        {"caches": [99, 0]},
        {"params": {"x": [[1 << 40], "float32"]}},
        {"config": ["many", []]},
        {"config": [96, [None]]},
        {"tokenizer": ["{}", None, None, {}]},
        {"plan": "{}"},
        {"plan": "[" * 100_000},
    ],
)
def test_manifests_that_do_not_fit_the_programs_are_refused(
    copy: Path, changes: dict[str, Any]
) -> None:
    change_manifest(copy, **changes)
    with pytest.raises(dj.errors.DFlashError):
        dj.load_exported(copy)


def test_programs_that_a_newer_jax_wrote_are_refused(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def newer(blob: bytearray) -> None:
        raise ValueError("calling convention version 99")

    monkeypatch.setattr(jax.export, "deserialize", newer)
    with pytest.raises(dj.CheckpointError, match=r"cannot read its programs \(calling conv.* 99"):
        dj.load_exported(copy)


def test_a_missing_package_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.raises(dj.PlanError, match=r"exported programs need flatbuffers; .*\[export\]"):
        dj.load_exported(path)


def test_what_cannot_be_exported_is_refused_by_name_and_leaves_nothing(
    engine: Engine, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for changes, message in (
        ({"kernels": "pallas"}, "kernels is 'pallas', and only programs of XLA's kernels"),
        ({"mesh": (2, 1)}, "programs of several devices cannot be exported; plan for one"),
    ):
        graph = dj.Graph(engine.graph.pair, engine.plan)
        object.__setattr__(graph, "plan", dj.Plan(**vars(engine.plan) | changes))
        with pytest.raises(dj.PlanError, match=message):
            graph.export(tmp_path / "x")
    with pytest.raises(dj.PlanError, match="'x' is no program of this graph"):
        engine.graph.export(tmp_path / "x", names=("x",))
    with pytest.raises(dj.CheckpointError, match="is not a folder; create it first"):
        engine.graph.export(tmp_path / "none" / "x", names=("plain",))
    before = path.read_bytes()
    with pytest.raises(dj.CheckpointError, match="exists; choose another place"):
        engine.graph.export(path, names=("plain",))
    monkeypatch.setattr(export, "MANIFEST", 3)  # writing fails
    with pytest.raises(AttributeError):
        engine.graph.export(path, names=("plain",), overwrite=True)
    assert path.read_bytes() == before
    assert not list(tmp_path.iterdir())
