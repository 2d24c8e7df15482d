"""Fields and paths of other servers that are refused by name instead of ignored."""

import itertools
from collections.abc import Mapping
from typing import Any

from dflash_jax.server.protocol import Problem

# Field name: values without effect, which are accepted. APIs that support a field skip this table.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "compaction": (),
    "container": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "ebnf": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": ("",),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprobs": (False,),
    "lora": ([],),
    "lora_path": (),
    "max_completion_tokens": (),
    "max_output_tokens": (),
    "max_tokens": (),
    "mcp_servers": ([],),
    "messages": ([],),
    "mirostat": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "parallel_tool_calls": (True,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "regex": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "web_search_options": (),
    "xtc_probability": (0,),
}
MOST_WARNINGS, LONGEST_NAME = 64, 100  # responses repeat the names of unknown fields
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
    return Problem(400, text, param=param, code="text_only")


def check_path(path: str) -> None:
    """Refuse paths of other servers that take or return something else than text.

    Raises:
      Problem: 400, the path is one of them.
    """
    if any(path == known or path.startswith(f"{known}/") for known in MEDIA_PATHS):
        raise text_only(path)


def check_unknown_fields(unknown: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a warning for each unknown field, up to MOST_WARNINGS.

    Raises:
      Problem: 400, a field is known from other servers and would change the output.
    """
    for name, value in unknown.items():
        if name in UNSUPPORTED and value is not None and value not in UNSUPPORTED[name]:
            if name in MEDIA_FIELDS:
                raise text_only(name, name)
            instead = f"; use {ALTERNATIVES[name]}" if name in ALTERNATIVES else ""
            raise Problem(400, f"{name} is not supported here{instead}", param=name)
    named = itertools.islice(unknown, MOST_WARNINGS)
    warnings = [f"the unknown field {name[:LONGEST_NAME]!r} was ignored" for name in named]
    if (more := len(unknown) - MOST_WARNINGS) > 0:
        warnings.append(f"{more} more unknown fields were ignored")
    return tuple(warnings)
