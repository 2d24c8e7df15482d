"""The benchmark of servers: the traffic, the figures and wrong arguments; times are not checked."""

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks import serving

# A server that answers every chat with three words, and is not ready at first.
SERVER = """
import http.server, json, sys
asked = []

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass

    def do_GET(self):
        self.answer(200, {"data": [{"id": "words"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked.append(body)
        if len(asked) == 1:
            return self.answer(503, {"error": {"message": "not ready"}})
        assert body["model"] == "words" and body["temperature"] == 0 and body["stream"]
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for word in ("one", "two", "three"):
            self.chunk({"choices": [{"delta": {"content": word}}]})
        self.chunk({"choices": [], "usage": {"completion_tokens": 5}})
        self.wfile.write(b"data: [DONE]\\n\\n")

    def chunk(self, value):
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\\n\\n")

    def answer(self, status, value):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_sides_get_the_same_traffic_in_both_phases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "SETTLED", 0.05)
    monkeypatch.setattr(serving, "IDLE", 10.0)
    monkeypatch.setattr(serving, "PAUSE", 0.0)
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    command, result = f"{sys.executable} {script} {{port}}", tmp_path / "out.json"
    sides = [f"{name}={command}" for name in ("a", "b")]
    options = ["--clients", "1,3", "--rounds", "2", "--json", str(result)]
    assert serving.main([*sides, *options]) == 0
    figures = json.loads(result.read_text())["figures"]
    for when, rounds in (("first minute", 1), ("later", 2)):
        for name in ("a", "b"):
            found = figures[when][name]
            tokens = {n: x["tokens"] for n, x in found["clients"].items()}
            assert tokens == {"1": 2 * 5 * rounds, "3": 6 * 5 * rounds}
            assert all(x["token_ms"] >= 0 < x["tokens_per_s"] for x in found["clients"].values())
    assert figures["later"]["a"]["long_prompt"]["longest_wait_s"] >= 0
    if sys.platform == "linux":
        assert figures["later"]["b"]["memory_mb"]["peak"] > 1
    shown = capsys.readouterr().out
    assert "answer tokens/s, a / b | ratio" in shown
    assert re.search(r"^\| later \| 3 \| [\d.]+ / [\d.]+ \| [\d.]+ \|", shown, re.MULTILINE)


def test_the_texts_of_a_round_are_the_same_for_all_sides_and_new_in_the_next() -> None:
    rng = serving.random.Random
    assert serving.words(rng("1 0"), 40) == serving.words(rng("1 0"), 40)
    assert serving.words(rng("1 0"), 40) != serving.words(rng("1 1"), 40)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ours"], "NAME=ADDRESS"),
        (["ours=dflash-jax serve"], r"\{port\}"),
        (["ours=http://127.0.0.1:1", "--clients", "many"], "--clients is 'many'"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        serving.main(arguments)
    assert re.search(said, capsys.readouterr().err)


def test_a_server_that_ends_is_named() -> None:
    with pytest.raises(SystemExit, match="gone ended with exit code 3"):
        serving.main([f"gone={sys.executable} -c 'raise SystemExit(3)' {{port}}", "--clients", "1"])
