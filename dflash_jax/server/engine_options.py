"""The options with which the engine generates what a `GenerationRequest` asks for."""

import dataclasses
from typing import Any

from dflash_jax.engine.sampling_params import SamplingParams
from dflash_jax.engine.state_machine import OFF, Recovery
from dflash_jax.errors import RequestError
from dflash_jax.server import errors
from dflash_jax.server.output_structure import structure_of
from dflash_jax.server.prompt import EncodedPrompt, resolve_max_tokens
from dflash_jax.server.protocol import GenerationRequest, Problem
from dflash_jax.server.served_models import ServedModel

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions
MOST_GRAMMAR = 2**18  # characters; larger grammars would block other requests for seconds


def sampling_params(
    model: ServedModel, request: GenerationRequest, prompt: EncodedPrompt, cache_salt: str = ""
) -> SamplingParams:
    """Return the engine's options of a request. Takes time if the request is large.

    Args:
      prompt: the prompt that the options are for, which decides what fits after it.
      cache_salt: separates the cached prefixes of the request's client from those of others.

    Raises:
      Problem: the prompt leaves no room for an output, or an option or grammar is not possible.
    """
    engine = model.engine
    options: dict[str, Any] = {"temperature": model.defaults.temperature} | request.options
    options["cache_salt"] = cache_salt
    if request.stop:
        options["stop"] = request.stop
    if request.return_token_sources:
        options["trace"] = True
    if request.logprobs is not None:
        options["logprobs"] = request.logprobs
    num_prompt_logprobs = _num_prompt_logprobs(request)
    if num_prompt_logprobs is not None:
        options["prompt_logprobs"] = num_prompt_logprobs
    if structure := structure_of(request, prompt, model.syntax, engine.tokenizer):
        options["structured"] = structure
    if len(str(options.get("structured", ""))) > MOST_GRAMMAR:
        raise Problem(
            f"the output grammar or the tools are longer than {MOST_GRAMMAR} characters",
            code="grammar_too_large",
        )
    default = _default_max_tokens(model, request)
    max_tokens = resolve_max_tokens(prompt.ids, request, engine.plan.max_length, default)
    options["max_tokens"] = max_tokens
    recovery = _recovery(model, request, max_tokens)
    if recovery != OFF:
        options["recovery"] = recovery
    if request.declared_tools:
        named = request.tool_choice.name
        options["tools"] = request.tools
        options["tool_choice"] = {"name": named} if named else request.tool_choice.kind
    try:
        return SamplingParams(**options)
    except RequestError as error:
        raise errors.to_problem(error, request.api) from error


def _num_prompt_logprobs(request: GenerationRequest) -> int | None:
    """Return the number of alternatives per prompt token; None for no log probabilities."""
    counts = [request.prompt_logprobs]
    if request.echo:  # the output's log probabilities include the prompt's
        counts.append(request.logprobs)
    return max((count for count in counts if count is not None), default=None)


def _default_max_tokens(model: ServedModel, request: GenerationRequest) -> int:
    """Return max_tokens of a request that has none; 0 for all that fits."""
    if model.defaults.max_tokens:
        return model.defaults.max_tokens
    return COMPLETION_MAX_TOKENS if request.api == "completions" else 0


def _recovery(model: ServedModel, request: GenerationRequest, max_tokens: int) -> Recovery:
    """Return a request's rules of recovery, which keep its budget of reasoning."""
    defaults = model.defaults
    recovery = defaults.tool_recovery if request.declared_tools else defaults.plain_recovery
    if request.recovery is not None:
        recovery = request.recovery
    budget = request.thinking_budget
    if budget is not None and budget < max_tokens:
        recovery = dataclasses.replace(recovery, answer_reserve=max_tokens - budget)
    return recovery
