"""Request decoding of OpenAI's /v1/responses, as far as agents use it."""

from typing import Any

from dflash_jax.server.conversation import parse_messages
from dflash_jax.server.fields import CommonFields, common_arguments
from dflash_jax.server.message_formats import messages_from_responses
from dflash_jax.server.protocol import NO_LIMIT, GenerationRequest, Problem, decode
from dflash_jax.server.response_store import ResponseStore
from dflash_jax.server.thinking import reasoning_options
from dflash_jax.server.tools import CLIENT_TYPES, parse_tools, responses_choice, responses_tools

ECHOED_DEFAULTS = {"function": {"strict": False}, "namespace": {"description": ""}}
LOGPROBS = "message.output_text.logprobs"  # an entry of `include`


class ResponsesRequest(CommonFields, kw_only=True):
    """Body of POST /v1/responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    prompt: Any = None
    conversation: Any = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Accepted without effect.
    max_tool_calls: Any = None
    stream_options: Any = None
    client_metadata: Any = None


def decode_responses(body: bytes, store: ResponseStore | None = None) -> GenerationRequest:
    """Return the request of a body.

    Args:
      store: responses that the request may refer to. Its own is added unless `store` is false.

    Raises:
      Problem: the body is invalid, or asks for something unsupported.
    """
    store = store or ResponseStore()
    parsed, unknown = decode(body, ResponsesRequest)
    for name in ("background", "prompt"):
        if getattr(parsed, name):
            raise Problem(400, f"{name} is not supported here", param=name)
    if not parsed.input and isinstance(parsed.input, list):
        raise Problem(400, "input is empty; give at least one item", param="input")
    items = parsed.input
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    conversation, keep = _conversation(parsed), parsed.store is not False
    turn = store.begin_turn(
        items, previous=parsed.previous_response_id, conversation=conversation, keep=keep
    )
    text = parsed.text or {}
    common = common_arguments(parsed, unknown, text.get("format"), "text.format")
    warnings = list(common["warnings"])
    if parsed.truncation == "auto":
        warnings.append("truncation was ignored: an input that is too long is refused")
    if text.get("verbosity"):
        warnings.append("text.verbosity was ignored")
    given = responses_tools(parsed.tools)
    wanted = responses_choice(parsed.tool_choice, given)
    tools, declared, choice = parse_tools(given.functions, wanted, given.places)
    warnings += given.warnings
    messages = messages_from_responses(parsed.instructions, turn.items, warnings)
    messages = parse_messages(messages, warnings)
    template, more = reasoning_options(parsed.chat_template_kwargs, reasoning=parsed.reasoning)
    warnings += more
    logprobs = parsed.top_logprobs or LOGPROBS in (parsed.include or ())
    return GenerationRequest(
        api="responses",
        messages=messages,
        tools=tools,
        declared_tools=declared,
        client_tools=given.client_tools,
        tool_choice=choice,
        parallel_tool_calls=parsed.parallel_tool_calls is not False,
        template_kwargs=template,
        max_tokens=parsed.max_output_tokens,
        logprobs=(parsed.top_logprobs or 0) if logprobs else None,
        echoed_fields=_echoed(parsed),
        store=turn.record if keep or conversation else None,
        **common | {"warnings": tuple(warnings)},
    )


def _conversation(parsed: ResponsesRequest) -> str | None:
    """Return the id of the conversation that a request continues, if it names one."""
    given = parsed.conversation
    if isinstance(given, dict):
        given = given.get("id", given)
    if given is not None and not (given and isinstance(given, str)):
        raise Problem(
            400, f"conversation is {str(given)[:100]!r}; expected an id, or an object with one",
            param="conversation",
        )  # fmt: skip
    if given and parsed.previous_response_id:
        raise Problem(
            400, "conversation and previous_response_id were given; give one of them",
            param="conversation",
        )  # fmt: skip
    return given


def _echoed(parsed: ResponsesRequest) -> dict[str, Any]:
    """Return the request fields that the response repeats, with defaults for missing ones."""
    text, reasoning = parsed.text or {}, parsed.reasoning or {}
    tools = [tool for tool in parsed.tools or [] if tool.get("type") in CLIENT_TYPES]
    max_output_tokens = parsed.max_output_tokens
    if max_output_tokens == NO_LIMIT:
        max_output_tokens = None
    return {
        "background": False,
        "conversation": {"id": id_} if (id_ := _conversation(parsed)) else None,
        "instructions": parsed.instructions,
        "max_output_tokens": max_output_tokens,
        "max_tool_calls": parsed.max_tool_calls,
        "metadata": parsed.metadata or {},
        "parallel_tool_calls": parsed.parallel_tool_calls is not False,
        "previous_response_id": parsed.previous_response_id,
        "prompt_cache_key": parsed.prompt_cache_key,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": parsed.safety_identifier,
        "service_tier": "default",
        "store": parsed.store is not False,
        "text": {"format": {"type": "text"}} | {k: v for k, v in text.items() if v is not None},
        "tool_choice": parsed.tool_choice or "auto",
        "tools": [ECHOED_DEFAULTS.get(tool["type"], {}) | tool for tool in tools],
        "truncation": "disabled",
        "user": parsed.user,
    }
