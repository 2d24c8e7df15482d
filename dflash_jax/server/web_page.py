"""The web page at `/`: static files of the package, served with a strict content policy."""

import dataclasses
import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from dflash_jax.server.middleware import Handler
from dflash_jax.server.protocol import Problem

FOLDER = Path(__file__).parent / "page"
INDEX, PREFIX = "index.html", "/page"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page runs its own scripts only, and sends nothing to other hosts.
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # browsers keep files, and ask whether they are current
}


@dataclasses.dataclass(frozen=True)
class PageFile:
    """A file of the page, as it is sent.

    Attributes:
      etag: a quoted digest of the content.
    """

    content: bytes
    media_type: str
    etag: str


class WebPage:
    """The page's files, read once; no other file can be requested.

    Its routes need no API key: the page has a field for the key.
    """

    def __init__(self) -> None:
        self._files = {
            path.name: _read(path) for path in FOLDER.iterdir() if path.suffix in CONTENT_TYPES
        }

    @property
    def gets(self) -> dict[str, Handler]:
        """Return the handlers of GET by path."""
        return {"/": self._index, f"{PREFIX}/{{name}}": self._file}

    async def _index(self, raw_request: Request) -> Response:
        return self._answer(raw_request, INDEX)

    async def _file(self, raw_request: Request) -> Response:
        return self._answer(raw_request, raw_request.path_params["name"])

    def _answer(self, raw_request: Request, name: str) -> Response:
        """Return a file, or 304 if the browser has it."""
        file = self._files.get(name)
        if file is None:
            path = raw_request.scope["path"]
            raise Problem(404, f"the page has no file {path[:200]}", code="unknown_url")
        headers = HEADERS | {"ETag": file.etag}
        known = raw_request.headers.get("if-none-match", "").split(",")
        if file.etag in (tag.strip().removeprefix("W/") for tag in known):
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=file.media_type)


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return PageFile(content, CONTENT_TYPES[path.suffix], etag)
