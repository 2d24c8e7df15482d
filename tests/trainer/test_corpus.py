"""The corpus: the same on every run, and split without overlap."""

import random
import re

from recipes.tiny.corpus import conversation, stdlib
from recipes.tiny.corpus.agents import TRUNCATED
from recipes.tiny.corpus.conversation import renamed
from recipes.tiny.corpus.world import Conversation, is_held_out

COUNT = 1500


def test_a_seed_decides_the_conversations():
    first = conversation.training_conversations(3, 50)
    assert first == conversation.training_conversations(3, 50)
    assert first != conversation.training_conversations(4, 50)


def test_held_out_questions_never_occur_in_training_text():
    training = conversation.training_conversations(0, COUNT)
    asked = {text for made in training for text in conversation.questions(made)}
    held_out = conversation.held_out_conversations(0, 100)
    opening = [conversation.questions(made)[0] for made in held_out]
    assert len(set(opening)) == len(opening)
    assert not asked.intersection(opening)
    assert all(is_held_out(text) for text in opening)


def test_held_out_conversations_wait_for_the_assistant():
    for made in conversation.held_out_conversations(1, 60):
        assert made.messages[-1]["role"] in ("user", "tool")


def test_library_files_are_on_one_side_of_the_split():
    training = stdlib.training_sources(400_000)
    pieces = stdlib.held_out_openings(20, training)
    assert training == stdlib.training_sources(400_000)
    assert len(set(pieces)) == 20
    assert not any(piece in source for piece in pieces for source in training)


def test_some_agents_stop_right_behind_their_preamble():
    preambles = stalls = longest = 0
    for made in conversation.training_conversations(0, COUNT):
        turns = [m for m in made.messages if m["role"] == "assistant" and made.tools]
        opened = [m for m in turns if re.search(r":\Z", m["content"])]
        preambles += len(opened)
        stalls += sum(not m.get("tool_calls") for m in opened)
        longest = max(longest, sum(m["role"] == "tool" for m in made.messages))
    assert 0.02 < stalls / preambles < 0.08
    assert longest >= 10


def test_every_stall_follows_a_cut_off_tool_response():
    for made in conversation.training_conversations(1, COUNT):
        for before, message in zip(made.messages, made.messages[1:], strict=False):
            if made.tools and message["role"] == "assistant" and message["content"].endswith(":"):
                assert message.get("tool_calls") or before["content"].endswith(TRUNCATED)


def test_a_person_gets_one_new_name_throughout():
    messages = (
        {"role": "user", "content": "Email Will: Ana will come."},
        {"role": "assistant", "content": "Sent to will@example.com about Ana."},
    )
    question, answer = (
        m["content"] for m in renamed(random.Random(0), Conversation(messages)).messages
    )
    found = re.fullmatch(r"Email (\w+): (\w+) will come\.", question)
    assert found is not None
    will, ana = found.groups()
    assert {will, ana}.isdisjoint({"Will", "Ana"})
    assert answer == f"Sent to {will.lower()}@example.com about {ana}."
