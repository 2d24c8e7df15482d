"""The web page at `/`: static files of the package, served with a strict content policy."""

import hashlib
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from dflash_jax.server.middleware import Handler
from dflash_jax.server.protocol import Problem

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
PREFIX = "/page"
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


class PageFile(NamedTuple):
    """A file of the page, with its digest in quotes, as headers have it."""

    content: bytes
    media_type: str
    etag: str


def page_routes() -> dict[str, Handler]:
    """Return the handlers of the page's files by path; they are read once, and there are no others.

    They need no API key: the page has a field for the key.
    """
    files: dict[str, PageFile] = {}
    for path in FOLDER.iterdir():
        media_type = CONTENT_TYPES.get(path.suffix)
        if media_type is not None:
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()[:32]
            files[path.name] = PageFile(content, media_type, f'"{digest}"')

    async def show(raw_request: Request) -> Response:
        """Return a file, or 304 if the browser has it."""
        name = raw_request.path_params.get("name", INDEX)
        if name not in files:
            path = raw_request.scope["path"][:200]
            raise Problem(f"the page has no file {path}", status=404, code="unknown_url")
        file = files[name]
        headers = HEADERS | {"ETag": file.etag}
        known = raw_request.headers.get("if-none-match", "").split(",")
        if file.etag in (tag.strip().removeprefix("W/") for tag in known):
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=file.media_type)

    return {"/": show, f"{PREFIX}/{{name}}": show}
