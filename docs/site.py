"""Hooks of mkdocs: links from pages to other files of the repository work on the site, too.

Such a file is published below repository/. A link to a folder becomes its text. Links to files that
do not exist stay as they are, and fail the build.
"""

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
DOCS, OTHERS = "docs/", "repository/"
PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")
LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def _target(source: str, link: str) -> str:
    """Return the path in the repository that a link of a page means."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _source(page: str) -> str:
    """Return the path in the repository of a page of the site."""
    return page.removeprefix(OTHERS) if page.startswith(OTHERS) else DOCS + page


def on_files(files: Any, config: Any) -> Any:
    """Add the files that pages link to, and those that they link to in turn."""
    waiting = [*PAGES, *(_source(file.src_uri) for file in files.documentation_pages())]
    known = set()
    while waiting:
        source = waiting.pop()
        if source in known:
            continue
        known.add(source)
        if not source.startswith(DOCS):
            path = os.fspath(ROOT / source)
            files.append(File.generated(config, OTHERS + source, abs_src_path=path))
        if source.endswith(".md"):
            text = (ROOT / source).read_text(encoding="utf-8")
            targets = (_target(source, link) for _, link, _ in LINK.findall(text))
            waiting += [target for target in targets if (ROOT / target).is_file()]
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the page with links that lead to the files of the site."""
    here = page.file.src_uri
    source = _source(here)

    def replace(match: "re.Match[str]") -> str:
        text, link, anchor = match[1], match[2], match[3] or ""
        target = _target(source, link)
        if (ROOT / target).is_dir():
            return text
        if not (ROOT / target).is_file():
            return match[0]
        site = target.removeprefix(DOCS) if target.startswith(DOCS) else OTHERS + target
        return f"[{text}]({posixpath.relpath(site, posixpath.dirname(here))}{anchor})"

    return LINK.sub(replace, markdown)
