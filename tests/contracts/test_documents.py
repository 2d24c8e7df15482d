"""Files, flags, options and figures that the documents name exist, and the server's files."""

import argparse
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

import dflash_jax as dj
from benchmarks import documents
from dflash_jax import server
from dflash_jax.cli import parser
from dflash_jax.trainer.recipes import Recipe, Schedule

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (
        *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
        ROOT / "CHANGELOG.md",
        *PAGES,
    )
}
PATH = re.compile(r"[`(](\w[\w.-]*/[\w./-]*(?:\.(?:py|json|md)|/))[`)]")
LINK = re.compile(r"\]\((?!https?://)([^)#]+)\)")
RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_documents_name_exist(document: str) -> None:
    homes = (ROOT, ROOT / "dflash_jax", ROOT / "benchmarks")
    named = PATH.findall(DOCUMENTS[document])
    assert not [p for p in named if not any((home / p).exists() for home in homes)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_of_documents_lead_to_files(document: str) -> None:
    folder = (ROOT / document).parent
    links = LINK.findall(DOCUMENTS[document])
    assert not [link for link in links if not (folder / link).exists()]


def test_tests_that_the_makefile_names_exist() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    groups = re.findall(r"addprefix tests/,(.*?)\)", text)
    named = [f"tests/{path}" for group in groups for path in group.split()]
    named += re.findall(r"tests/[\w/]+(?:\.py)?\b(?!\S*\*)", text)
    assert len(named) > 20
    assert not [path for path in named if not (ROOT / path).exists()]


OF_GATEWAYS = {"--config", "--policy", "--worker-urls"}  # flags of other programs
OF_AGENTS = "docs/agents.md"  # the page with flags of other programs


def test_flags_that_documents_name_exist() -> None:
    [commands] = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    known = {
        flag for command in commands.choices.values() for flag in command._option_string_actions
    }
    for program in (*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")):
        known |= set(re.findall(r'"(--[a-z][a-z-]*)"', program.read_text(encoding="utf-8")))
    pages = "".join(text for page, text in DOCUMENTS.items() if page != OF_AGENTS)
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]\b(?!-)", pages))
    assert len(flags) > 40
    assert not flags - known - OF_GATEWAYS


def test_every_page_has_its_place_on_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^ +- [\w ]+: ([\w/]+\.md)$", text, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert {path.name for path in PAGES} == {name for name in listed if "/" not in name}


def test_pages_that_everybody_reads_are_short() -> None:
    assert DOCUMENTS["README.md"].count("\n") <= 160
    assert DOCUMENTS["docs/benchmarks.md"].count("\n") <= 200
    assert len(DOCUMENTS["ARCHITECTURE.md"].split()) <= 2500


@pytest.mark.parametrize(
    ("page", "options"), [("docs/plan.md", dj.Plan), ("docs/recovery.md", dj.Recovery)]
)
def test_pages_name_every_option_in_the_order_of_the_class(page: str, options: Any) -> None:
    named = re.findall(r"^\| `(\w+)` \|", DOCUMENTS[page], re.MULTILINE)
    assert named == [field.name for field in dataclasses.fields(options)]


def test_defaults_of_recovery_are_those_of_the_class() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `?([^|`]+?)`? \|", DOCUMENTS["docs/recovery.md"], re.M)
    assert {name: default for name, default in rows} == {
        field.name: str(field.default) for field in dataclasses.fields(dj.Recovery)
    }


def test_tables_and_pictures_are_those_of_the_results() -> None:
    """`python -m benchmarks.documents` writes them."""
    different = [
        path.relative_to(ROOT).as_posix()
        for path, text in documents.files().items()
        if path.read_text(encoding="utf-8") != text
    ]
    assert not different


def test_every_table_of_the_results_is_shown_once() -> None:
    texts = "".join(path.read_text(encoding="utf-8") for path in documents.PAGES)
    shown = [name for _, name, _ in documents.BLOCK.findall(texts)]
    assert sorted(shown) == sorted(documents.TABLES)


def test_acceptance_lengths_of_training_are_those_of_the_results() -> None:
    runs = json.loads((RESULTS / "drafters.json").read_text(encoding="utf-8"))["runs"].values()
    kept = {
        tuple(f"{run['measured'][k]['acceptance_length']:.2f}" for k in ("chat", "code"))
        for run in runs
    }
    rows = re.findall(r" \| (\d\.\d\d) \| (\d\.\d\d) \|$", DOCUMENTS["docs/training.md"], re.M)
    assert set(rows) == kept


def test_numbers_of_compared_tokens_are_those_of_the_results() -> None:
    rows = re.findall(r"\| ([\d,]+) (?:greedy )?tokens, 0 diff", DOCUMENTS["docs/experiments.md"])
    *grids, amx, avx512 = (
        json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("soak_shipped", "soak_families", "soak_sampled", "audit", "audit_avx512")
    )
    audits = (amx, avx512)
    counts = [grid["tokens"] for grid in grids]
    counts += [audit["counts"]["greedy tokens"] for audit in audits]
    assert rows == [f"{count:,}" for count in counts]
    assert not any(grid["different_prompts"] for grid in grids)
    assert not any(audit["differences"] for audit in audits)


def test_results_name_no_folder_of_the_machine_they_were_measured_on() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in RESULTS.glob("*.json")}
    assert texts
    for name, text in texts.items():
        assert not re.findall(r'"/[^" ]*/[^"]*"', text), name


def test_every_file_of_the_server_has_its_place_in_the_order_of_reading() -> None:
    said = set(re.findall(r"`(\w+)`", server.__doc__ or ""))
    files = {path.stem for path in (ROOT / "dflash_jax" / "server").glob("[!_]*.py")}
    assert files <= said


def test_every_setting_of_a_recipe_is_documented() -> None:
    text = DOCUMENTS["docs/training.md"].partition("## Settings of a recipe")[2].partition("##")[0]
    named = set(re.findall(r"`(\w+)`", "".join(row.split(" | ")[0] for row in text.splitlines())))
    settings = {field.name for field in dataclasses.fields(Recipe)} - {"name", "schedule"}
    settings |= {field.name for field in dataclasses.fields(Schedule)}
    assert named == settings
