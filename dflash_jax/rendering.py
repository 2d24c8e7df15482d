"""Renders chat templates, also in the process for those of which nobody knows what they do.

A `LimitedProcess` loads this file alone, without the package.
"""

import datetime
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

STACK = 16 * 2**20  # bytes of the thread that renders: macros may call each other
LARGEST = 10_000_000  # most digits or items of a product or power
LONGEST = 2**25  # most characters of a text


def prepare(setup: Mapping[str, Any]) -> Callable[[Any], tuple[str, str | None]]:
    """Return the function that answers messages; nothing has to be set up."""
    return answer


def answer(message: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the text of a `template` for its `variables`, and the error if it raised one."""
    try:
        text = compiled(message["template"]).render(message["variables"])
    except Exception as error:  # templates are arbitrary programs
        return "", str(error) or type(error).__name__
    if len(text) > LONGEST:
        return "", f"its text has {len(text)} characters; at most {LONGEST} are allowed"
    return text, None


@functools.lru_cache(maxsize=32)
def compiled(template: str) -> jinja2.Template:
    """Return a compiled template; compiling takes longer than a short request."""
    names = {"raise_exception": _raise_exception, "strftime_now": _now}
    return _environment().from_string(template, globals=names)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**"))

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """Return a product or power if it is small: no operation gets large by mistake."""
        if (size := _size(operator, left, right)) > LARGEST:
            raise jinja2.TemplateError(
                f"{operator} would give {size} digits or items; at most {LARGEST} are allowed"
            )
        return super().call_binop(context, operator, left, right)


def _size(operator: str, left: Any, right: Any) -> int:
    """Return the approximate digits or items of a product or power; 0 for fractions."""
    if isinstance(left, int) and isinstance(right, int):
        product = operator == "*"
        return left.bit_length() * (1 if product else abs(right)) + right.bit_length() * product
    sized = [(a, b) for a, b in ((left, right), (right, left)) if isinstance(b, int)]
    return max((len(a) * b for a, b in sized if isinstance(a, str | list | tuple)), default=0)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return the environment that chat templates are written for, as in transformers."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment.filters["tojson"] = tojson
    return environment


class _Generation(jinja2.ext.Extension):
    """The tags `generation` and `endgeneration`, which mark text for training only."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 types it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _now(form: str) -> str:
    """Return the date or time in a format; prompts of gpt-oss and Llama 3 contain the date."""
    return datetime.datetime.now().strftime(form)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
