"""How bodies become asks: fields of other servers, past turns, and what is refused."""

import json
from typing import Any

import pytest

from dflash_jax.server.anthropic import decode_messages
from dflash_jax.server.chat import decode_chat
from dflash_jax.server.protocol import Ask, Problem
from dflash_jax.server.responses import decode_responses

HELLO = [{"role": "user", "content": "Hello"}]


def messages(**fields: Any) -> Ask:
    body = {"messages": HELLO, "max_tokens": 5} | fields
    return decode_messages(json.dumps(body).encode())


def chat(**fields: Any) -> Ask:
    return decode_chat(json.dumps({"messages": HELLO} | fields).encode())


def responses(**fields: Any) -> Ask:
    return decode_responses(json.dumps({"input": "Hello"} | fields).encode())


def test_threads_and_compaction_are_refused_so_that_clients_send_everything() -> None:
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        with pytest.raises(Problem) as caught:
            messages(thread=thread)
        error = caught.value.to_json()["error"]
        assert error["details"]["error_code"] == "thread_unsupported_request"
        assert (caught.value.status, caught.value.param) == (400, "thread")
    with pytest.raises(Problem, match="compaction is not supported"):
        messages(compaction={"type": "enabled"})
    assert messages(thread=None, compaction=None).max_tokens == 5


@pytest.mark.parametrize(("word", "counts"), [("max", "max"), ("ultra", "high"), ("none", "none")])
def test_every_effort_is_taken_and_unknown_ones_are_high(word: str, counts: str) -> None:
    asks = [
        chat(reasoning_effort=word),
        messages(output_config={"effort": word}),
        responses(reasoning={"effort": word}),
    ]
    for ask in asks:
        assert ask.template == {"reasoning_effort": counts, "enable_thinking": counts != "none"}
        assert len(ask.warnings) == (word != counts)


def test_p31_a_billing_line_is_in_no_prompt_and_other_system_text_is() -> None:
    def system(*texts: str) -> list[tuple[str, str]]:
        ask = messages(system=[{"type": "text", "text": text} for text in texts])
        return [(m["role"], m["content"]) for m in ask.messages or ()]

    first, second = (f"x-anthropic-billing-header: cc_version=2.1; cch={n};" for n in "ab")
    assert system(first, "Be brief.") == system(second, "Be brief.") == system("Be brief.")
    assert system(first, "Be brief.") != system(first, "Be long.")
    assert system(first + "\nBe brief.") == system("Be brief.")
    assert system(first) == [("user", "Hello")]
    whole = messages(system=f"{first}\nBe brief.").messages
    assert [(m["role"], m["content"]) for m in whole or ()] == system("Be brief.")
