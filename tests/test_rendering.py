"""Chat templates that nobody knows, in a process of their own: they stop no other work."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jinja2
import pytest

from dflash_jax import chat_template, rendering
from dflash_jax.chat_template import known_digests, rendered, template_digest
from dflash_jax.errors import InterruptedRequestError, RequestError
from dflash_jax.loading import locate
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.utils import limited_process

TALK = {"messages": [{"role": "user", "content": "Hi"}], "tools": None}
NESTED = (  # comparing these lists takes for ever, and holds the interpreter lock
    "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(40) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}"
)
GROWING = "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(40) %}{% set ns.x = STEP %}"
LARGE = [
    GROWING.replace("STEP", "ns.x ~ ns.x") + "{% endfor %}{{ ns.x | length }}",
    GROWING.replace("STEP", "ns.x + ns.x") + "{% endfor %}{{ ns.x | length }}",
    "{{ '%0999999999d' % 1 }}{{ '%0999999999d' % 1 }}",
    "{{ (range(99999) | list | tojson(indent=99999)) | length }}",
]


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered("{{ 1 }}", TALK)  # a process has started
    monkeypatch.setattr(chat_template, "TIME_LIMIT", 1.0)


@pytest.mark.usefixtures("short_limit")
def test_an_operation_that_does_not_end_stops_nothing_else() -> None:
    turns: list[float] = []
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            turns.append(time.monotonic())
            time.sleep(0.001)

    other = threading.Thread(target=work)
    other.start()
    with pytest.raises(InterruptedRequestError, match="chat template ran for more than 1 s"):
        rendered(NESTED, TALK)
    done.set()
    other.join()
    assert len(turns) > 10  # one, if the lock was held
    assert rendered("{{ messages[0].content }}", TALK) == "Hi"


@pytest.mark.parametrize("template", LARGE)
def test_a_template_that_takes_much_memory_is_refused_by_name(template: str) -> None:
    with pytest.raises((RequestError, InterruptedRequestError), match="the chat template"):
        rendered(template, TALK)
    assert rendered("{{ messages[0].content }}", TALK) == "Hi"


def test_a_text_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "LONGEST", 10)
    assert rendering.answer({"template": "a" * 10, "variables": {}}) == ("a" * 10, None)
    text, error = rendering.answer({"template": "a" * 11, "variables": {}})
    assert (text, error) == ("", "its text has 11 characters; at most 10 are allowed")


def test_known_templates_are_rendered_here_and_others_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = Tokenizer.from_directory(locate("tiny", "target"))
    assert tokenizer is not None
    assert tokenizer.template is not None
    talk = [
        {"role": "system", "content": "Ü \ud800 😀"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm"},
    ]
    assert template_digest(tokenizer.template + "\n") in known_digests()
    other = Tokenizer(tokenizer.core, tokenizer.template + "{# other #}", tokenizer.specials)
    texts = {x.render(talk, enable_thinking=False) for x in (tokenizer, other)}
    assert len(texts) == 1
    monkeypatch.setattr(chat_template.LimitedProcess, "ask", None)
    assert tokenizer.render(talk, enable_thinking=False) in texts


def test_what_is_no_json_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"have to be JSON values: .* set is not"):
        rendered("{{ a }}", {"a": {1, 2}})


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL")
def test_a_killed_process_costs_no_request() -> None:
    rendered("{{ 1 }}", TALK)
    process = chat_template._idle[-1]._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    assert rendered("{{ 2 }}", TALK) == "2"


def test_templates_are_rendered_at_once_in_as_many_processes_as_are_needed() -> None:
    texts: list[str] = []
    slow = "{% for i in range(30000) %}{{ '' }}{% endfor %}{{ messages[0].content }}"
    threads = [
        threading.Thread(target=lambda: texts.append(rendered(slow, TALK))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert texts == ["Hi"] * 6
    assert len(chat_template._idle) <= chat_template.MOST_IDLE


def test_the_process_imports_nothing_of_the_package() -> None:
    path = str(Path(jinja2.__file__).parents[1])
    setup = {"module": rendering.__file__, "setup": {}, "path": [path]}
    setup |= {"memory": 2**29, "stack": rendering.STACK, "niceness": 0}
    message = {"template": "{{ x }}", "variables": {"x": "ü"}}
    text = f"{json.dumps(setup)}\n{json.dumps(message)}\n"
    command = [sys.executable, "-X", "importtime", "-P", limited_process.__file__]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(text)
        process.stdin.flush()
        assert process.stdout.readline() == "null\n"
        assert json.loads(process.stdout.readline()) == ["ü", None]
        _, imported = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "jinja2" in imported
    assert "jax" not in imported.replace("dflash_jax", "")
