"""The commands serve, chat and bench."""

import ctypes
import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import tokenizers

from dflash_jax.bench.prompts import read_prompts
from dflash_jax.bench.report import OverHttp, RequestSettings
from dflash_jax.cli import chat, main, parser, serve
from dflash_jax.cli.bench import report
from dflash_jax.engine.core import EngineCore
from dflash_jax.engine.engine import Engine, RequestHandle
from dflash_jax.engine.result import Piece
from dflash_jax.engine.state_machine import OFF, Recovery
from dflash_jax.errors import RequestError
from dflash_jax.loading import locate
from dflash_jax.serve_options import ServeOptions
from dflash_jax.server import configuration
from dflash_jax.server.access_log import log_to_stderr
from dflash_jax.server.run import url_of
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.utils.command import INTERRUPTED
from tests.server.conftest import LiveServer

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("dflash_jax.cli.options.use_compilation_cache", lambda: None)

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call


# -- serve -------------------------------------------------------------------------------------


@pytest.fixture
def process(oracle: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start `dflash-jax serve` in a process, and yield it with its URL; its log file is `log`."""
    command = [sys.executable, "-m", "dflash_jax", "serve", "--port", "0", "--chunk", "16"]
    command += ["--target", str(oracle / "drafters" / "target_qwen3"), "--drafter", "none"]
    command += ["--max-length", "96", "--name", "small", "--drain", "20"]
    command += ["--recovery", "off", "--prefix-cache", "0"]  # less to compile
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    with (
        (tmp_path / "log").open("w", encoding="utf-8") as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        ) as started,
    ):
        assert started.stdout is not None
        line = started.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:"), line
        yield started, line.split()[-1]
        if started.poll() is None:
            started.kill()


@pytest.mark.exhaustive
def test_closed_connections_do_not_kill_it_and_sigterm_ends_it_in_order(
    process: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    server, url = process
    for attempt in httpx_until_ready(url):
        assert attempt < 1200
    body = {"prompt": [1, 2, 3], "max_tokens": 60, "stream": True, "ignore_eos": True}
    raw = json.dumps(body).encode()
    host = httpx.URL(url)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
    for _ in range(10):
        with socket.create_connection((host.host, host.port or 0)) as connection:
            connection.sendall(head.encode() + raw)
            connection.recv(10)
    with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.send_signal(signal.SIGTERM)
        assert "data: [DONE]" in list(lines)
    assert server.wait(60) == 0  # even while it compiles programs
    log = (tmp_path / "log").read_text(encoding="utf-8")
    said = (
        "loading small",
        "small: program 1 of ",
        f"ready: {url} serves small",
        "draining: running requests: ",
    )
    places = [log.find(line) for line in said]
    assert -1 not in places, log
    assert places == sorted(places)
    assert "Traceback" not in log
    assert "terminate called" not in log


def httpx_until_ready(url: str) -> Iterator[int]:
    attempt = 0
    while httpx.get(url + "/ready").status_code != 200:
        yield attempt
        attempt += 1
        time.sleep(0.1)


def test_serve_refuses_what_it_cannot_do(run: Run, tmp_path: Path) -> None:
    empty = tmp_path / "keys"
    empty.write_text("\n", encoding="utf-8")
    for arguments in (
        ["--queue", "0"],
        ["--port", "99999"],
        ["--compile-wait", "nan"],
        ["--grammar-timeout", "0"],
        ["--grammar-timeout", "inf"],
        ["--max-tokens", "-1"],
        ["--temperature", "nan"],
        ["--model", "nameless"],
        ["--api-key-file", str(tmp_path / "none")],
        ["--api-key-file", str(empty)],
        ["--target", str(tmp_path / "none")],
    ):
        code, out, err = run("serve", *arguments)
        assert code == 1, arguments
        assert out == ""
        assert "Error" in err


def test_no_command_of_ours_publishes_a_container_without_a_key() -> None:
    root = Path(__file__).parents[2]
    found = 0
    for file in [*root.glob("Dockerfile*"), *root.glob("docs/*.md"), root / "README.md"]:
        for command in re.findall(r"docker run[^`\n]*", file.read_text(encoding="utf-8")):
            found += 1
            assert "-p 127.0.0.1:" in command or "DFLASH_API_KEY=" in command, (file, command)
    assert found >= 3


def served(*words: str) -> ServeOptions:
    """The checked options of a command line."""
    options = parser().parse_args(["serve", "--port", "0", *words])
    options.check(options)
    return options.serve


@pytest.mark.parametrize(
    ("flags", "reported"),
    [([], True), (["--report-drafts"], True), (["--no-report-drafts"], False)],
)
def test_serve_reports_drafts_unless_told_otherwise(flags: list[str], reported: bool) -> None:
    options = served("--max-length", "64", *flags)
    assert configuration.planned(options, None).report_drafts is reported


def test_serve_sets_the_time_that_a_grammar_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    async def open_all(engines: dict[str, Any], *given: Any, **more: Any) -> None:
        opened.extend(make() for make in engines.values())

    monkeypatch.setattr("dflash_jax.server.run.serve", open_all)
    asked = ["serve", "--port", "0", "--grammar-timeout", "7", "--model", "second=tiny"]
    options = parser().parse_args(asked)
    options.check(options)
    assert serve.run(options) == 0
    assert [engine.core.grammars.seconds for engine in opened] == [7.0, 7.0]


def test_serve_records_turns_to_a_new_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opened: list[Any] = []

    async def open_all(engines: dict[str, Any], *given: Any, **more: Any) -> None:
        opened.extend(make() for make in engines.values())

    monkeypatch.setattr("dflash_jax.server.run.serve", open_all)
    path = tmp_path / "turns.jsonl"
    options = parser().parse_args(["serve", "--port", "0", "--record", str(path)])
    options.check(options)
    assert serve.run(options) == 0
    assert opened[0].core.recorder is not None
    opened[0].close()
    assert path.read_text(encoding="utf-8").startswith('{"recording":1,')
    with pytest.raises(RequestError, match=r"--record: .* exists; give the name of a new file"):
        served("--record", str(path))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["missing/turns.jsonl"], "there is no folder missing"),
        (["turns", "--model", "second=tiny"], "--model cannot be used with --record"),
        (["turns", "--hosts", "2"], "--hosts cannot be used with --record"),
        (["turns", "--prefix-folder", "x"], "--prefix-folder cannot be used with --record"),
    ],
)
def test_what_cannot_be_recorded_is_named(flags: list[str], expected: str) -> None:
    with pytest.raises(RequestError, match=expected):
        served("--record", *flags)


def test_addresses_of_both_kinds_become_urls() -> None:
    assert url_of("127.0.0.1", 8000) == "http://127.0.0.1:8000"
    assert url_of("::1", 8000) == "http://[::1]:8000"


def test_every_model_may_do_without_a_drafter() -> None:
    asked = ["serve", "--name", "first", "--model", "second=tiny,none", "--model", "third=tiny"]
    pairs = configuration._pairs(served(*asked[1:]), None)
    drafters = {name: pair.configs[1] is not None for name, pair in pairs.items()}
    assert drafters == {"first": True, "second": False, "third": True}


def test_the_adapter_belongs_to_the_first_model() -> None:
    tests = Path(__file__).parents[1]
    lora = tests / "converters" / "data" / "adapters" / "patterns.llama3"
    target = tests / "oracle" / "targets" / "llama3"
    asked = ["serve", "--target", str(target), "--lora", str(lora), "--model", "second=tiny"]
    first, second = configuration._pairs(served(*asked[1:]), None).values()
    assert "adapter of llama3" in first.target.notes[-1]
    assert second.target.notes == ()


def test_rules_for_agents_are_on_and_the_environment_has_its_say(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    def chosen(*words: str) -> tuple[Recovery, Recovery]:
        return configuration._recovery(served(*words))

    assert chosen() == (OFF, Recovery())
    assert chosen("--recovery", "all") == (Recovery(), Recovery())
    monkeypatch.setenv("DFLASH_MIN_TOKENS", "64")
    monkeypatch.setenv("DFLASH_STALL_TOOL_PREFIX", "0")
    rules = Recovery(floor=64, tool_prefix=False)
    assert chosen() == (OFF, rules)
    assert chosen("--recovery", "all") == (rules, rules)
    assert chosen("--recovery", "off") == (OFF, OFF)
    monkeypatch.setenv("DFLASH_MIN_TOKENS", "many")
    code, _, err = run("serve")
    assert code == 1
    assert "DFLASH_MIN_TOKENS" in err


# -- chat --------------------------------------------------------------------------------------


def converse(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, run: Run, text: str, *arguments: object
) -> tuple[int, str, str]:
    monkeypatch.setattr(chat, "_load", lambda options: engine)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return run("chat", *arguments)


def test_a_piped_chat_answers_every_line_and_remembers(
    random_tiny: Engine, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    code, out, err = converse(
        random_tiny, monkeypatch, run, "Hello\n/stats\n/reset\nHello\n\n/what\n/exit\n", "-n", "8"
    )
    assert code == 0
    first = random_tiny.chat_ids([{"role": "user", "content": "Hello"}])
    answer = random_tiny.generate(first, max_tokens=8)
    assert out == 2 * f"{answer.text}\n"  # standard output has only the answers
    assert "8 tokens (length)" in err
    assert "was reset" in err
    assert "unknown command /what" in err
    assert "> " not in err
    assert all(len(line) <= 80 for line in err.splitlines())


def test_a_chat_marks_drafts_if_asked_to(
    random_tiny: Engine, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    _, out, _ = converse(random_tiny, monkeypatch, run, "Hello\nHello\n", "-n", "8")
    code, marked, _ = converse(
        random_tiny, monkeypatch, run, "Hello\nHello\n", "-n", "8", "--show-drafts"
    )
    assert code == 0
    legends = [line for line in marked.splitlines() if line.startswith("[+accepted draft]")]
    assert len(legends) == 2
    kept = re.sub(r"\[-.*?\](?=\S|\s|$)", "", marked.replace(f"{legends[0]}\n", ""))
    assert "[-" in marked
    assert out.split()[0] in kept


def test_a_chat_whose_output_goes_to_a_file_asks_on_standard_error(
    random_tiny: Engine, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(chat, "_load", lambda options: random_tiny)
    monkeypatch.setattr(sys, "stdin", Terminal("Hello\n"))
    code, out, err = run("chat", "-n", 4)
    assert code == 0
    assert len(out.splitlines()) == 1
    assert "> " not in out
    assert err.startswith(chat.HELP)
    assert err.count("> ") == 2


def test_a_chat_shows_no_headers_of_messages(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer.from_directory(locate("tiny", "target"))
    assert tokenizer is not None
    core = tokenizers.Tokenizer.from_str(tokenizer.core.to_str())
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
    core.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in marks])
    harmony = Tokenizer(core, "<|channel|>", {})
    answer = "<|channel|>analysis<|message|>Hm. <|end|>"
    answer += "<|start|>assistant<|channel|>final<|message|>Hello!"
    stream = FakeStream([Piece(tuple(harmony.encode(answer)), "")])
    engine: Any = SimpleNamespace(
        tokenizer=harmony,
        plan=SimpleNamespace(max_length=99),
        chat_ids=lambda talk: [0],
        submit=lambda prompt, params: stream,
    )
    chat.ChatSession(engine, parser().parse_args(["chat"])).send("Hi")
    assert capsys.readouterr().out == "Hm. Hello!\n"


def test_a_chat_prints_the_engines_text_where_markers_are_no_special_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As in Qwen3, whose engine text contains the markers of reasoning."""
    tokenizer = Tokenizer.from_directory(locate("tiny", "target"))
    assert tokenizer is not None
    fields = json.loads(tokenizer.core.to_str())
    for token in fields["added_tokens"]:
        token["special"] &= "think" not in token["content"]
    core = tokenizers.Tokenizer.from_str(json.dumps(fields))
    hermes = Tokenizer(core, "<tool_call>", {})
    answer = "<think>\nHm.\n</think>\n\nHello \u00e9\U0001f600!<|im_end|>"
    ids, decoder = hermes.encode(answer, specials=False), hermes.stream()
    pieces = [Piece((i,), decoder.push([i])) for i in ids]
    stream = FakeStream([*pieces, Piece((), decoder.flush())])
    engine: Any = SimpleNamespace(
        tokenizer=hermes,
        plan=SimpleNamespace(max_length=99),
        chat_ids=lambda talk: [0],
        submit=lambda prompt, params: stream,
    )
    session = chat.ChatSession(engine, parser().parse_args(["chat"]))
    session.send("Hi")
    assert capsys.readouterr().out == "Hm.\nHello \u00e9\U0001f600!\n"
    assert session._messages[-1]["content"] == "Hello \u00e9\U0001f600!"


class FakeStream(list):
    """The pieces of a stream, and its result."""

    def result(self) -> None:
        """Return nothing, as the chat does not print it."""


def test_a_long_chat_forgets_its_oldest_exchanges(
    random_tiny: Engine, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    lines = "".join(f"{'word ' * 40}{i}\n" for i in range(4)) + "word " * 2000 + "\n"
    code, _, err = converse(random_tiny, monkeypatch, run, lines, "-n", "4")
    assert code == 0
    assert "forgotten" in err
    assert "shorten it" in err


def test_ctrl_c_stops_an_answer_and_not_the_chat(
    random_tiny: Engine, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    advance, left = EngineCore.step, [3]

    def interrupted(self: EngineCore) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        advance(self)

    monkeypatch.setattr(EngineCore, "step", interrupted)
    code, _, err = converse(random_tiny, monkeypatch, run, "Hello\n/stats\nHi\n", "-n", "64")
    assert code == 0
    assert err.count("[stopped]") == 1
    assert "cancelled" in err
    assert not random_tiny.core.active


def test_ctrl_c_before_the_first_token_forgets_the_message_and_goes_on(
    random_tiny: Engine, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """As if a template was being rendered, or programs compiled."""
    talks: list[list[dict[str, str]]] = []
    right = Engine.chat_ids

    def interrupted(self: Engine, talk: list[dict[str, str]], **variables: Any) -> list[int]:
        talks.append(list(talk))
        if len(talks) == 1:
            raise KeyboardInterrupt
        return right(self, talk, **variables)

    monkeypatch.setattr(Engine, "chat_ids", interrupted)
    code, _, err = converse(random_tiny, monkeypatch, run, "Hello\nHi\n", "-n", "4")
    assert code == 0
    assert err.startswith(" [stopped]")
    assert talks[1] == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("when", ["while the first is acted upon", "at the prompt"])
def test_a_second_ctrl_c_ends_the_chat(
    random_tiny: Engine, monkeypatch: pytest.MonkeyPatch, run: Run, when: str
) -> None:
    def pressed(*_: Any) -> None:
        raise KeyboardInterrupt

    lines = iter(["Hello"])

    def read(prompt: str = "") -> str:
        line = next(lines, None)
        return pressed() or "" if line is None else line

    monkeypatch.setattr(EngineCore, "step", pressed)
    if when == "at the prompt":
        monkeypatch.setattr("builtins.input", read)
    else:
        monkeypatch.setattr(RequestHandle, "close", pressed)
    monkeypatch.setattr(chat, "_load", lambda options: random_tiny)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nHello\n"))
    code, out, err = run("chat", "-n", "8")
    assert code == INTERRUPTED
    assert err.endswith("\ndflash-jax: interrupted\n")
    assert "[stopped]" not in out
    assert err.count("[stopped]") == (when == "at the prompt")
    monkeypatch.undo()
    while random_tiny.core.busy:  # a dropped stream ends in the next step
        random_tiny.advance()
    assert not random_tiny.core.active


def test_two_ctrl_c_that_come_as_one_end_the_chat(
    random_tiny: Engine, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """Both can arrive during one step of a large model."""
    again = getattr(ctypes.PyDLL(None), "raise")
    monkeypatch.setattr(EngineCore, "step", lambda self: list(map(again, [signal.SIGINT] * 2)))
    code, _, err = converse(random_tiny, monkeypatch, run, "Hello\nHello\n")
    assert code == INTERRUPTED
    assert err.count("[stopped]") == 1
    monkeypatch.setattr(EngineCore, "step", lambda self: list(map(again, [signal.SIGINT])))
    code, _, err = converse(random_tiny, monkeypatch, run, "Hello\nHello\n")
    assert code == 0
    assert err.count("[stopped]") == 2


# -- bench -------------------------------------------------------------------------------------


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    path = tmp_path / "talks.jsonl"
    lines = [{"messages": [{"role": "user", "content": "Hello"}]}, {"prompt": "Hi"}]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


@pytest.mark.exhaustive
def test_bench_in_process_compares_the_modes(
    random_tiny: Engine, monkeypatch: pytest.MonkeyPatch, run: Run, talks: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr("dflash_jax.cli.bench._engine", lambda options, rows: random_tiny)
    found = tmp_path / "found.json"
    options = ("--data", talks, "-n", 12, "--concurrency", "1,2", "--out", found)
    code, out, _ = run("bench", *options, "--profile", tmp_path / "trace")
    assert code == 0
    assert out.count("2 of 2 outputs equal") == 2
    table = out[out.index("mode ") :]
    assert all(len(line) <= 80 for line in table.splitlines())
    headings = re.split(" {2,}", table.splitlines()[0])
    explained = re.findall(r"^(\S+(?: \S+)*) {2,}\S", table[table.rindex("\n\n") :], re.MULTILINE)
    assert headings == ["mode", *explained]
    assert "target/mlp" in out
    assert len(list((tmp_path / "trace").rglob("*.xplane.pb"))) == 2
    written = json.loads(found.read_text(encoding="utf-8"))
    assert [each["program"] for each in written["profile"]] == ["speculative", "plain"]
    runs = written["runs"]
    modes = [(r["concurrency"], r["lane"]) for r in runs]
    assert modes == [(1, "speculative"), (1, "plain"), (2, "speculative"), (2, "plain")]
    drafted, plain = runs[0], runs[1]
    assert plain["rounds"] == 0
    assert drafted["rounds"] == sum(drafted["acceptance_histogram"].values()) > 0
    tau = sum(int(n) * k for n, k in drafted["acceptance_histogram"].items()) / drafted["rounds"]
    assert drafted["acceptance_length"] == pytest.approx(tau)
    assert 1 + sum(drafted["accepted_per_position"]) == pytest.approx(tau)


def test_bench_compares_outputs_that_are_drawn(
    random_tiny: Engine, monkeypatch: pytest.MonkeyPatch, run: Run, talks: Path
) -> None:
    monkeypatch.setattr("dflash_jax.cli.bench._engine", lambda options, rows: random_tiny)
    options = ("bench", "--data", talks, "-n", 12, "--temperature", 1)
    code, out, err = run(*options)
    assert (code, err) == (0, "")
    code, out, _ = run(*options, "--json")
    [pair] = json.loads(out)["pairs"]
    assert code == 0
    assert pair["equal_outputs"] == pair["outputs"] > 0


def test_bench_refuses_a_picture_it_cannot_make_before_it_measures(
    monkeypatch: pytest.MonkeyPatch, run: Run, tmp_path: Path
) -> None:
    monkeypatch.delattr("dflash_jax.cli.bench._engine")
    for path, says in (
        (tmp_path / "a.abc", "its name ends in eps,"),
        (tmp_path / "none" / "a.png", "give a file in a folder that exists"),
    ):
        code, out, err = run("bench", "--plot", path)
        assert (code, out) == (1, "")
        assert says in err
    code, _, err = run("bench", "--out", tmp_path / "none" / "a.json")
    assert code == 1
    assert "give a file in a folder that exists" in err
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run("bench", "--plot", tmp_path / "a.png")
    assert (code, out) == (1, "")
    assert (
        "plots need matplotlib; install the extra from the checkout: pip install -e '.[plot]'"
        in err
    )


def test_a_table_wider_than_the_terminal_becomes_lines() -> None:
    found: dict[str, Any] = {"pairs": [], "runs": [MODE, MODE | {"lane": "plain"}]}
    for width in (80, 40):
        shown = report(found, width)
        assert max(map(len, shown.splitlines())) <= width
        assert shown.count("1234.5") == 2
    assert "speculative: at once 8, tok/s 9999.5,\n  tok/s each 1234.5" in shown


MODE = {
    "lane": "speculative",
    "concurrency": 8,
    "tokens_per_s": 9999.5,
    "tokens_per_s_of_one_request": 1234.5,
    "first_token_s": {"median": 12.3456, "p95": 99.9},
    "acceptance_length": 6.21,
    "draft_acceptance_rate": 0.75,
    "accepted_per_position": [0.5] * 15,
}


def test_bench_against_a_url_and_what_it_refuses(
    live: LiveServer, run: Run, talks: Path, tmp_path: Path
) -> None:
    code, out, _ = run("bench", "--url", live.url, "--data", talks, "-n", 12, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["pairs"][0]["equal_outputs"] == 2
    assert found["runs"][0]["acceptance_length"] >= 1
    assert found["runs"][1]["acceptance_length"] is None
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{", encoding="utf-8")
    for arguments in (
        ["--url", live.url, "--data", bad],
        ["--url", live.url, "--data", tmp_path / "none"],
        ["--url", live.url, "--concurrency", "0"],
        ["--url", live.url, "--count", "0"],
        ["--url", "http://127.0.0.1:9"],
        ["--url", "ftp://x"],
    ):
        code, _, err = run("bench", *arguments)
        assert code == 1, arguments
        assert "RequestError" in err
    with pytest.raises(RequestError, match="404"):
        OverHttp(live.url, "other", RequestSettings(4)).run(read_prompts(str(talks), 1), 1, "plain")


def test_a_line_is_logged_once_whatever_other_libraries_set_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger, level = logging.getLogger("dflash_jax"), logging.getLogger("dflash_jax").level
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(sys.stderr)])
    log_to_stderr(quiet=False)
    logging.getLogger("dflash_jax.server").info("a line")
    logger.setLevel(level)
    assert capsys.readouterr().err.count("a line") == 1
