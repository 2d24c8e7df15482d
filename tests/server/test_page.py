"""The files of the web page: headers, contents, and the option that leaves them out."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from dflash_jax.cli import parser, serve
from dflash_jax.engine.engine import Engine
from dflash_jax.server.run import ServerConfig
from dflash_jax.server.web_page import CONTENT_TYPES, FOLDER
from tests.server.conftest import LiveServer, api_keys, run_server, twin

FILES = sorted(path.name for path in FOLDER.iterdir())
POLICY = {
    "default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'",
    "img-src 'self' data:", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
}  # fmt: skip
SVG = "http://www.w3.org/2000/svg"  # the name of a vocabulary, not an address
LINES = 350


@pytest.fixture(scope="module")
def closed(random_tiny: Engine) -> Iterator[LiveServer]:
    """A server with an API key and without the page."""
    live = run_server(
        lambda: twin(random_tiny),
        ServerConfig(port=0, api_keys=api_keys("secret"), no_ui=True),
        ready=False,
    )
    yield live
    live.stop()


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_served_with_its_type_and_a_strict_policy(
    live: LiveServer, name: str
) -> None:
    answer = httpx.get(f"{live.url}/page/{name}")
    assert answer.status_code == 200
    assert answer.content == (FOLDER / name).read_bytes()
    assert answer.headers["content-type"] == CONTENT_TYPES[Path(name).suffix]
    assert set(answer.headers["content-security-policy"].split("; ")) == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"
    assert not [header for header in answer.headers if header.startswith("access-control")]


def test_the_page_is_at_the_root_and_is_sent_again_only_if_it_changed(live: LiveServer) -> None:
    first = httpx.get(live.url + "/")
    assert first.status_code == 200
    assert first.content == (FOLDER / "index.html").read_bytes()
    etag = first.headers["etag"]
    for known in (etag, f"W/{etag}", f'"old", {etag}'):
        again = httpx.get(live.url + "/", headers={"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == etag
        assert set(again.headers["content-security-policy"].split("; ")) == POLICY
    assert httpx.get(live.url + "/", headers={"If-None-Match": '"old"'}).status_code == 200
    head = httpx.head(live.url + "/")
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", etag)
    assert httpx.post(live.url + "/").status_code == 405


def test_no_other_file_can_be_requested(live: LiveServer) -> None:
    for name in ("nothing.js", "%2e%2e%2frun.py", "..%2frun.py", "../run.py", "", "page/app.js"):
        answer = httpx.get(f"{live.url}/page/{name}")
        assert answer.status_code == 404, name
        assert answer.json()["error"]["code"] == "unknown_url"


def test_the_page_needs_no_key_and_answers_no_other_host(random_tiny: Engine) -> None:
    live = run_server(
        lambda: twin(random_tiny),
        ServerConfig(port=0, api_keys=api_keys("secret"), allowed_host=("box.example",)),
        ready=False,
    )
    try:
        assert httpx.get(live.url + "/").status_code == 200
        assert httpx.get(live.url + "/page/app.js").status_code == 200
        assert httpx.get(live.url + "/props").status_code == 401
        evil = httpx.get(live.url + "/", headers={"Host": "evil.example"})
        assert evil.json()["error"]["code"] == "host_not_allowed"
    finally:
        live.stop()


def test_without_the_page_nothing_is_at_its_paths(closed: LiveServer) -> None:
    for path in ("/", "/page/app.js", "/page/index.html"):
        answer = httpx.get(closed.url + path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")
    assert httpx.get(closed.url + "/health").status_code == 200


def test_an_option_leaves_the_page_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []

    async def note(engines: object, listening: ServerConfig, **more: object) -> None:
        found.append(listening.no_ui)

    monkeypatch.setattr("dflash_jax.server.run.serve", note)
    for words in ([], ["--no-ui"]):
        options = parser().parse_args(["serve", *words])
        options.check(options)
        assert serve.run(options) == 0
    assert found == [False, True]


def references(name: str) -> set[str]:
    """Return the files of the page that a file names: sources, links and imports."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    named = re.findall(r"""(?:src|href)="([^"#]+)"|from "([^"]+)"|url\(([^)]+)\)""", text)
    paths = {next(filter(None, each)) for each in named}
    start = FOLDER.parent if name == "index.html" else FOLDER
    return {(start / path).resolve().relative_to(FOLDER.resolve()).as_posix() for path in paths}


def test_every_file_that_is_named_exists_and_every_file_is_named() -> None:
    assert {Path(name).suffix for name in FILES} == set(CONTENT_TYPES)
    named = set().union(*map(references, FILES))
    assert named == set(FILES) - {"index.html"}


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_another_host_parses_html_or_is_long(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert not re.findall(r"(?:https?:)?//[\w-]+\.[\w./-]+", text.replace(SVG, ""))
    banned = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function"
    assert not re.findall(rf"{banned}|localStorage|cookie|\bstyle=|\bon\w+=\"", text)
    assert text.count("\n") <= (LINES if name.endswith(".js") else 500)
