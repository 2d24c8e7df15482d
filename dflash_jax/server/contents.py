"""The text of message contents, whose parts differ between APIs.

`param` is a path in the request, for errors. What is left out or changed is added to `warnings`.
"""

import base64
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

from dflash_jax.server.protocol import Problem
from dflash_jax.server.unsupported import text_only

TEXT_MEDIA = re.compile(r"text/[\w.+-]+|application/(json|xml|yaml|x-yaml|toml)")
MEDIA = re.compile(r"(.*_)?(image|audio|video|file|screenshot)(_url|_file)?")
TEXTS = ("text", "input_text", "output_text", "summary_text", "refusal", None)
THOUGHTS = ("thinking", "reasoning", "reasoning_text", "redacted_thinking")
TOOL_NAMES = ("tool_reference", "tool_addition", "tool_removal")
# Fields with text, in the order of reading, of results of tools that ran elsewhere.
RESULT_FIELDS = (
    "title", "filename", "url", "source", "tool_name", "name", "text", "data", "logs", "stdout",
    "stderr", "output", "outputs", "results", "content", "tool_references", "tools", "outcome",
    "error", "error_code", "message", "summary",
)  # fmt: skip
EXIT_CODES = ("return_code", "exit_code")
FAILED = "The tool call failed."


def unwrap(texts: list[str]) -> str | list[str]:
    """Return the only text, or the list."""
    return texts[0] if len(texts) == 1 else texts


def content_text(content: Any, param: str, warnings: list[str]) -> str | None:
    """Return a content as one text; clients split output of a model into parts."""
    texts = content_texts(content, param, warnings)
    return "".join(texts) if isinstance(texts, list) else texts


def content_texts(content: Any, param: str, warnings: list[str]) -> str | list[str] | None:
    """Return the text of a message's content, or a list if it has more than one text.

    Raises:
      Problem: 400, the content has another form, or is no text.
    """
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise Problem("content is neither a text nor a list", param=param)
    texts = [part_text(part, f"{param}[{at}]", warnings) for at, part in enumerate(content)]
    return unwrap([text for text in texts if text is not None] or [""])


def result_texts(
    content: Any, param: str, warnings: list[str], *, failed: bool = False
) -> str | list[str]:
    """Return the text of a tool's result; values that are neither text nor parts become JSON.

    Args:
      failed: the client reports that the call failed.
    """
    parts = content if isinstance(content, list) else [content]
    if content is not None and not all(map(_is_part, parts)):
        content = json.dumps(content, ensure_ascii=False)
    texts = content_texts(content, param, warnings) or ""
    return with_failure(texts) if failed else texts


def _is_part(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and "type" in value)


def with_failure(texts: str | list[str]) -> str | list[str]:
    """Return a tool's result after a note that the call failed."""
    first, *rest = [texts] if isinstance(texts, str) else texts
    return unwrap([f"{FAILED}\n{first}" if first else FAILED, *rest])


def part_text(part: Any, param: str, warnings: list[str]) -> str | None:
    """Return the text of a content part; None if it has none, which adds a warning.

    Raises:
      Problem: 400, the part is no object, or is an image, sound, video or binary file.
    """
    if isinstance(part, str):
        return part
    if part is None:
        part = {}
    if not isinstance(part, dict):
        raise Problem(
            f"a content part is {part!r:.50}; expected an object with a type", param=param
        )
    kind = part.get("type")
    match kind:
        case "document":
            return _document_text(part, param)
        case "file" | "input_file":
            text = _file_text(part.get("file") if kind == "file" else part)
        case "search_result":
            text = _lines(part.get("title"), part.get("source"), text_within(part.get("content")))
        case _ if kind in TOOL_NAMES:
            text = _tool_name(part)
        case _ if kind in THOUGHTS:
            text = None  # it is in another place than an assistant's turn
        case _:
            text = part.get("text", part.get("refusal"))
            if isinstance(text, dict):  # as in the Assistants API
                text = text.get("value")
    if isinstance(text, str):
        if kind not in TEXTS and kind not in ("file", "input_file", "search_result", *TOOL_NAMES):
            warnings.append(f"only the text of content of type {kind!r:.99} was read")
        return text
    if is_medium(part):
        raise text_only(f"a content part of type {kind!r:.99}", param)
    warnings.append(f"content of type {kind!r:.99} without a text was left out")
    return None


def is_medium(part: Mapping[str, Any]) -> bool:
    """Return whether a part is an image, sound, video or binary file."""
    kind = part.get("type")
    names = [kind] if isinstance(kind, str) else list(part)
    return any(MEDIA.fullmatch(name) for name in names)


def thought_text(part: Any) -> str | None:
    """Return the text of a part that is reasoning, empty if it is encrypted; None for others."""
    if not isinstance(part, dict) or part.get("type") not in THOUGHTS:
        return None
    for field in ("thinking", "text", "reasoning", "summary"):
        if part.get(field):
            return text_within(part[field])
    return ""


def text_within(value: Any) -> str:
    """Return the texts of a result whose form is not known, one per line.

    Media are named; ids and encrypted texts are left out.
    """
    return "\n".join(_texts_within(value))


def _texts_within(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value] if value else []
    texts: list[str] = []
    if isinstance(value, Sequence):
        for inner in value:
            texts += _texts_within(inner)
        return texts
    if not isinstance(value, Mapping):
        return []
    if is_medium(value) and not isinstance(value.get("text"), str):
        return [f"[{value.get('type')}]"]
    if value.get("type") in ("base64", "file"):  # the source of a document
        return [f"[{value.get('media_type') or 'file'}]"]
    for field in RESULT_FIELDS:
        texts += _texts_within(value.get(field))
    for field in EXIT_CODES:
        code = value.get(field)
        if isinstance(code, int) and code:
            texts.append(f"exit code {code}")
    return texts


def _tool_name(part: Mapping[str, Any]) -> str | None:
    """Return the name of a tool after whether the part adds, removes or refers to it."""
    tool = part.get("tool")
    if not isinstance(tool, Mapping):
        tool = part
    name = tool.get("tool_name", tool.get("name"))
    if not isinstance(name, str):
        return None
    return f"{part['type'].replace('_', ' ')}: {name}"


def _document_text(part: Mapping[str, Any], param: str) -> str:
    """Return the title, context and text of an Anthropic `document`, one per line."""
    source = part.get("source")
    if not isinstance(source, dict):
        source = {}
    match source.get("type"):
        case "text":
            data = source.get("data")
        case "content":
            data = source.get("content")
        case "base64" if TEXT_MEDIA.fullmatch(str(source.get("media_type"))):
            data = _decoded(str(source.get("data")), coded=True)
        case _:
            data = None
    blocks = data if isinstance(data, list) else [data]  # documents do not nest
    texts = [_block_text(block) for block in blocks]
    if not all(isinstance(text, str) for text in texts):
        kind = source.get("type")
        raise text_only(f"a document whose source is of type {kind!r} with more than text", param)
    return _lines(part.get("title"), part.get("context"), *texts)


def _block_text(block: Any) -> Any:
    """Return the text of a document's block; for media, a value that is no text."""
    if not isinstance(block, dict):
        return block
    if block.get("type") == "text" and block.get("text") is None:
        return ""
    return block.get("text")


def _lines(*texts: Any) -> str:
    return "\n".join(text for text in texts if isinstance(text, str) and text)


def _file_text(file: Any) -> str | None:
    """Return the name and text of an OpenAI file that is a data URL of text, else None."""
    url = file.get("file_data") if isinstance(file, dict) else None
    head, comma, body = url.partition(",") if isinstance(url, str) else ("", "", "")
    media, *parameters = head.removeprefix("data:").split(";")
    if not (comma and head.startswith("data:") and TEXT_MEDIA.fullmatch(media)):
        return None
    text = _decoded(body, coded="base64" in parameters)
    return None if text is None else _lines(file.get("filename"), text)


def _decoded(body: str, *, coded: bool) -> str | None:
    """Return the text of a data URL's body; None if it is no text."""
    try:
        data = base64.b64decode(body, validate=True) if coded else unquote_to_bytes(body)
        return data.decode("utf-8-sig")
    except ValueError:
        return None
