"""Grammars of a request's reasoning and tool calls, around an answer with a grammar of its own."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dflash_jax.engine.structured.grammars import Grammars
from dflash_jax.errors import RequestError, StructureError
from dflash_jax.server.prompt import EncodedPrompt
from dflash_jax.server.protocol import GenerationRequest, Problem
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tool_parsers import Syntax
from dflash_jax.tool_parsers.grammar import answer_grammar, call_grammar
from dflash_jax.tool_parsers.tool_schema import Tool


def structure_of(
    request: GenerationRequest,
    prompt: EncodedPrompt,
    syntax: Syntax | None,
    tokenizer: Tokenizer | None,
) -> Mapping[str, Any] | None:
    """Return what the output has to follow, as `SamplingParams.structured`; None if nothing.

    A required call leaves no content, so that `request.grammar` does not apply.

    Raises:
      Problem: the model has no syntax of tool calls, or a tool's arguments cannot be followed.
    """
    if syntax and syntax.thought and syntax.thought.is_open(prompt.prefix):
        prompt = dataclasses.replace(prompt, thinking=True)
    try:
        if _requires_call(request):
            if syntax is None or tokenizer is None:
                raise Problem("this model's template knows no tool calls", param="tool_choice")
            return {"grammar": _calls(request, prompt, syntax, tokenizer)}
        if request.grammar is None:
            return None
        around = grammar_around(request, prompt, syntax, tokenizer)
    except RequestError as error:
        raise Problem(str(error), param="tools") from None
    kind, value = request.grammar
    structure = {kind: value}
    if around is not None:
        structure["around"] = around
    if prefix := _answer_begun(prompt, syntax):
        structure["prefix"] = prefix
    return structure


def structure_problem(error: StructureError, request: GenerationRequest) -> Problem:
    """Return the response to a structure that cannot be followed, with the field it comes from."""
    if error.of_prompt:
        return Problem(str(error), param=request.source)
    calls = _requires_call(request)
    return Problem(str(error), param="tools" if calls else request.grammar_field)


def usable_tools(request: GenerationRequest, grammars: Grammars) -> GenerationRequest:
    """Return the request with tools whose arguments a grammar can follow.

    Values that grammars do not support, such as patterns that look ahead, are left out with a
    warning. It may take about a second.

    Raises:
      Problem: such a value belongs to a strict tool, or no arguments fit a tool's schema.
    """
    auto = request.tool_choice.kind == "auto" and request.grammar is not None
    wanted = request.declared_tools and (auto or _requires_call(request))
    if not wanted or not grammars.available:
        return request
    try:
        end = grammars.deadline()
    except RequestError as error:
        raise Problem(str(error)) from None
    tools, warnings = [], list(request.warnings)
    for tool in request.declared_tools:
        if request.tool_choice.kind == "named" and tool.name != request.tool_choice.name:
            tools.append(tool)
            continue
        schema, dropped, refused = _usable(tool, grammars, end)
        if refused is not None:
            raise _tool_problem(tool, *refused)
        for path, key, reason in dropped:
            if tool.strict:
                raise _tool_problem(tool, f"{path}/{key}", reason)
            warnings.append(f"the tool {tool.name!r}: {key} at {path} was ignored: {reason}")
        tools.append(dataclasses.replace(tool, parameters=schema) if dropped else tool)
    return dataclasses.replace(request, declared_tools=tuple(tools), warnings=tuple(warnings))


def _usable(tool: Tool, grammars: Grammars, end: float) -> Any:
    """Return what `Grammars.usable_schema` does for a tool.

    Raises:
      Problem: no arguments fit its schema, or one of its numbers cannot be followed exactly.
    """
    try:
        return grammars.usable_schema(tool.parameters, end)
    except RequestError as error:
        raise Problem(f"the tool {tool.name!r}: {error}", param="tools") from None


def _tool_problem(tool: Tool, path: str, reason: str) -> Problem:
    strict = " of a strict tool" if tool.strict else ""
    return Problem(
        f"the tool {tool.name!r}: the schema{strict} is not supported at {path}: {reason}",
        param="tools",
    )


def _requires_call(request: GenerationRequest) -> bool:
    return request.tool_choice.kind in ("required", "named")


def _answer_begun(prompt: EncodedPrompt, syntax: Syntax | None) -> str:
    """Return the beginning of an answer that the prompt ends with, without reasoning before it."""
    if prompt.thinking:
        return ""
    if syntax is None or syntax.thought is None:
        return prompt.prefix
    _, closing, answer = prompt.prefix.rpartition(syntax.thought.closing)
    return answer.lstrip("\n") if closing else answer


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
