"""The token that a drafter sees in places whose token it predicts."""

from collections.abc import Iterable, Sequence

from dflash_jax.config import TargetConfig
from dflash_jax.errors import ConfigError
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.trainer.data import Example

MASK_NAMES = ("<|mask|>", "<|MASK|>", "[MASK]", "<mask>")


def mask_token(
    tokenizer: Tokenizer | None, target: TargetConfig, examples: Sequence[Example] = ()
) -> tuple[int, str]:
    """Return a token that no text contains, and a description of its origin.

    It is the tokenizer's mask token, an unused row of the embedding table, or the last special
    token that neither the chat template nor the examples use.

    Raises:
      ConfigError: there is none of them.
    """
    if tokenizer is not None:
        named = (tokenizer.specials.get("mask_token"), *MASK_NAMES)
        for text in filter(None, named):
            token = tokenizer.core.token_to_id(text)
            if token is not None and token < target.vocab_size:
                return token, f"the tokenizer's {text}"
        unused = 1 + max(tokenizer.core.get_vocab(with_added_tokens=True).values(), default=-1)
        if unused < target.vocab_size:
            return unused, "the first unused row of the embedding table"
        for token, text in _unused_specials(tokenizer, target, examples):
            return token, f"the special token {text}, which neither template nor data use"
    raise ConfigError(
        "no mask token is known: the tokenizer has none, the embedding table has no unused row, and"
        " template or data use every special token; name a token that never occurs in text with"
        " mask_id (--mask-id)"
    )


def _unused_specials(
    tokenizer: Tokenizer, target: TargetConfig, examples: Sequence[Example]
) -> Iterable[tuple[int, str]]:
    """Yield special tokens, the last one first: reserved ones come last in vocabularies."""
    known = tokenizer.core.get_added_tokens_decoder().items()
    templates = f"{tokenizer.template or ''}{tokenizer.tool_template or ''}"
    roles = set(tokenizer.specials.values())  # start and end of texts, padding
    for token, added in sorted(known, reverse=True):
        text = added.content
        free = added.special and text not in roles and text not in templates
        free = free and token < target.vocab_size and token not in target.eos_token_ids
        if free and not any(token in x.ids or x.contains(text) for x in examples):
            yield token, text
