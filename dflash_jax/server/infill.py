"""Fill-in-the-middle prompts, for `suffix` of completions."""

from dflash_jax.server.protocol import Problem
from dflash_jax.tokenizer import Tokenizer

# Tokens before the prefix, the suffix and the middle, as the families' files name them.
FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SmolLM
    ("<PRE>", "<SUF>", "<MID>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # CodeLlama
    (
        "<\uff5cfim\u2581begin\uff5c>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<\uff5cfim\u2581end\uff5c>",
    ),  # DeepSeek
)


def infill_ids(tokenizer: Tokenizer, prefix: str | list[int], suffix: str) -> list[int]:
    """Return the ids after which a model writes the text between prefix and suffix.

    Raises:
      Problem: 400, the vocabulary has no tokens for that.
    """
    for family in FAMILIES:
        before, after, middle = map(tokenizer.core.token_to_id, family)
        if before is not None and after is not None and middle is not None:
            break
    else:
        names = ", ".join(family[0] for family in FAMILIES)
        raise Problem(
            400,
            "suffix needs a model with fill-in-the-middle tokens, and this model's vocabulary has"
            f" none of {names}; leave suffix out, and put the text around the gap into the prompt",
            param="suffix",
        )
    start: list[int] = []  # what the tokenizer puts before every text
    if isinstance(prefix, str):
        text = prefix
        prefix = tokenizer.encode(text, specials=False)
        whole = tokenizer.encode(text)
        if whole[len(whole) - len(prefix) :] == prefix:
            start = whole[: len(whole) - len(prefix)]
    tail = tokenizer.encode(suffix, specials=False)
    return [*start, before, *prefix, after, *tail, middle]
