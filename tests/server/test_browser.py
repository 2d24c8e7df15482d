"""The web page in a real browser, served by the shipped pair; skipped without a browser."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import dflash_jax as dj
from dflash_jax.engine.engine import Engine
from dflash_jax.server.completions import ChatRequest
from dflash_jax.server.run import ServerConfig
from tests.server import browser
from tests.server.browser import Browser, browsing
from tests.server.conftest import LiveServer, api_keys, run_server, twin

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(bool(browser.missing()), reason=browser.missing() or "there is one"),
]

ENTER, TAB, RIGHT, END = "\ue007", "\ue004", "\ue014", "\ue010"
HELLO = "What can you do for me?"
# Answer requests of chat completions with a given response.
STUB = """
const [status, headers, body] = arguments;
const real = window.fetch;
window.fetch = (path, options) => {
  if (!String(path).includes("chat/completions")) return real(path, options);
  window.sent = JSON.parse(options.body);
  return Promise.resolve(new Response(body, { status, headers }));
};
"""
UNLABELLED = """
return [...document.querySelectorAll("input, select, textarea")]
  .filter((field) => !field.labels.length && !field.ariaLabel).map((field) => field.id);
"""


class Page:
    """The page of a server that can be stopped and started again."""

    def __init__(self, engine: Engine, session: Browser):
        self.engine, self.browser = engine, session
        self.live = self.start(port=0)

    def start(self, port: int, **settings: Any) -> LiveServer:
        config = ServerConfig(port=port, drain=2, **settings)
        self.live = run_server(lambda: twin(self.engine), config)
        return self.live

    def restart(self, **settings: Any) -> None:
        """Replace the server by one at the same address."""
        self.live.stop()
        self.start(self.live.running.port, **settings)

    def open(self) -> None:
        self.browser.open(self.live.url + "/")
        self.browser.until(lambda: self.browser.text("#state") == "Ready", "the page is ready")

    def ask(self, text: str) -> None:
        """Send a message, and wait for the end of its answer."""
        before = self.browser.count(".message.assistant")
        self.browser.type("#message", text + ENTER)
        self.finished(before + 1)

    def finished(self, answers: int) -> None:
        ends = ".message.assistant[aria-busy=false]"
        self.browser.until(lambda: self.browser.count(ends) == answers, "the answer ends")
        self.browser.until(lambda: self.browser.count("#send"), "the answer is shown")

    def show(self, view: str) -> None:
        self.browser.click(f"label:has([value={view}]) span")
        self.browser.frame()

    def stub(self, body: Any, status: int = 200, **headers: str) -> None:
        """Answer the following requests with a body, or with the chunks of a stream."""
        if isinstance(body, list):
            lines = [each if isinstance(each, str) else json.dumps(each) for each in body]
            body = "".join(f"data: {line}\n\n" for line in lines)
        elif not isinstance(body, str):
            body = json.dumps(body)
        self.browser.run(STUB, status, headers, body)


def chunk(content: str = "", finish: str | None = None, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
    return {"choices": [choice | fields]}


def one_round(sources: str, text: str, rejected: str = "", ms: float = 4.0) -> dict[str, Any]:
    """Return a round: a letter of `sources` (d, t, f) for each word of the text."""
    kinds = {"d": "drafted", "t": "target", "f": "forced"}
    words = [f" {word}" for word in text.split()]
    tokens = [
        {"id": i, "text": word, "source": kinds[s]}
        for i, (word, s) in enumerate(zip(words, sources, strict=True))
    ]
    proposed = 7 if "d" in sources else 0
    return {
        "tokens": tokens,
        "rejected": [{"id": 0, "text": f" {word}"} for word in rejected.split()],
        "proposed": proposed,
        "accepted": sources.count("d"),
        "ms": ms,
    }


def metrics(live: LiveServer) -> str:
    return httpx.get(live.url + "/metrics").text


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    engine = dj.load("tiny", plan=dj.Plan(max_length=1024))
    engine.measures_drafting = False  # drafts on every machine
    engine.warm_up()
    with browsing(tmp_path_factory.mktemp("profile")) as session:
        page = Page(engine, session)
        yield page
        page.live.stop()


@pytest.fixture
def page(whole: Page) -> Iterator[Page]:
    whole.open()
    yield whole
    assert whole.browser.problems() == []


def test_a_conversation_with_a_tool_call_and_another_try(page: Page) -> None:
    window = page.browser
    assert window.run(UNLABELLED) == []
    page.show("text")
    page.ask(HELLO)
    messages: list[dict[str, Any]] = [{"role": "user", "content": HELLO}]
    body = {"messages": messages, "max_tokens": 512, "temperature": 0}
    answer = httpx.post(f"{page.live.url}/v1/chat/completions", json=body, timeout=60).json()
    text = answer["choices"][0]["message"]["content"]
    assert window.text(".message .markdown") == text
    window.click(".message footer button")  # regenerate
    page.finished(1)
    assert window.text(".message .markdown") == text
    assert "tokens" in window.text(".message footer")

    window.click("#new-chat")
    assert window.count(".message") == 0
    window.click("#example-tools")
    page.ask("Check the weather in Paris.")
    assert window.text(".call h3") == "get_weather"
    assert json.loads(window.text(".call pre")) == {"city": "Paris"}
    window.type(".call textarea", '{"degrees": 21, "sky": "sunny"}')
    window.click(".call form button")
    page.finished(2)
    assert "21 degrees and sunny in Paris" in window.text(".message:last-child .markdown")


def test_tokens_are_coloured_and_rejected_drafts_are_shown_on_focus(page: Page) -> None:
    window = page.browser
    rounds = [
        one_round("t", "Red"),
        one_round("ddt", "and blue and", "green not yellow of me"),
        one_round("dddddddt", "a b c d e f g h"),
        one_round("f", "<end>", ms=2.0),
    ]
    texts = ["".join(token["text"] for token in r["tokens"]) for r in rounds]
    parts = [chunk(text, rounds=[r]) for text, r in zip(texts, rounds, strict=True)]
    page.stub([*parts, chunk(finish="stop"), "[DONE]"])
    page.ask("Colours?")
    assert window.run("return document.querySelector('.tokens').innerText").count("blue") == 1
    for kind, n in {"drafted": 9, "target": 3, "forced": 1}.items():
        assert window.count(f".tokens .token.{kind}") == n
        assert window.count(f"#legend .token.{kind}") == 1
    colours = {
        window.run(f"return getComputedStyle(document.querySelector('{each}')).backgroundColor")
        for each in (".token.drafted", ".token.target", ".token.forced", ".token.rejected")
    }
    assert len(colours) == 4

    assert window.count(".tokens .cut") == 2
    assert window.count(".round-card") == 0
    window.run("document.querySelector('.cut').focus()")
    words = window.run("return document.activeElement.textContent")
    assert "Round 2: 7 drafts, 2 accepted" in words
    assert "rejected: “ green” “ not” “ yellow”" in words
    assert "Round 2: 2 of 7 drafts accepted" in window.text(".round-card")
    assert window.count(".round-card del") == 5
    window.press(RIGHT)
    assert "Round 3: 7 of 7 drafts" in window.text(".round-card")
    assert window.count("[tabindex='0'].cut") == 1
    assert window.count(".tokens .token.rejected") == 0
    window.click("#show-rejected")
    assert window.count(".tokens .token.rejected") == 5

    words = window.text("#strip-words")
    assert words == (
        "On average 5.50 tokens per round (bars), 64 % of drafts accepted;"
        " 1,200 tokens per second (line)."
    )
    assert window.count("#strip-chart .bar-accepted") == 2
    page.show("text")
    assert window.count(".tokens") == 0
    assert window.text(".message .markdown") == "".join(texts).strip()


@pytest.mark.skipif(
    "return_token_sources" not in ChatRequest.__struct_fields__,
    reason="the server has no field return_token_sources",
)
def test_tokens_of_the_server_are_coloured(page: Page) -> None:
    page.ask(HELLO)
    assert page.browser.count(".tokens .token.drafted") > 5
    assert page.browser.count(".tokens .token.target") > 0
    assert "tokens per round" in page.browser.text("#strip-words")


def test_the_page_works_where_the_server_reports_no_rounds(page: Page) -> None:
    page.stub([chunk("One *two*"), chunk(finish="stop"), "[DONE]"])
    page.ask("Count")
    assert page.browser.text(".message .markdown em") == "two"
    assert page.browser.count("#strip") == 0


def test_stop_ends_the_request_and_keeps_the_text(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    window, advance, gate = page.browser, Engine.advance, threading.Event()
    thread = page.live.running.server.models[0].engine_thread

    def waiting(engine: Engine) -> None:
        if any(x.handle and len(x.handle.token_ids) > 4 for x in thread._running):
            gate.wait(20)
        advance(engine)

    monkeypatch.setattr(Engine, "advance", waiting)
    page.show("text")
    window.type("#message", HELLO + ENTER)
    window.until(lambda: window.count(".message .markdown"), "text arrives")
    window.click("#stop")
    page.finished(1)
    assert "stopped" in window.text(".message footer")
    assert window.text(".message .markdown").startswith("I can")
    cancelled = 'request_cancelled_total{model="tiny",phase="output",reason="disconnect"} 1.0'
    window.until(lambda: cancelled in metrics(page.live), "the server notices")
    gate.set()
    assert page.live.is_idle()
    monkeypatch.undo()
    page.ask("And then?")
    assert window.count(".message.assistant .error") == 0


def test_a_comparison_says_equal_or_where_it_differs(page: Page) -> None:
    window = page.browser
    window.click("nav a[href='#compare']")
    window.click("#compare-run")
    window.until(lambda: window.count("#verdict.equal"), "the comparison says equal")
    assert window.text("#verdict").startswith("Equal: both gave the same ")
    assert window.text("#speculative .output") == window.text("#plain .output")
    assert "tok/s" in window.text("#plain .facts")
    ids = {True: [1, 2, 3], False: [1, 2, 4]}
    page.browser.run(
        "const real = window.fetch; const [fast, slow] = arguments;"
        "window.fetch = (path, options) => String(path).includes('completions') ?"
        " Promise.resolve(new Response(JSON.parse(options.body).speculative.enabled ? fast : slow))"
        " : real(path, options);",
        *(
            f"data: {json.dumps(chunk(f'so {ids[k][2]}', finish='stop', token_ids=ids[k]))}\n\n"
            "data: [DONE]\n\n"
            for k in (True, False)
        ),
    )
    window.click("#compare-run")
    window.until(lambda: window.count("#verdict.differs"), "the comparison says different")
    assert "first difference is at token 3 (ids 3 and 4)" in window.text("#verdict")
    assert window.text("#plain mark") == "4"


SHAPES: list[tuple[int, Any, str]] = [
    (429, {"error": {"message": "too fast", "type": "rate_limit_error"}}, "429: too fast"),
    (529, {"type": "error", "error": {"type": "overloaded_error", "message": "later"}}, "later"),
    (422, {"detail": [{"msg": "bad field", "loc": ["body"]}]}, "422: bad field"),
    (404, {"error": "no such model"}, "no such model"),
    (502, "<html><script>window.hacked = 1</script><h1>Bad gateway</h1></html>", "Bad gateway"),
    (500, "", "The server answered 500"),
    (200, [chunk("Half"), {"error": {"message": "device lost"}}], "device lost"),
    (200, [chunk("Half")], "ended before the answer was complete"),
    (200, ["{"], "The stream is not valid"),
]


def test_errors_are_shown_in_the_words_of_the_server(page: Page) -> None:
    window = page.browser
    window.run("document.getElementById('max-tokens').value = '99999'")
    page.ask(HELLO)
    assert "and max_tokens is 99999; this model's maximum context length is 1024" in window.text(
        ".message .error"
    )
    window.run("document.getElementById('max-tokens').value = '8'")
    window.click(".message .error button")  # try again
    page.finished(1)
    assert window.count(".message .error") == 0
    assert "length limit" in window.text(".message footer")
    for status, body, words in SHAPES:
        page.stub(body, status, **{"Retry-After": "7"} if status == 429 else {})
        page.ask("x")
        assert words in window.text(".message:last-child .error[role=alert]"), body
        if status == 429:
            assert "7 seconds" in window.text(".message:last-child .error")
    assert window.run("return window.hacked ?? 0") == 0
    assert window.count(".error button") == 1  # only the last answer can be tried again


MARKUP = """<img src=x onerror="window.hacked = 1"><script>window.hacked = 1</script>

[bad](javascript:window.hacked=1) [worse](data:text/html,x) [good](https://page.example/a_b)

| a | b |
| - | -: |
| `<b>` | **1** |

- one
  - two <iframe src="https://page.example"></iframe>

```html
<script>window.hacked = 1</script>
"""


def test_markup_in_answers_stays_text(page: Page) -> None:
    window = page.browser
    rounds = [one_round("t", "<script>window.hacked=1</script>", ms=0)]
    page.stub([chunk(MARKUP, rounds=rounds, finish="stop"), "[DONE]"])
    page.ask(MARKUP.replace("\n", " "))
    assert window.text(".tokens").strip() == "<script>window.hacked=1</script>"
    page.show("text")
    assert window.run("return window.hacked ?? 0") == 0
    assert window.count("#log :is(script, img, iframe, b)") == 0
    shown = window.text(".markdown")
    for text in ("<img src=x onerror=", "[bad](javascript:", "[worse](data:", "<iframe src="):
        assert text in shown
    links = window.run(
        "return [...document.querySelectorAll('#log a')].map((a) => [a.innerText, a.href, a.rel])"
    )
    assert links == [
        ["good", "https://page.example/a_b", "noopener noreferrer"],
        ["https://page.example", "https://page.example/", "noopener noreferrer"],
    ]
    assert window.text(".markdown pre").strip() == "<script>window.hacked = 1</script>"
    assert window.text(".markdown td code") == "<b>"
    assert window.count(".markdown li li") == 1
    # The policy holds even if a script were inserted.
    window.run(
        "const s = document.createElement('script'); s.textContent = 'window.hacked = 1';"
        "document.body.append(s)"
    )
    assert window.run("return window.hacked ?? 0") == 0
    [refused] = window.problems()
    assert "Content Security Policy" in refused


def test_the_status_view_shows_the_plan_and_the_metrics(page: Page) -> None:
    window = page.browser
    page.ask(HELLO)
    window.click("nav a[href='#status']")
    window.until(lambda: window.count(".model-status"), "the status is shown")
    window.click(".model-status summary")
    text = window.text("#view-status")
    for words in ("Running", "Acceptance length", "Context length", "Greedy", "max_length"):
        assert words in text
    assert "1,024" in text


def test_a_server_that_goes_away_and_comes_back(page: Page) -> None:
    window = page.browser

    def told(words: str) -> None:
        window.run("window.dispatchEvent(new Event('online'))")  # look at once
        window.until(lambda: words in window.text("#banner"), words)

    page.ask(HELLO)
    port = page.live.running.port
    page.live.stop()
    told("cannot be reached")
    page.ask("Still there?")
    assert "cannot be reached" in window.text(".message .error")
    page.start(port)
    told("The server is back")
    window.click(".message .error button")
    page.finished(2)
    assert window.count(".message .error") == 0

    page.restart(api_keys=api_keys("secret"))
    told("Enter it in the settings")
    page.ask("Hello")
    assert "401: the API key is missing or wrong" in window.text(".message:last-child .error")
    window.type("#api-key", "secret" + TAB)
    window.until(lambda: window.text("#state") == "Ready", "the key is accepted")
    window.click(".message:last-child .error button")
    page.finished(3)
    assert window.count(".message .error") == 0
    assert window.run("return [localStorage.length, document.cookie]") == [0, ""]
    page.restart()


def test_the_page_fits_a_narrow_screen(page: Page) -> None:
    window = page.browser
    size = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    window.devtools("Emulation.setDeviceMetricsOverride", **size)
    try:
        page.ask(HELLO)
        for view in ("compare", "status", "chat"):
            window.click(f"nav a[href='#{view}']")
            window.until(lambda view=view: window.count(f"#view-{view}"), "the view is shown")
            assert window.run("return document.documentElement.scrollWidth") == 360
            scrolls = "return document.querySelector('main > section:not([hidden])').scrollWidth"
            assert window.run(scrolls) <= 360
    finally:
        window.devtools("Emulation.clearDeviceMetricsOverride")
