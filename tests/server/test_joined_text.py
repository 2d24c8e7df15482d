"""Texts of one output around its calls and thoughts, which chat completions have in one field."""

import pytest

from dflash_jax.server.anthropic import MessagesWriter
from dflash_jax.server.completions import ChatWriter
from dflash_jax.tokenizer import Tokenizer
from tests.server.test_replies import CALL, asked, generation, replied, streamed

CASES = [
    (f"Sure.\n{CALL}\nDone!", "Sure.\nDone!", ""),
    (f"Sure.{CALL}Done!", "Sure.\nDone!", ""),
    (f"{CALL}Done!", "Done!", ""),
    (f"Sure.{CALL}", "Sure.", ""),
    (f"One.{CALL}{CALL}Two.{CALL}Three.", "One.\nTwo.\nThree.", ""),
    (f"<think>A</think>One.{CALL}<think>B</think>Two.", "One.\nTwo.", "A\nB"),
    ("One. <think>A</think> two", "One. two", "A"),
]


@pytest.mark.parametrize("width", [1, 4, 100])
@pytest.mark.parametrize(("text", "content", "reasoning"), CASES)
def test_texts_of_chat_completions_are_on_lines_of_their_own(
    tokenizer: Tokenizer, text: str, content: str, reasoning: str, width: int
) -> None:
    request = asked()
    reply, events = replied(tokenizer, text, request, width=width)
    writer = ChatWriter(generation(reply, request))
    message = writer.to_json()["choices"][0]["message"]
    assert message["content"] == content
    assert message.get("reasoning_content", "") == reasoning
    deltas = [
        chunk["choices"][0]["delta"]
        for chunk in streamed(ChatWriter(generation(reply, request)), reply, events)
        if chunk["choices"]
    ]
    assert "".join(delta.get("content") or "" for delta in deltas) == content
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == reasoning


def test_apis_with_a_part_for_each_text_have_no_more_than_the_text(tokenizer: Tokenizer) -> None:
    request = asked("messages")
    reply, _ = replied(tokenizer, f"Sure.\n{CALL}\nDone!", request)
    blocks = MessagesWriter(generation(reply, request)).to_json()["content"]
    assert [block.get("text") for block in blocks] == ["Sure.", None, "Done!"]
