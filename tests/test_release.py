"""Versions follow one rule, and the files of releases agree with each other."""

import re
from pathlib import Path

import pytest

from dflash_jax.version import __version__
from recipes.release import ReleaseError, check_versions

ROOT = Path(__file__).parents[1]
RELEASED = "## [0.2.0] - 2026-03-01\n### Added\n## [0.1.0] - 2026-01-31\n"


def test_the_changelog_begins_with_the_version_or_unreleased() -> None:
    check_versions((ROOT / "CHANGELOG.md").read_text("utf-8"), __version__)


def test_versions_that_agree_are_accepted() -> None:
    check_versions("## [Unreleased]\n", "0.1.0")
    check_versions(RELEASED, "0.2.0", "v0.2.0")
    for version in ("0.2.0", "0.3.0"):
        check_versions("## [Unreleased]\n" + RELEASED, version)


@pytest.mark.parametrize(
    ("changelog", "version", "tag", "says"),
    [
        ("", "0.1.0", None, "no heading"),
        ("## 0.1.0\n", "0.1.0", None, "heading '## 0.1.0'"),
        (RELEASED, "0.3.0", None, "version 0.3.0, and CHANGELOG.md begins with 0.2.0"),
        ("## [Unreleased]\n" + RELEASED, "0.1.0", None, "begins with 0.2.0"),
        (RELEASED + "## [Unreleased]\n", "0.2.0", None, "not the first heading"),
        ("## [0.1.0] - 2026-01-31\n" + RELEASED, "0.1.0", None, "do not descend"),
        ("## [Unreleased]\n" + RELEASED, "0.2.0", "v0.2.0", "the tag v0.2.0 is not"),
        (RELEASED, "0.2.0", "v0.3.0", "the tag v0.3.0 is not v0.2.0"),
        ("## [Unreleased]\n", "0.1.0", "v0.1.0", "the tag v0.1.0 is not"),
    ],
)
def test_versions_that_disagree_are_named(
    changelog: str, version: str, tag: str | None, says: str
) -> None:
    with pytest.raises(ReleaseError, match=re.escape(says)):
        check_versions(changelog, version, tag)


def test_workflows_run_commands_that_the_makefile_has() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        used = set(re.findall(r"run: make ([a-z-]+)", workflow.read_text("utf-8")))
        assert used
        assert used <= targets, workflow


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_images_copy_files_that_exist_and_run_as_a_user(name: str) -> None:
    text = (ROOT / name).read_text("utf-8").replace("\\\n", " ")
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ")]
    sources = [path for paths in copied for path in paths if not path.startswith(("--", "/"))]
    assert sources
    assert not [path for path in sources if not (ROOT / path).exists()]
    lines = [line.split()[0] for line in text.splitlines() if line[:1].isupper()]
    assert lines.index("USER") < lines.index("ENTRYPOINT")
    assert not re.search(r"(?i)(api_key|token|password)\s*=\s*\S", text)
