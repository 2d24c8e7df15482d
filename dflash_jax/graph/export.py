"""Programs of a graph in one file, which runs without the code of their models.

The file is a ZIP archive without compression, whose checksums reveal damage. `manifest.json` has
the plan, shapes and the tokenizer, `programs/` StableHLO of `jax.export`, and `params/` the
weights, if they were given. Classes of models do not occur in it: parameters are named by their
paths, and the caches of a state are tuples of arrays.

A file may come from a stranger: what is read is bounded by its size, compared with what its
manifest declares, and refused by name. Programs may call nothing but StableHLO and `CALLS`.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import json
import os
import re
import subprocess
import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import jaxlib
import numpy as np
import tokenizers

from dflash_jax.errors import CheckpointError, DFlashError, PlanError, install_hint
from dflash_jax.graph.abstract import by_path
from dflash_jax.graph.build import compile_programs
from dflash_jax.graph.graph import Graph, GraphPrograms, keys_of
from dflash_jax.graph.keys import ProgramKey
from dflash_jax.graph.programs import STATES, Program
from dflash_jax.graph.protocols import Draft
from dflash_jax.graph.settings import isolated_jax_config
from dflash_jax.graph.state import DecodeState, Logprobs, OutputColumn, RowRules, StepOutput
from dflash_jax.graph.steps import inputs
from dflash_jax.graph.steps.logits_processing import LogitsState
from dflash_jax.graph.steps.rows import Segment
from dflash_jax.kernels.products import set_weight_layout
from dflash_jax.plan import ResolvedPlan
from dflash_jax.quant.layouts import StructuredWeight
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.utils.atomic import new_path
from dflash_jax.utils.python_command import python_command
from dflash_jax.utils.store import default_store
from dflash_jax.version import __version__

FORMAT = 1
# Code of XLA that programs call by name: on a CPU the triangular system of recurrent layers, on a
# GPU random numbers, if JAX is asked for its kernel. Others take pointers of the file's choice.
TRIANGULAR = "lapack_strsm_ffi"
CALLS = (TRIANGULAR, "cu_threefry2x32_ffi", "hip_threefry2x32_ffi")
CALL = re.compile(r"custom_call @([\w.$]+)\(.* : \((.*)\) -> (\S+)")
CHECKING = """
import json, sys
from dflash_jax.graph.export import checked
print(json.dumps(checked(sys.argv[1])))
"""
PATIENCE = 120  # seconds for that
CHECKED = "checked"  # cache of empty entries that say which programs passed
MOST_RECORDS = 2**20  # bytes of it
CALLING = re.compile(r"custom_call|stablehlo\.(infeed|outfeed|send|recv)\b")
MANIFEST = "manifest.json"
CLASSES = (
    *(DecodeState, RowRules, Logprobs, StepOutput, Draft, LogitsState, Segment),
    *(inputs.PrefillInputs, inputs.DecodeInputs, inputs.ForcedTokensInputs),
    *(inputs.PromptLogprobsInputs, inputs.CopyRowInputs),
    *(inputs.SegmentInputs, inputs.SetLogitsStateInputs),
)
# Arguments and results of programs; those of other versions may differ.
INTERFACE: dict[str, list[str]] = {
    **{cls.__name__: [field.name for field in dataclasses.fields(cls)] for cls in CLASSES},
    "OutputColumn": [f"{column.name} {column.value}" for column in OutputColumn],
}


@dataclasses.dataclass(frozen=True)
class ExportedConfig:
    """What programs' callers need of a target's config."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]


@isolated_jax_config()
def export(
    graph: Graph,
    path: str | os.PathLike[str],
    *,
    names: Collection[str] | None,
    params: Any,
    tokenizer: Tokenizer | None,
    overwrite: bool,
) -> None:
    """Write programs to a file; arguments and errors as for `Graph.export`."""
    plan = graph.plan
    if plan.kernels != "xla":
        raise PlanError(
            f"kernels is {plan.kernels!r}, and only programs of XLA's kernels can be exported; make"
            " the graph with dj.Plan(kernels='xla')"
        )
    if plan.two_devices or plan.mesh != (1, 1):
        raise PlanError("programs of several devices cannot be exported; plan for one device")
    _check_package()
    programs = graph.programs()
    keys = (
        list(programs)
        if names is None
        else keys_of(names, programs, graph.plan.kernels, "this graph")
    )
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": __version__,
        "jax": jax.__version__,
        "platform": jax.export.default_export_platform(),
        "interface": INTERFACE,
        "plan": plan.to_json(),
        "config": [graph.config.vocab_size, graph.stop_tokens],
        "forms": graph.forms,
        "params": {name: _kind(leaf) for name, leaf in by_path(graph.params).items()},
        "state": [_kind(leaf) for leaf in jax.tree.leaves(graph.state)],
        "caches": [len(jax.tree.leaves(x)) for x in (graph.state.target, graph.state.drafter)],
        "programs": [str(key) for key in keys],
        "stored": params is not None,
        "tokenizer": _described(tokenizer),
    }
    weights = {} if params is None else _fitting(manifest["params"], params, plan, graph.forms)
    blobs = [
        jax.export.export(jax.jit(function))(*arguments).serialize()
        for function, arguments in (_without_classes(programs[key]) for key in keys)
    ]
    needed = sum(map(len, blobs)) + sum(leaf.nbytes for leaf in weights.values())
    with (
        new_path(Path(path), overwrite=overwrite, needed=needed) as place,
        zipfile.ZipFile(place, "w") as archive,
    ):
        archive.writestr(MANIFEST, json.dumps(manifest))
        for i, blob in enumerate(blobs):
            archive.writestr(f"programs/{i}", blob)
        for i, name in enumerate(manifest["params"] if weights else ()):
            with archive.open(f"params/{i}", "w", force_zip64=True) as file:
                file.write(np.ascontiguousarray(weights[name]).reshape(-1).view(np.uint8).data)


def load_exported(path: str | os.PathLike[str]) -> "ExportedGraph":
    """Load programs that `Graph.export` wrote.

    The code of their models is not needed. Nothing is compiled yet.

    Raises:
      CheckpointError: the file is missing, damaged, of another version, or for another platform.
      PlanError: the package flatbuffers is missing.
    """
    _check_package()
    try:
        with zipfile.ZipFile(path) as archive:
            _check_members(archive, Path(path).stat().st_size)
            return _read(archive, str(path))
    except DFlashError:
        raise
    except Exception as error:  # whatever libraries raise for bytes that they cannot read
        raise CheckpointError(
            f"{path} is missing or no whole file of Graph.export ({error}); export it again"
        ) from error


def _check_members(archive: zipfile.ZipFile, size: int) -> None:
    """Check that members of an archive are stored as they are, and are no larger than the file."""
    members = archive.infolist()
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            raise ValueError(f"{member.filename} is compressed")
    if len({member.filename for member in members}) < len(members):
        raise ValueError("a member occurs twice")
    if sum(member.file_size for member in members) > size:
        raise ValueError("members overlap")


def _read(archive: zipfile.ZipFile, path: str) -> "ExportedGraph":
    try:
        manifest = json.loads(archive.read(MANIFEST))
        written = f"dflash_jax {manifest['version']} with jax {manifest['jax']}"
        alike = manifest["format"] == FORMAT and manifest["interface"] == INTERFACE
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} has no usable manifest ({error}); export again") from error
    if not alike:
        raise CheckpointError(
            f"{path} was written by {written}, whose programs have other inputs than those of"
            f" dflash_jax {__version__}; export it again, or use that version"
        )
    platform = jax.export.default_export_platform()
    if manifest["platform"] != platform:
        raise CheckpointError(
            f"{path} is for {manifest['platform']}, and JAX runs on {platform} here; export it on"
            " such a device"
        )
    blobs = [archive.read(f"programs/{i}") for i in range(len(manifest["programs"]))]
    _check_programs(path, blobs)
    plan = ResolvedPlan.parse(manifest["plan"], where=f"the plan of {path}")
    exported = {}
    for name, blob in zip(manifest["programs"], blobs, strict=True):
        key = ProgramKey.parse(name)
        try:
            made = jax.export.deserialize(bytearray(blob))
        except Exception as error:
            raise CheckpointError(
                f"{path} was written by {written}, and jax {jax.__version__} cannot read its"
                f" programs ({error}); export it again"
            ) from error
        exported[key] = _program(key, made, manifest, plan)
    stored = {}
    for i, (name, (shape, dtype)) in enumerate(manifest["params"].items()):
        if manifest["stored"]:
            data = np.frombuffer(archive.read(f"params/{i}"), jnp.dtype(dtype))
            stored[name] = data.reshape(shape)
    vocab, ends = manifest["config"]
    if not all(type(number) is int and number >= 0 for number in (vocab, *ends)):
        raise ValueError(f"the config is {manifest['config']!r}")
    config = ExportedConfig(vocab, tuple(ends))
    return ExportedGraph(plan, config, exported, manifest, stored if manifest["stored"] else None)


def _program(
    key: ProgramKey, made: jax.export.Exported, manifest: Mapping[str, Any], plan: ResolvedPlan
) -> Program:
    """Return a program of a file whose arguments are those that its manifest declares."""
    avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in made.in_avals]
    arguments, options = jax.tree.unflatten(made.in_tree, avals)
    params, state, *_ = arguments
    if options or len(arguments) != 4:
        raise ValueError(f"the program {key} has other arguments than programs have")
    if params is not None and {name: _kind(x) for name, x in params.items()} != {
        name: (list(shape), dtype) for name, (shape, dtype) in manifest["params"].items()
    }:
        raise ValueError(f"the program {key} has other parameters than the manifest")
    kinds = [(list(shape), dtype) for shape, dtype in manifest["state"]]
    if kinds[-1] != ([plan.rows], "int32") or sum(manifest["caches"]) != len(kinds) - 2:
        raise ValueError("the state has other arrays than the plan")
    if state is not None and list(map(_kind, jax.tree.leaves(state))) != kinds:
        raise ValueError(f"the program {key} has another state than the manifest")
    return Program(key, made.call, arguments, STATES)


def _check_programs(path: str, blobs: Sequence[bytes]) -> None:
    """Check the programs of a file in a process of its own, which may end while it reads them.

    The reader of StableHLO was not made for strangers' bytes: some end the process. Programs that
    passed before, with these versions, are not checked again.
    """
    digests = {hashlib.sha256(blob).hexdigest() for blob in blobs}
    store = default_store(CHECKED, f".{CHECKED}", size=MOST_RECORDS)
    made_by = [FORMAT, __version__, jax.__version__, jaxlib.__version__, CALLS, sorted(digests)]
    key = hashlib.sha256(json.dumps(made_by).encode()).hexdigest()
    if store is not None and store.get(key) is not None:
        return
    root = str(Path(__file__).parents[2])
    paths = filter(None, [root, os.environ.get("PYTHONPATH")])
    variables = {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    command = python_command("-c", CHECKING, path)
    try:
        done = subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(
            f"the programs of {path} could not be read in {PATIENCE} s; export it again"
        ) from error
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2][:200]
        raise CheckpointError(
            f"{path} is missing or no whole file of Graph.export (jax {jax.__version__} ended with"
            f" {done.returncode} while it read the programs: {last}); export it again"
        )
    problem, passed = json.loads(done.stdout)
    if problem:
        raise CheckpointError(
            f"{path} contains {problem}, which Graph.export never writes; get the file from"
            " somebody you trust"
        )
    if not digests <= set(passed):
        raise CheckpointError(f"{path} was changed while it was read; load it again")
    with contextlib.suppress(OSError):  # a full disk, say: the file is checked again next time
        if store is not None:
            store.put(key, [])


def checked(path: str) -> tuple[str, list[str]]:
    """Return what a file's programs contain that none of `export` does, and their digests.

    The first is "" if there is nothing.
    """
    _register()
    digests = []
    with zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            if member.startswith("programs/"):
                blob = archive.read(member)
                made = jax.export.deserialize(bytearray(blob))
                if problem := forbidden(made.mlir_module()):
                    return f"{problem} in {member}", []
                digests.append(hashlib.sha256(blob).hexdigest())
    return "", digests


def forbidden(module: str) -> str:
    """Return what a program's text contains that none of `export` does; "" if nothing."""
    for line in module.splitlines():
        if not CALLING.search(line):
            continue
        call = CALL.search(line)
        if call is None or call[1] not in CALLS:
            return f"a call of {call[1] if call else line.strip()[:60]!r}"
        if call[1] == TRIANGULAR and not _fits_triangular(call[2], call[3]):
            return f"a call of {TRIANGULAR} by shapes that do not fit"
    return ""


def _fits_triangular(operands: str, result: str) -> bool:
    """Return whether types are those of a x = b with square matrices a; LAPACK checks none."""
    types = re.fullmatch(r"tensor<([\dx]*)xf32>, (tensor<([\dx]*)xf32>)", operands)
    if types is None or result != types[2]:
        return False
    *batch, rows, columns = types[1].split("x")
    *others, height, _ = types[3].split("x")
    return batch == others and rows == columns == height


class ExportedGraph:
    """Exported programs, in the place of a `Graph` whose modules are not there.

    `compile`, `init_state`, `place_params` and `rules` are those of `Graph`, and so are the
    compiled programs. An engine needs a `Graph`.

    Attributes:
      plan: the graph's plan.
      config: vocabulary size and end tokens of the target.
      params: shapes and dtypes of all parameters, by path.
      tokenizer: the target's, or None.
    """

    def __init__(
        self,
        plan: ResolvedPlan,
        config: ExportedConfig,
        programs: Mapping[ProgramKey, Program],
        manifest: Mapping[str, Any],
        stored: Mapping[str, np.ndarray] | None,
    ):
        """Keep what `load_exported` has read."""
        self.plan = plan
        self.config = config
        self._programs = programs
        self._stored = stored
        self._manifest = manifest
        self.params = {
            name: jax.ShapeDtypeStruct(shape, dtype)
            for name, (shape, dtype) in manifest["params"].items()
        }
        self.tokenizer = _tokenizer(manifest["tokenizer"])

    def __repr__(self) -> str:
        return f"<ExportedGraph: {', '.join(map(str, self._programs))}>"

    rules = Graph.rules

    @isolated_jax_config()
    def place_params(self, params: Any = None) -> dict[str, jax.Array]:
        """Return parameters by path, in the dtypes and layouts that programs expect.

        Args:
          params: trees by role, as for `Graph.place_params`, or arrays by path; packed weights have
            to be packed before. By default the parameters in the file.

        Raises:
          PlanError: parameters are missing, unknown or of another shape.
        """
        chosen = self._stored if params is None else params
        if chosen is None:
            raise PlanError("the file has no parameters; give them, or export with `params`")
        expected = self._manifest["params"]
        return jax.device_put(_fitting(expected, chosen, self.plan, self._manifest["forms"]))

    @isolated_jax_config()
    def init_state(self) -> DecodeState:
        """Return a state with every row at position 0."""
        leaves = [jnp.zeros(shape, dtype) for shape, dtype in self._manifest["state"]]
        target, drafter = self._manifest["caches"]
        caches = tuple(leaves[:target]), tuple(leaves[target : target + drafter])
        return DecodeState(*caches, *leaves[target + drafter :])

    def compile(self, names: Collection[str] | None = None) -> GraphPrograms:
        """Compile programs, as `Graph.compile` does; by default all of the file."""
        known = self._programs
        keys = (
            list(known) if names is None else keys_of(names, known, self.plan.kernels, "the file")
        )
        try:
            compiled = compile_programs(self._programs[key] for key in keys)
        except DFlashError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"the programs of the file cannot be compiled ({error}); export it again"
            ) from error
        return GraphPrograms(self, compiled)


def _check_package() -> None:
    """Check that JAX can read and write programs, and prepare it for our classes."""
    try:
        importlib.import_module("flatbuffers")  # which `jax.export` needs
    except ImportError as error:
        raise PlanError(f"exported programs need flatbuffers; {install_hint('export')}") from error
    _register()


@functools.cache
def _register() -> None:
    """Let JAX write the classes of arguments and results by name, with their static fields."""
    for cls in CLASSES:
        jax.export.register_pytree_node_serialization(
            cls,
            serialized_name=f"dflash_jax.{cls.__name__}",
            serialize_auxdata=lambda static: json.dumps(static).encode(),
            deserialize_auxdata=lambda text: tuple(json.loads(bytes(text))),
        )


def _without_classes(program: Program) -> tuple[Any, tuple[Any, ...]]:
    """Return a program as a function of `_plain` trees, and its arguments."""
    params, *rest = program.arguments
    names = list(by_path(params))
    structure = jax.tree.structure(params)
    others = tuple(rest)
    rest_structure = jax.tree.structure(others)

    def call(named: dict[str, Any] | None, *plain: Any) -> Any:
        whole = jax.tree.unflatten(structure, [(named or {})[name] for name in names])
        arguments = jax.tree.unflatten(rest_structure, jax.tree.leaves(plain))
        return _plain(program.function(whole, *arguments))

    call.__name__ = program.key.identifier
    return call, (None if params is None else by_path(params), *_plain(others))


def _plain(tree: Any) -> Any:
    """Return a tree in which caches of models are tuples of arrays."""

    def plain(x: Any) -> Any:
        if not isinstance(x, DecodeState | Segment):
            return x
        target, drafter = (tuple(jax.tree.leaves(part)) for part in (x.target, x.drafter))
        return dataclasses.replace(x, target=target, drafter=drafter)

    return jax.tree.map(plain, tree, is_leaf=lambda x: isinstance(x, DecodeState | Segment))


def _kind(leaf: Any) -> tuple[list[int], str]:
    return [*leaf.shape], str(leaf.dtype)


def _fitting(
    expected: Mapping[str, Any], params: Any, plan: ResolvedPlan, forms: Mapping[str, str]
) -> dict[str, Any]:
    """Return arrays by path, laid out and cast as programs expect them."""
    if wrong := [name for name, x in by_path(params).items() if not hasattr(x, "dtype")]:
        raise PlanError(f"the parameter {wrong[0]} is no array; give trees by role")
    tree = jax.tree.map(lambda x: x, params, is_leaf=lambda x: isinstance(x, StructuredWeight))
    if isinstance(tree, dict):
        set_weight_layout(tree, forms, native=plan.kernels == "native")  # in the copy
    leaves = by_path(tree)
    for name in dict.fromkeys([*expected, *leaves]):
        x = leaves.get(name)
        kind = _kind(x) if hasattr(x, "dtype") else None
        wanted = (list(expected[name][0]), expected[name][1]) if name in expected else None
        alike = kind and wanted and kind[0] == wanted[0] and _is_float(kind) == _is_float(wanted)
        if not alike:
            described = f"{kind[1]}{kind[0]}" if kind else "missing"
            expects = f"{wanted[1]}{wanted[0]}" if wanted else "none"
            raise PlanError(f"the parameter {name} is {described}; expected {expects}")
    return {name: leaves[name].astype(jnp.dtype(dtype)) for name, (_, dtype) in expected.items()}


def _is_float(kind: tuple[list[int], str]) -> bool:
    return jnp.issubdtype(jnp.dtype(kind[1]), jnp.floating)


def _described(tokenizer: Tokenizer | None) -> Any:
    if tokenizer is None:
        return None
    templates = tokenizer.template, tokenizer.tool_template
    return tokenizer.core.to_str(), *templates, tokenizer.specials


def _tokenizer(described: Any) -> Tokenizer | None:
    if described is None:
        return None
    core, template, tool_template, specials = described
    return Tokenizer(tokenizers.Tokenizer.from_str(core), template, specials, tool_template)
