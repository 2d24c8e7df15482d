"""Load on the server: agents, disconnects, crowds, malformed bodies, mixed load.

`dflash-jax serve` runs in another process with the shipped pair. An agent works for twelve turns,
clients disconnect in the middle of answers, two hundred requests arrive at once for a queue of 64,
and malformed and random bodies arrive for `--fuzz` minutes. `--stored` responses and further
conversations fill the stores. Then four clients send a mixed load for `--minutes`, and store and
delete. It fails if an answer is missing, wrong or a 5xx other than 503, if the server's memory is
3 % higher in the last third of the load than before, or if shutdown fails.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import json
import os
import random
import socket
import sys
import time
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import hypothesis
from hypothesis import strategies as st

from benchmarks.environment import write_result
from benchmarks.processes import ServerProcess, started

if TYPE_CHECKING:
    import openai

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
CONVERSATIONS = "/v1/conversations"
ASK = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
WAIT = 300.0  # seconds for an answer, on a busy machine

# -- an agent ----------------------------------------------------------------------------------

CITIES = ("Paris", "Oslo", "Kyoto", "Quito", "Lisbon", "Sydney", "Athens", "Porto", "Cairo",
          "Lima", "Delhi", "Rome")  # fmt: skip
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ABOUT = {"name": "get_weather", "description": "Get the current weather for a city."}
TOOLS: Any = [{"type": "function", "function": {**ABOUT, "parameters": SCHEMA}}]


def work(client: "openai.OpenAI", turns: int) -> list[dict[str, Any]]:
    """Run an agent that requests the weather; return the result of each turn."""
    talk: list[Any] = [{"role": "system", "content": "You are a helpful assistant."}]
    cities = iter(CITIES)
    results = []
    for _ in range(turns):
        if talk[-1]["role"] != "tool":
            talk.append({"role": "user", "content": f"Check the weather in {next(cities)}."})
        answer: Any = client.chat.completions.create(
            model="any",
            messages=talk,
            tools=TOOLS,
            max_tokens=64,
            extra_body={"return_token_ids": True, "timings_per_token": True},
        )
        [choice] = answer.choices
        calls = choice.message.tool_calls or []
        results.append(
            {
                "empty": not (choice.message.content or calls),
                "calls": [call.function.name for call in calls],
                "prompt_tokens": answer.usage.prompt_tokens,
                "cached_tokens": answer.usage.prompt_tokens_details.cached_tokens,
                "drafted": answer.timings["draft_n"],
                "finish_reason": choice.finish_reason,
                "asked": list(talk),
                "token_ids": choice.token_ids,
            }
        )
        talk.append(choice.message.model_dump(exclude_none=True))
        for call in calls:
            city = json.loads(call.function.arguments)["city"]
            content = json.dumps({"city": city, "degrees": 21, "sky": "sunny"})
            talk.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return results


# -- malformed bodies ---------------------------------------------------------------------------

BODIES = {
    "empty": b"",
    "no JSON": b"hello",
    "half": b'{"messages": [',
    "a list": b"[]",
    "deep nesting": b'{"messages":' + b"[" * 100_000,
    "deep tools": b'{"messages":[{"role":"user","content":"x"}],"tools":[{"a":'
    + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}]}",
    "a deep schema": b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"prompt":"x",'
    b'"input":"x","text":{"format":{"type":"json_schema","schema":' + b'{"items":' * 400 + b"{}"
    + b"}" * 400 + b'}},"response_format":{"type":"json_schema","json_schema":{"schema":'
    + b'{"items":' * 400 + b"{}" + b"}" * 400 + b'}},"tools":[{}],"temperature":-1}',
    "infinity": b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    "a huge number": b'{"messages": [{"role": "user", "content": "x"}], "top_k": '
    + b"9" * 400 + b"}",
}  # fmt: skip

MALFORMED = Path(__file__).with_name("malformed.jsonl")
CHANGES: list[dict] = [
    *map(json.loads, MALFORMED.read_text(encoding="utf-8").splitlines()),
    {"stop_token_ids": list(range(100))},
    {"tools": [TOOL] * 10_000},
    {"guided_regex": "a" * 2**19},
]


def is_error(response: httpx.Response) -> bool:
    """Return whether an answer is a 4xx or 503 with OpenAI's error object."""
    error = response.json()["error"]
    well_formed = isinstance(error["message"], str) and {"type", "param", "code"} <= set(error)
    return well_formed and (400 <= response.status_code < 500 or response.status_code == 503)


numbers = st.integers(-3, 2**70) | st.floats(allow_nan=False, allow_infinity=False)
words = st.text(max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted(
    {"messages", "prompt", "input", "tools", "tool_choice", "max_tokens", "temperature", "top_p",
     "top_k", "n", "seed", "stop", "stop_token_ids", "stream", "stream_options", "model",
     "logprobs", "top_logprobs", "response_format", "system", "thinking", "reasoning", "text",
     "min_p", "logit_bias", "chat_template_kwargs", "continue_final_message", "echo", "timeout",
     "max_output_tokens", "instructions", "stop_sequences", "content", "tokens", "add_special",
     "presence_penalty", "guided_json", "guided_choice", "guided_regex", "parallel_tool_calls",
     "min_tokens", "speculative", "structured_outputs", "include", "truncation", "reasoning_effort",
     "output_config", "thinking_token_budget", "recovery", "functions", "metadata", "thread",
     "repeat_penalty", "enable_thinking", "with_pieces", "return_token_strs"}
)  # fmt: skip
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer", "function"])},
        optional={
            "content": st.text(max_size=8) | json_values,
            "tool_calls": json_values,
            "function_call": json_values,
            "reasoning": json_values,
        },
    ),
    max_size=3,
)
PATHS = {  # routes, and the required fields of their bodies
    CHAT: ("messages", "max_tokens"),
    COMPLETIONS: ("prompt", "max_tokens"),
    RESPONSES: ("input", "max_output_tokens"),
    MESSAGES: ("messages", "max_tokens"),
    MESSAGES + "/count_tokens": ("messages",),
    RESPONSES + "/input_tokens": ("input",),
    "/tokenize": ("messages",),
    "/detokenize": ("tokens",),
}


def fuzz(url: str, examples: int) -> collections.Counter[int]:
    """Send random bodies to every route; return the counts of each status; none may fail."""
    statuses: collections.Counter[int] = collections.Counter()
    with httpx.Client(base_url=url, timeout=WAIT) as client:

        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(
            st.sampled_from(sorted(PATHS)),
            messages,
            st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=3),
        )
        def one(path: str, talk: list, change: dict) -> None:
            least = {"messages": talk, "input": "x", "prompt": "x", "tokens": [1]}
            least |= {"max_tokens": 2, "max_output_tokens": 2}
            body = {name: least[name] for name in PATHS[path]} | change
            response = client.post(path, json=body)
            statuses[response.status_code] += 1
            assert response.status_code in (200, 400, 404), (path, body, response.text)

        one()
    return statuses


# -- disconnects and crowds --------------------------------------------------------------------


def send(url: str, body: dict, path: str = CHAT) -> socket.socket:
    """Return a connection on which a request was sent and nothing was read."""
    parts = urllib.parse.urlsplit(url)
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    connection = socket.create_connection((parts.hostname, parts.port))
    connection.sendall(head + raw)
    return connection


def leave(url: str, body: dict, times: int) -> None:
    """Close connections: at once, or after some streamed text."""
    for i in range(times):
        with contextlib.closing(send(url, body)) as connection:
            came = b""
            while body.get("stream") and i % 2 and came.count(b"data: ") < 3:
                part = connection.recv(4096)
                assert part, came
                came += part


def crowd(url: str, count: int) -> list[httpx.Response]:
    """Send `count` requests at once, every second one streamed; return the answers."""
    limits = httpx.Limits(max_connections=count)
    with (
        httpx.Client(limits=limits, timeout=WAIT) as client,
        concurrent.futures.ThreadPoolExecutor(count) as pool,
    ):

        def ask(i: int) -> httpx.Response:
            return client.post(url + CHAT, json=ASK | {"stream": bool(i % 2)})

        return list(pool.map(ask, range(count)))


# -- mixed load and memory -----------------------------------------------------------------------

CLIENTS = 4
SAMPLE_S = 2.0  # seconds between two samples of memory
LEVEL = 1.03  # memory in the last third of a load over that before it: more is growth
WORDS = ("add", "two", "numbers", "list", "weather", "Paris", "write", "test", "why", "table")


def mixed(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a path and a body of one of many kinds."""
    content = " ".join(rng.choices(WORDS, k=rng.randrange(1, 120)))
    talk = [{"role": "user", "content": content}]
    chat: dict[str, Any] = {"messages": talk, "max_tokens": rng.randrange(1, 60)}
    chat |= {"stream": rng.random() < 0.5}
    text = {"prompt": content, "max_tokens": rng.randrange(1, 40)}
    schema = {"type": "object", "properties": {rng.choice(WORDS): {"type": "integer"}}}
    return rng.choice(
        [
            (CHAT, chat),
            (CHAT, chat | {"temperature": 0.8, "n": 2}),
            (CHAT, chat | {"tools": TOOLS}),
            (CHAT, chat | {"tools": TOOLS, "tool_choice": "required"}),
            (CHAT, chat | {"guided_choice": rng.sample(WORDS, 3)}),
            (CHAT, chat | {"response_format": {"type": "json_object", "schema": schema}}),
            (CHAT, chat | {"logprobs": True, "top_logprobs": 2, "frequency_penalty": 0.5}),
            (CHAT, chat | {"messages": talk * 3000}),
            (CHAT, chat | {"messages": [talk[0] | {"content": content * 5000}]}),
            (CHAT, chat | {"temperature": -1}),
            (COMPLETIONS, text | {"echo": True, "logprobs": 1}),
            (COMPLETIONS, text | {"stop": rng.sample(WORDS, 2)}),
            (RESPONSES, {"input": content, "max_output_tokens": 30, "tools": []}),
            (MESSAGES, {"messages": talk, "max_tokens": 30, "stream": rng.random() < 0.5}),
            ("/tokenize", {"content": content}),
        ]
    )


STORED: dict[str, Any] = {"input": "Hello", "max_output_tokens": 2}
KEPT = 8000  # bytes of metadata with each stored response: 5,000 of them fill a store
LONG_ITEM = {"type": "message", "role": "user", "content": "a " * 2**18}
CONVERSATIONS_KEPT = 80  # conversations of half a MiB, which fill a store


def fill(url: str, count: int) -> dict[str, Any]:
    """Store this many responses, and conversations; return how many were taken, and the memory."""
    before = resident(url)
    with (
        concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool,
        httpx.Client(base_url=url, timeout=WAIT) as http,
    ):

        def store(number: int) -> int:
            body = STORED | {"metadata": {"x": f"{number:08}" * (KEPT // 8)}}
            return http.post(RESPONSES, json=body).status_code

        responses = list(pool.map(store, range(count)))
        talk = {"items": [LONG_ITEM]}
        conversations = [
            http.post(CONVERSATIONS, json=talk).status_code for _ in range(CONVERSATIONS_KEPT)
        ]
    return {
        "responses": responses.count(200),
        "conversations": conversations.count(200),
        "memory_mb": [before >> 20, resident(url) >> 20],
    }


def stored(http: httpx.Client, content: str) -> list[httpx.Response]:
    """Store a response and a conversation, continue, read and delete them; return the answers."""
    item = {"type": "message", "role": "user", "content": content}
    first = http.post(RESPONSES, json=STORED | {"input": content})
    talk = http.post(CONVERSATIONS, json={"items": [item]})
    response, conversation = (f"/{answer.json().get('id')}" for answer in (first, talk))
    follow = STORED | {"previous_response_id": response[1:]}
    return [
        first,
        talk,
        http.post(RESPONSES, json=follow),
        http.post(f"{CONVERSATIONS}{conversation}/items", json={"items": [item] * 20}),
        http.post(RESPONSES, json=STORED | {"conversation": conversation[1:]}),
        http.get(f"{CONVERSATIONS}{conversation}/items"),
        http.get(RESPONSES + response),
        http.delete(RESPONSES + response),
        http.delete(CONVERSATIONS + conversation),
    ]


def load(url: str, minutes: float) -> dict[str, Any]:
    """Run a mixed load for some minutes and return the server's memory.

    `growth` compares the peak of the last third with the peak before it, because memory falls
    whenever free memory is returned.
    """
    end = time.monotonic() + 60 * minutes
    statuses: collections.Counter[int] = collections.Counter()

    def client(number: int) -> None:
        rng = random.Random(number)
        with httpx.Client(base_url=url, timeout=WAIT) as http:
            while time.monotonic() < end:
                if rng.random() < 0.1:
                    content = " ".join(rng.choices(WORDS, k=9))
                    statuses.update(answer.status_code for answer in stored(http, content))
                    continue
                path, body = mixed(rng)
                if rng.random() < 0.1:
                    send(url, body, path).close()
                    continue
                statuses[http.post(path, json=body).status_code] += 1

    samples: list[int] = []
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        running = [pool.submit(client, number) for number in range(CLIENTS)]
        while time.monotonic() < end:
            samples.append(resident(url))
            time.sleep(SAMPLE_S)
        for each in running:
            each.result()
    third = len(samples) // 3
    before = samples[:-third]
    last = samples[-third:]
    step = max(len(samples) // 60, 1)
    return {
        "minutes": minutes,
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "memory_mb": [size >> 20 for size in samples[::step]],
        "growth": max(last) / max([*before, 1]) - 1,
    }


def resident(url: str) -> int:
    """Return the bytes of memory that the server reports."""
    name = "dflash_jax:resident_memory_bytes "
    lines = httpx.get(url + "/metrics", timeout=WAIT).text.splitlines()
    return next((int(float(x.removeprefix(name))) for x in lines if x.startswith(name)), 0)


# -- everything --------------------------------------------------------------------------------


def served(
    *options: str, descriptors: int | None = None, log: Path | None = None
) -> contextlib.AbstractContextManager[ServerProcess]:
    """Return `dflash-jax serve` with these options in a process, which runs meanwhile."""
    command = [sys.executable, "-m", "dflash_jax", "serve", "--port", "0", "--quiet", *options]
    return started(command, descriptors=descriptors, log=log)


def soak(
    url: str, minutes: float, fuzzing: float, count: int, *, only_load: bool
) -> dict[str, Any]:
    """Run all phases and return their results; `failures` lists the failed checks.

    Args:
      minutes: minutes of mixed load.
      fuzzing: minutes of random bodies.
      count: stored responses before the load.
      only_load: run only the mixed load.
    """
    import openai

    results: dict[str, Any] = {}
    failures: list[str] = []

    def greedy() -> Any:
        body = ASK | {"max_tokens": 16, "return_token_ids": True}
        answer = httpx.post(url + CHAT, json=body, timeout=WAIT)
        return answer.json()["choices"][0]["token_ids"] if answer.status_code == 200 else answer

    wanted = greedy()

    def check(name: str, good: bool) -> None:
        if not good:
            failures.append(name)
        if greedy() != wanted:
            failures.append(f"{name}: the next request was not served as the first one")

    if not only_load:
        with openai.OpenAI(
            base_url=url + "/v1", api_key="none", max_retries=0, timeout=WAIT
        ) as client:
            turns = work(client, 12)
        keys = ("empty", "calls", "prompt_tokens", "cached_tokens", "finish_reason")
        results["agent"] = [{key: turn[key] for key in keys} for turn in turns]
        check("an empty turn", not any(turn["empty"] for turn in turns))
        check("no prefix hit", all(turn["cached_tokens"] for turn in turns[1:]))
        check("no drafts", all(turn["drafted"] for turn in turns))

        for stream in (True, False):
            leave(url, ASK | {"max_tokens": 400, "ignore_eos": True, "stream": stream}, 10)
            check(f"disconnects, stream={stream}", True)
        results["disconnects"] = 20

        answers = crowd(url, 200)
        statuses = collections.Counter(answer.status_code for answer in answers)
        results["crowd"] = {str(status): count for status, count in statuses.items()}
        whole = [a for a in answers if a.status_code == 200]
        check("a crowd", set(statuses) <= {200, 503} and len(whole) >= 64)
        check("half answers", all(b'finish_reason":"' in a.content for a in whole))
        check("no Retry-After", all("retry-after" in a.headers for a in answers if a not in whole))

        for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES):
            for name, body in BODIES.items():
                refused = httpx.post(url + path, content=body, timeout=WAIT)
                if not is_error(refused):
                    failures.append(f"{path} {name}: {refused.status_code}")
        for change in CHANGES:
            refused = httpx.post(url + CHAT, json=ASK | change, timeout=WAIT)
            if not is_error(refused):
                failures.append(f"{str(change)[:80]}: {refused.status_code}")
        results["malformed"] = 4 * len(BODIES) + len(CHANGES)
        check("malformed bodies", True)

        end = time.monotonic() + 60 * fuzzing
        total: collections.Counter[int] = collections.Counter()
        while time.monotonic() < end:
            total += fuzz(url, 500)
        results["fuzz"] = {"minutes": fuzzing, "statuses": {str(s): n for s, n in total.items()}}
        check("fuzz", True)
        results["stored"] = fill(url, count)
        check("stored responses", results["stored"]["responses"] == count)
    results["load"] = load(url, minutes)
    check("memory grows", results["load"]["growth"] < LEVEL - 1)
    check("mixed load", {200, 400} >= {int(status) for status in results["load"]["statuses"]})
    return results | {"failures": failures}


def serve(words: Sequence[str]) -> int:
    """Run all phases against a new server and write their results; return 1 if a check fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit serve")
    parser.add_argument("--minutes", type=float, default=20.0, help="of mixed load")
    parser.add_argument("--fuzz", type=float, default=10.0, help="minutes of random bodies")
    parser.add_argument("--stored", type=int, default=5000, help="responses stored before the load")
    parser.add_argument("--only-load", action="store_true", help="the mixed load and nothing else")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    plan = ("--queue", "64", "--rows", "4", "--max-length", "2048", "--prefix-cache", str(2**25))
    with served(*plan, "--warm", "all") as server:
        results = soak(
            server.url, options.minutes, options.fuzz, options.stored, only_load=options.only_load
        )
        server.process.terminate()
        results["exit_code"] = server.process.wait(60)
    write_result(options.out, "soak_serve", {"load_average": os.getloadavg()} | results)
    print(json.dumps({name: x for name, x in results.items() if name != "agent"}, indent=1))
    return 1 if results["failures"] or results["exit_code"] else 0
