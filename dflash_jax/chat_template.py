"""Chat templates: finding and rendering them, and the forms of messages that they support."""

import collections
import contextlib
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import markupsafe

from dflash_jax import rendering
from dflash_jax.errors import InterruptedRequestError, RequestError
from dflash_jax.utils import interruption
from dflash_jax.utils.limited_process import MEMORY, ClosedError, LimitedProcess

Message = dict[str, Any]
KNOWN = Path(__file__).parent / "data" / "known_templates.txt"
MOST_IDLE = 4  # processes that wait for the next template
SHORT = 9  # characters of ids that Mistral's templates take
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


def _named(templates: Any) -> dict[str, Any]:
    """Return templates by name; older files have a list of them."""
    if isinstance(templates, list):
        return {entry["name"]: entry["template"] for entry in templates}
    return {} if templates is None else {"default": templates}


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


def text_and_calls(message: Message) -> list[Message]:
    """Return a turn with a text and calls as two turns; any other message alone."""
    if not (calls_of(message) and message.get("content")):
        return [message]
    text = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = {"role": message.get("role"), "content": None, "tool_calls": message["tool_calls"]}
    return [text, calls]


class CallForm(NamedTuple):
    """How a template takes calls.

    Attributes:
      content: content of a turn without text: None, or "" if the template rejects or prints None.
      as_text: arguments are JSON text, not objects.
      short_ids: ids have nine characters, as Mistral's.
    """

    content: str | None
    as_text: bool
    short_ids: bool

    def applied(self, message: Message) -> Message:
        """Return a message with its calls, or the id of the call that it answers, in this form."""
        if calls := calls_of(message):
            message = message | {"tool_calls": [self._call(call) for call in calls]}
        if self.short_ids and message.get("role") == "tool":
            message = message | {"tool_call_id": short_id(message.get("tool_call_id"))}
        return message

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call.get("function")
        if isinstance(function, dict) and "arguments" in function:
            call = call | {"function": function | {"arguments": self._arguments(function)}}
        return call | {"id": short_id(call.get("id"))} if self.short_ids else call

    def _arguments(self, function: dict[str, Any]) -> Any:
        """Return the arguments of a function as an object, or as text."""
        arguments = function["arguments"]
        if self.as_text:
            return (
                arguments
                if isinstance(arguments, str)
                else json.dumps(arguments, ensure_ascii=False)
            )
        if isinstance(arguments, str):  # OpenAI's API writes texts
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(arguments)
                return value if isinstance(value, dict) else arguments
        return arguments


def short_id(call_id: Any) -> str:
    """Return an id of nine letters and digits for a call: its own, or one that follows from it."""
    text = str(call_id)
    own = len(text) == SHORT and text.isascii() and text.isalnum()
    return text if own else hashlib.sha256(text.encode(errors="replace")).hexdigest()[:SHORT]


def rendered(template: str, variables: Mapping[str, Any]) -> str:
    """Return the text of a template for the given variables.

    A template that is not among the known ones is rendered in another process: no limit inside a
    process holds against an operation that takes its memory, or the interpreter lock.

    Raises:
      RequestError: the template raised an error.
      InterruptedRequestError: it took longer than TIME_LIMIT or more memory than MEMORY, or the
        request was cancelled.
    """
    interruption.check()
    if template_digest(template) in known_digests():
        text, error = rendering.answer({"template": template, "variables": variables})
    else:
        text, error = _rendered_apart(template, variables)
    interruption.check()
    if error is not None:
        raise RequestError(f"the chat template refused the messages: {error}")
    return text


def template_digest(template: str) -> str:
    """Return the digest of a template, without white space around it, which copies differ in."""
    return hashlib.sha256(template.strip().encode(errors="replace")).hexdigest()


@functools.cache
def known_digests() -> frozenset[str]:
    """Return the digests of published templates, which are rendered in this process."""
    lines = KNOWN.read_text(encoding="utf-8").splitlines()
    return frozenset(line.split()[0] for line in lines if line and not line.startswith("#"))


def _rendered_apart(template: str, variables: Mapping[str, Any]) -> Sequence[Any]:
    """Return the text of a template and its error, as `rendering.answer` does."""
    try:
        process = _idle.pop()  # whichever is idle: they are all alike
    except IndexError:
        process = LimitedProcess(
            rendering.__file__,
            {},
            [jinja2.__file__, markupsafe.__file__],
            stack=rendering.STACK,
        )
    try:
        answer = process.ask({"template": template, "variables": variables}, TIME_LIMIT)
    except TimeoutError:
        raise InterruptedRequestError(
            f"the chat template ran for more than {TIME_LIMIT:g} s and was stopped; send fewer or"
            " shorter messages, or use a template without nested loops"
        ) from None
    except (EOFError, ClosedError) as error:
        raise InterruptedRequestError(
            f"the chat template ended the process that renders it ({error}), by its depth or by"
            f" more than {MEMORY >> 20} MiB of memory; send fewer or shorter messages, or use"
            " another template"
        ) from None
    except OSError as error:
        raise RequestError(
            f"the process that renders chat templates cannot start ({error}); it needs"
            " a Python that can import jinja2"
        ) from None
    except TypeError as error:  # from Python: bodies of requests are JSON
        raise RequestError(f"messages and variables have to be JSON values: {error}") from None
    _idle.append(process)
    return answer


_idle: collections.deque[LimitedProcess] = collections.deque(maxlen=MOST_IDLE)


# A model's chat template, and the forms of messages that it supports.


PROBE = "zqxprobe"  # a content to look for in rendered text
FUNCTION = {"name": "f", "description": "", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]


class ChatFormat:
    """Renders conversations in the forms that a template supports.

    The forms are found by rendering small conversations, once each.

    Args:
      template: the chat template, if the model has one.
      tool_template: that of conversations with tools, if it is different.
      specials: variables such as bos_token.
    """

    def __init__(
        self, template: str | None, tool_template: str | None, specials: Mapping[str, str]
    ):
        self._template = template
        self._tool_template = tool_template
        self._specials = specials
        self._takes_parts: dict[tuple[str, str], bool] = {}  # by template and role

    def render(self, messages: Sequence[Message], /, **variables: Any) -> str:
        """Return a conversation in the template; see `Tokenizer.render`.

        Raises:
          RequestError: the model has no template, or the template raises an error.
        """
        if wrong := [m for m in messages if not isinstance(m, dict)]:
            raise RequestError(
                f"a message is {wrong[0]!r}; expected dicts, such as"
                ' {"role": "user", "content": "..."}'
            )
        plain = [self.plain(message) for message in messages]
        most_calls = max((len(calls_of(message)) for message in plain), default=0)
        if most_calls > 1 and self._takes_one_call:
            plain = [self.plain(message) for message in one_call_each(plain)]
        if most_calls and self._drops_calls_after_text:
            turns: list[Message] = []
            for message in plain:
                turns += text_and_calls(message)
            plain = [self.plain(turn) for turn in turns]
        if most_calls or any(message.get("role") == "tool" for message in plain):
            plain = [self._call_form.applied(message) for message in plain]
        return self._render(plain, **variables)

    def plain(self, message: Message) -> Message:
        """Return a message with one text as its content, and calls in the form of the template.

        A list of texts, or of parts of type text, becomes one text, joined as the template joins
        parts; by a newline, as in other servers, if the template does not support lists. Tool calls
        without a content get an empty text if the template needs one.
        """
        content = message.get("content")
        if not content and message.get("tool_calls"):
            return self._without_content(message)
        if not isinstance(content, list):
            return message
        parts = (part.get("text") if isinstance(part, dict) else part for part in content)
        texts = [text for text in parts if isinstance(text, str)]
        if len(texts) < len(content):
            return message
        return message | {"content": self._part_separator.join(texts)}

    @property
    def hides_content(self) -> bool:
        """Whether the template renders a user's message, but not its content, in either form."""
        if self._template is None:
            return False
        texts = [self._shown(self._template, "user", form) for form in (PROBE, parts_of(PROBE))]
        return any(text is not None for text in texts) and not any(texts)

    def _without_content(self, message: Message) -> Message:
        """Return a turn of tool calls alone, with its reasoning in the field that gpt-oss uses."""
        thought = message.get("reasoning_content")
        template = self._tool_template or self._template or ""
        if thought and "message.thinking" in template:
            message = message | {"thinking": thought}
        if message.get("content") != "":
            message = message | {"content": self._call_form.content}
        return message

    @functools.cached_property
    def _call_form(self) -> CallForm:
        """The first form of calls that the template shows as they are."""
        forms = [
            CallForm(content, as_text=as_text, short_ids=short_ids)
            for short_ids, as_text, content in itertools.product(
                (False, True), (False, True), (None, "")
            )
        ]
        return min(forms, key=self._harm)

    def _harm(self, form: CallForm) -> float:
        """Return how far the text of a call in a form is from what its author wanted."""
        text = self._with_calls(form, [PROBE], answered=True)
        if text is None:  # the template may know calls, and no results
            text = self._with_calls(form, [PROBE])
        if text is None:
            return math.inf
        written = str(call_of(PROBE, "")["function"]["arguments"])  # Python's notation
        harm = 10 * text.count(written) + text.count("None")
        return harm if PROBE in text else harm + 100

    @functools.cached_property
    def _takes_one_call(self) -> bool:
        """Whether the template supports a turn with one call, but not one with two."""
        first = "first-value"
        second = "second-value"
        alone, both = (
            self._with_calls(self._call_form, values, answered=True) or ""
            for values in ([first], [first, second])
        )
        return first in alone and not (first in both and second in both)

    @functools.cached_property
    def _drops_calls_after_text(self) -> bool:
        """Whether the template supports a turn of calls alone, but drops those after a text."""
        alone, after = (
            self._with_calls(form, [PROBE], answered=True) or ""
            for form in (self._call_form, self._call_form._replace(content="."))
        )
        return PROBE in alone and PROBE not in after

    def _with_calls(
        self, form: CallForm, values: Sequence[str], *, answered: bool = False
    ) -> str | None:
        """Return a conversation that calls a tool with each value; None if rendering fails."""
        calls = [call_of(value, f"call_{i:019}") for i, value in enumerate(values)]
        turn = {"role": "assistant", "content": form.content, "tool_calls": calls}
        answers = [{"role": "tool", "tool_call_id": c["id"], "content": "."} for c in calls]
        talk = [{"role": "user", "content": "."}, turn, *(answers if answered else ())]
        try:
            return self._render([form.applied(message) for message in talk], tools=TOOLS)
        except RequestError:
            return None

    @functools.cached_property
    def _part_separator(self) -> str:
        """Separator that the template puts between two parts of a content."""
        first = "\ue000"
        second = "\ue001"
        parts = [{"type": "text", "text": text} for text in (first, second)]
        try:
            text = self._render([{"role": "user", "content": parts}])
        except RequestError:
            return "\n"
        separator, complete, _ = text.partition(first)[2].partition(second)
        return separator if complete and not separator.strip() else "\n"

    def _render(self, messages: Sequence[Message], /, **variables: Any) -> str:
        """Render messages whose contents are texts, as lists of parts where that is needed."""
        template = (variables.get("tools") and self._tool_template) or self._template
        if template is None:
            raise RequestError(
                "this model ships no chat template; give a plain text or token ids instead"
            )
        formed = [self._formed(message, template) for message in messages]
        return self._render_as_given(template, formed, variables)

    def _render_as_given(
        self, template: str, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> str:
        defaults: dict[str, Any] = {"add_generation_prompt": True, "tools": None, "documents": None}
        supplied = {**self._specials, **variables, "messages": messages}
        return rendered(template, defaults | supplied)

    def _formed(self, message: Message, template: str) -> Message:
        """Return a message with its text as a list of parts if the template reads no text."""
        content = message.get("content")
        role = message.get("role")
        if not isinstance(content, str) or not isinstance(role, str):
            return message
        if (key := (template, role)) not in self._takes_parts:
            self._takes_parts[key] = not self._shown(template, role, PROBE) and bool(
                self._shown(template, role, parts_of(PROBE))
            )
        return message | {"content": parts_of(content)} if self._takes_parts[key] else message

    def _shown(self, template: str, role: str, content: Any) -> bool | None:
        """Return whether the content of a message of this role is in the rendered text.

        None if the template refuses the message.
        """
        probe = {"role": role, "content": content}
        user, system = ({"role": name, "content": "."} for name in ("user", "system"))
        if role == "user":  # the form that the other role takes is not known yet
            system |= {"content": "." if isinstance(content, str) else parts_of(".")}
        else:
            user = self._formed(user, template)
        if role not in ("user", "system"):
            system = self._formed(system, template)
        talks = [[user, probe]]
        match role:
            case "user":
                talks = [[probe]]
            case "system":
                talks = [[probe, user]]
            case "assistant":
                talks = [[user, probe, user], [user, probe]]
            case "tool":
                call = call_of(".", "call00000")
                turn = {"role": "assistant", "content": "", "tool_calls": [call]}
                turn = self._formed(turn, template)
                talks = [[user, turn, probe | {"tool_call_id": call["id"]}]]
        if role != "system":
            talks += [[system, *talk] for talk in talks]  # some templates need one
        with_tools = role == "tool" or template == self._tool_template
        variables = {"tools": TOOLS} if with_tools else {}
        for talk in talks:
            try:
                return PROBE in self._render_as_given(template, talk, variables)
            except RequestError:
                continue
        return None


def parts_of(text: str) -> list[Message]:
    """Return a text as a content of one part."""
    return [{"type": "text", "text": text}]


def call_of(value: str, call_id: str) -> dict[str, Any]:
    """Return a call with one argument of this value."""
    function = {"name": "f", "arguments": {"k": value}}
    return {"id": call_id, "type": "function", "function": function}
