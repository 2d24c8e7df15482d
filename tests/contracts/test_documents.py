"""Files, flags, options and figures that the documents name exist, and the server's files."""

import argparse
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

import dflash_jax as dj
from benchmarks import acceptance, accuracy, collectives, compile_for, llama_cpp
from dflash_jax import server
from dflash_jax.cli import parser
from dflash_jax.trainer.recipes import Recipe, Schedule
from recipes.smollm2 import comparison
from recipes.smollm2.__main__ import DRAFTERS

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


def test_flags_that_documents_name_exist() -> None:
    [commands] = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    known = {
        flag for command in commands.choices.values() for flag in command._option_string_actions
    }
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]\b(?!-)", "".join(DOCUMENTS.values())))
    assert len(flags) > 40
    assert not flags - known - OF_GATEWAYS


def test_every_page_has_its_place_on_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^ +- [\w ]+: ([\w/]+\.md)$", text, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert {path.name for path in PAGES} == {name for name in listed if "/" not in name}


def test_readme_is_short() -> None:
    assert DOCUMENTS["README.md"].count("\n") < 150


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


def ratios(name: str) -> dict[str, dict[str, str]]:
    """Return each pair's median ratios from a file of results, with two decimals."""
    cases = json.loads((RESULTS / name).read_text(encoding="utf-8"))["cases"]
    return {
        case: {
            series: f"{found['ratio']['median']:.2f}" for series, found in kept["series"].items()
        }
        for case, kept in cases.items()
    }


def test_speeds_are_those_of_the_results() -> None:
    rows = [line.split(" | ") for line in DOCUMENTS["docs/benchmarks.md"].splitlines()]
    rows = [row for row in rows if len(row) == 5 and re.match(r"\| (shipped|\d+M)$", row[0])]
    assert len(rows) == 8
    name = ""
    for pair, _, official, plain, results in rows:
        name = found[0] if (found := re.findall(r"\[(\w+\.json)\]", results)) else name
        kept = ratios(name)[pair.removeprefix("| ").lower().replace("shipped", "tiny")]
        assert official == kept.get("official", "not run")
        assert plain == kept["plain"]


@pytest.mark.parametrize(
    ("suite", "page"),
    [
        (accuracy, "benchmarks"),
        (llama_cpp, "benchmarks"),
        (compile_for, "benchmarks"),
        (collectives, "serving"),
    ],
)
def test_tables_are_those_of_the_results(suite: Any, page: str) -> None:
    name = suite.__name__.split(".")[-1]
    kept = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["cases"]
    assert "\n".join(suite.table(kept)) in DOCUMENTS[f"docs/{page}.md"]


def test_acceptance_of_smollm2_is_that_of_the_results() -> None:
    text = DOCUMENTS["docs/benchmarks.md"]
    words = " ".join(text.split())
    kept = json.loads((RESULTS / "acceptance.json").read_text(encoding="utf-8"))["tables"]
    assert "\n".join(acceptance.table(kept)) in text
    every = kept["int8, temperature 0"]["all"]
    whole, short = (f"{every[f'block {n}']['acceptance_length']:.2f}" for n in (6, 3))
    assert f"Acceptance is low: {whole} tokens a round" in words
    assert f"blocks of 6, {short} with the first" in words
    results = json.loads((ROOT / "dflash_jax/data/smollm2/results.json").read_text("utf-8"))
    assert f"trained on it is {results['chat']['acceptance_length']:.2f}" in words


def test_shapes_of_smollm2s_drafters_are_those_of_the_results() -> None:
    kept = json.loads((RESULTS / "smollm2_shapes.json").read_text(encoding="utf-8"))
    assert list(kept["drafters"]) == list(DRAFTERS)
    assert "\n".join(comparison.lines(kept, DRAFTERS)) in DOCUMENTS["docs/benchmarks.md"]


def test_speeds_by_steps_per_call_are_those_of_the_results() -> None:
    kept = ratios("decode_rounds.json")
    rows = re.findall(
        r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", DOCUMENTS["docs/benchmarks.md"], re.M
    )
    assert {f"tiny:{n}": {"plain": p, "device_loop": d} for n, p, d in rows} == kept


def test_figures_of_the_readme_are_those_of_the_results() -> None:
    text, kept = DOCUMENTS["README.md"], ratios("decode.json")
    rows = re.findall(r"^\| (\w+), .* \| ([\d.]+) \| ([\d.]+)x \| ([\d.]+)x \|$", text, re.M)
    assert [row[0] for row in rows] == ["shipped", "9M", "60M"]
    cases = json.loads((RESULTS / "decode.json").read_text(encoding="utf-8"))["cases"]
    for pair, length, official, plain in rows:
        case = pair.lower().replace("shipped", "tiny")
        assert length == f"{cases[case]['acceptance_length']:.2f}"
        assert {"official": official, "plain": plain}.items() <= kept[case].items()
    shipped = json.loads((ROOT / "dflash_jax/data/tiny/results.json").read_text(encoding="utf-8"))
    chat, code = (f"{shipped[kind]['acceptance_length']:.2f}" for kind in ("chat", "code"))
    assert f"τ = {chat} (chat and tools) and {code} (code)" in text.replace("\n", " ")


def test_acceptance_lengths_of_training_are_those_of_the_results() -> None:
    runs = json.loads((RESULTS / "drafters.json").read_text(encoding="utf-8"))["runs"].values()
    kept = {
        tuple(f"{run['measured'][k]['acceptance_length']:.2f}" for k in ("chat", "code"))
        for run in runs
    }
    rows = re.findall(r" \| (\d\.\d\d) \| (\d\.\d\d) \|$", DOCUMENTS["docs/training.md"], re.M)
    assert set(rows) == kept


def test_numbers_of_compared_tokens_are_those_of_the_results() -> None:
    rows = re.findall(r"\| ([\d,]+) (?:greedy )?tokens, 0 diff", DOCUMENTS["docs/benchmarks.md"])
    *grids, amx, avx512 = (
        json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("soak_lossless", "soak_families", "soak_sampled", "audit", "audit_avx512")
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
