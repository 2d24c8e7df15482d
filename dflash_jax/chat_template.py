"""Chat templates: finding them among a model's files, and rendering them."""

import collections
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from dflash_jax.errors import InterruptedRequestError, RequestError
from dflash_jax.utils import interruption

Message = dict[str, Any]
LARGEST = 10_000_000  # most digits or items of a product or power
TIME_LIMIT = 10.0  # seconds per rendering; thousands of messages take less than one second


def templates_of(
    texts: Mapping[str, str], settings: Mapping[str, Any]
) -> tuple[str | None, str | None]:
    """Return the chat template, and the one for conversations with tools if there is another.

    Template files take precedence over the tokenizer's settings, and these over a processor's.

    Args:
      texts: the texts of the model's files, by name.
      settings: the tokenizer's settings.

    Raises:
      TypeError, KeyError: a template is not a text, or has no name.
    """
    files = {Path(name).stem: text for name, text in texts.items() if name.endswith(".jinja")}
    if "chat_template" in files:
        files["default"] = files.pop("chat_template")
    named = files if "default" in files else _named(settings.get("chat_template")) | files
    if not named:
        named = _named(json.loads(texts.get("chat_template.json", "{}")).get("chat_template"))
    chosen = named.get("default", next(iter(named.values()), None)), named.get("tool_use")
    for template in chosen:
        if not isinstance(template, str | None):
            raise TypeError(f"the chat template is a {type(template).__name__}, not a text")
    return chosen


def _named(given: Any) -> dict[str, Any]:
    """Return templates by name; older files have a list of them."""
    if isinstance(given, list):
        return {entry["name"]: entry["template"] for entry in given}
    return {} if given is None else {"default": given}


def calls_of(message: Message) -> list[Any]:
    """Return the tool calls of a turn, or an empty list if they are malformed."""
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) and all(isinstance(x, dict) for x in calls) else []


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with each turn of more than one call split into one turn per call.

    Each turn is followed by the answers to its call, by id, or by position if they have none. The
    text of the turn stays with the first call.
    """
    turns: list[Message] = []
    remaining = collections.deque(messages)
    while remaining:
        turn = remaining.popleft()
        calls = calls_of(turn)
        if len(calls) < 2:
            turns.append(turn)
            continue
        places = {str(call["id"]): at for at, call in enumerate(calls) if call.get("id")}
        answers: list[list[Message]] = [[] for _ in calls]
        for order in range(len(remaining)):
            if remaining[0].get("role") != "tool":
                break
            answer = remaining.popleft()
            place = places.get(str(answer.get("tool_call_id")), min(order, len(calls) - 1))
            answers[place].append(answer)
        for place, call in enumerate(calls):
            head = turn if place == 0 else {"role": turn.get("role"), "content": None}
            turns += [head | {"tool_calls": [call]}, *answers[place]]
    return turns


def rendered(template: str, variables: Mapping[str, Any]) -> str:
    """Return the text of a template for the given variables.

    Raises:
      RequestError: the template raised an error.
      InterruptedRequestError: it took longer than TIME_LIMIT, or the request was cancelled.
    """
    try:
        with interruption.time_limit(TIME_LIMIT, "the chat template"):
            return compiled(template).render(variables)
    except InterruptedRequestError:
        raise
    except Exception as error:  # templates are arbitrary programs
        raise RequestError(f"the chat template refused the messages: {error}") from error


@functools.lru_cache(maxsize=32)
def compiled(template: str) -> jinja2.Template:
    """Return a compiled template; compiling takes longer than a short request."""
    names = {"raise_exception": _raise_exception, "strftime_now": _now}
    return _environment().from_string(template, globals=names)


class _Checking(jinja2.compiler.CodeGenerator):
    """Compile templates whose loops and macros check for an interruption in each iteration.

    The sandbox limits each `range`, but nested ones multiply, and a thread cannot be killed.
    """

    def visit_For(self, node: jinja2.nodes.For, frame: jinja2.compiler.Frame) -> None:
        node.body.insert(0, _check(node.lineno, self.environment))
        super().visit_For(node, frame)

    def macro_body(
        self, node: jinja2.nodes.Macro | jinja2.nodes.CallBlock, frame: jinja2.compiler.Frame
    ) -> tuple[jinja2.compiler.Frame, jinja2.compiler.MacroRef]:
        node.body.insert(0, _check(node.lineno, self.environment))
        return super().macro_body(node, frame)


def _check(line: int, environment: jinja2.Environment) -> jinja2.nodes.Node:
    """Return a statement that calls `interruption.check`."""
    function = jinja2.nodes.EnvironmentAttribute("check_interruption")
    call = jinja2.nodes.Call(function, [], [], None, None)
    return jinja2.nodes.ExprStmt(call).set_lineno(line).set_environment(environment)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    code_generator_class = _Checking
    check_interruption = staticmethod(interruption.check)
    intercepted_binops = frozenset(("*", "**"))

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """Return a product or power if it is small: a single operation cannot be interrupted."""
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
