"""The automaton finds the same stop strings as a search for each of them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.tool_parsers.incremental import Stops, automaton, overlap


class OneByOne:
    """The same search, string by string, over all text that is held back."""

    def __init__(self, texts: list[str]):
        self.texts, self.held, self.found = texts, "", None

    def push(self, new: str) -> str:
        if self.found is not None:
            return ""
        given = self.search(self.held + new, self.texts)
        if self.found is None:
            at = len(given) - max((overlap(given, s) for s in self.texts), default=0)
            given, self.held = given[:at], given[at:]
        return given

    def flush(self, markup: str) -> str:
        if self.found is not None:
            return ""
        length = len(self.held)
        texts = [s for s in self.texts if markup and s.endswith(markup)]
        return self.search(self.held + markup, texts)[:length]

    def search(self, pending: str, texts: list[str]) -> str:
        matches = [(pending.find(s), s) for s in texts if s in pending]
        at, self.found = min(matches) if matches else (len(pending), None)
        self.held = pending[at:]
        return pending[:at]


strings = st.lists(st.text("ab<", min_size=1, max_size=5), max_size=6)
pieces = st.lists(st.tuples(st.booleans(), st.text("abc<", max_size=9)), max_size=8)


@settings(max_examples=1000, deadline=None)
@given(texts=strings, pieces=pieces)
def test_the_automaton_finds_what_a_search_for_each_string_finds(
    texts: list[str], pieces: list[tuple[bool, str]]
) -> None:
    """The same text is returned and held after every piece, and the same string is found."""
    stops, naive = Stops(texts), OneByOne(texts)
    for ends, piece in pieces:
        if ends:
            assert stops.flush(piece) == naive.flush(piece)
        else:
            assert stops.push(piece) == naive.push(piece)
        assert (stops.held, stops.found) == (naive.held, naive.found)


@settings(max_examples=200, deadline=None)
@given(texts=strings, text=st.text("ab<", max_size=40))
def test_a_character_costs_few_steps_whatever_the_number_of_strings(
    texts: list[str], text: str
) -> None:
    """Each fallback undoes an earlier step: at most two lookups per character of a text."""
    machine = automaton(tuple(texts))
    state = back = 0
    for character in text:
        while state and character not in machine.next[state]:
            state, back = machine.fail[state], back + 1
        state = machine.step(state, character)
    assert back <= len(text)
    assert len(machine.next) <= 1 + sum(map(len, texts))
