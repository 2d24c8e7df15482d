"""Traces, results, statistics and plans as marked text, and as HTML for notebooks.

The HTML has no scripts and refers to nothing outside it; all text is escaped. Colours are
translucent, so that they can be read on light and on dark pages.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

NAMES = {
    "drafted": "accepted draft",
    "target": "target's own token",
    "forced": "forced token",
    "rejected": "rejected draft",
}
MARKS = {"drafted": "+", "target": "", "forced": "!", "rejected": "-"}
ANSI = {"drafted": "32", "target": "36", "forced": "33", "rejected": "2;9"}
_STYLE = """<style>
.dflash-trace { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.6; }
.dflash-trace small { font-family: monospace; opacity: 0.7; }
.dflash-trace span, .dflash-trace del { border-radius: 3px; }
.dflash-drafted { background: rgba(46, 160, 67, 0.28); }
.dflash-target { border-bottom: 2px solid rgba(56, 139, 253, 0.9); }
.dflash-forced { background: rgba(210, 153, 34, 0.38); }
.dflash-rejected { background: rgba(248, 81, 73, 0.2); opacity: 0.8; }
.dflash-table td, .dflash-table th { text-align: left; vertical-align: top; padding-right: 1em; }
.dflash-table td { white-space: pre-wrap; overflow-wrap: anywhere; }
</style>"""


class Run(NamedTuple):
    """Adjacent tokens of a round that came from the same source."""

    source: str  # a key of `NAMES`
    ids: tuple[int, ...]
    texts: tuple[str, ...]


class Shown:
    """Something to display: HTML in a notebook, marked text elsewhere."""

    def __init__(self, html: str, text: str):
        self.html = html
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html


def runs(traced: Any) -> Iterator[Run]:
    """Yield the tokens of a round, then its rejected drafts; ids are the texts without texts."""
    texts = traced.texts or tuple(f"{token} " for token in traced.tokens)
    columns = zip(traced.sources, traced.tokens, texts, strict=True)
    for source, group in itertools.groupby(columns, lambda column: column[0]):
        _, ids, parts = zip(*group, strict=True)
        yield Run(source, ids, parts)
    if traced.rejected:
        texts = traced.rejected_texts or tuple(f"{token} " for token in traced.rejected)
        yield Run("rejected", traced.rejected, texts)


def marked(traced: Any, *, colours: bool = False) -> str:
    """Return a round as text: [+accepted drafts], own tokens, [!forced tokens], [-rejected drafts].

    Args:
      colours: mark them by the colours of terminals instead.
    """
    parts = []
    for run in runs(traced):
        text = "".join(run.texts)
        if run.source == "rejected":
            text = text.replace("\n", "\\n")
        parts.append(_mark(run.source, text, colours=colours))
    return "".join(parts)


def legend(stats: Any, *, colours: bool = False) -> str:
    """Return a line that explains the marks of `marked`, and the acceptance length."""
    names = ", ".join(_mark(source, name, colours=colours) for source, name in NAMES.items())
    return f"{names}; {_acceptance(stats)}"


def result_shown(result: Any, *, by_round: bool = False) -> Shown:
    """Return a result to display: its trace, or text and statistics without one."""
    text = "".join(map(marked, result.trace)) if result.trace else repr(result)
    return Shown(result_html(result, by_round=by_round), text)


def result_html(result: Any, *, by_round: bool = False) -> str:
    """Return the trace of a result as HTML, or a table of text and statistics without one.

    Args:
      by_round: begin a line with every round, and show its number of drafts and its time.
    """
    if result.trace:
        keys = "  ".join(_element(Run(source, (), (name,))) for source, name in NAMES.items())
        lines = [_round_html(traced, by_round=by_round) for traced in result.trace]
        body = ("\n" if by_round else "").join(lines)
        about = escape(f"{result.finish_reason}; {_acceptance(result.stats)}")
        blocks = (body, f"{keys}  {about}")
        return _STYLE + "".join(f'<div class="dflash-trace">{block}</div>' for block in blocks)
    text = " ".join(map(str, result.token_ids)) if result.text is None else result.text
    rows = [("text", text), ("finish reason", result.finish_reason), *_figures(result.stats)]
    return table_html(rows)


def stats_html(stats: Any) -> str:
    """Return the statistics of a request as an HTML table."""
    return table_html(_figures(stats))


def plan_html(plan: Any) -> str:
    """Return the choices of a plan as an HTML table, with what each one is."""
    return table_html(_choices(plan), ("option", "value", "meaning"))


def plan_text(plan: Any) -> str:
    """Return the choices of a plan as lines of text, with what each one is."""
    rows = _choices(plan)
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(
        f"{name:{widths[0]}}  {value:{widths[1]}}  {text}" for name, value, text in rows
    )


def precision(plan: Any) -> str:
    """Return in what numbers a completed plan computes, such as "float32" or "int8 weights".

    Packed weights are named with the formats of their blocks.
    """
    if plan.weights == "float":
        return plan.dtype
    kinds = {kind for _, (_, parts) in plan.stored for kind, _ in parts if kind}
    named = f" ({', '.join(sorted(kinds))})" if plan.weights == "packed" else ""
    by = ", int8 activations" if plan.activations == "int8" else ""
    return f"{plan.weights} weights{named}{by}, {plan.dtype}"


def _choices(plan: Any) -> list[tuple[str, str, str]]:
    fields = plan.fields().items()
    return [(name, str(getattr(plan, name)), field.help) for name, field in fields]


def table_html(rows: Iterable[Sequence[str]], headings: Sequence[str] = ()) -> str:
    """Return an HTML table; the first cell of each row is its heading."""
    lines = ["".join(f'<th scope="col">{escape(name)}</th>' for name in headings)]
    for first, *rest in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        lines.append(f'<th scope="row">{escape(first)}</th>{cells}')
    body = "".join(f"<tr>{line}</tr>" for line in lines if line)
    return f'{_STYLE}<table class="dflash-table">{body}</table>'


def _mark(source: str, text: str, *, colours: bool) -> str:
    if colours:
        return f"\033[{ANSI[source]}m{text}\033[0m"
    return f"[{mark}{text}]" if (mark := MARKS[source]) else text


def _round_html(traced: Any, *, by_round: bool) -> str:
    elements = "".join(_element(run, inline=by_round) for run in runs(traced))
    if not by_round:
        return elements
    drafts = f"{traced.accepted}/{traced.proposed}" if traced.proposed else "plain"
    return f"<small>{drafts:>5} {traced.seconds * 1e3:7.1f} ms  </small>{elements}"


def _element(run: Run, *, inline: bool = False) -> str:
    """Return the HTML element of a run, with its ids as a tooltip.

    Args:
      inline: show line breaks as a sign, as always in rejected drafts.
    """
    rejected = run.source == "rejected"
    tag = "del" if rejected else "span"
    text = "".join(run.texts)
    if rejected or inline:
        text = text.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}")
    title = escape(f"{NAMES[run.source]} {' '.join(map(str, run.ids))}".strip())
    return f'<{tag} class="dflash-{run.source}" title="{title}">{escape(text)}</{tag}>'


def _acceptance(stats: Any) -> str:
    length = stats.acceptance_length
    return "plain decoding" if length is None else f"acceptance length {length:.2f}"


def _figures(stats: Any) -> list[tuple[str, str]]:
    """Return the main figures of a request, by name."""
    cached = f", {stats.cached_tokens} of them cached" if stats.cached_tokens else ""
    figures: dict[str, Any] = {
        "prompt": f"{stats.prompt_tokens} tokens{cached}",
        "output": f"{stats.output_tokens} tokens",
        "decoding": _acceptance(stats),
        "speed": f"{stats.tokens_per_s:.1f} tokens/s",
        "first token": f"{stats.first_token_s * 1e3:.0f} ms",
        "prefill": f"{stats.prefill_s * 1e3:.0f} ms",
    }
    if stats.rounds:
        figures["drafts"] = f"{stats.accepted} of {stats.drafted} accepted in {stats.rounds} rounds"
    for name in ("fallbacks", "recovery"):
        counts = getattr(stats, name)
        if any(counts.values()):
            figures[name] = ", ".join(f"{key} {count}" for key, count in counts.items() if count)
    return list(figures.items())
