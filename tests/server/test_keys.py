"""API keys: files, names, limits, and reading them again while requests run."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.audit.serve import COMPLETIONS, RESPONSES
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import RequestError
from dflash_jax.server import key_ring
from dflash_jax.server.app import Server
from dflash_jax.server.key_ring import KeyRing
from dflash_jax.server.keys import ApiKey, KeyLimits, keys_of, read_keys, unique
from dflash_jax.server.protocol import Problem
from dflash_jax.server.served_models import ServerConfig
from tests.server.conftest import api_keys, run_server, twin

ASK: dict[str, Any] = {"prompt": "Hi", "max_tokens": 2}


def read(file: Path | None, environment: dict[str, str] | None = None) -> list[str]:
    """The labels of keys; warnings are errors."""

    def report(message: str) -> None:
        raise AssertionError(message)

    path = None if file is None else str(file)
    return [x.label for x in read_keys(path, environment=environment or {}, report=report)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that nobody else can read."""
    path = tmp_path / "keys"
    path.touch(0o600)
    return path


@pytest.mark.parametrize("value", ["", ",", " , ,", "\n"])
def test_a_variable_without_a_key_opens_no_server(value: str) -> None:
    with pytest.raises(RequestError, match="which holds no key; give one or several"):
        read(None, {"DFLASH_API_KEY": value})
    ring = KeyRing(
        read_keys(None, environment={"DFLASH_API_KEY": value + ", a,bob: b,,a"}, report=print)
    )
    assert ring.labels == ["key-1", "bob"]
    assert ring.find("a")
    assert not ring.find("bob: b")


def test_a_file_has_names_keys_limits_and_comments(file: Path) -> None:
    text = (
        "\ufeff# team keys\r\n\r\n  sk-1\r\n\t# of Bob:\r\nbob: sk-2#2 rpm=60 parallel=4 # of Bob"
        "\r\nsk-1\r\nbob : a:b\r\nalice@x.org:  sk-3  tpm=5\r\n"
    )
    file.write_bytes(text.encode())
    ring = KeyRing(keys := read_keys(str(file), environment={}, report=print))
    assert [key.label for key in keys] == ["key-1", "bob", "bob", "alice@x.org"]
    found = [ring.find(key) for key in ("sk-1", "sk-2#2", "a:b", "sk-3")]
    assert found == list(keys)
    assert [key.limits for key in keys] == [
        KeyLimits(), KeyLimits(rpm=60, parallel=4), KeyLimits(rpm=60, parallel=4), KeyLimits(tpm=5)
    ]  # fmt: skip
    assert len({key.owner for key in keys}) == 3
    assert next(repr(key) for key in keys) == f"ApiKey(label='key-1', limits={KeyLimits()})"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# only a comment\n", "holds no key; write one a line"),
        ("sk-1\nsk 2\n", "key 2 is followed by what is no limit; expected parallel=N, rpm=N, "),
        ("sk-\u00e9\n", "key 1 has spaces or other characters"),
        ("alice:secret\n", "key 1 has a colon, but no name; write NAME: KEY with a space"),
        ("al/ice: secret\n", "key 1 has a name with other characters"),
        (f"{'a' * 65}: secret\n", "or more than 64"),
        ("alice: secret rpm=0\n", "key 1 is followed by what is no limit"),
        ("alice: secret rpm=x\n", "key 1 is followed by what is no limit"),
        ("alice: secret other=1\n", "key 1 is followed by what is no limit"),
        ("alice: secret\nbob: secret\n", "one key belongs to alice and to bob"),
        ("alice: secret\nsecret\n", "one key belongs to alice and to nobody by name"),
        ("alice: secret rpm=1\nalice: secret2 rpm=2\n", "the keys of alice have different limits"),
    ],
)
def test_errors_name_the_key_and_do_not_repeat_it(file: Path, text: str, message: str) -> None:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(RequestError, match=message) as caught:
        read(file)
    assert "secret" not in str(caught.value)


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name in ("bytes", ".", "none", "a\0b"):
        with pytest.raises(RequestError, match="cannot be read: "):
            read(tmp_path / name)


def test_a_file_that_others_can_read_is_warned_of(file: Path) -> None:
    file.write_text("sk-1\n", encoding="utf-8")
    for mode, verb in ((0o644, "read"), (0o640, "read"), (0o622, "change")):
        file.chmod(mode)
        said: list[str] = []
        read_keys(str(file), environment={}, report=said.append)
        expected = f"other users can {verb} the keys in {file}, whose mode is {mode:04o}"
        assert [expected in line for line in said] == [True]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (5, "expected key = 'TEXT', or a list"),
        ([], "expected key = 'TEXT', or a list"),
        ({"rpm": 5}, "expected key = 'TEXT', or a list"),
        ({"key": "secret", "rpm": "5"}, "wrong entry 'rpm'; expected parallel, rpm, tpm"),
        ({"key": "secret", "rpm": True}, "wrong entry 'rpm'"),
        ({"key": "secret", "other": "secret"}, "wrong entry 'other'"),
        ("sec ret", "has spaces or other characters"),
        (["secret", 5], "expected key = 'TEXT', or a list"),
    ],
)
def test_a_table_of_keys_is_checked(entry: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        keys_of({"alice": entry}, "serve.toml")
    assert "secret" not in str(caught.value)
    keys = unique(keys_of({"alice": ["a", "b"], "bob": {"key": "c", "rpm": 5}}, "serve.toml"))
    assert [(key.label, key.limits.rpm) for key in keys] == [
        ("alice", None), ("alice", None), ("bob", 5)
    ]  # fmt: skip


# -- limits ------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the clock of limits."""
    now = [1000.0]
    monkeypatch.setattr(key_ring.time, "monotonic", lambda: now[0])

    def forward(seconds: float) -> None:
        now[0] += seconds

    return forward


def refusal(ring: KeyRing, key: ApiKey) -> tuple[str, int | None]:
    with pytest.raises(Problem) as caught:
        ring.begin(key)
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    return caught.value.message, caught.value.retry_s


def test_requests_a_minute_come_back_evenly(clock: Callable[[float], None]) -> None:
    [key] = api_keys("alice: a rpm=6")
    ring = KeyRing([key])
    for _ in range(6):
        ring.begin(key).end(0)
    message, seconds = refusal(ring, key)
    assert message == "the key 'alice' is limited to 6 requests a minute; try again in about 10 s"
    assert seconds == 10
    clock(10)
    ring.begin(key).end(0)
    assert refusal(ring, key)[1] == 10
    clock(600)
    for _ in range(6):
        ring.begin(key).end(0)
    refusal(ring, key)


def test_tokens_are_counted_at_the_end_of_requests(clock: Callable[[float], None]) -> None:
    [key] = api_keys("alice: a tpm=60")
    ring = KeyRing([key])
    both = [ring.begin(key), ring.begin(key)]
    for usage in both:
        usage.end(60)
    assert refusal(ring, key)[1] == 61  # 60 tokens too many, and one for the next
    clock(61)
    ring.begin(key).end(1)


def test_requests_at_a_time_are_those_of_all_keys_of_a_name(clock: Callable[[float], None]) -> None:
    first, second, other = api_keys("alice: a parallel=1", "alice: b", "bob: c parallel=1")
    ring = KeyRing([first, second, other])
    usage = ring.begin(first)
    assert "1 requests at a time" in refusal(ring, second)[0]
    ring.begin(other)
    usage.end(5)
    ring.begin(second)


def test_reading_again_keeps_what_was_used_of_limits(clock: Callable[[float], None]) -> None:
    before, after = api_keys("alice: a rpm=1"), api_keys("alice: b rpm=1", "bob: a")
    ring = KeyRing(before)
    usage = ring.begin(before[0])
    ring.replace(after)
    found = ring.find("b")
    assert found
    refusal(ring, found)  # another key of the same name
    usage.end(5)
    ring.replace(api_keys("alice: b rpm=2"))
    ring.begin(ring.find("b") or before[0])  # another limit


# -- in a server -------------------------------------------------------------------------------


def test_keys_are_read_again_and_mistakes_change_nothing(
    file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("dflash_jax"), "propagate", True)
    caplog.set_level(logging.INFO, logger="dflash_jax.server")

    def keys() -> tuple[ApiKey, ...]:
        return read_keys(str(file), environment={}, report=print)

    async def ask(key: str) -> int:
        transport, url = httpx.ASGITransport(server.app), "http://localhost"
        async with httpx.AsyncClient(transport=transport, base_url=url) as client:
            return (await client.get("/metrics", headers={"x-api-key": key})).status_code

    def code(key: str) -> int:
        return asyncio.run(ask(key))

    file.write_text("alice: old\n", encoding="utf-8")
    server = Server([], ServerConfig(api_keys=keys(), read_keys=keys))
    assert (code("old"), code("new")) == (200, 401)
    file.write_text("alice: old\nalice: new\n", encoding="utf-8")
    server.reload_keys()
    assert (code("old"), code("new")) == (200, 200)
    file.write_text("alice: new\n", encoding="utf-8")
    server.reload_keys()
    assert (code("old"), code("new")) == (401, 200)
    for wrong in ("", "# nothing\n", "alice: new new\n", "\x00\n"):
        file.write_text(wrong, encoding="utf-8")
        server.reload_keys()
        assert (code("old"), code("new")) == (401, 200)
    file.unlink()
    server.reload_keys()
    assert (code("old"), code("new")) == (401, 200)
    said = [record.getMessage() for record in caplog.records if not hasattr(record, "access")]
    assert said.count("keys were read again: alice") == 2
    assert sum("the keys that were read before stay: " in line for line in said) == 5


def test_a_server_without_keys_has_none_to_read_again(file: Path) -> None:
    server = Server([], ServerConfig(read_keys=lambda: ()))
    server.reload_keys()
    Server([], ServerConfig()).reload_keys()
    assert not server._keys


def test_keys_that_change_under_load_refuse_nobody_wrongly(random_tiny: Engine) -> None:
    """Requests of both keys of a name, while one is added and the other removed."""
    now = [api_keys("alice: a")]
    live = run_server(
        lambda: twin(random_tiny),
        ServerConfig(port=0, drain=5, api_keys=now[0], read_keys=lambda: now[0]),
    )
    stored = httpx.post(
        live.url + RESPONSES,
        json={"input": "Hi", "max_output_tokens": 2},
        headers={"x-api-key": "a"},
        timeout=60,
    ).json()["id"]
    loop = live.running.server.models[0].engine_thread._loop

    async def ask(client: httpx.AsyncClient, key: str) -> int:
        answer = await client.post(COMPLETIONS, json=ASK, headers={"x-api-key": key})
        return answer.status_code

    async def load() -> list[int]:
        found: list[int] = []
        async with httpx.AsyncClient(base_url=live.url, timeout=60) as client:
            for step in (["alice: a"], ["alice: a", "alice: b"], ["alice: b"], ["alice: b", "x"]):
                now[0] = api_keys(*step)
                valid = {"a": "alice: a" in step, "b": "alice: b" in step}
                running = [asyncio.ensure_future(ask(client, "ab"[i % 2])) for i in range(8)]
                await asyncio.gather(*running)
                done = asyncio.Event()
                loop.call_soon_threadsafe(live.running.server.reload_keys)
                loop.call_soon_threadsafe(asyncio.get_running_loop().call_soon_threadsafe, done.set)
                await done.wait()
                for key, good in valid.items():
                    codes = await asyncio.gather(*(ask(client, key) for _ in range(3)))
                    found += [code for code in codes if (code == 200) is not good]
                kept = await client.get(
                    f"{RESPONSES}/{stored}", headers={"x-api-key": "a" if valid["a"] else "b"}
                )
                assert kept.status_code == 200  # what alice stored by her old key
        return found

    assert asyncio.run(load()) == []
    live.stop()


def test_a_limit_of_a_key_is_answered_with_429_and_counts_until_the_end(
    random_tiny: Engine,
) -> None:
    keys = api_keys("alice: a parallel=1", "bob: b")
    live = run_server(lambda: twin(random_tiny), ServerConfig(port=0, drain=5, api_keys=keys))
    body = {"prompt": "Hi", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=live.url, headers={"x-api-key": "a"}, timeout=60) as client:
        with client.stream("POST", COMPLETIONS, json=body) as stream:
            lines = stream.iter_lines()  # kept: an iterator that is dropped closes the connection
            next(lines)
            refused = client.post(COMPLETIONS, json=ASK)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert client.get("/v1/models").status_code == 200
            other = client.post(COMPLETIONS, json=ASK, headers={"x-api-key": "b"})
            assert other.status_code == 200
        assert live.is_idle()
        assert client.post(COMPLETIONS, json={"prompt": 5}).status_code == 400
        assert client.post(COMPLETIONS, json=ASK).status_code == 200
    live.stop()
