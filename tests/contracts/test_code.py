"""Docstrings of everything public, unique class names, functions of one screen, plain statements.

    PYTHONPATH=. python tests/contracts/test_code.py

prints the figures of `MOST` as they are now.
"""

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_jax.graph.keys import Step, Variant

ROOT = Path(__file__).parents[2]
PACKAGES = ("dflash_jax", "converters")
FILE_LINES, FUNCTION_LINES, PARAMETERS, ENGINE_FILES = 600, 70, 8, 13

Function = ast.FunctionDef | ast.AsyncFunctionDef


def areas() -> dict[str, list[Path]]:
    """Return Python files by area: a subpackage, or one of the other folders of code."""
    found: dict[str, list[Path]] = defaultdict(list)
    for folder in PACKAGES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.is_relative_to(ROOT / "dflash_jax" / "converters"):
                continue  # a link to the folder that is read anyway
            parts = path.relative_to(ROOT).parts
            name = "/".join(parts[:2]) if folder == "dflash_jax" and len(parts) > 2 else folder
            found[name].append(path)
    return dict(found)


AREAS = areas()


def expect_none(found: list[str]) -> None:
    if found:
        pytest.fail("\n".join([f"{len(found)} found:", *found]), pytrace=False)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


def functions(tree: ast.AST) -> Iterator[tuple[Function, ast.ClassDef | None]]:
    """Yield every function of a module with the class it is a method of."""
    for node in ast.iter_child_nodes(tree):
        owner = tree if isinstance(tree, ast.ClassDef) else None
        if isinstance(node, Function):
            yield node, owner
        yield from functions(node)


def undocumented(node: ast.AST, prefix: str = "") -> Iterator[tuple[int, str]]:
    """Yield public classes, functions and methods without a docstring; nested ones are private."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If | ast.Try):
            yield from undocumented(child, prefix)
        elif isinstance(child, ast.ClassDef | Function) and not child.name.startswith("_"):
            marks = {
                getattr(mark, "attr", getattr(mark, "id", "")) for mark in child.decorator_list
            }
            if not ast.get_docstring(child) and marks.isdisjoint({"setter", "overload"}):
                yield child.lineno, prefix + child.name
            if isinstance(child, ast.ClassDef):
                yield from undocumented(child, f"{child.name}.")


def parameters(function: Function, owner: ast.ClassDef | None) -> int:
    """Return the number of parameters that callers pass, without `self` and `cls`."""
    found = function.args
    count = len(found.posonlyargs) + len(found.args) + len(found.kwonlyargs)
    static = any(getattr(mark, "id", "") == "staticmethod" for mark in function.decorator_list)
    return count - (owner is not None and not static)


def is_public_constructor(function: Function, owner: ast.ClassDef | None) -> bool:
    named = owner is not None and not owner.name.startswith("_")
    return named and function.name == "__init__"


def test_class_names_are_unique_in_the_package() -> None:
    homes = defaultdict(list)
    for area in AREAS:
        for path in AREAS[area]:
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.ClassDef):
                    homes[node.name].append(relative(path))
    shared = {name: paths for name, paths in homes.items() if len(paths) > 1}
    expect_none([f"{name}: {', '.join(paths)}" for name, paths in shared.items()])


@pytest.mark.parametrize("area", AREAS)
def test_everything_public_has_a_docstring(area: str) -> None:
    found = [
        f"{relative(path)}:{line}: {name}"
        for path in AREAS[area]
        for line, name in undocumented(tree_of(path))
    ]
    expect_none(found)


@pytest.mark.parametrize("area", AREAS)
def test_files_and_functions_are_short_and_take_few_parameters(area: str) -> None:
    found = []
    for path in AREAS[area]:
        lines = text_of(path).count("\n")
        if lines > FILE_LINES:
            found.append(f"{relative(path)}: {lines} lines")
        for function, owner in functions(tree_of(path)):
            where = f"{relative(path)}:{function.lineno}: {function.name}"
            size = (function.end_lineno or 0) - function.lineno + 1
            if size > FUNCTION_LINES:
                found.append(f"{where} has {size} lines")
            count = parameters(function, owner)
            if count > PARAMETERS and not is_public_constructor(function, owner):
                found.append(f"{where} has {count} parameters")
    expect_none(found)


def test_no_step_is_called_as_a_variant() -> None:
    assert not {*Step} & {*Variant}


def test_the_engine_has_few_files_at_its_top() -> None:
    files = sorted(path.name for path in (ROOT / "dflash_jax" / "engine").glob("*.py"))
    assert len(files) <= ENGINE_FILES, files


# Statements that say more than one thing, or nothing of what they hold, by folder of code: packed
# assignments, arithmetic on booleans, expressions as statements, and names like `found`.
# These figures may only fall.
MOST: dict[str, tuple[int, int, int, int]] = {
    "dflash_jax/engine": (0, 4, 0, 0),
    "dflash_jax/trainer": (0, 0, 0, 1),
    "converters": (0, 1, 0, 0),
}
CODE = AREAS | {
    folder: sorted((ROOT / folder).rglob("*.py")) for folder in ("benchmarks", "recipes")
}
VAGUE = ("found", "given")


def is_packed(node: ast.AST) -> bool:
    """Return whether an assignment has several values that do not depend on what it assigns."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return False
    target = node.targets[0]
    value = node.value
    if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
        return False
    if any(isinstance(part, ast.Starred) for part in (*target.elts, *value.elts)):
        return False
    assigned = {ast.unparse(each) for each in target.elts}
    return assigned.isdisjoint(ast.unparse(part) for part in ast.walk(value) if is_place(part))


def is_place(node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Attribute | ast.Subscript)


def is_boolean(node: ast.AST | None) -> bool:
    negated = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    named = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "bool"
    return negated or named or isinstance(node, ast.Compare)


def counts_a_boolean(node: ast.AST) -> bool:
    """Return whether a boolean is added, multiplied, or the bound of a slice."""
    match node:
        case ast.BinOp(left, ast.Add() | ast.Sub() | ast.Mult(), right):
            return is_boolean(left) or is_boolean(right)
        case ast.AugAssign(_, ast.Add() | ast.Sub() | ast.Mult(), value):
            return is_boolean(value)
        case ast.Slice(lower, upper, _):
            return is_boolean(lower) or is_boolean(upper)
    return False


def is_value_as_statement(node: ast.AST) -> bool:
    usual = ast.Call | ast.Await | ast.Yield | ast.YieldFrom | ast.Constant
    return isinstance(node, ast.Expr) and not isinstance(node.value, usual)


def is_vague(node: ast.AST) -> bool:
    return getattr(node, "id", getattr(node, "arg", "")) in VAGUE and isinstance(
        node, ast.Name | ast.arg
    )


def language(area: str) -> tuple[int, ...]:
    """Return the figures of an area, in the order of `MOST`."""
    kinds = (is_packed, counts_a_boolean, is_value_as_statement, is_vague)
    counts = [0] * len(kinds)
    for path in CODE[area]:
        for node in ast.walk(tree_of(path)):
            for at, holds in enumerate(kinds):
                if holds(node):
                    counts[at] += 1
    return tuple(counts)


@pytest.mark.parametrize("area", CODE)
def test_statements_say_one_thing_each(area: str) -> None:
    counts = language(area)
    most = MOST.get(area, (0, 0, 0, 0))
    grown = [count > limit for count, limit in zip(counts, most, strict=True)]
    assert not any(grown), f"{area} has {counts}, at most {most} are allowed: see `MOST`"


if __name__ == "__main__":
    for name in CODE:
        if any(language(name)):
            print(f'    "{name}": {language(name)},')
