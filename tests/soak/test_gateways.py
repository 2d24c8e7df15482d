"""Gateways of others in front of two servers: sglang-router, smg, and LiteLLM's proxy.

They are taken from PATH: `pip install sglang-router smg 'litellm[proxy]'`, in an environment of
their own.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import dflash_jax as dj
from dflash_jax.server.run import ServerConfig
from tests.server.conftest import LiveServer, run_server, twin

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

KEY = "sk-" + "9f2c7d1e8b3a" * 3  # LiteLLM starts only with a strong master key
WAIT, READY = 60.0, 90.0
ROUTER, SMG, LITELLM = "sglang-router", "smg", "litellm"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        },
    },
}  # fmt: skip
PROMPTS = [f"Count from {n} to {n + 6}." for n in range(8)]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[LiveServer]]:
    engine = dj.load("tiny", plan=dj.Plan(rows=2, max_length=512))
    engine.warm_up("greedy", "sampled", "constrained")
    live = [run_server(lambda: engine, ServerConfig(port=0))]
    live.append(run_server(lambda: twin(engine), ServerConfig(port=0)))
    yield live
    for server in live:
        server.stop()


@pytest.fixture(scope="module", params=[ROUTER, SMG, LITELLM])
def gateway(
    request: pytest.FixtureRequest, servers: list[LiveServer], tmp_path_factory: Any
) -> Iterator[tuple[str, httpx.Client]]:
    """Yield the name of a gateway, and a client of it that is ready."""
    name = request.param
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not on PATH; see this file's first lines")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp(name)
    words = command(name, [server.url for server in servers], port, folder)
    variables = os.environ | {"LITELLM_MASTER_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(
            words, stdout=log, stderr=log, env=variables, cwd=folder, start_new_session=True
        )
    headers = {"Authorization": f"Bearer {KEY}"}
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=WAIT)
    try:
        wait_until_ready(client, running, folder / "log")
        yield name, client
    finally:
        client.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def command(name: str, urls: list[str], port: int, folder: Path) -> list[str]:
    """Return the command line of a gateway, as in docs/serving.md."""
    if name == LITELLM:
        models = [
            {
                "model_name": "tiny",
                "litellm_params": {
                    "model": "hosted_vllm/tiny", "api_base": f"{url}/v1", "api_key": "none",
                },
            }
            for url in urls
        ]  # fmt: skip
        (folder / "gateway.yaml").write_text(json.dumps({"model_list": models}))  # JSON is YAML
        return [LITELLM, "--config", "gateway.yaml", "--port", str(port), "--host", "127.0.0.1"]
    launch = [ROUTER, "launch"] if name == ROUTER else [SMG, "launch"]
    where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(port + 1)]
    return [*launch, "--policy", "cache_aware", *where, "--worker-urls", *urls]


def wait_until_ready(client: httpx.Client, running: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + READY
    while time.monotonic() < deadline:
        assert running.poll() is None, log.read_text()[-2000:]
        with contextlib.suppress(httpx.HTTPError):
            if client.post("/v1/chat/completions", json=chat("Hi.", max_tokens=1)).is_success:
                return
        time.sleep(0.3)
    raise AssertionError(log.read_text()[-2000:])


def chat(text: str, **fields: Any) -> dict[str, Any]:
    said = {"role": "user", "content": text}
    return {"model": "tiny", "messages": [said], "max_tokens": 24, "temperature": 0, **fields}


def completed(server: LiveServer) -> float:
    """Return the requests that a server has answered."""
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    rows = [x for x in lines if "request_success_total{" in x]
    return sum(float(row.rpartition(" ")[2]) for row in rows)


def test_answers_are_those_of_a_server(gateway: Any, servers: list[LiveServer]) -> None:
    """And every request reaches one of both."""
    _, client = gateway
    before = sum(map(completed, servers))
    for prompt in PROMPTS:
        answered = client.post("/v1/chat/completions", json=chat(prompt)).json()
        own = httpx.post(servers[0].url + "/v1/chat/completions", json=chat(prompt), timeout=WAIT)
        ours = own.json()["choices"][0]["message"]["content"]
        assert ours
        assert answered["choices"][0]["message"]["content"] == ours
    assert sum(map(completed, servers)) == before + 2 * len(PROMPTS)


def test_streams_arrive_in_pieces(gateway: Any) -> None:
    _, client = gateway
    whole = client.post("/v1/chat/completions", json=chat(PROMPTS[0])).json()
    with client.stream("POST", "/v1/chat/completions", json=chat(PROMPTS[0], stream=True)) as got:
        lines = [x.removeprefix("data: ") for x in got.iter_lines() if x.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    choices = [json.loads(x)["choices"] for x in lines[:-1]]
    texts = [c[0]["delta"].get("content") or "" for c in choices if c]
    assert len(list(filter(None, texts))) > 1
    assert "".join(texts) == whole["choices"][0]["message"]["content"]


def test_tool_calls_pass(gateway: Any) -> None:
    _, client = gateway
    asked = chat("What is the weather in Paris?", tools=[TOOL], tool_choice="required")
    reply = client.post("/v1/chat/completions", json=asked | {"max_tokens": 96}).json()
    call = reply["choices"][0]["message"]["tool_calls"][0]["function"]
    assert call["name"] == "get_weather"
    assert isinstance(json.loads(call["arguments"])["city"], str)


def test_errors_of_the_server_pass(gateway: Any) -> None:
    _, client = gateway
    refused = client.post("/v1/chat/completions", json=chat("long " * 2000))
    assert refused.status_code == 400
    assert "512" in refused.text  # tokens that fit the server


def test_a_request_after_errors_is_answered(gateway: Any) -> None:
    _, client = gateway
    for _ in range(5):
        assert client.post("/v1/chat/completions", json=chat("long " * 2000)).status_code == 400
    assert client.post("/v1/chat/completions", json=chat(PROMPTS[1])).is_success
