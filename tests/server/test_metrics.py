"""Labels of metrics, what counts as a failure, the port of metrics, and the dashboard."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.audit.serve import COMPLETIONS
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import RequestError
from dflash_jax.serve_options import ServeOptions
from dflash_jax.server.app import Server
from dflash_jax.server.served_models import ServerConfig
from tests.server.conftest import LiveServer, api_keys, run_server, twin

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
ASK = {"prompt": "Hi", "max_tokens": 2}
OF_THE_PROCESS = {"resident_memory_bytes"}


@pytest.fixture(scope="module")
def monitored(random_tiny: Engine) -> Iterator[LiveServer]:
    """A server with keys, whose metrics have a port of their own."""
    keys = api_keys("alice: a", "b")
    live = run_server(
        lambda: twin(random_tiny), ServerConfig(port=0, drain=5, api_keys=keys, metrics_port=0)
    )
    yield live
    live.stop()


def metrics_url(live: LiveServer) -> str:
    return f"http://127.0.0.1:{live.running.server._middleware._metrics_port}"


def types(text: str) -> dict[str, str]:
    """The kind of every metric by name, without the prefix."""
    found = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    return {name.removeprefix("dflash_jax:"): kind for name, kind in found}


def samples(text: str) -> list[tuple[str, dict[str, str], float]]:
    found = re.findall(r"^dflash_jax:(\w+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE)
    return [
        (name, dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value))
        for name, labels, value in found
    ]


def test_the_metrics_port_needs_no_key_and_has_nothing_else(monitored: LiveServer) -> None:
    own = metrics_url(monitored)
    assert own != monitored.url
    for path in ("/metrics", "/health", "/ready"):
        assert httpx.get(own + path).status_code == 200
    for path in ("/v1/models", "/", "/props", "/metrics/", "/page/main.js"):
        assert httpx.get(own + path, headers={"x-api-key": "a"}).status_code == 404
    assert httpx.post(own + COMPLETIONS, json=ASK, headers={"x-api-key": "a"}).status_code == 404
    assert httpx.get(own + "/metrics", headers={"Host": "evil.example"}).status_code == 200
    hidden = httpx.get(monitored.url + "/metrics", headers={"x-api-key": "a"})
    assert hidden.status_code == 404
    assert "--metrics-port" in hidden.json()["error"]["message"]
    for path in ("/health", "/ready"):
        assert httpx.get(monitored.url + path).status_code == 200


def test_samples_name_the_model_and_the_key(monitored: LiveServer) -> None:
    url = monitored.url + COMPLETIONS
    before = samples(httpx.get(metrics_url(monitored) + "/metrics").text)
    for key in ("a", "b", "wrong"):
        httpx.post(url, json=ASK, headers={"x-api-key": key}, timeout=60)
    httpx.post(url, json=ASK | {"model": "none"}, headers={"x-api-key": "a"})
    after = samples(httpx.get(metrics_url(monitored) + "/metrics").text)

    def grown(name: str) -> list[dict[str, str]]:
        old = {str(labels): value for each, labels, value in before if each == name}
        return [x for each, x, value in after if each == name and value > old.get(str(x), 0.0)]

    for name in ("generation_tokens_total", "prompt_tokens_total", "request_success_total"):
        assert [(x["model"], x["key"]) for x in grown(name)] == [
            ("tiny", "alice"), ("tiny", "key-2")
        ]  # fmt: skip
    assert [(x["model"], x["key"], x["status"]) for x in grown("request_failure_total")] == [
        ("", "", "401"), ("", "alice", "404")
    ]  # fmt: skip
    assert not [name for name, labels, _ in after if "model" not in labels if
                name not in OF_THE_PROCESS]  # fmt: skip


def test_figures_of_a_model_are_there_before_its_first_request(monitored: LiveServer) -> None:
    found = {
        name for name, labels, _ in samples(httpx.get(metrics_url(monitored) + "/metrics").text)
    }
    assert {"spec_decode_num_drafts_total", "time_to_first_token_seconds_bucket"} <= found


def test_probes_that_fail_are_no_failures() -> None:
    server = Server([], ServerConfig())
    server._middleware.draining = True

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [await client.get(path) for path in ("/ready", "/nothing", "/metrics")]

    ready, _, metrics = asyncio.run(ask())
    assert ready.status_code == 503
    failures = [x for x in samples(metrics.text) if x[0] == "request_failure_total"]
    assert [(labels["status"], value) for _, labels, value in failures] == [("404", 1.0)]


def test_the_port_of_metrics_is_another_one() -> None:
    with pytest.raises(RequestError, match="--metrics-port is 8000, as --port is; give another"):
        ServeOptions(metrics_port=8000)
    ServeOptions(metrics_port=0, port=0)


def test_the_dashboard_asks_for_metrics_and_labels_that_there_are(monitored: LiveServer) -> None:
    text = httpx.get(metrics_url(monitored) + "/metrics").text
    kinds = types(text)
    assert len(kinds) > 25
    parts = [f"{name}_bucket" for name, kind in kinds.items() if kind == "histogram"]
    names = {*kinds, *parts}
    labels = {"le", "model", "key", "finished_reason", "status", "reason", "phase", "position",
              "event", "part"}  # fmt: skip
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    panels = dashboard["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {name for text in expressions for name in re.findall(r"dflash_jax:(\w+)", text)}
    assert asked <= names
    assert len(asked) > 20
    for text in expressions:
        assert text.count("(") == text.count(")")
        for group in re.findall(r"by \(([^)]*)\)", text):
            assert set(group.split(", ")) <= labels, text
    legends = [target["legendFormat"] for panel in panels for target in panel["targets"]]
    for legend in legends:
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= labels
    places = [tuple(panel["gridPos"][name] for name in "xy") for panel in panels]
    assert len(set(places)) == len({panel["id"] for panel in panels}) == len(panels)
    [_, model] = dashboard["templating"]["list"]
    assert model["query"]["query"] == "label_values(dflash_jax:num_requests_running, model)"
