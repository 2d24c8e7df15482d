"""Which part may import which: the boundaries of ARCHITECTURE.md, read from the source."""

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_jax import families

ROOT = Path(__file__).parents[2]
# Those that run modules of NNX, or read states of other libraries' modules.
NNX = (
    *("protocols.py", "test_contract.py", "test_own_modules.py"),
    *("rollouts.py", "test_flax.py", "test_live.py", "test_rollouts.py"),
    *("test_update_params.py", "check.py", "write.py"),
)
NETWORKS = "dflash_jax/families/*_net.py"
TRACED = (
    NETWORKS,
    *(f"dflash_jax/{x}.py" for x in ("nn/*", "graph/steps/*", "trainer/recorder")),
)


def files(*folders: str) -> list[Path]:
    found = [p for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))]
    assert found, folders
    return found


def matching(pattern: str) -> list[Path]:
    paths = sorted(ROOT.glob(pattern))
    assert paths, pattern
    return paths


@functools.cache
def imports(path: Path, *, inside_functions: bool = True) -> set[str]:
    """Dotted names a file imports; `from a import b` counts as a.b.

    Args:
      inside_functions: count imports in functions, and those for type checkers alone.
    """

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or (
                isinstance(child, ast.If) and dotted(child.test).endswith("TYPE_CHECKING")
            )
            if inside_functions or not deferred:
                yield child
                yield from walk(child)

    names = set()
    for node in walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def package(name: str) -> str:
    """Return the package of a dotted name of ours, or the module at the top of `dflash_jax`."""
    parts = name.split(".")
    return ".".join(parts[:2]) if under(name, "dflash_jax") else ""


def under(name: str, *packages: str) -> bool:
    return any(name == p or name.startswith(p + ".") for p in packages)


def dotted(node: ast.AST) -> str:
    """`jax.jit` for the expression jax.jit; empty for anything but names and attributes."""
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_the_request_machine_knows_nothing_but_the_standard_library() -> None:
    pure = ("dflash_jax.engine.state_machine", "dflash_jax.tool_parsers", "dflash_jax.errors")
    pure = (*pure, "dflash_jax.declared")  # which knows nothing else either
    banned = ("time", "random", "os", "logging", "threading", "io", "pathlib", "socket")
    for path in files("dflash_jax/engine/state_machine", "dflash_jax/tool_parsers"):
        names = {n for n in imports(path) if not under(n, *pure)}
        assert {n.split(".")[0] for n in names} <= sys.stdlib_module_names, path
        assert not any(under(n, *banned) for n in names), path


def test_what_limited_processes_load_knows_nothing_of_the_package() -> None:
    others = {
        "utils/limited_process.py": (),
        "engine/structured/trial_process.py": ("llguidance",),
        "rendering.py": ("jinja2",),
    }
    for name, known in others.items():
        path = ROOT / "dflash_jax" / name
        # What starts a process imports another module of the package, which the process does not.
        starts = name == "utils/limited_process.py"
        names = {n.split(".")[0] for n in imports(path, inside_functions=not starts)}
        assert names <= {*sys.stdlib_module_names, *known}, path


def test_what_clients_send_is_read_without_arrays_and_sockets() -> None:
    banned = ("jax", "numpy", "starlette", "uvicorn", "asyncio", "socket", "time")
    for name in ("protocol", "fields", "conversation"):
        names = imports(ROOT / f"dflash_jax/server/{name}.py")
        assert names
        assert not [n for n in names if under(n, *banned)], name


def test_the_package_itself_needs_no_server_libraries() -> None:
    libraries = ("starlette", "uvicorn", "msgspec", "prometheus_client")
    for path in files("dflash_jax"):
        if not {"server", "ray"} & {*path.relative_to(ROOT).parts}:
            top = imports(path, inside_functions=False)
            assert not [n for n in top if under(n, *libraries, "dflash_jax.server")], path


def test_only_the_adapter_imports_ray_and_nothing_imports_the_adapter_at_once() -> None:
    for path in files("dflash_jax"):
        inside = path.is_relative_to(ROOT / "dflash_jax" / "ray")
        if not inside:
            assert not [n for n in imports(path) if under(n, "ray")], path
        if not inside or path.name == "__init__.py":
            top = imports(path, inside_functions=False)
            assert not [n for n in top if under(n, "ray", "dflash_jax.ray")], path


@pytest.mark.parametrize("pattern", TRACED)
def test_traced_code_imports_neither_the_host_side_nor_input_and_output(pattern: str) -> None:
    host = ("engine", "cli", "loading", "target_model")
    host += ("tokenizer", "trainer", "testing", "utils", "bench")
    banned = [f"dflash_jax.{part}" for part in host]
    banned += [
        "dflash_jax.converters",
        "logging",
        "time",
        "os",
        "pathlib",
        "json",
        "io",
        "random",
        "warnings",
    ]
    for path in matching(pattern):
        assert not [n for n in imports(path) if under(n, *banned)], path


@pytest.mark.parametrize("pattern", TRACED)
def test_traced_code_calls_nothing_that_leaves_the_device(pattern: str) -> None:
    banned = {"print", "open", "np.load", "np.save", "np.asarray", "np.array", "jax.device_get"}
    banned |= {"jax.pure_callback", "jax.debug.print", "jax.debug.callback", "jax.device_put"}
    for path in matching(pattern):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        calls = {dotted(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not calls & banned, path


def test_packages_import_each_other_in_no_circle() -> None:
    """Imports inside functions count as well."""
    graph: dict[str, set[str]] = {}
    for path in files("dflash_jax"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        own = package(".".join(part for part in parts if part != "__init__"))
        found = {package(name) for name in imports(path)}
        graph.setdefault(own, set()).update(found - {"", "dflash_jax", own})
    graph = {name: found & graph.keys() for name, found in graph.items()}
    assert len([*graphlib.TopologicalSorter(graph).static_order()]) > 30  # or it raises


def test_modules_of_benchmarks_import_each_other_in_no_circle() -> None:
    """Imports inside functions count as well."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in files("benchmarks", "recipes")
    }
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        names = imports(path)
        homes = {name.rpartition(".")[0] for name in names}  # of classes and functions
        graph[module] = (names | homes) & paths.keys()
    assert len([*graphlib.TopologicalSorter(graph).static_order()]) == len(paths)  # or it raises


def test_networks_do_not_know_how_they_are_decoded() -> None:
    for path in files("dflash_jax/nn"):
        names = imports(path)
        banned = ("dflash_jax.families", "dflash_jax.networks", "dflash_jax.graph.steps")
        assert not [n for n in names if under(n, *banned)], path
    for path in matching(NETWORKS):
        assert not [n for n in imports(path) if under(n, "dflash_jax.graph.steps")], path


def test_only_the_compiler_jits() -> None:
    jitting = set()
    for path in files("dflash_jax", "converters", "recipes"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        if names & {"jax.jit", "nn.jit", "jax.pmap"} or imports(path) & {"jax.jit", "jax.pmap"}:
            jitting.add(path.relative_to(ROOT).parts[:2])
    assert jitting == {("dflash_jax", "graph")}


def test_converters_are_imported_inside_functions_of_loading_and_the_commands_alone() -> None:
    importing = set()
    for path in files("dflash_jax"):
        used = [n for n in imports(path) if under(n, "dflash_jax.converters")]
        if path.parent.name == "families":
            assert not [n for n in used if not under(n, "dflash_jax.converters.formats")], path
            continue
        if used:
            importing.add(path.relative_to(ROOT / "dflash_jax").parts[0])
        top = imports(path, inside_functions=False)
        assert not [n for n in top if under(n, "dflash_jax.converters")], path
    assert importing <= {"loading.py", "rollouts.py", "cli", "trainer", "testing.py"}
    assert {"loading.py", "cli"} <= importing


def test_converters_know_configs_and_errors_of_the_engine_alone() -> None:
    parts = ("config", "families", "converters", "quant", "checkpoint", "errors", "tokenizer")
    parts += ("model_files", "utils.atomic", "utils.command", "utils.sources")
    parts += ("utils.progress", "utils.store", "kernels.native.interleaved")
    allowed = [f"dflash_jax.{part}" for part in parts]
    for path in files("converters"):
        ours = [n for n in imports(path) if under(n, "dflash_jax")]
        assert not [n for n in ours if not under(n, *allowed)], path


def test_formats_know_neither_families_nor_how_models_are_read_and_written() -> None:
    allowed = ("config", "converters.formats", "errors", "quant")
    for path in files("converters/formats"):
        ours = [n for n in imports(path) if under(n, "dflash_jax")]
        assert not [n for n in ours if not under(n, *(f"dflash_jax.{x}" for x in allowed))], path


def test_configs_plans_requests_and_errors_are_free_of_jax() -> None:
    names = ("errors", "serve_options", "utils/command", "plan", "utils/sources")
    names += (
        "declared",
        "engine/request",
        "engine/sampling_params",
        "kernels/native/compiling",
        "kernels/native/shipped",
    )
    names += ("kernels/native/interleaved", "utils/private_folder", "utils/allocator")
    single = [ROOT / "dflash_jax" / f"{name}.py" for name in names]
    for path in [*files("dflash_jax/config"), *single]:
        assert not [n for n in imports(path) if under(n, "jax", "flax", "jaxlib")], path


def test_a_family_is_imported_alone_and_none_imports_jax_but_their_networks() -> None:
    code = """
import importlib, sys
from dflash_jax import families

def imported():
    return {m.removeprefix("dflash_jax.families.") for m in sys.modules if "jax.families." in m}

assert families.family_of("mistral3") == "ministral3" and not imported()
assert families.family("llama").slots and imported() == {"llama", "entry"}, imported()
for name in sys.argv[1:]:
    importlib.import_module(f"dflash_jax.families.{name}")
    assert not {"jax", "flax"} & sys.modules.keys(), name
"""
    names = [p.stem for p in files("dflash_jax/families") if not p.stem.endswith(("_net", "__"))]
    assert {*families.BUILT_IN, *families.BUILT_IN_KINDS} <= {*names}
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_flax_means_linen_and_struct() -> None:
    used = set()
    for path in files("dflash_jax", "converters", "recipes", "tests"):
        own = {n for n in imports(path) if under(n, "flax")}
        used |= own - ({"flax.nnx"} if path.name in NNX else set())
    assert used <= {"flax.linen", "flax.struct"}
    assert "flax.linen" in used


def test_the_recipe_of_the_shipped_pair_is_no_part_of_the_package() -> None:
    """The trainer generates its default corpus by it, in a function, where it is there."""
    using = {p for p in files("dflash_jax") if any(under(n, "recipes") for n in imports(p))}
    assert using == {ROOT / "dflash_jax/trainer/sources.py"}
    top = imports(ROOT / "dflash_jax/trainer/data.py", inside_functions=False)
    assert not [name for name in top if under(name, "recipes")]


def test_only_one_file_knows_the_store_of_jax_and_programs_do_not_know_it() -> None:
    knowing = {p for p in files("dflash_jax") if any(under(n, "jax._src") for n in imports(p))}
    calls = ("_client.", "key_value_set")
    named = {p for p in knowing if any(x in p.read_text(encoding="utf-8") for x in calls)}
    assert named == {ROOT / "dflash_jax/distributed.py"}
    for path in files("dflash_jax/graph", "dflash_jax/nn", "dflash_jax/kernels"):
        assert not [n for n in imports(path) if under(n, "dflash_jax.distributed")], path
