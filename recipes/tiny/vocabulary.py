"""The tokenizer of the shipped pair: byte-level BPE, ChatML specials and the chat template.

Written as Hugging Face readers expect it: tokenizer.json, tokenizer_config.json (which holds
the template) and generation_config.json. It turns text into documents: token ids, and a mask of
those that the assistant writes.
"""

import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import jinja2
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from dflash_jax.errors import ConfigError
from dflash_jax.trainer.files import write_json
from dflash_jax.trainer.rows import Document, pieces
from recipes.tiny.corpus.world import Conversation

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
MASK = "<|mask|>"
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>")
SPECIALS = (END_OF_TEXT, TURN_START, TURN_END, *MARKUP, "</tool_response>", MASK)
TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")


def train(texts: Iterable[str], size: int) -> Tokenizer:
    """Train a byte-level BPE of `size` entries, special tokens last, digits separate.

    Raises:
      ConfigError: `size` leaves no room for the 256 bytes and the specials.
    """
    merges = size - len(SPECIALS)
    if merges < 256:
        raise ConfigError(
            f"a vocabulary of {size} cannot hold 256 bytes and {len(SPECIALS)} special tokens;"
            f" ask for at least {256 + len(SPECIALS)}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=merges,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    for text in SPECIALS:
        hidden = text not in MARKUP and text != "</tool_response>"
        tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=hidden)])
    return tokenizer


def token_id(tokenizer: Tokenizer, text: str) -> int:
    """Return the id of one token.

    Raises:
      ConfigError: the tokenizer does not have it.
    """
    token = tokenizer.token_to_id(text)
    if token is None:
        raise ConfigError(f"the tokenizer has no token {text!r}; train it again")
    return token


def save(tokenizer: Tokenizer, directory: Path, longest: int) -> None:
    """Write the tokenizer, its chat template and the generation defaults into a folder."""
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "mask_token": MASK,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
        "added_tokens_decoder": {
            str(key): {"content": token.content, "special": token.special}
            | dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
            for key, token in sorted(tokenizer.get_added_tokens_decoder().items())
        },
        "chat_template": TEMPLATE_FILE.read_text(encoding="utf-8"),
    }
    write_json(directory / "tokenizer_config.json", settings)
    ends = [token_id(tokenizer, TURN_END), token_id(tokenizer, END_OF_TEXT)]
    generation = {"eos_token_id": ends, "pad_token_id": ends[1], "do_sample": False}
    write_json(directory / "generation_config.json", generation)


@functools.cache
def _template() -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)

    def refuse(message: str) -> str:
        raise ConfigError(message)

    text = TEMPLATE_FILE.read_text(encoding="utf-8")
    return environment.from_string(text, globals={"raise_exception": refuse})


def render(
    messages: Sequence[dict], *, tools: Sequence[dict] = (), opens: bool, thinking: bool = True
) -> str:
    """Render the chat template; `opens` adds the start of an assistant turn."""
    variables = {"messages": list(messages), "tools": list(tools), "add_generation_prompt": opens}
    if not thinking:
        variables["enable_thinking"] = False
    return _template().render(variables)


def training_text(chat: Conversation) -> str:
    """Return a conversation as training text."""
    if chat.thinking:
        return render(chat.messages, tools=chat.tools, opens=False)
    prompt = render(chat.messages[:-1], tools=chat.tools, opens=True, thinking=False)
    return prompt + chat.messages[-1]["content"] + TURN_END + "\n"


def prompt_text(chat: Conversation) -> str:
    """Return a conversation as a prompt, with the next assistant turn opened."""
    return render(chat.messages, tools=chat.tools, opens=True, thinking=chat.thinking)


def chat_documents(tokenizer: Tokenizer, texts: Iterable[str]) -> list[Document]:
    """Return rendered conversations; assistant turns are wanted, their end included."""
    opening = tokenizer.encode(TURN_START + "assistant\n").ids
    end = token_id(tokenizer, TURN_END)
    documents = []
    for encoding in tokenizer.encode_batch(list(texts)):
        ids = np.asarray(encoding.ids, np.int32)
        documents.append(Document(ids, answer_mask(ids, opening, end)))
    return documents


def answer_mask(ids: np.ndarray, opening: list[int], end: int) -> np.ndarray:
    """Return a mask that is true after each opening, up to and including the next end.

    Args:
      ids: int32 [tokens].

    Returns:
      bool [tokens].
    """
    wanted = np.zeros(len(ids), bool)
    inside = False
    for i, token in enumerate(ids):
        wanted[i] = inside
        if inside:
            inside = token != end
        elif i + 1 >= len(opening) and list(ids[i + 1 - len(opening) : i + 1]) == opening:
            inside = True
    return wanted


def source_documents(tokenizer: Tokenizer, texts: Iterable[str], length: int) -> list[Document]:
    """Return source files in pieces of `length` tokens, all wanted, the file's end marked."""
    end = token_id(tokenizer, END_OF_TEXT)
    documents = []
    for encoding in tokenizer.encode_batch(list(texts)):
        documents += pieces(np.asarray([*encoding.ids, end], np.int32), length)
    return documents
