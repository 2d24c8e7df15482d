"""Web pages of other sites cannot use the server, with any host name or content type."""

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.audit.serve import ASK, CHAT, COMPLETIONS, MESSAGES, RESPONSES, is_error
from dflash_jax.cli import main
from dflash_jax.engine.engine import Engine
from dflash_jax.errors import RequestError
from dflash_jax.server.access import allowed_host, allowed_hosts, cors_origin, host_name
from dflash_jax.server.run import ServerConfig
from tests.server.conftest import LiveServer, api_keys, run_server, twin

PAGE, OTHER = "https://page.example", "https://other.example"
MODELS = "/v1/models"


def raw(
    live: LiveServer,
    *lines: str,
    method: str = f"GET {MODELS}",
    version: str = "1.1",
    body: bytes = b"",
    closes: str = "Connection: close",
) -> bytes:
    """Return the complete response to a request, given as lines, on a new connection."""
    address = ("127.0.0.1", live.running.port)
    head = [f"{method} HTTP/{version}", *lines, *filter(None, [closes])]
    with contextlib.closing(socket.create_connection(address, timeout=20)) as connection:
        connection.sendall("\r\n".join([*head, "", ""]).encode() + body)
        return b"".join(iter(lambda: connection.recv(2**16), b""))


def status(answer: bytes) -> int:
    return int(answer.split(None, 2)[1])


@contextlib.contextmanager
def serving(engine: Engine, host: str = "127.0.0.1", **settings: Any) -> Iterator[LiveServer]:
    listening = ServerConfig(host=host, port=0, drain=5, **settings)
    live = run_server(lambda: twin(engine), listening, ready=False)
    try:
        yield live
    finally:
        live.stop()


# -- hosts -------------------------------------------------------------------------------------

LOOPBACK = [
    "localhost", "LocalHost:8000", "localhost.", "localhost.:80", "localhost:", "127.0.0.1",
    "127.0.0.1:1", "127.255.3.4:99999", "[::1]", "[::1]:8000", "[0:0:0:0:0:0:0:1]",
    "[::ffff:127.0.0.1]:1",
]  # fmt: skip
FOREIGN = [
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
    "evil.example.", "10.1.2.3", "[2001:db8::1]:8000", "0.0.0.0:8000", "[::]", "x",
    "localhost@evil.example", "evil.example:80@localhost", "localhost:8000@evil.example",
    "localhost, evil.example", "localhost/health", "x/health?", "localhost#", "localhost:80:80",
    "localhost:http", "::1", "[localhost]", "[::1", "[::1]evil", "localhost evil.example",
    "127.1", "2130706433", "0x7f.1", "localhost..", ".", "", "%6cocalhost", "*",
]  # fmt: skip


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_names_and_addresses_are_served_at_any_port(live: LiveServer, host: str) -> None:
    assert status(raw(live, f"Host: {host}")) == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_other_hosts_are_refused_on_every_path(live: LiveServer, host: str) -> None:
    for method in (f"GET {MODELS}", "GET /health", "GET /ready", f"POST {CHAT}", "GET /nothing",
                   "OPTIONS /tokenize", "GET /health/"):  # fmt: skip
        answer = raw(live, f"Host: {host}", "Content-Length: 0", method=method)
        assert status(answer) == 403, answer
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert (error["code"], error["type"]) == ("host_not_allowed", "permission_error")
        assert "--allowed-host" in error["message"]
        assert host in error["message"]


def test_a_host_may_be_absent_in_http_1_0_only_and_given_once(live: LiveServer) -> None:
    assert status(raw(live, version="1.0")) == 200
    assert status(raw(live, "Host: evil.example", version="1.0")) == 403
    assert status(raw(live)) == 400
    for second in ("evil.example", "localhost"):
        for version in ("1.0", "1.1"):
            hosts = ("Host: localhost", f"Host: {second}")
            assert status(raw(live, *hosts, version=version)) == 400
            assert status(raw(live, *reversed(hosts), version=version)) == 400


def test_a_target_in_absolute_form_opens_nothing(live: LiveServer) -> None:
    absolute = f"GET http://localhost{MODELS}"
    assert status(raw(live, "Host: evil.example", method=absolute)) == 403
    assert status(raw(live, "Host: localhost", method="GET http://evil.example/metrics")) == 404


def test_a_page_that_rebinds_its_name_reaches_nothing(live: LiveServer) -> None:
    headers = {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}
    for path in (CHAT, COMPLETIONS, MESSAGES, RESPONSES):
        refused = httpx.post(live.url + path, json=ASK, headers=headers)
        assert (refused.status_code, is_error(refused)) == (403, True)
    assert live.is_idle()


@pytest.mark.parametrize(
    ("bound", "given", "accepted", "refused"),
    [
        (["10.1.2.3"], [], ["10.1.2.3:80", "localhost"], ["10.1.2.4", "box.example"]),
        (["Box.example", "10.1.2.3"], [], ["box.example", "10.1.2.3"], ["a.box.example"]),
        (["fe80::1%eth0"], [], ["[fe80::1]", "[fe80:0::1%25eth0]"], ["[fe80::2]"]),
        (["0.0.0.0"], [], ["10.1.2.3", "[fe80::1]:80", "0.0.0.0"], ["evil.example"]),
        (["::"], [], ["10.1.2.3", "my.host.example", "my", "my.local"], ["evil", "my.example"]),
        ([""], [], ["10.1.2.3"], ["evil.example"]),
        (["127.0.0.1"], ["Box.example."], ["box.example", "BOX.example.:1"], ["a.box.example"]),
        (["127.0.0.1"], ["*.box.example"], ["a.box.example", "a.b.box.example"], ["box.example"]),
        (["127.0.0.1"], ["*.box.example"], ["localhost"], ["evilbox.example", ".box.example."]),
        (["127.0.0.1"], ["[fe80:0::1]", "10.0.0.1"], ["[fe80::1]", "10.0.0.1"], ["10.0.0.2"]),
        (["127.0.0.1"], ["*"], ["evil.example", "a/b?", ""], []),
    ],
)  # fmt: skip
def test_hosts_follow_from_the_address_and_the_options(
    monkeypatch: pytest.MonkeyPatch, bound: list, given: list, accepted: list, refused: list
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "My.host.example")
    hosts = allowed_hosts(bound, given)
    assert [host for host in accepted if not hosts.accepts(host)] == []
    assert [host for host in refused if hosts.accepts(host)] == []


def test_a_key_opens_all_hosts_unless_some_are_named(random_tiny: Engine) -> None:
    evil = ("Host: evil.example", "X-Api-Key: secret")
    with serving(random_tiny, api_keys=api_keys("secret")) as live:
        assert status(raw(live, *evil)) == 200
        assert status(raw(live, evil[0])) == 401
    with serving(random_tiny, api_keys=api_keys("secret"), allowed_host=("box.example",)) as live:
        assert status(raw(live, *evil)) == 403
        assert status(raw(live, "Host: box.example", evil[1])) == 200


def test_all_interfaces_are_reached_by_address_and_by_the_machines_name(
    random_tiny: Engine,
) -> None:
    with serving(random_tiny, host="0.0.0.0") as live:
        for host in ("192.168.7.7:8000", socket.gethostname(), "localhost"):
            assert status(raw(live, f"Host: {host}", method="GET /health")) == 200
        assert status(raw(live, "Host: evil.example", method="GET /health")) == 403


@pytest.mark.parametrize(
    ("header", "name"),
    [("A.B:1", "a.b"), ("[::1]:1", "::1"), ("a@b", None), ("", None), (".", None), ("a:b", None)],
)
def test_names_are_read_from_host_headers(header: str, name: str | None) -> None:
    assert host_name(header) == name


# -- lengths -----------------------------------------------------------------------------------

CHUNKED = "Transfer-Encoding: chunked"
SECOND = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("path", [CHAT, "/nothing", "/health", MODELS])
@pytest.mark.parametrize("length", [0, 4, 5, 5 + len(SECOND), 10**6])
def test_two_lengths_are_refused_and_nothing_behind_them_is_read(
    live: LiveServer, path: str, length: int
) -> None:
    lengths = ["Host: localhost", CHUNKED, f"content-length: {length}"]
    for lines in (lengths, lengths[::-1]):
        answer = raw(live, *lines, method=f"POST {path}", body=b"0\r\n\r\n" + SECOND, closes="")
        assert status(answer) == 400, answer
        assert answer.count(b"HTTP/1.1 ") == 1
        assert b"connection: close" in answer.lower()
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == "ambiguous_length"


def test_lengths_that_are_none_are_refused(live: LiveServer) -> None:
    chunks = b"0\r\n\r\n" + SECOND
    for lines, version in (
        ([CHUNKED], "1.0"),
        (["Transfer-Encoding: chunked, chunked"], "1.1"),
        (["Transfer-Encoding: identity"], "1.1"),
        ([CHUNKED, CHUNKED], "1.1"),
        (["Content-Length: 5", "Content-Length: 6"], "1.1"),
        (["Content-Length: +5"], "1.1"),
        (["Content-Length : 5"], "1.1"),
    ):
        asked = {"method": f"POST {CHAT}", "version": version, "body": chunks, "closes": ""}
        answer = raw(live, "Host: localhost", *lines, **asked)
        assert status(answer) in (400, 501), answer
        assert answer.count(b"HTTP/1.1 ") == 1
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_a_body_that_breaks_off_into_nonsense_after_its_answer_only_closes(
    live: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    address = ("127.0.0.1", live.running.port)
    head = f"POST /nothing HTTP/1.1\r\nHost: localhost\r\n{CHUNKED}\r\n\r\n"
    with contextlib.closing(socket.create_connection(address, timeout=20)) as connection:
        connection.sendall(head.encode())
        assert connection.recv(2**16).startswith(b"HTTP/1.1 404")
        connection.sendall(b"no chunk\r\n")
        with contextlib.suppress(ConnectionResetError):
            rest = b"".join(iter(lambda: connection.recv(2**16), b""))
            assert b"HTTP/1.1" not in rest  # at most the response body
    assert status(raw(live, "Host: localhost")) == 200
    assert "Traceback" not in caplog.text
    assert "Fatal error" not in caplog.text


def test_one_length_of_either_kind_is_served(live: LiveServer) -> None:
    body = json.dumps(ASK).encode()
    parts = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    for line, sent in ((CHUNKED, parts), (f"Content-Length: {len(body)}", body)):
        assert status(raw(live, "Host: localhost", line, method=f"POST {CHAT}", body=sent)) == 200


# -- content types and origins -----------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/tokenize",
                                  "/detokenize", "/v1/messages/count_tokens",
                                  RESPONSES + "/input_tokens"])  # fmt: skip
@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:3000"])
@pytest.mark.parametrize("kind", ["text/plain;charset=UTF-8", None, "text/plain; application/json",
                                  "application/x-www-form-urlencoded"])  # fmt: skip
def test_what_a_page_of_another_site_sends_without_asking_is_refused(
    live: LiveServer, path: str, origin: str, kind: str | None
) -> None:
    headers = {"Origin": origin} | ({"Content-Type": kind} if kind else {})
    refused = httpx.post(live.url + path, content=json.dumps(ASK), headers=headers)
    assert (refused.status_code, is_error(refused)) == (415, True)
    error = refused.json()["error"]
    assert error["code"] == "unsupported_content_type"
    assert "--cors-origin" in error["message"]
    assert "access-control-allow-origin" not in refused.headers
    assert live.is_idle()


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8",
                                  "application/vnd.api+json"])  # fmt: skip
def test_json_is_served_whatever_the_origin_and_anything_without_one(
    live: LiveServer, kind: str
) -> None:
    body = json.dumps(ASK)
    for headers in ({"Origin": "app://tool", "Content-Type": kind}, {"Content-Type": "text/plain"}):
        answer = httpx.post(live.url + CHAT, content=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
    own = {"Origin": live.url, "Content-Type": "text/plain"}  # a page from this address
    assert httpx.post(live.url + CHAT, content=body, headers=own, timeout=60).status_code == 200


def test_without_the_option_no_page_is_answered_in_a_way_that_it_can_read(live: LiveServer) -> None:
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    for answer in (
        httpx.options(live.url + CHAT, headers=asked),
        httpx.get(live.url + MODELS, headers={"Origin": PAGE}),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_pages_that_are_let_in_may_ask_first_and_read_every_answer(random_tiny: Engine) -> None:
    settings: dict[str, Any] = {"api_keys": api_keys("secret"), "max_body": 1000}
    with (
        serving(random_tiny, cors_origin=(PAGE,), **settings) as live,
        httpx.Client(base_url=live.url, timeout=60) as client,
    ):
        asked = {
            "Origin": PAGE,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
            "Access-Control-Request-Private-Network": "true",
        }
        preflight = client.options(CHAT, headers=asked)  # browsers send it without a key
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == PAGE
        assert "POST" in preflight.headers["access-control-allow-methods"]
        allowed = preflight.headers["access-control-allow-headers"]
        assert set(allowed.split(",")) >= {"authorization", "content-type", "x-stainless-os"}
        assert preflight.headers["access-control-allow-private-network"] == "true"
        refused = client.options(CHAT, headers=asked | {"Origin": OTHER})
        assert "access-control-allow-origin" not in refused.headers

        key, page = {"Authorization": "Bearer secret"}, {"Origin": PAGE}
        served = client.post(CHAT, json=ASK, headers=key | page)
        stream = client.post(CHAT, json=ASK | {"stream": True}, headers=key | page)
        plain = client.post(CHAT, content=json.dumps(ASK), headers=key | page)
        large = client.post(CHAT, content=b" " * 2000, headers=key | page)
        answers = {
            200: [served, stream, plain, client.get("/health", headers=page)],
            401: [client.post(CHAT, json=ASK, headers=page)],
            404: [client.get("/nothing", headers=page)],
            405: [client.get(CHAT, headers=page)],
            413: [large],
        }
        assert "header Authorization: Bearer KEY" in answers[401][0].json()["error"]["message"]
        for code, found in answers.items():
            for answer in found:
                assert answer.status_code == code, answer.text
                assert answer.headers["access-control-allow-origin"] == PAGE
                assert "Origin" in answer.headers["vary"]
                assert "retry-after" in answer.headers["access-control-expose-headers"].lower()
        for other in ({"Origin": OTHER}, {"Origin": "null"}):
            hidden = client.post(CHAT, json=ASK, headers=key | other)
            assert "access-control-allow-origin" not in hidden.headers
            unasked = client.post(CHAT, content=json.dumps(ASK), headers=key | other)
            assert unasked.status_code == 415


def test_refused_hosts_and_full_servers_can_be_read_by_pages(random_tiny: Engine) -> None:
    with serving(random_tiny, cors_origin=("*",)) as live:
        page = {"Origin": PAGE}
        foreign = httpx.get(live.url + MODELS, headers=page | {"Host": "evil.example"})
        full = httpx.post(live.url + CHAT, json=ASK | {"n": 64}, headers=page, timeout=60)
        for answer, code in ((foreign, 403), (full, 503)):
            assert answer.status_code == code, answer.text
            assert answer.headers["access-control-allow-origin"] == "*"
        headers = page | {"Content-Type": "text/plain"}
        served = httpx.post(live.url + CHAT, content=json.dumps(ASK), headers=headers, timeout=60)
        assert served.status_code == 200


@pytest.mark.parametrize(
    ("given", "taken"),
    [("HTTPS://Page.example", PAGE), ("https://page.example:443", PAGE), ("*", "*"),
     ("http://localhost:3000", "http://localhost:3000"), ("app://obsidian.md", "app://obsidian.md"),
     ("http://[::1]:3000", "http://[::1]:3000")],
)  # fmt: skip
def test_origins_are_taken_as_browsers_write_them(given: str, taken: str) -> None:
    assert cors_origin(given) == taken


@pytest.mark.parametrize("given", ["page.example", "https://page.example/", "https://a b", "",
                                   "https://user@page.example", "https://a,https://b"])  # fmt: skip
def test_what_is_no_origin_is_refused(given: str) -> None:
    with pytest.raises(RequestError, match=r"--cors-origin is .*expected an origin"):
        cors_origin(given)


@pytest.mark.parametrize("given", ["http://box", "box:80", "", "a/b", "*.*", "a b", "**", "a*"])
def test_what_is_no_host_is_refused(given: str) -> None:
    with pytest.raises(RequestError, match=r"--allowed-host is .*expected a host name"):
        allowed_host(given)


def test_wrong_options_end_the_command_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--allowed-host", "http://box"]) == 1
    assert main(["serve", "--cors-origin", "https://page.example/"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "--allowed-host" in first
    assert "--cors-origin" in second
