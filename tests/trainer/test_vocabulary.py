"""The tokenizer and the chat template of the shipped pair."""

import json

import pytest

from dflash_jax.errors import ConfigError
from dflash_jax.tokenizer import Tokenizer
from recipes.tiny import vocabulary

TOOL = {"type": "function", "function": {"name": "read_file", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "read_file", "arguments": {"path": "é.py"}}}
AGENT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": "Let me check the file:", "tool_calls": [CALL]},
    {"role": "tool", "content": "x = 1"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return vocabulary.train(["Hello there, def f(x): return x + 12\n"] * 4, 300)


def test_specials_come_last_and_the_mask_is_the_very_last(tokenizer):
    size = tokenizer.get_vocab_size()
    ids = [tokenizer.token_to_id(text) for text in vocabulary.SPECIALS]
    assert ids == list(range(size - len(ids), size))
    assert vocabulary.SPECIALS[-1] == vocabulary.MASK


def test_any_text_survives_the_round_trip(tokenizer):
    text = "naïve 数 \t\n  x = 1234\r\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_digits_are_single_tokens(tokenizer):
    assert tokenizer.encode("1234").tokens == ["1", "2", "3", "4"]


def test_a_vocabulary_without_room_for_all_bytes_is_refused():
    with pytest.raises(ConfigError, match="at least 266"):
        vocabulary.train(["text"], 200)


def test_a_tool_turn_is_rendered_in_hermes_syntax():
    text = vocabulary.render(AGENT, tools=[TOOL], opens=True)
    assert text.startswith("<|im_start|>system\nBe brief.\n\nTools you may call:\n<tools>\n{")
    assert (
        "Let me check the file:\n<tool_call>\n"
        '{"name": "read_file", "arguments": {"path": "é.py"}}\n</tool_call><|im_end|>\n'
    ) in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\nx = 1\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tool_responses_in_a_row_share_one_user_turn():
    text = vocabulary.render([*AGENT, {"role": "tool", "content": "y"}], opens=False)
    assert text.endswith(
        "x = 1\n</tool_response>\n<tool_response>\ny\n</tool_response><|im_end|>\n"
    )


def test_reasoning_is_kept_behind_the_last_question_only():
    answer = {"role": "assistant", "content": "4", "reasoning_content": "2 + 2 = 4"}
    question = {"role": "user", "content": "2 + 2?"}
    once = vocabulary.render([question, answer], opens=False)
    assert once.endswith("<think>\n2 + 2 = 4\n</think>\n\n4<|im_end|>\n")
    assert "<think>" not in vocabulary.render([question, answer, question], opens=True)


def test_thinking_can_be_switched_off():
    question = [{"role": "user", "content": "2 + 2?"}]
    assert vocabulary.render(question, opens=True, thinking=False).endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_the_saved_folder_renders_as_training_does(tokenizer, tmp_path):
    vocabulary.save(tokenizer, tmp_path, 4096)
    loaded = Tokenizer.from_directory(tmp_path)
    assert loaded is not None
    text = vocabulary.render(AGENT, tools=[TOOL], opens=True)
    assert loaded.chat(AGENT, tools=[TOOL]) == tokenizer.encode(text).ids
    ends = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    assert [tokenizer.id_to_token(i) for i in ends] == ["<|im_end|>", "<|endoftext|>"]


def test_only_assistant_turns_are_wanted(tokenizer):
    messages = [*AGENT, {"role": "assistant", "content": "It is 1."}]
    text = vocabulary.render(messages, tools=[TOOL], opens=False)
    (document,) = vocabulary.chat_documents(tokenizer, [text])
    wanted = tokenizer.decode(document.ids[document.wanted].tolist(), skip_special_tokens=False)
    call = '<tool_call>\n{"name": "read_file", "arguments": {"path": "é.py"}}\n</tool_call>'
    assert wanted == f"Let me check the file:\n{call}<|im_end|>It is 1.<|im_end|>"
