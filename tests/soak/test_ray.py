"""Ray on loopback with the shipped pair: two replicas of the server, two workers that answer."""

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import dflash_jax as dj
from benchmarks.audit.serve import work
from dflash_jax.errors import RequestError
from dflash_jax.ray import answers, app, decoder
from dflash_jax.server.run import ServerConfig
from dflash_jax.trainer.recipes import recipe
from dflash_jax.trainer.run import stored_rows
from dflash_jax.trainer.setup import begin
from tests.server.conftest import run_server

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = [pytest.mark.soak, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]
NAME = f"dflash-{os.getpid()}"
TURNS, WAIT = 12, 120.0
OPTIONS = {
    "target": "tiny", "rows": 2, "max_length": 1024, "prefix_cache": 2**26, "replicas": 2,
    "cpus": 0.5, "warm": "none", "quiet": True, "drain": 60,
}  # fmt: skip


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    variables = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=200 * 2**20,
        logging_level="ERROR", log_to_driver=False, runtime_env={"env_vars": variables},
    )  # fmt: skip
    yield
    ray.shutdown()


def deploy(**changes: Any) -> None:
    from ray import serve

    serve.run(app(OPTIONS | changes), name=NAME)


@pytest.fixture(scope="module")
def url(cluster: None) -> Iterator[str]:
    from ray import serve

    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    deploy()
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "model": "tiny", **fields}


def post(url: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(url + "/v1/chat/completions", json=body, timeout=WAIT)


def streamed(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream, which has to end as it should."""
    lines = post(url, body | {"stream": True}).text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    return [json.loads(x.removeprefix("data: ")) for x in lines[:-1] if x.startswith("data: ")]


@contextlib.contextmanager
def meanwhile(*tasks: Callable[[], Any]) -> Iterator[list[Any]]:
    """Repeat tasks in threads while the block runs; yields what they return."""
    stop, results = threading.Event(), []

    def repeat(task: Callable[[], Any]) -> None:
        while not stop.is_set():
            results.append(task())

    with concurrent.futures.ThreadPoolExecutor(len(tasks)) as pool:
        running = [pool.submit(repeat, task) for task in tasks]
        try:
            yield results
        finally:
            stop.set()
            for task in running:
                task.result(WAIT)


def processes(name: str) -> list[int]:
    """Return the ids of this test's processes that have a name."""
    parents, found = {}, []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            parents[int(path.name)] = int(fields[1])
            if name.encode() in (path / "cmdline").read_bytes():
                found.append(int(path.name))

    def is_own(number: int) -> bool:
        return number == os.getpid() or (number in parents and is_own(parents[number]))

    return [number for number in found if is_own(number)]


def replicas() -> list[int]:
    return processes(f"ServeReplica:{NAME}:Replica")


def active() -> int:
    from ray import serve

    states = serve.status().applications[NAME].deployments["Replica"].replica_states
    return states.get("RUNNING", 0)


def test_an_agent_of_twelve_turns_keeps_its_prefix(url: str) -> None:
    import openai

    def make() -> dj.Engine:
        return dj.load("tiny", plan=dj.Plan(rows=2, max_length=1024, prefix_cache=2**26))

    live = run_server(make, ServerConfig(port=0, drain=1))
    alone = work(live.openai, TURNS)
    live.openai.close()
    live.stop()
    numbers = iter(range(10**6))

    def other() -> None:
        assert post(url, chat(f"Count to {next(numbers)}.", max_tokens=16)).status_code == 200

    with meanwhile(other), openai.OpenAI(base_url=url + "/v1", api_key="none") as client:
        turns = work(client, TURNS)
    assert [turn["token_ids"] for turn in turns] == [turn["token_ids"] for turn in alone]
    cached, expected = (sum(x["cached_tokens"] for x in every) for every in (turns, alone))
    print(f"cached tokens: {cached} of two replicas, {expected} of one server")
    assert expected > 0
    assert cached >= 0.95 * expected


def test_streams_arrive_in_pieces_and_a_disconnect_ends_the_request(url: str) -> None:
    body = chat("Hello!", max_tokens=900, ignore_eos=True)
    begin, times = time.monotonic(), []
    with httpx.stream(
        "POST", url + "/v1/chat/completions", json=body | {"stream": True}, timeout=WAIT
    ) as response:
        times += [time.monotonic() - begin for _ in response.iter_raw()]
    print(f"first piece after {times[1]:.3f} s of {times[-1]:.3f} s, {len(times)} pieces")
    assert len(times) > 20
    assert times[1] < times[-1] / 3
    with httpx.stream(
        "POST", url + "/v1/chat/completions", json=body | {"stream": True}, timeout=WAIT
    ) as response:
        next(response.iter_raw())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url + "/v1/chat/completions", json=body, timeout=0.5)
    end = time.monotonic() + 20
    counts = re.compile(r'request_cancelled_total{[^}]*reason="disconnect"[^}]*} ([0-9.]+)')
    found: list[str] = []
    while sum(map(float, found)) < 2:  # of either replica
        found = counts.findall(httpx.get(url + "/metrics", timeout=WAIT).text)
        assert time.monotonic() < end


def test_responses_are_continued_where_they_are_stored(url: str) -> None:
    import openai

    with openai.OpenAI(base_url=url + "/v1", api_key="none") as client:
        for i in range(6):
            first = client.responses.create(model="tiny", input=f"Say {i}.", max_output_tokens=8)
            more = client.responses.create(
                model="tiny", input="Go on.", previous_response_id=first.id, max_output_tokens=8
            )
            assert client.responses.retrieve(more.id).output_text == more.output_text


def test_a_killed_replica_leaves_no_request_without_an_end(url: str) -> None:
    def whole(i: int) -> str:
        answer = post(url, chat(f"Request {i}", max_tokens=800, ignore_eos=True))
        assert answer.status_code == 200, answer.text
        return "whole"

    def pieces(i: int) -> str:
        *_, last = streamed(url, chat(f"Stream {i}", max_tokens=800, ignore_eos=True))
        if "error" not in last:
            return "whole"
        assert last["error"]["code"] == "replica_ended"
        return "ended"

    before = replicas()
    assert len(before) == 2
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        begin = time.monotonic()
        tasks = [pool.submit(task, i) for i in range(8) for task in (whole, pieces)]
        time.sleep(1.0)
        os.kill(before[0], signal.SIGKILL)
        ends = [task.result(WAIT) for task in tasks]
    print(f"{ends.count('ended')} of {len(ends)} ended early, {time.monotonic() - begin:.1f} s")
    assert ends.count("ended") > 0
    end = time.monotonic() + WAIT
    while active() < 2 or before[0] in replicas():
        assert time.monotonic() < end
        time.sleep(0.5)
    assert post(url, chat("Hello!", max_tokens=4)).status_code == 200


def test_an_update_fails_no_request(url: str) -> None:
    numbers = iter(range(10**6))

    def whole() -> int:
        answer = post(url, chat(f"Request {next(numbers)}", max_tokens=200, ignore_eos=True))
        assert answer.status_code == 200, answer.text
        return len(answer.json()["choices"][0]["message"]["content"])

    def pieces() -> int:
        events = streamed(url, chat(f"Stream {next(numbers)}", max_tokens=200, ignore_eos=True))
        assert not [event for event in events if "error" in event]
        return len(events)

    before, begin = replicas(), time.monotonic()
    with meanwhile(whole, pieces) as results:
        deploy(queue=63)
    print(f"{len(results)} requests in an update of {time.monotonic() - begin:.1f} s")
    assert results
    assert all(results)
    assert not {*before} & {*replicas()}


def test_requests_without_room_in_a_queue_are_refused(url: str) -> None:
    deploy(queue=2)

    def attempt(i: int) -> int:
        answer = post(url, chat(f"Request {i}", max_tokens=400, ignore_eos=True))
        if answer.status_code != 200:
            assert answer.status_code == 503, answer.text
            assert answer.json()["error"]["code"] == "queue_full"
            assert answer.headers["retry-after"] == "1"
        return answer.status_code

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = [*pool.map(attempt, range(16))]
    assert {*found} == {200, 503}
    too_long = httpx.post(url + "/v1/completions", content=b"x" * (33 * 2**20), timeout=WAIT)
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (413, "body_too_large")


RECIPE = recipe("smoke", ["prompts=240", "text_prompts=0", "new_tokens=48"])
LINES = 300


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "lines.jsonl"
    asked = ({"prompt": f"Check the weather in city {i}, then count to {i}."} for i in range(LINES))
    path.write_text("".join(json.dumps(line) + "\n" for line in asked))
    return path


@pytest.fixture(scope="module")
def alone(lines: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the answers of this process."""
    out = tmp_path_factory.mktemp("runs") / "alone"
    begun = begin("tiny", str(lines), out, RECIPE, report=print)
    _, usage = begun.held_out()
    stored_rows(out, begun.model, begun.data.training, RECIPE, print, usage)
    return (out / "answers.jsonl").read_bytes()


def test_answers_are_those_of_a_local_run_although_a_worker_is_killed(
    cluster: None, lines: Path, alone: bytes, tmp_path: Path
) -> None:
    dataset, out, killed = ray.data.read_json(str(lines)), tmp_path / "run", []

    def report(line: str) -> None:
        if line.startswith("answers 2/"):
            killed.extend(processes("AnswerActor")[:1])
            os.kill(killed[0], signal.SIGKILL)

    found = answers(dataset, out, RECIPE, workers=2, report=report)
    assert killed
    assert (out / "answers.jsonl").read_bytes() == alone
    rows = found.take_all()
    expected = sum(len(json.loads(group)) for group in alone.splitlines())
    assert len(rows) == expected < LINES  # some lines are held out
    assert all(any(row["wanted"]) and row["text"] for row in rows)


def test_answers_resume_after_an_interruption(
    cluster: None, lines: Path, alone: bytes, tmp_path: Path
) -> None:
    out, reports = tmp_path / "run", []

    def interrupt(line: str) -> None:
        if line.startswith("answers 3/"):
            raise InterruptedError

    with pytest.raises(InterruptedError):
        answers(str(lines), out, RECIPE, workers=2, report=interrupt)
    before = (out / "answers.jsonl").read_bytes()
    assert alone.startswith(before)
    assert 0 < before.count(b"\n") < alone.count(b"\n")
    answers(str(lines), out, RECIPE, workers=2, report=reports.append)
    assert (out / "answers.jsonl").read_bytes() == alone
    assert sum(line.startswith("answers ") for line in reports) == (alone.count(b"\n")
        - before.count(b"\n"))  # fmt: skip


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999", "localhost:port"])
def test_a_cluster_that_does_not_answer_is_named(address: str) -> None:
    with pytest.raises(RequestError, match=rf"--ray {address}: no cluster answers"):
        decoder(address, "tiny", RECIPE)


def test_the_documents_example_runs(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    page = (ROOT / "docs" / "ray.md").read_text(encoding="utf-8")
    [text] = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    exec(compile(text, "block", "exec"), {})
    assert "Count to " in capsys.readouterr().out
