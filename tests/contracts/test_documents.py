"""What the documents name is there: files, flags, and the rooms of the server."""

import argparse
import re
from pathlib import Path

import pytest

from dflash_jax import server
from dflash_jax.cli import parser

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
PATH = re.compile(r"[`(](\w[\w.-]*/[\w./-]*(?:\.(?:py|json|md)|/))[`)]")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_documents_name_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    homes = (ROOT, ROOT / "dflash_jax", ROOT / "benchmarks")
    missing = [p for p in PATH.findall(text) if not any((home / p).exists() for home in homes)]
    assert not missing


def test_flags_that_documents_name_exist() -> None:
    [verbs] = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    known = {flag for verb in verbs.choices.values() for flag in verb._option_string_actions}
    text = "".join((ROOT / document).read_text(encoding="utf-8") for document in DOCUMENTS)
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]\b(?!-)", text))
    assert len(flags) > 40
    assert not flags - known


def test_every_file_of_the_server_has_its_place_in_the_order_of_reading() -> None:
    said = set(re.findall(r"`(\w+)`", server.__doc__ or ""))
    files = {path.stem for path in (ROOT / "dflash_jax" / "server").glob("[!_]*.py")}
    assert files <= said
