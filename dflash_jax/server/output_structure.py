"""Structures that outputs have to follow: answers with reasoning and tool calls around them."""

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

    A required call leaves no content, so that `request.grammar` does not apply. The call is what
    the output begins with, unless the prompt opens reasoning.

    Raises:
      Problem: the model or its tools allow no such structure.
    """
    if syntax and syntax.thought and syntax.thought.is_open(prompt.prefix):
        prompt = dataclasses.replace(prompt, thinking=True)
    try:
        if request.requires_call:
            if syntax is None or tokenizer is None:
                raise Problem("this model's template knows no tool calls", param="tool_choice")
            # A thought that the prompt did not open could be free text of any length.
            prompt = dataclasses.replace(prompt, may_think=False)
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
    if prefix := _answer_prefix(prompt, syntax):
        structure["prefix"] = prefix
    return structure


def structure_problem(error: StructureError, request: GenerationRequest) -> Problem:
    """Return the response to a structure that cannot be followed, with the field it comes from."""
    if error.of_prompt:
        return Problem(str(error), param=request.source)
    field = "tools" if request.requires_call else request.grammar_field
    return Problem(str(error), param=field)


def usable_tools(request: GenerationRequest, grammars: Grammars) -> GenerationRequest:
    """Return the request with tools whose arguments a grammar can follow.

    Keywords that grammars do not support or that contradict others, such as patterns that look
    ahead, are left out with a warning, and so are tools that still take no arguments. This may
    take about a second.

    Raises:
      Problem: something of a strict tool would be left out, or no tool is left.
    """
    auto = request.tool_choice.kind == "auto" and request.grammar is not None
    needs_grammar = request.declared_tools and (auto or request.requires_call)
    if not needs_grammar or not grammars.available:
        return request
    try:
        deadline = grammars.deadline()
    except RequestError as error:
        raise Problem(str(error)) from None
    tools: list[Tool] = []
    problems: list[Problem] = []  # why tools are left out
    warnings = list(request.warnings)
    named = request.tool_choice.name
    for tool in request.declared_tools:
        if named not in (None, tool.name):  # it is not called
            tools.append(tool)
            continue
        usable = grammars.usable_schema(tool.parameters, deadline)
        for path, key, reason in usable.dropped:
            if tool.strict:
                raise _tool_problem(tool, f"{path}/{key}", reason)
            warnings.append(f"the tool {tool.name!r}: {key} at {path} was ignored: {reason}")
        if usable.refused is not None:
            problem = _tool_problem(tool, *usable.refused)
            if tool.strict or tool.name == named:
                raise problem
            warnings.append(f"{problem}; it was left out, so that it cannot be called")
            problems.append(problem)
            continue
        if usable.dropped:
            tool = dataclasses.replace(tool, parameters=usable.schema)
        tools.append(tool)
    if not tools:
        raise problems[0]
    return dataclasses.replace(request, declared_tools=tuple(tools), warnings=tuple(warnings))


def _tool_problem(tool: Tool, path: str, reason: str) -> Problem:
    strict = " of a strict tool" if tool.strict else ""
    return Problem(
        f"the tool {tool.name!r}: the schema{strict} is not supported at {path}: {reason}",
        param="tools",
    )


def _answer_prefix(prompt: EncodedPrompt, syntax: Syntax | None) -> str:
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
        thoughts=_may_think(request, prompt, syntax, tokenizer),
    )


def _calls(
    request: GenerationRequest,
    prompt: EncodedPrompt,
    syntax: Syntax,
    tokenizer: Tokenizer,
    *,
    answer: bool = False,
) -> str:
    """Return the grammar of calls; with `answer`, also of the rule of that name in their place."""
    return call_grammar(
        syntax,
        request.declared_tools,
        request.tool_choice,
        tokenizer.special_texts,
        thinking=prompt.thinking,
        thoughts=_may_think(request, prompt, syntax, tokenizer),
        parallel=request.parallel_tool_calls,
        answer=answer,
    )


def _may_think(
    request: GenerationRequest, prompt: EncodedPrompt, syntax: Syntax, tokenizer: Tokenizer
) -> bool:
    """Return whether an output may begin with reasoning: its model was trained to write some."""
    if not prompt.may_think or request.template_kwargs.get("enable_thinking") is False:
        return False
    thought = syntax.thought
    if thought is None:
        return False
    template = tokenizer.teaches or ""
    return thought.opening.strip() in template or thought.closing.strip() in template
