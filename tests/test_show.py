"""Traces, results, statistics and plans as marked text and as HTML."""

import html.parser
import json
from collections import Counter

import pytest

import dflash_jax as dj
from dflash_jax.engine.engine import Engine
from dflash_jax.graph.explain import explain
from dflash_jax.graph.roofline import DEVICES
from dflash_jax.show import legend, marked, precision
from dflash_jax.testing import planned

ROUNDS = (
    dj.RoundTrace((1,), ("target",), texts=("A <b>",)),
    dj.RoundTrace(
        (2, 3, 4),
        ("drafted", "drafted", "target"),
        proposed=4,
        accepted=2,
        rejected=(5, 6),
        seconds=0.0125,
        texts=(" &", "\n", " c"),
        rejected_texts=("</del>", "\n"),
    ),
    dj.RoundTrace((7, 8), ("target", "forced"), texts=("", "<script>alert(1)</script>")),
)
IDS = [1, 2, 3, 4, 7, 8]


def result(trace: tuple[dj.RoundTrace, ...] = (), text: str | None = "<i>text</i>") -> dj.Result:
    stats = dj.Stats(
        prompt_tokens=9,
        cached_tokens=4,
        output_tokens=6,
        rounds=1,
        drafted=4,
        accepted=2,
        acceptance_lengths=[3],
        recovery=Counter(floor=1, none=0),
    )
    return dj.Result(IDS, text, "stop", stats, trace=trace)


class Page(html.parser.HTMLParser):
    """Elements and visible text of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.open: list[str] = []
        self.classes: Counter[str] = Counter()
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.open.append(tag)
        self.classes.update([str(dict(attrs).get("class"))])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def test_a_trace_is_marked_text() -> None:
    texts = [marked(traced) for traced in ROUNDS]
    assert texts == ["A <b>", "[+ &\n] c[-</del>\\n]", "[!<script>alert(1)</script>]"]
    without_texts = dj.RoundTrace((2, 4), ("drafted", "target"), rejected=(5,))
    assert marked(without_texts) == "[+2 ]4 [-5 ]"
    coloured = marked(ROUNDS[1], colours=True)
    assert coloured == "\033[32m &\n\033[0m\033[36m c\033[0m\033[2;9m</del>\\n\033[0m"


def test_the_legend_names_the_marks_and_the_acceptance_length() -> None:
    text = legend(result().stats)
    assert text == (
        "[+accepted draft], target's own token, [!forced token], [-rejected draft];"
        " acceptance length 3.00"
    )
    assert legend(dj.Stats()).endswith("plain decoding")


@pytest.mark.parametrize("by_round", [False, True])
def test_a_trace_is_html_without_scripts_in_which_all_text_is_escaped(by_round: bool) -> None:
    shown = result(ROUNDS).show(by_round=by_round)
    page = Page(shown._repr_html_())
    assert set(page.tags) == {"style", "div", "span", "del"} | ({"small"} if by_round else set())
    legends = 1
    assert page.classes["dflash-drafted"] == 1 + legends
    assert page.classes["dflash-forced"] == 1 + legends
    assert page.classes["dflash-rejected"] == page.tags["del"] == 1 + legends
    assert "A <b>" in page.text
    assert "<script>alert(1)</script>" in page.text
    assert "acceptance length 3.00" in page.text
    assert ("2/4" in page.text) is ("12.5 ms" in page.text) is by_round
    assert repr(shown).startswith("A <b>[+ &")
    assert "http" not in shown.html


@pytest.mark.parametrize("text", ["<i>text</i>", None])
def test_a_result_without_a_trace_is_a_table(text: str | None) -> None:
    page = Page(result(text=text)._repr_html_())
    assert set(page.tags) == {"style", "table", "tr", "th", "td"}
    for part in (text or "1 2 3 4 7 8", "stop", "2 of 4 accepted", "4 of them cached", "floor 1"):
        assert part in page.text
    assert "none" not in page.text
    assert repr(result(text=text).show()) == repr(result(text=text))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "float32"),
        ({"weights": "int8"}, "int8 weights, float32"),
        (
            {"weights": "int4", "activations": "int8"},
            "int4 weights, int8 activations, float32",
        ),
        ({"weights": "packed"}, "packed weights (Q4_1, Q8_0), float32"),
    ],
)
def test_a_precision_names_weights_and_activations(fields: dict[str, str], named: str) -> None:
    spec = (1, (("Q8_0", 4), ("", 2), ("Q4_1", 2)))
    stored = (("target/head", spec),) if fields.get("weights") == "packed" else ()
    plan = dj.Plan(**{"weights": "float", "dtype": "float32"} | fields, stored=stored)
    assert precision(plan) == named


def test_statistics_plans_and_explanations_are_tables(tiny: Engine) -> None:
    assert "acceptance length 3.00" in Page(result().stats._repr_html_()).text
    lines = str(dj.Plan(rows=3)).splitlines()
    assert [line.split()[0] for line in lines] == list(dj.Plan.fields())
    assert lines[0].split() == ["rows", "3", "requests", "decoded", "in", "parallel"]
    plan = Page(dj.Plan(rows=3)._repr_html_())
    assert plan.tags["tr"] == len(dj.Plan.fields()) + 1
    assert "requests decoded in parallel" in plan.text
    found = explain(
        planned(tiny.graph.config, tiny.graph.drafter_config, tiny.plan), DEVICES["H200"]
    )
    page = Page(found._repr_html_())
    assert page.tags["table"] == 2
    for part in ("speculative[", "memory", "roofline"):
        assert part in page.text
    assert repr(found) == str(found)
    assert repr(tiny.graph.explain()).splitlines()[0] == repr(found).splitlines()[0]


def test_a_trace_is_part_of_a_result_as_json() -> None:
    assert "trace" not in result().to_json()
    [first, *_] = json.loads(json.dumps(result(ROUNDS).to_json()))["trace"]
    assert (first["tokens"], first["sources"], first["texts"]) == ([1], ["target"], ["A <b>"])
