"""Request fields and paths of other servers that are refused by name, and unknown fields."""

import itertools
from typing import Any

from dflash_jax.server.protocol import Problem, Unread

# Fields of other servers that would change the output, by the values that have no effect and are
# accepted. APIs that support a field skip this table.
NEUTRAL: tuple[tuple[tuple[Any, ...], str], ...] = (
    ((), "add_special_tokens audio chat_template compaction container ebnf json_schema lora_path"
     " max_completion_tokens max_output_tokens max_tokens prompt_logprobs reasoning_effort regex"
     " structural_tag truncate_prompt_tokens web_search_options"),
    ((0,), "dry_multiplier dynatemp_range mirostat n_probs top_logprobs xtc_probability"),
    ((1,), "best_of length_penalty n typical_p"),
    ((-1,), "n_predict"),
    ((True,), "add_generation_prompt parallel_tool_calls skip_special_tokens"
     " spaces_between_special_tokens"),
    ((False,), "continue_final_message echo include_stop_str_in_output logprobs use_beam_search"),
    (("",), "grammar suffix"),
    (("none", "auto"), "function_call tool_choice"),
    (([],), "allowed_token_ids bad_words documents functions logits_processors lora mcp_servers"
     " messages tools"),
    (({},), "chat_template_kwargs"),
    ((["text"],), "modalities"),
    (({"type": "text"},), "response_format"),
)  # fmt: skip


def _unsupported() -> dict[str, tuple[Any, ...]]:
    """Return the accepted values of each field in `NEUTRAL`."""
    accepted: dict[str, tuple[Any, ...]] = {}
    for values, names in NEUTRAL:
        accepted |= dict.fromkeys(names.split(), values)
    return accepted


UNSUPPORTED = _unsupported()
# Bounds on the names of unknown fields, which responses repeat.
MOST_WARNINGS = 64
LONGEST_NAME = 100  # characters
MEDIA_FIELDS = ("audio", "modalities")
MEDIA_PATHS = ("/v1/audio", "/v1/embeddings", "/v1/images", "/v1/realtime", "/v1/videos")
ALTERNATIVES = {
    "ebnf": "guided_grammar, in Lark's notation",
    "function_call": "tool_choice",
    "functions": "tools",
    "grammar": "guided_grammar, in Lark's notation",
    "json_schema": "response_format or guided_json",
    "max_tokens": "max_output_tokens",
    "messages": "input, or /v1/chat/completions",
    "n_predict": "max_tokens",
    "n_probs": "logprobs and top_logprobs",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "reasoning.effort or output_config.effort",
    "regex": "guided_regex",
    "response_format": "text.format or output_config.format",
}


def text_only(subject: str, param: str | None = None) -> Problem:
    """Return the error of a request for images, audio, video or embeddings."""
    text = f"{subject} is not supported: this server reads and writes text only"
    return Problem(text, param=param, code="text_only")


def check_path(path: str) -> None:
    """Refuse paths of other servers that take or return something else than text.

    Raises:
      Problem: 400, the path is one of them.
    """
    if any(path == known or path.startswith(f"{known}/") for known in MEDIA_PATHS):
        raise text_only(path)


REPLACED = "half characters (lone surrogates) were replaced by U+FFFD"


def check_unread(unread: Unread) -> tuple[str, ...]:
    """Return a warning for each unknown field, up to MOST_WARNINGS, and for replaced characters.

    Raises:
      Problem: 400, a field is known from other servers and would change the output.
    """
    for name, value in unread.fields.items():
        if name in UNSUPPORTED and value is not None and value not in UNSUPPORTED[name]:
            if name in MEDIA_FIELDS:
                raise text_only(name, name)
            instead = f"; use {ALTERNATIVES[name]}" if name in ALTERNATIVES else ""
            raise Problem(f"{name} is not supported here{instead}", param=name)
    warnings = [REPLACED] if unread.replaced else []
    for name in itertools.islice(unread.fields, MOST_WARNINGS):
        warnings.append(f"the unknown field {name[:LONGEST_NAME]!r} was ignored")
    num_unnamed = len(unread.fields) - MOST_WARNINGS
    if num_unnamed > 0:
        warnings.append(f"{num_unnamed} more unknown fields were ignored")
    return tuple(warnings)
