"""Grammars of a request's reasoning and tool calls, around an answer with a grammar of its own."""

from dflash_jax.server.prompt import EncodedPrompt
from dflash_jax.server.protocol import GenerationRequest, Problem
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import Syntax
from dflash_jax.tool_parsers.grammar import answer_grammar, call_grammar


def required_call_grammar(
    request: GenerationRequest,
    prompt: EncodedPrompt,
    syntax: Syntax | None,
    tokenizer: Tokenizer | None,
) -> str:
    """Return the grammar of an output that has to call a tool.

    Raises:
      Problem: the model has no syntax of tool calls.
    """
    if syntax is None or tokenizer is None:
        raise Problem(400, "this model's template knows no tool calls", param="tool_choice")
    return _calls(request, prompt, syntax, tokenizer)


def grammar_around(
    request: GenerationRequest,
    prompt: EncodedPrompt,
    syntax: Syntax | None,
    tokenizer: Tokenizer | None,
) -> str | None:
    """Return the grammar of reasoning and calls around the rule `answer`; None without either.

    Reasoning is free text, and comes first. Completions have none.
    """
    if syntax is None or tokenizer is None or request.api == "completions":
        return None
    if request.declared_tools and request.tool_choice.kind == "auto":
        return _calls(request, prompt, syntax, tokenizer, answer=True)
    if syntax.thought is None:
        return None
    return answer_grammar(
        syntax,
        tokenizer.special_texts,
        thinking=prompt.thinking,
        thoughts=_may_think(request, prompt),
    )


def _calls(
    request: GenerationRequest,
    prompt: EncodedPrompt,
    syntax: Syntax,
    tokenizer: Tokenizer,
    *,
    answer: bool = False,
) -> str:
    return call_grammar(
        syntax,
        request.declared_tools,
        request.tool_choice,
        tokenizer.special_texts,
        thinking=prompt.thinking,
        thoughts=_may_think(request, prompt),
        parallel=request.parallel_tool_calls,
        answer=answer,
    )


def _may_think(request: GenerationRequest, prompt: EncodedPrompt) -> bool:
    """Return whether an output may start with reasoning."""
    return prompt.may_think and request.template_kwargs.get("enable_thinking") is not False
