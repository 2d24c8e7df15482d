"""The files of the host that a token passes through are those that ARCHITECTURE.md lists."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import dflash_jax
from dflash_jax.cli import main
from dflash_jax.engine.engine import Engine, RequestHandle

PACKAGE = Path(dflash_jax.__file__).parent
DOCUMENT = PACKAGE.parent / "ARCHITECTURE.md"
MOST = 16


def listed() -> list[str]:
    """The files between the marks in the document, in its order."""
    text = DOCUMENT.read_text(encoding="utf-8")
    [path] = re.findall(r"<!-- token path -->\n(.*?)<!-- end -->", text, re.DOTALL)
    return re.findall(r"^\d+\. `([\w/]+\.py)`", path, re.MULTILINE)


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, None]]:
    """Files in which functions run from a prompt's tokens to the last printed one, in order."""
    found: dict[str, None] = {}

    def note(frame: FrameType, event: str = "call", _: object = None) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE) and frame.f_code.co_name != "<module>":
            found.setdefault(file.relative_to(PACKAGE).as_posix())

    submit, pieces = Engine.submit, RequestHandle.__iter__

    def begin(self: Engine, *arguments: Any, **options: Any) -> RequestHandle:
        note(sys._getframe(1))
        sys.setprofile(note)
        return submit(self, *arguments, **options)

    def end(self: RequestHandle) -> Iterator[Any]:
        yield from pieces(self)
        sys.setprofile(None)

    monkeypatch.setattr(Engine, "submit", begin)
    monkeypatch.setattr(RequestHandle, "__iter__", end)
    try:
        yield found
    finally:
        sys.setprofile(None)


@pytest.mark.exhaustive
def test_the_document_lists_the_files_that_a_token_passes_through(
    entered: dict[str, None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "What can you do for me?", "--max-tokens", "24"]) == 0
    assert capsys.readouterr().out.strip()
    assert list(entered) == listed()


def test_the_path_of_a_token_is_short() -> None:
    assert len(listed()) <= MOST
