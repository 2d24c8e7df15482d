"""The engine's options of a `GenerationRequest`."""

import dataclasses
from typing import Any

from dflash_jax.engine.sampling_params import SamplingParams
from dflash_jax.engine.state_machine import OFF
from dflash_jax.errors import RequestError
from dflash_jax.server.errors import to_problem
from dflash_jax.server.output_grammar import structure_of
from dflash_jax.server.prompt import EncodedPrompt, resolve_max_tokens
from dflash_jax.server.protocol import GenerationRequest, Problem
from dflash_jax.server.served_models import ServedModel

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions
MOST_GRAMMAR = 2**18  # characters; larger grammars would block other requests for seconds


def sampling_params(
    model: ServedModel, request: GenerationRequest, prompt: EncodedPrompt
) -> SamplingParams:
    """Return the options of a request for the engine. Takes time if the request is large.

    Raises:
      Problem: no engine could serve them.
    """
    defaults, engine = model.defaults, model.engine
    options: dict[str, Any] = {"temperature": defaults.temperature} | request.options
    if request.stop:
        options["stop"] = request.stop
    if request.return_token_sources:
        options["trace"] = True
    if request.logprobs is not None:
        options["logprobs"] = request.logprobs
    counts = [request.prompt_logprobs, request.logprobs if request.echo else None]
    if counts := [n for n in counts if n is not None]:
        options["prompt_logprobs"] = max(counts)
    if structure := structure_of(request, prompt, model.syntax, engine.tokenizer):
        options["structured"] = structure
    if len(str(options.get("structured", ""))) > MOST_GRAMMAR:
        raise Problem(
            400, f"the output grammar or the tools are longer than {MOST_GRAMMAR} characters",
            code="grammar_too_large",
        )  # fmt: skip
    default = defaults.max_tokens or (COMPLETION_MAX_TOKENS if request.api == "completions" else 0)
    most = resolve_max_tokens(prompt.ids, request, engine.plan.max_length, default)
    recovery = request.recovery or (
        defaults.with_tools if request.declared_tools else defaults.recovery
    )
    if request.thinking_budget is not None and request.thinking_budget < most:
        recovery = dataclasses.replace(recovery, answer_reserve=most - request.thinking_budget)
    if recovery != OFF:
        options["recovery"] = recovery
    if request.declared_tools:
        choice = (
            {"name": request.tool_choice.name}
            if request.tool_choice.name
            else request.tool_choice.kind
        )
        options |= {"tools": request.tools, "tool_choice": choice}
    try:
        return SamplingParams(**options, max_tokens=most)
    except RequestError as error:
        raise to_problem(error, request.api) from error
