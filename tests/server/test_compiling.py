"""Requests whose programs are not compiled yet, and other requests at the same time."""

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from benchmarks.audit.serve import ASK, CHAT, COMPLETIONS, MESSAGES, RESPONSES, is_error, send
from dflash_jax.engine import break_even
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.sampling_params import SamplingParams
from dflash_jax.errors import PlanError
from dflash_jax.graph import Graph, build
from dflash_jax.graph.keys import Variant
from dflash_jax.graph.programs import Program
from dflash_jax.server.access_log import log_to_stderr
from dflash_jax.server.engine_thread import EngineThread, PendingOutput, Warm
from dflash_jax.server.run import ServerConfig
from tests.server.conftest import QUEUE, LiveServer, run_server

LONG = ASK | {"max_tokens": 200, "ignore_eos": True, "return_token_ids": True}
LOGPROBS = ASK | {"logprobs": True}
CHOICE = ASK | {"guided_choice": ["red", "blue"]}
RECOVERY = {  # a request of each API in which recovery may force tokens
    CHAT: ASK | {"recovery": True},
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 4, "recovery": True},
    RESPONSES: {"input": "Hi", "max_output_tokens": 4, "recovery": True},
    MESSAGES: ASK | {"model": "tiny", "recovery": True},
}
LIKELY = [Variant.GREEDY, Variant.SAMPLED]
Start = Callable[..., LiveServer]


class Gate:
    """Delays the compilation of programs that are neither greedy nor sampled until it is open."""

    def __init__(self, engine: Engine):
        self.open = threading.Event()
        self.held = set(engine.core.runner.compiled.programs) - set(
            engine.core.runner.compiled.keys(LIKELY)
        )
        self.broken: set[str] = set()  # programs that cannot be compiled
        self._compile = build._compile

    def compile(self, program: Program, stored: Any) -> Any:
        if program.key in self.held:
            assert self.open.wait(120)
        if str(program.key) in self.broken:
            raise PlanError(f"{program.key} is broken")
        return self._compile(program, stored)


@pytest.fixture
def gate(random_tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(random_tiny)
    monkeypatch.setattr(build, "_compile", made.compile)
    yield made
    made.open.set()


def cold(engine: Engine) -> Engine:
    """Return an engine over the same models with compiled greedy and sampled programs only."""
    made = Engine(
        Graph(engine.graph.pair, engine.plan),
        engine.params,
        tokenizer=engine.tokenizer,
    )
    early = engine.core.runner.compiled.keys(LIKELY)
    made.core.runner.compiled.executables = {
        name: engine.core.runner.executables[name] for name in early
    }
    return made


@pytest.fixture
def start(random_tiny: Engine, gate: Gate) -> Iterator[Start]:
    """Yield a function that starts servers over cold engines."""
    started: list[LiveServer] = []

    def begin(*, warm: Warm = "none", ready: bool = True, **settings: Any) -> LiveServer:
        engine = cold(random_tiny)
        chosen: Any = {"keepalive": 0.05, "compile_wait": 60.0} | settings
        listening = ServerConfig(port=0, drain=20, warm=warm, **chosen)
        started.append(run_server(lambda: engine, listening, ready=ready))
        return started[-1]

    yield begin
    gate.open.set()
    for live in started:
        live.stop()


@contextlib.contextmanager
def streaming(live: LiveServer, body: dict[str, Any], path: str = CHAT) -> Iterator[Iterator[str]]:
    """Yield the lines of a streamed response."""
    with httpx.stream("POST", live.url + path, json=body | {"stream": True}, timeout=120) as answer:
        assert answer.status_code == 200
        yield answer.iter_lines()


def states(live: LiveServer) -> dict[str, str]:
    """Return the state of each variant from /props."""
    [model] = httpx.get(live.url + "/props").json()["models"]
    return {name: each["state"] for name, each in model["programs"].items()}


def soon(happened: Callable[[], bool]) -> bool:
    end = time.monotonic() + 240
    while not happened() and time.monotonic() < end:
        time.sleep(0.01)
    return happened()


def first(lines: Iterator[str], begin: str) -> str:
    """Return the next line with this prefix."""
    return next(line for line in lines if line.startswith(begin))


def chunks(lines: Iterator[str]) -> list[dict[str, Any]]:
    """Return the data of the remaining events."""
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.exhaustive
def test_whoever_started_a_server_is_told_when_it_is_ready(start: Start, gate: Gate) -> None:
    live = start(warm="all", ready=False)
    assert not live.announced.is_set()
    gate.open.set()
    assert live.announced.wait(60)


def test_plain_requests_are_served_while_others_wait_for_their_programs(
    start: Start, gate: Gate
) -> None:
    live = start()
    alone = httpx.post(live.url + CHAT, json=LONG, timeout=120).json()["choices"][0]["token_ids"]
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(streaming(live, LONG))
        first(running, "data: ")
        waiting = [stack.enter_context(streaming(live, body)) for body in (LOGPROBS, CHOICE)]
        for lines, variant in zip(waiting, ("penalized", "constrained"), strict=True):
            assert first(lines, ":").startswith(f": compiling {variant}: ")
        streamed = chunks(running)  # until the end, while nothing is compiled
        assert streamed[-1]["choices"][0]["token_ids"] == alone
        beside = httpx.post(live.url + CHAT, json=LONG, timeout=120).json()
        assert beside["choices"][0]["token_ids"] == alone
        for lines in waiting:
            assert first(lines, ":").startswith(": compiling ")  # repeatedly
        assert not gate.open.is_set()
        gate.open.set()
        scored, chosen = map(chunks, waiting)
    assert scored[0]["choices"][0]["logprobs"]["content"]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chosen)
    assert text in ("red", "blue")
    assert live.is_idle()


def test_a_grammar_is_checked_while_another_request_waits_for_its_programs(start: Start) -> None:
    live = start()
    with streaming(live, CHOICE) as lines:
        first(lines, ": compiling constrained")
        refused = httpx.post(live.url + CHAT, json=ASK | {"guided_regex": "("}, timeout=60)
        assert (refused.status_code, is_error(refused)) == (400, True)


@pytest.mark.parametrize("path", RECOVERY)
def test_every_api_keeps_a_stream_alive_until_it_begins(
    start: Start, gate: Gate, path: str
) -> None:
    live = start()
    with streaming(live, RECOVERY[path], path) as lines:
        before = [next(lines) for _ in range(12)]
        gate.open.set()
        after = list(lines)
    comments = [line for line in before if line.startswith(":")]
    assert set(comments) == {": compiling recovery: 0 of 1 programs"}
    if path == MESSAGES:
        at = before.index(comments[0])
        assert before[at + 1 : at + 4] == ["event: ping", 'data: {"type":"ping"}', ""]
    whole = "\n".join(after)
    end = {RESPONSES: "response.incomplete", MESSAGES: "message_stop"}.get(path, "data: [DONE]")
    assert end in whole
    assert "event: error" not in whole
    assert "response.failed" not in whole


@pytest.mark.exhaustive
def test_clients_read_past_what_keeps_a_stream_alive(start: Start, gate: Gate) -> None:
    live = start()
    streamed: list[str] = []
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        message: Any = {"model": "tiny", "max_tokens": 4, "messages": ASK["messages"]}
        more = {"extra_body": {"recovery": True}}

        def anthropic() -> str:
            with live.anthropic.messages.stream(**message, **more) as stream:
                streamed.extend(event.type for event in stream)
                return stream.get_final_text()

        def openai() -> str:
            stream = live.openai.chat.completions.create(**message, **more, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

        answers = [pool.submit(anthropic), pool.submit(openai)]
        assert soon(lambda: live.running.server.models[0].engine_thread.active == 2)
        gate.open.set()
        texts = {answer.result(120) for answer in answers}
    assert len(texts) == 1
    assert streamed[0] == "message_start"
    live.openai.close()
    live.anthropic.close()


@pytest.mark.exhaustive
def test_a_request_that_is_not_streamed_is_told_to_come_back(start: Start, gate: Gate) -> None:
    live = start(compile_wait=0.05)
    early = httpx.post(live.url + CHAT, json=LOGPROBS, timeout=60)
    assert (early.status_code, is_error(early)) == (503, True)
    assert early.json()["error"]["code"] == "compiling"
    assert "penalized" in early.json()["error"]["message"]
    assert 1 <= int(early.headers["retry-after"]) <= 60
    assert live.is_idle()  # the request is gone
    gate.open.set()
    assert soon(lambda: states(live)["penalized"] == "ready")  # compilation continued
    assert httpx.post(live.url + CHAT, json=LOGPROBS, timeout=60).status_code == 200


@pytest.mark.exhaustive
def test_a_request_that_is_not_streamed_waits_for_its_programs(start: Start, gate: Gate) -> None:
    live = start()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, live.url + CHAT, json=LOGPROBS, timeout=120)
        assert soon(lambda: states(live)["penalized"] == "compiling")
        gate.open.set()
        answer = asked.result(120)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["logprobs"]["content"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_while_programs_are_compiled_is_an_error_and_no_empty_answer(
    start: Start, stream: bool
) -> None:
    live = start()
    body = LOGPROBS | {"timeout": 0.1, "stream": stream}
    answer = httpx.post(live.url + CHAT, json=body, timeout=60)
    assert answer.status_code == (200 if stream else 503)
    assert '"code":"compiling"' in answer.text
    assert '"finish_reason":"' not in answer.text
    assert answer.text.endswith("data: [DONE]\n\n") or not stream
    assert live.is_idle()


def test_a_client_that_leaves_while_programs_are_compiled_leaves_nothing_behind(
    start: Start,
) -> None:
    live = start()
    with contextlib.closing(send(live.url, LOGPROBS | {"stream": True})) as connection:
        assert b"200 OK" in connection.recv(4096)
    assert live.is_idle()
    with streaming(live, LONG) as lines:
        assert chunks(lines)


def test_programs_that_cannot_be_compiled_fail_the_requests_that_need_them(
    start: Start, gate: Gate
) -> None:
    gate.broken.add("plain[constrained]")
    gate.open.set()
    live = start()
    failed = httpx.post(live.url + CHAT, json=LOGPROBS, timeout=120)
    assert failed.status_code == 500
    assert "plain[constrained] is broken" in failed.json()["error"]["message"]
    assert states(live)["penalized"] == "failed"
    assert httpx.post(live.url + CHAT, json=ASK, timeout=120).status_code == 200
    gate.broken.clear()
    assert httpx.post(live.url + CHAT, json=LOGPROBS, timeout=120).status_code == 200


@pytest.mark.exhaustive
def test_half_of_the_queue_is_for_requests_that_can_begin(random_tiny: Engine, gate: Gate) -> None:
    ends: dict[int, Any] = {}

    async def run() -> None:
        thread = EngineThread(lambda: cold(random_tiny))
        await thread.ready.wait()

        def ask(index: int, **options: Any) -> None:
            params = SamplingParams(**{"max_tokens": 2} | options)
            thread.submit(
                PendingOutput([1, 2], params, index, lambda i, _, end: ends.update({i: end}))
            )

        for i in range(QUEUE // 2 + 1):
            ask(i, logprobs=0)
        ask(99)
        while ends.get(99) is None:
            await asyncio.sleep(0.01)
        refused = [i for i, end in ends.items() if isinstance(end, Exception)]
        assert refused == [QUEUE // 2]
        gate.open.set()
        while None in ends.values():
            await asyncio.sleep(0.01)
        await thread.stop()

    asyncio.run(asyncio.wait_for(run(), 120))
    assert len(ends) == QUEUE // 2 + 2
    assert ends.pop(QUEUE // 2).code == "compiling"
    assert {end.finish_reason for end in ends.values()} == {"length"}


# -- which programs are compiled when ----------------------------------------------------------


@pytest.mark.exhaustive
def test_common_programs_are_ready_first_and_the_others_follow(start: Start, gate: Gate) -> None:
    live = start(warm="common")  # ready while the gate is closed
    assert httpx.get(live.url + "/ready").status_code == 200
    found = states(live)
    assert [found.pop(name) for name in ("greedy", "sampled")] == ["ready", "ready"]
    assert found.pop("recovery") == "compiling"
    assert found.pop("prompt") == "on demand"
    assert set(found.values()) == {"waiting"}
    gate.open.set()
    assert soon(lambda: set((states(live) | {"prompt": "ready"}).values()) == {"ready"})


@pytest.mark.exhaustive
def test_all_programs_may_be_compiled_before_it_is_ready(start: Start, gate: Gate) -> None:
    live = start(warm="all", ready=False)
    early = httpx.post(live.url + CHAT, json=ASK, timeout=60)
    error = early.json()["error"]
    assert (early.status_code, error["code"]) == (503, "loading")
    state = r"loading|compiling, \d+ of \d+ programs are ready"
    wait = f"in about {early.headers['retry-after']} s, or when GET /ready answers 200"
    assert re.fullmatch(f"the model is ({state}); try again {wait}", error["message"])
    assert httpx.get(live.url + "/ready").status_code == 503
    assert soon(lambda: "compiling" in states(live).values())
    gate.open.set()
    assert soon(lambda: httpx.get(live.url + "/ready").status_code == 200)
    assert set(states(live).values()) == {"ready"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("warm", ["none", "common"])
def test_drafting_is_timed_before_a_warm_server_is_ready(
    random_tiny: Engine, gate: Gate, warm: Warm
) -> None:
    gate.open.set()
    engine = cold(random_tiny)
    assert engine.core.meter.value.at(0) == 0
    live = run_server(lambda: engine, ServerConfig(port=0, warm=warm))
    assert (engine.core.meter.value.at(0) > 0) == (warm == "common")
    assert httpx.post(live.url + CHAT, json=ASK, timeout=60).status_code == 200
    live.stop()


def test_a_failure_while_drafting_is_timed_costs_no_more_than_the_figure(
    random_tiny: Engine, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> float:
        raise RuntimeError("of a test")

    gate.open.set()
    engine = cold(random_tiny)
    monkeypatch.setattr(break_even, "measure", fail)
    live = run_server(lambda: engine, ServerConfig(port=0, warm="common"))
    assert httpx.post(live.url + CHAT, json=ASK, timeout=60).status_code == 200
    live.stop()


@pytest.mark.exhaustive
def test_nothing_but_greedy_programs_need_be_compiled(random_tiny: Engine) -> None:
    engine = cold(random_tiny)
    for name in set(engine.core.runner.executables) - set(
        engine.core.runner.compiled.keys([Variant.GREEDY])
    ):
        del engine.core.runner.executables[name]
    live = run_server(lambda: engine, ServerConfig(port=0, warm="none"))
    found = states(live)
    assert (found.pop("greedy"), found.pop("sampled")) == ("ready", "ready")  # the same programs
    assert set(found.values()) == {"on demand"}
    assert httpx.post(live.url + CHAT, json=LOGPROBS, timeout=60).status_code == 200
    assert states(live)["penalized"] == "ready"
    live.stop()


# -- what is logged ----------------------------------------------------------------------------


@pytest.fixture
def logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    # A command that another test ran in this process may have turned it off.
    monkeypatch.setattr(logging.getLogger("dflash_jax"), "propagate", True)
    caplog.set_level(logging.INFO, logger="dflash_jax")
    return caplog


@pytest.mark.exhaustive
def test_phases_refusals_and_the_end_are_logged(
    start: Start, gate: Gate, logged: pytest.LogCaptureFixture
) -> None:
    live = start(compile_wait=0.05)
    with streaming(live, LOGPROBS | LONG) as lines:
        first(lines, ": compiling")
        refused = httpx.post(live.url + CHAT, json=LOGPROBS, timeout=60)
        gate.open.set()
        first(lines, "data: ")
        live.running.stop()
        assert chunks(lines)
    live.thread.join(60)
    said = [record.getMessage() for record in logged.records]
    known = len(live.engine.core.runner.compiled.keys([Variant.GREEDY, Variant.PENALIZED]))
    number = refused.headers["x-request-id"]
    message = refused.json()["error"]["message"]
    for line in (
        "loading tiny",
        f"ready: {live.url} serves tiny",
        "draining: running requests: 1; those not finished in 20 s are ended",
    ):
        assert line in said
    [line] = [line for line in said if line.startswith(f"{number} POST {CHAT} 503 ")]
    assert f"error={json.dumps(message)}" in line
    last = re.compile(
        rf"tiny: program {known} of {known} (compiled in [0-9.]+ s|read from the cache)"
        r": verify\[constrained\]"
    )
    assert any(map(last.fullmatch, said))


def test_every_line_of_a_request_has_the_id_of_its_headers(
    live: LiveServer, logged: pytest.LogCaptureFixture
) -> None:
    whole = httpx.post(live.url + CHAT, json=ASK | {"n": 2}, timeout=60)
    streamed = httpx.post(live.url + CHAT, json=ASK | {"stream": True}, timeout=60)
    for answer, outputs in ((whole, 2), (streamed, 1)):
        number = answer.headers["request-id"]
        assert live.is_idle()
        while not (lines := [r for r in logged.records if r.getMessage().startswith(number)]):
            time.sleep(0.001)
        assert len(lines) == 1
        fields = lines[0].access
        assert fields["outputs"] == outputs
        assert fields["output_tokens"] == 4 * outputs


@pytest.mark.exhaustive
def test_quiet_servers_leave_out_nothing_but_the_lines_of_outputs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger, requests = (logging.getLogger(f"dflash_jax{n}") for n in ("", ".server.requests"))
    levels = logger.level, requests.level
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    log_to_stderr(quiet=True)
    logging.getLogger("dflash_jax.server").info("a phase")
    requests.info("an output")
    logger.setLevel(levels[0])
    requests.setLevel(levels[1])
    err = capsys.readouterr().err
    assert "a phase" in err
    assert "an output" not in err
