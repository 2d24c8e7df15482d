"""Names, prose and sizes: one vocabulary in code and documents, files and functions of one screen.

The lists name words of an earlier, private vocabulary. CHANGELOG.md keeps its history, and this
file is exempt from its own lists.
"""

import ast
import functools
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
THIS = Path(__file__)
PACKAGES = ("dflash_jax", "converters")

BANNED = (
    r"anew", r"whoever", r"likewise", r"bereft", r"undisturbed", r"hangs? on", r"let go of",
    r"stands? still", r"nobody hears", r"is heard by", r"tellers?", r"feeders?", r"dictat\w*",
    r"unsaid", r"unserved",
)  # fmt: skip
# A gap in a phrase may be a line break, a comment sign or an underscore.
PHRASES = re.compile(
    r"(?<![a-z])(?:" + "|".join(word.replace(" ", r"[\W_]+") for word in BANNED) + r")(?![a-z])",
    re.IGNORECASE,
)
CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")

OLD_NAMES = frozenset({
    "Live", "Flight", "Teller", "Feeder", "Runner", "tell", "hear",  # the host loop
    "Dictated", "dictate", "Shaping", "Shaper", "SHAPED", "shaped",  # forced tokens, logits
    "likely", "likeliest", "is_likeliest",
    "apart", "Halves", "yours", "mine", "Lender", "Chooser", "Drafting", "Drafted",  # drafting
    "in_row", "several", "goes_on", "go_on",  # programs
    "in_order", "put_in_order", "panels", "Panels",  # weight layouts
    "Ask", "Said", "undisturbed", "bereft", "doubtful", "settle", "recall",
})  # fmt: skip
OLD_PARTS = frozenset({"lane", "lanes", "teller", "feeder", "dictated"})  # of snake_case names
OLD_MODULES = frozenset({
    "teller", "feeder", "flight", "lanes", "unsaid", "unserved", "kept", "blocks", "slips",
    "arriving", "declared",
})  # fmt: skip
OLD_FIELDS = frozenset({"rounds", "order"})  # of `Plan`; accepted with a warning

FILE_LINES, FUNCTION_LINES, PARAMETERS, ENGINE_FILES = 350, 70, 8, 16

Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files(folder: str) -> list[Path]:
    return [p for p in sorted((ROOT / folder).rglob("*.py")) if "__pycache__" not in p.parts]


def areas() -> dict[str, list[Path]]:
    """Return Python files by area: a subpackage, or one of the other folders of code."""
    found: dict[str, list[Path]] = defaultdict(list)
    folders = [*PACKAGES, "benchmarks", "tests", *(p for p in ("recipes",) if (ROOT / p).is_dir())]
    for folder in folders:
        for path in python_files(folder):
            parts = path.relative_to(ROOT).parts
            if path.is_relative_to(ROOT / "dflash_jax" / "converters"):
                continue  # a link to the folder that is read anyway
            name = "/".join(parts[:2]) if folder == "dflash_jax" and len(parts) > 2 else folder
            found[name].append(path)
    return dict(found)


AREAS = areas()
PACKAGE_AREAS = [name for name in AREAS if name.startswith(PACKAGES)]
TEXTS = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "Makefile")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / ".github").rglob("*.yml")),
    *sorted((ROOT / "dflash_jax" / "data").rglob("*.md")),
]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def expect_none(found: list[str]) -> None:
    if found:
        pytest.fail("\n".join([f"{len(found)} found:", *found]), pytrace=False)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def text_of(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return text


@functools.cache
def tree_of(path: Path) -> ast.Module:
    if path.suffix != ".ipynb":
        return ast.parse(text_of(path))
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return ast.parse("\n".join(code))


def banned_words(path: Path) -> list[str]:
    """Return the banned words of a file, in its text and its name, with their lines."""
    text = CAMEL.sub(" ", f"{path.stem}\n{text_of(path)}")
    lines = ((text.count("\n", 0, found.start()), found[0]) for found in PHRASES.finditer(text))
    return [f"{relative(path)}:{line}: {' '.join(word.split())}" for line, word in lines]


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield every identifier of a module that its code defines or uses, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.Name(id=name):
                yield node.lineno, name
            case ast.Attribute(attr=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield node.lineno, name
            case ast.alias(name=name, asname=other):
                for each in (*name.split("."), *filter(None, [other])):
                    yield node.lineno, each


@functools.cache
def is_old(name: str) -> bool:
    plain = name.strip("_")
    return plain in OLD_NAMES or not OLD_PARTS.isdisjoint(plain.lower().split("_"))


def old_names(path: Path) -> list[str]:
    if not any(map(is_old, set(re.findall(r"\w+", text_of(path))))):
        return []  # most files need not be parsed
    found = sorted({(line, name) for line, name in names(tree_of(path)) if is_old(name)})
    return [f"{relative(path)}:{line}: {name}" for line, name in found]


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


@pytest.mark.parametrize("area", AREAS)
def test_code_has_no_word_of_the_private_vocabulary(area: str) -> None:
    found = [word for path in AREAS[area] if path != THIS for word in banned_words(path)]
    expect_none(found)


@pytest.mark.parametrize("path", [*TEXTS, *NOTEBOOKS], ids=relative)
def test_documents_have_no_word_of_the_private_vocabulary(path: Path) -> None:
    found = banned_words(path)
    expect_none(found)


@pytest.mark.parametrize("area", [*AREAS, "notebooks"])
def test_old_names_are_gone(area: str) -> None:
    paths = AREAS.get(area, NOTEBOOKS)
    found = [name for path in paths for name in old_names(path)]
    modules = {path.stem for path in paths} & OLD_MODULES
    expect_none(found)
    assert not modules


def test_old_fields_of_the_plan_are_gone() -> None:
    [plan] = [
        node
        for node in ast.walk(tree_of(ROOT / "dflash_jax" / "plan.py"))
        if isinstance(node, ast.ClassDef) and node.name == "Plan"
    ]
    fields = {node.target.id for node in plan.body if isinstance(node, ast.AnnAssign)}  # pyrefly: ignore
    assert len(fields) > 20
    assert not fields & OLD_FIELDS


def test_class_names_are_unique_in_the_package() -> None:
    homes = defaultdict(list)
    for area in PACKAGE_AREAS:
        for path in AREAS[area]:
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.ClassDef):
                    homes[node.name].append(relative(path))
    shared = {name: paths for name, paths in homes.items() if len(paths) > 1}
    expect_none([f"{name}: {', '.join(paths)}" for name, paths in shared.items()])


@pytest.mark.parametrize("area", PACKAGE_AREAS)
def test_everything_public_has_a_docstring(area: str) -> None:
    found = [
        f"{relative(path)}:{line}: {name}"
        for path in AREAS[area]
        for line, name in undocumented(tree_of(path))
    ]
    expect_none(found)


@pytest.mark.parametrize("area", PACKAGE_AREAS)
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


def test_the_engine_has_few_files_at_its_top() -> None:
    files = sorted(path.name for path in (ROOT / "dflash_jax" / "engine").glob("*.py"))
    assert len(files) <= ENGINE_FILES, files


@pytest.mark.parametrize(
    "text",
    ["decoded anew", "it hangs\n    # on them", "def test_dictated_tokens():", "class NewTeller:"],
)
def test_the_list_of_words_finds_them_in_names_and_across_lines(text: str) -> None:
    assert PHRASES.search(CAMEL.sub(" ", text))


@pytest.mark.parametrize("text", ["storyteller", "anewish", "hanging on", "Feed", "indictment"])
def test_the_list_of_words_leaves_other_words_alone(text: str) -> None:
    assert not PHRASES.search(CAMEL.sub(" ", text))
