"""Tokenizer files: chat templates with the conventions of transformers, and damaged files."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders

from dflash_jax import chat_template
from dflash_jax.converters.models import companions
from dflash_jax.errors import CheckpointError, InterruptedRequestError, RequestError
from dflash_jax.loading import locate
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import SYNTAXES, syntax_of
from dflash_jax.utils import interruption
from dflash_jax.utils.atomic import copy_companions

TALK = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def core() -> Path:
    return locate("tiny", "target") / "tokenizer.json"


def read(core: Path, settings: Any) -> Tokenizer:
    files = {"tokenizer.json": core, "tokenizer_config.json": json.dumps(settings)}
    found = Tokenizer.from_files(files, where="here")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ strftime_now('%Y-%m-%d') }}", r"\d{4}-\d\d-\d\d"),
        ("a{% generation %}{{ messages[0].content }}{% endgeneration %}b", "aHib"),
        (
            "{{ {'b': 'é', 'a': 1} | tojson(separators=(',', ':'), sort_keys=True) }}",
            '{"a":1,.*é"}',
        ),
        ("{{ {'a': 1} | tojson(indent=1) }}", '{\n "a": 1\n}'),
        ("{{ 'none' if documents is none and tools is none }}", "none"),
    ],
)
def test_templates_have_the_environment_of_transformers(
    core: Path, template: str, expected: str
) -> None:
    found = read(core, {"chat_template": template}).render(TALK)
    assert re.fullmatch(expected, found)


def test_conversations_with_tools_take_the_template_that_is_for_them(core: Path) -> None:
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "<tool_call>"}]
    tokenizer = read(core, {"chat_template": named})
    for one in (tokenizer, tokenizer.showing(["<tool_call>"])):
        assert one.render(TALK) == one.render(TALK, tools=[]) == "A"
        assert one.render(TALK, tools=[{}]) == "<tool_call>"
        assert syntax_of(one.teaches) is SYNTAXES["hermes"]
    assert read(core, {"chat_template": "A"}).render(TALK, tools=[{}]) == "A"


TOOLS: Any = [{}]


@pytest.mark.parametrize(
    ("files", "plain", "with_tools"),
    [  # as transformers has them: a template's own file, the tokenizer's settings, a processor's
        ({"chat_template.json": {"chat_template": "P"}}, "P", "P"),
        ({"chat_template.json": {"chat_template": "P"}, "tokenizer_config.json": "S"}, "S", "S"),
        ({"chat_template.jinja": "J", "tokenizer_config.json": "ST"}, "J", "J"),
        ({"chat_template.jinja": "J", "additional_chat_templates/tool_use.jinja": "T"}, "J", "T"),
        (
            {"additional_chat_templates/tool_use.jinja": "T", "tokenizer_config.json": "S"},
            "S",
            "T",
        ),
        ({"additional_chat_templates/rag.jinja": "R", "chat_template.jinja": "J"}, "J", "J"),
    ],
)
def test_templates_are_found_in_every_file_that_may_hold_them(
    core: Path, tmp_path: Path, files: dict[str, Any], plain: str, with_tools: str
) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "tokenizer.json").write_bytes(core.read_bytes())
    for name, content in files.items():
        if name == "tokenizer_config.json":  # "S" has one template, "ST" two named ones
            named = [{"name": "default", "template": "S"}, {"name": "tool_use", "template": "T"}]
            content = {"chat_template": "S" if content == "S" else named}
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_text(text)
    copied = tmp_path / "copied"
    copied.mkdir()
    copy_companions(companions(tmp_path), copied)  # as a conversion keeps them
    for folder in (tmp_path, copied):
        tokenizer = Tokenizer.from_directory(folder)
        assert tokenizer is not None
        assert tokenizer.render(TALK) == plain
        assert tokenizer.render(TALK, tools=TOOLS) == with_tools


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"bos_token": "<a>"}, "<b>-"),  # older tokenizers have a separate file for it
        ({"bos_token": "<a>", "added_tokens_decoder": {}}, "<a>-"),
        ({"bos_token": "<a>", "extra_special_tokens": {"image_token": "<i>"}}, "<b>-<i>"),
    ],
)
def test_templates_know_the_special_tokens_of_every_file(
    core: Path, settings: dict[str, Any], expected: str
) -> None:
    files = {
        "tokenizer.json": core,
        "special_tokens_map.json": json.dumps({"bos_token": {"content": "<b>"}}),
        "tokenizer_config.json": json.dumps(
            settings | {"chat_template": "{{ bos_token }}-{{ image_token }}"}
        ),
    }
    found = Tokenizer.from_files(files, where="here")
    assert found is not None
    assert found.render(TALK) == expected


CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
GUARDED = "{% for m in messages %}{% if 'x' in m.content %}{% endif %}{{ m.content }}{% endfor %}"
CALLS_BY_NONE = (
    "{% for m in messages %}{% if m['content'] is none %}calls{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (GUARDED, "Hi"),  # as gpt-oss and the first Qwen3, which look into every content
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "Hi"),  # would write None
        (CALLS_BY_NONE, "Hicalls"),  # as DeepSeek's, which has no calls next to a text
    ],
)
def test_calls_without_a_content_have_the_one_that_the_template_reads(
    core: Path, template: str, expected: str
) -> None:
    tokenizer = read(core, {"chat_template": template})
    for turn in ({"content": None}, {}):
        assert (
            tokenizer.render([*TALK, {"role": "assistant", "tool_calls": [CALL]} | turn])
            == expected
        )


def test_gpt_oss_thoughts_before_a_call_have_their_own_field(core: Path) -> None:
    template = (
        "{% for message in messages %}{% if message.content and message.thinking %}"
        "{{ raise_exception('both') }}{% endif %}{{ message.content or message.thinking }}"
        "{% endfor %}"
    )
    turn = {"role": "assistant", "tool_calls": [CALL], "reasoning_content": "Hm"}
    tokenizer = read(core, {"chat_template": template})
    assert tokenizer.render([*TALK, turn]) == "HiHm"
    assert tokenizer.render([*TALK, turn | {"content": ""}]) == "HiHm"
    assert tokenizer.render([*TALK, turn | {"content": "Look:"}]) == "HiLook:"


FIRST_CALL = (  # as gpt-oss, which names no tool in an answer but the last one called
    "{% for m in messages %}{{ m.content or '' }}{% if m.tool_calls %}"
    "{{ m.tool_calls[0].function.arguments.k }}{% endif %}-{% endfor %}"
)
REFUSED = (
    "{% for m in messages if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endfor %}"
)
ALL_CALLS = (
    "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls %}"
    "{{ c.function.arguments.k }}{% endfor %}-{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "ids", "expected"),
    [
        (FIRST_CALL, "abba", "Look:1-A-2-B-bye-"),
        (REFUSED + FIRST_CALL, "abba", "Look:1-A-2-B-bye-"),  # as Llama 3
        (FIRST_CALL, "ab a", "Look:1-A-2-bye-"),  # an answer that is missing
        (FIRST_CALL, "  AB", "Look:1-A-2-B-bye-"),  # unknown ids: in their order
        (ALL_CALLS, "abba", "Look:12-B-A-bye-"),
    ],
)
def test_turns_of_several_calls_are_split_where_a_template_takes_one(
    core: Path, template: str, ids: str, expected: str
) -> None:
    calls = [
        {"id": id_, "type": "function", "function": {"name": "f", "arguments": {"k": k}}}
        for id_, k in zip(ids[:2].strip() or (None, None), "12", strict=True)
    ]
    answers = [
        {"role": "tool", "tool_call_id": id_, "content": id_.upper()} for id_ in ids[2:].strip()
    ]
    turn = {"role": "assistant", "content": "Look:", "tool_calls": calls}
    talk = [turn, *answers, {"role": "user", "content": "bye"}]
    assert read(core, {"chat_template": template}).render(talk) == expected


def call_template(call: str, *, when: str = "m.tool_calls", ids: bool = False) -> str:
    """Return a template that writes calls so, as DeepSeek's or Mistral's."""
    nine = "{{ raise_exception('length 9') if (ID or '') | length != 9 }}{{ ID }}" if ids else ""
    return (
        "{% for m in messages %}"
        f"{{% if {when} %}}{{% for c in m.tool_calls %}}{nine.replace('ID', 'c.id')}{call}"
        "{% endfor %}{% else %}"
        f"{{% if m.role == 'tool' %}}{nine.replace('ID', 'm.tool_call_id')}{{% endif %}}"
        "{{ m.content }}{% endif %}-{% endfor %}"
    )


ARGUMENTS = "{{ c.function.name + c.function.arguments }}"
AS_IT_IS = "{{ c.function.arguments }}"
AS_JSON = "{{ c.function.arguments | tojson }}"
EITHER_FORM = "{% if c.function.arguments is string %}text{% else %}" + AS_JSON + "{% endif %}"
PAIRS = "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}"
TEXT_ONLY = "{% if c.function.arguments is string %}{{ c.function.arguments }}{% endif %}"
WROTE = '{"city": "Köln"}'


@pytest.mark.parametrize("given", [WROTE, json.loads(WROTE)])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (call_template(ARGUMENTS), f"Hi-f{WROTE}-done-"),
        (call_template(AS_IT_IS), f"Hi-{WROTE}-done-"),  # would write Python's notation
        (call_template(TEXT_ONLY), f"Hi-{WROTE}-done-"),
        (call_template(AS_JSON), f"Hi-{WROTE}-done-"),
        (call_template(EITHER_FORM), f"Hi-{WROTE}-done-"),
        (call_template(PAIRS), "Hi-city=Köln-done-"),
        (call_template(AS_JSON, ids=True), f"Hi-74196fe72{WROTE}-74196fe72done-"),
        (call_template(ARGUMENTS, ids=True), f"Hi-74196fe72f{WROTE}-74196fe72done-"),
        (call_template(ARGUMENTS, when="m.content is none"), f"Hi-Look:-f{WROTE}-done-"),
    ],
)  # fmt: skip
def test_calls_have_the_form_that_the_template_shows(
    core: Path, template: str, expected: str, given: Any
) -> None:
    function = {"name": "f", "arguments": given}
    call = {"type": "function", "id": "call_1", "function": function}
    text = "Look:" if "Look:" in expected else None
    turn = {"role": "assistant", "content": text, "tool_calls": [call]}
    talk = [*TALK, turn, {"role": "tool", "tool_call_id": "call_1", "content": "done"}]
    tokenizer = read(core, {"chat_template": template})
    assert tokenizer.render(talk) == expected
    short = json.loads(json.dumps(talk).replace("call_1", "abcDEF123"))
    assert tokenizer.render(short) == expected.replace("74196fe72", "abcDEF123")


@pytest.mark.parametrize("calls", [True, 7, [1, 2], {"a": 1, "b": 2}])
def test_calls_that_are_none_are_for_the_template_to_judge(core: Path, calls: Any) -> None:
    tokenizer = read(core, {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"})
    assert tokenizer.render([TALK[0] | {"tool_calls": calls}]) == TALK[0]["content"]


def test_a_message_that_is_no_dict_is_refused(core: Path) -> None:
    with pytest.raises(RequestError, match=r"a message is 'Hi'; expected dicts, such as"):
        read(core, {"chat_template": "."}).render([*TALK, "Hi"])  # pyrefly: ignore[bad-argument-type]


def test_without_a_template_contents_are_joined_but_no_conversation_is_written(core: Path) -> None:
    tokenizer = read(core, {})
    message = tokenizer.plain({"role": "user", "content": ["Hi", "there"]})
    assert message["content"] == "Hi\nthere"
    with pytest.raises(RequestError, match="this model ships no chat template"):
        tokenizer.render([message])


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{{ '{0}'.format() }}",
        "{{ 'a'.encode('no such code') }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% if %}",
        "{{ raise_exception('no') }}",
    ],
)
def test_errors_of_templates_are_request_errors(core: Path, template: str) -> None:
    with pytest.raises(RequestError, match="the chat template refused the messages"):
        read(core, {"chat_template": template}).render(TALK)


@pytest.mark.parametrize(
    "settings",
    [
        None,
        [],
        "x",
        *({"chat_template": odd} for odd in (5, [1], ["x"], [{"name": "default"}], {"a": "b"})),
    ],
)
def test_damaged_settings_are_refused_by_name(core: Path, settings: Any) -> None:
    with pytest.raises(CheckpointError, match="the tokenizer of here cannot be read"):
        read(core, settings)


def test_a_link_to_a_file_that_is_no_template_is_refused(core: Path, tmp_path: Path) -> None:
    """A server would show its text."""
    model = tmp_path / "repo" / "snapshots" / "1"
    model.mkdir(parents=True)
    (model / "tokenizer.json").symlink_to(core)
    secret = tmp_path / "shadow"
    secret.write_text("root:secret")
    template = model / "chat_template.jinja"
    blob = tmp_path / "repo" / "blobs" / "0a1b"
    blob.parent.mkdir()
    other = tmp_path / "other.jinja"
    for followed in (blob, other, model / "renamed"):
        followed.write_text("{{ messages }}")
        template.symlink_to(followed)
        found = Tokenizer.from_directory(model)
        assert found is not None
        assert found.template == "{{ messages }}"
        template.unlink()
    outside = tmp_path / "blobs"
    outside.symlink_to(tmp_path)
    for link in (secret, Path("../../../shadow"), outside / "shadow"):
        template.symlink_to(link)
        with pytest.raises(CheckpointError, match=r"is a link to .*shadow, which is no \.jinja"):
            Tokenizer.from_directory(model)
        template.unlink()
    settings = model / "special_tokens_map.json"
    settings.symlink_to(tmp_path / "special_tokens_map.json")
    settings.resolve().write_text("{}")
    assert Tokenizer.from_directory(model)
    settings.unlink()
    credentials = tmp_path / "credentials.json"
    credentials.write_text("{}")
    settings.symlink_to(credentials)
    with pytest.raises(CheckpointError, match=r"which is no special_tokens_map\.json; put a copy"):
        Tokenizer.from_directory(model)
    settings.unlink()
    more = model / "additional_chat_templates"
    more.mkdir()
    (more / "default.jinja").symlink_to(secret)
    with pytest.raises(CheckpointError, match="is a link to"):
        Tokenizer.from_directory(model)


def test_invalid_bytes_do_not_end_a_stream() -> None:
    """Models with byte fallback, such as Gemma, may generate them."""
    pieces = ["▁", "h", "i", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = {piece: at for at, piece in enumerate(pieces)}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(words, [], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence(parts)
    stream = Tokenizer(core, None, {}).stream()
    odd = [words["h"], *(words[f"<0x{byte:02X}>"] for byte in "é".encode() + b"\xc3"), words["i"]]
    assert "".join(stream.push([token]) for token in odd) + stream.flush() == "hé\ufffdi"
    assert stream.push([words["h"]]) == "h"


LONG = "{% for i in range(100000) %}"
MACRO = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"


@pytest.mark.parametrize(
    "template",
    [
        LONG + LONG + "{% endfor %}{% endfor %}",
        LONG + "{{ loop.index }}" + LONG + "{% endfor %}{% endfor %}",
        "{% for i in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 40 }}{% endfor %}",
        MACRO,
    ],
)
def test_a_template_that_does_not_end_is_stopped_by_name(
    core: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "TIME_LIMIT", 0.05)
    with pytest.raises(InterruptedRequestError, match="chat template ran for more than"):
        read(core, {"chat_template": template}).render(TALK)


def test_rendering_can_be_cancelled(core: Path) -> None:
    gone = threading.Event()
    gone.set()
    tokenizer = read(core, {"chat_template": "{% for m in messages %}{{ m }}{% endfor %}"})
    with interruption.cancellable(gone), pytest.raises(InterruptedRequestError, match="cancelled"):
        tokenizer.render(TALK)


def test_an_interrupted_trial_of_a_template_is_tried_again(core: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.content if m.content is string else 1 / 0 }}{% endfor %}"
    )
    tokenizer = read(core, {"chat_template": template})
    parts = [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}]
    gone = threading.Event()
    gone.set()
    with interruption.cancellable(gone), pytest.raises(InterruptedRequestError):
        tokenizer.render(parts)
    assert tokenizer.render(parts) == "a\nb"


@pytest.mark.parametrize(
    "expression", ["10 ** (10 ** 8)", "'a' * 10 ** 9", "(10 ** 9) * [0]", "9 ** (9 ** 9) * 2"]
)
def test_an_operation_that_cannot_be_interrupted_is_refused_where_it_is_large(
    core: Path, expression: str
) -> None:
    with pytest.raises(RequestError, match="at most 10000000 are allowed"):
        read(core, {"chat_template": "{{ (" + expression + ") | length }}"}).render(TALK)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 ** 10", "1024"), ("'ab' * 3", "ababab"), ("3 * 4", "12"), ("1.5 * 2", "3.0")],
)
def test_small_products_and_powers_are_computed(core: Path, expression: str, value: str) -> None:
    assert read(core, {"chat_template": "{{ " + expression + " }}"}).render(TALK) == value


LOOPS = """{%- for m in messages if m.role != 'x' recursive -%}
{{ loop.index }}{{ m.content }}{% if loop.last %}!{% else %}{% continue %}{% endif %}
{%- else -%}none{%- endfor -%}
{%- macro f(a, b=2) -%}{{ a }}{{ b }}{{ caller() if caller else '' }}{%- endmacro -%}
{{ f(1) }}{% call f(3) %}c{% endcall %}"""


def test_checks_for_an_interruption_change_no_text(core: Path) -> None:
    assert read(core, {"chat_template": LOOPS}).render(TALK * 2) == "1Hi2Hi!1232c"


@pytest.mark.parametrize(
    "expression",
    [
        "messages.__class__",
        "messages|attr('__class__')",
        "'{0.__class__.__mro__}'.format(messages)",
        "('{0.__class__.__mro__}'|attr('format'))(messages)",  # open in jinja2 up to 3.1.5
        "(['{0.__class__.__mro__}']|map('attr', 'format')|first)(messages)",
        "''.format_map.__self__.__class__",
        "namespace.__init__.__globals__",
        "cycler.__init__.__globals__.os",
    ],
)
def test_templates_do_not_leave_the_sandbox(core: Path, expression: str) -> None:
    tokenizer = read(core, {"chat_template": "{{ " + expression + " }}"})
    try:
        text = tokenizer.render(TALK)
    except RequestError:
        text = ""
    assert "class" not in text
    assert "module" not in text


# A template reads the content of a message as a text, as a list of parts, or as both.
TEXTS = "{{ m.content }}"
PARTS = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
FIRST = "{{ m.content[0]['text'] + '' }}"  # refuses a text
EITHER = f"{{% if m.content is string %}}{TEXTS}{{% else %}}{PARTS}{{% endif %}}"
SEQUENCES = f"{{% if m.content is sequence %}}{PARTS}{{% else %}}{TEXTS}{{% endif %}}"
BY_ROLE = f"{{% if m.role == 'user' %}}{PARTS}{{% else %}}{TEXTS}{{% endif %}}"
NOT_LAST = f"{{% if loop.last %}}{PARTS}{{% else %}}{PARTS}{{% endif %}}"
STRICT = (  # needs a system message, and a user's message after it
    "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
)
CONVERSATION = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a", "tool_calls": [CALL]},
    {"role": "tool", "content": "t"},
    {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
]


@pytest.mark.parametrize(
    ("body", "last"),
    [(TEXTS, "x\ny"), (PARTS, "xy"), (FIRST, "x\ny"), (EITHER, "xy"), (SEQUENCES, "xy"),
     (BY_ROLE, "xy"), (NOT_LAST, "xy")],
)  # fmt: skip
@pytest.mark.parametrize("head", ["", STRICT])
def test_contents_have_the_form_that_the_template_reads(
    core: Path, body: str, last: str, head: str
) -> None:
    template = f"{head}{{% for m in messages %}}[{{{{ m.role }}}}]{body}{{% endfor %}}"
    tokenizer = read(core, {"chat_template": template})
    text = tokenizer.render(CONVERSATION)
    if head:  # no conversation of one user's message can be rendered to find the separator
        last = text.rpartition("]")[2]
        assert last in ("xy", "x\ny")
    assert text == f"[system]s[user]u[assistant]a[tool]t[user]{last}"
    assert not tokenizer.hides_content


def test_a_template_that_leaves_contents_out_is_noticed(core: Path) -> None:
    for body, hides in (("{{ m.role }}", True), (TEXTS, False), ("{{ raise_exception('a') }}", 0)):
        template = f"{{% for m in messages %}}{body}{{% endfor %}}"
        assert read(core, {"chat_template": template}).hides_content == hides
    assert not Tokenizer(read(core, {}).core, None, {}).hides_content
