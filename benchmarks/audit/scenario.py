"""Scenarios: requests and events as plain data, drawn from a seed.

Nothing here runs a model. Equal seed, case and limits give the same scenario. As JSON it can be
reduced by hand and run again.
"""

import dataclasses
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

VARIANTS = ("sampled", "penalized", "constrained")  # variants of programs beside the greedy ones
MOST_NEW = 64  # output tokens per request
TOOLS = [{"name": "read", "parameters": {"type": "object", "required": ["path"]}}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", ""]}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # random weights mostly write spaces
}
STRUCTURES: tuple[dict[str, Any], ...] = (
    {"json": SCHEMA},
    {"regex": "([a-f]{3}[0-9],){2,9}"},
    {"regex": "[a-z ]{0,30}:?"},
    {"choice": ["red", "green", "", 'say "a"']},
    {"grammar": 'start: "x" /[0-9]+/ "y"'},
)

Cancelling = Literal["cell", "close", "drop"]
Failing = Literal["dispatch", "answer", "interrupt"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a scenario may contain for one engine.

    Attributes:
      pool: token ids from which prompts and stop tokens are drawn.
      ordered: the pool is a text, and prompts are contiguous parts of it.
      open_thought: ids that end a prompt inside a thought; may be empty.
      inviting: ids that recovery acts on, made likely by biases in some requests.
      stop_texts: texts from which stop strings are drawn; empty without a tokenizer.
      variants: permitted entries of `VARIANTS`.
      prompt_logprobs: requests may have prompt log-probabilities.
      scripted: the drafter can be scripted.
      structured: there is an end token, which structured output needs.
    """

    rows: int
    chunk: int
    block: int
    max_length: int
    rounds: int
    stop_tokens: int
    pool: tuple[int, ...]
    ordered: bool = False
    open_thought: tuple[int, ...] = ()
    inviting: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()
    variants: tuple[str, ...] = VARIANTS
    prompt_logprobs: bool = True
    scripted: bool = True
    structured: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cancellation:
    """A cancellation, a number of turns after submission."""

    how: Cancelling
    turns: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """A program call that fails.

    Attributes:
      call: index of the call, counted over all programs of one engine in one session.
      how: "dispatch": the call raises a device error. "answer": reading its result does.
        "interrupt": a KeyboardInterrupt is raised before the caller gets the result.
    """

    how: Failing
    call: int
    session: int = 0
    engine: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditRequest:
    """One request.

    Attributes:
      options: options of `Engine.submit`; `recovery` holds the fields of a `dj.Recovery`.
      turn: turn of the session at which it is submitted.
      answers: number of answers, submitted together.
      accepted: drafts to accept in successive rounds; empty for the drafter's own drafts.
      broken: output positions with a non-finite draft.
    """

    prompt: tuple[int, ...]
    options: Mapping[str, Any]
    session: int = 0
    engine: int = 0
    turn: int = 0
    answers: int = 1
    cancellation: Cancellation | None = None
    accepted: tuple[int, ...] = ()
    broken: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        """Whether the output is deterministic in every decoding mode."""
        return not self.options.get("temperature")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """Requests and the conditions they run under.

    Attributes:
      sessions: number of sessions; engines are closed and reopened between them.
      engines: number of engines of one plan, advanced in turn, with a shared folder.
      folder: prefixes are also kept on disk.
      segments: capacity of a prefix cache in prompt chunks; 0 for none.
      disk_turns: turns that a read from the folder takes.
      rounds: maximum steps of successive decoding calls, repeated as needed.
      break_even: tokens per round from which drafting pays; 0 if unknown.
      waiting: requests that may be unfinished when another is submitted; 0 for any number.
      drafter_seed: the drafter has random weights of this seed; None for its own.
    """

    requests: tuple[AuditRequest, ...]
    failures: tuple[Failure, ...] = ()
    sessions: int = 1
    engines: int = 1
    folder: bool = False
    segments: int = 0
    disk_turns: int = 0
    rounds: tuple[int, ...] = (1,)
    break_even: float = 0.0
    waiting: int = 0
    drafter_seed: int | None = None

    def to_json(self) -> str:
        """Return the scenario as JSON, one request per line; `from_json` is the inverse."""
        fields = dataclasses.asdict(self)
        requests = ",\n  ".join(map(json.dumps, fields.pop("requests")))
        return f'{json.dumps(fields)[:-1]},\n "requests": [\n  {requests}\n]}}\n'

    @classmethod
    def from_json(cls, text: str) -> "Scenario":
        """Return the scenario of a text written by `to_json`.

        Raises:
          ValueError, TypeError: the text is not JSON, or has other fields.
        """
        fields = json.loads(text)
        requests = [_request(x) for x in fields.pop("requests")]
        failures = [Failure(**x) for x in fields.pop("failures", ())]
        fields["rounds"] = tuple(fields.get("rounds", (1,)))
        return cls(requests=tuple(requests), failures=tuple(failures), **fields)


def _request(fields: Mapping[str, Any]) -> AuditRequest:
    """Return the request of JSON values."""
    values = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}
    if values.get("cancellation"):
        values["cancellation"] = Cancellation(**values["cancellation"])
    return AuditRequest(**values)


def draw_scenario(seed: int, case: int, limits: Limits) -> Scenario:
    """Draw a scenario; equal arguments give equal scenarios."""
    rng = random.Random(f"{seed}/{case}")
    mixed = rng.choice([(), (), ("sampled",), ("sampled", "penalized"), VARIANTS, VARIANTS])
    variants = [variant for variant in mixed if variant in limits.variants]
    segments = rng.choice([0, 2, 6, 64, 64])
    folder = segments > 0 and rng.random() < 0.35
    sessions = 2 if folder and rng.random() < 0.6 else 1
    engines = 2 if folder and rng.random() < 0.4 else 1
    longest = min(5 * limits.chunk, limits.max_length - MOST_NEW - limits.chunk)
    documents = [_text(rng, limits, max(longest, 1)) for _ in range(2)]
    requests = []
    for session in range(sessions):
        turn = 0
        for _ in range(rng.randint(2, 9 if sessions == 1 else 6)):
            turn += rng.choice([0, 0, 1, 2, 7])
            engine = rng.randrange(engines)
            request = _draw_request(rng, limits, variants, documents)
            requests.append(dataclasses.replace(request, session=session, engine=engine, turn=turn))
    failures = [
        Failure(
            how=rng.choice(["dispatch", "dispatch", "answer", "interrupt"]),
            call=rng.randrange(70),
            session=rng.randrange(sessions),
            engine=rng.randrange(engines),
        )
        for _ in range(rng.choice([0, 0, 0, 1, 1, 2]))
    ]
    return Scenario(
        requests=tuple(requests),
        failures=tuple(failures),
        sessions=sessions,
        engines=engines,
        folder=folder,
        segments=segments,
        disk_turns=rng.randrange(3) if folder else 0,
        rounds=tuple(rng.randint(1, limits.rounds) for _ in range(rng.randint(1, 5))),
        break_even=rng.choice([0.0, 0.0, 1.5, 3.0]),
    )


def _draw_request(
    rng: random.Random,
    limits: Limits,
    variants: Sequence[str],
    documents: Sequence[tuple[int, ...]],
) -> AuditRequest:
    """Draw a request, without its place in the scenario."""
    most = min(MOST_NEW, limits.max_length // 3)
    options: dict[str, Any] = {"max_tokens": rng.choice([1, 2, *[rng.randint(8, most)] * 8])}
    prompt = _prompt(rng, limits, documents)
    _draw_ends(rng, limits, options)
    if rng.random() < 0.5:
        options |= _recovery(rng, limits, most)
        if limits.open_thought and rng.random() < 0.3:
            prompt = (*prompt, *limits.open_thought)
    if "sampled" in variants and rng.random() < 0.3:
        options |= {"temperature": rng.choice([0.3, 1.0, 2.0]), "seed": rng.randrange(1000)}
        options |= rng.choice([{}, {"top_p": 0.9}, {"top_k": 7, "min_p": 0.02}])
    if "penalized" in variants and rng.random() < 0.4:
        options |= _shaping(rng, limits)
    if "constrained" in variants and limits.structured and limits.stop_texts and rng.random() < 0.3:
        options["structured"] = rng.choice(STRUCTURES)
        options.pop("min_tokens", None)  # rejected in combination
    if limits.prompt_logprobs and rng.random() < 0.05:
        options["prompt_logprobs"] = rng.randrange(3)
    if rng.random() < 0.15:
        options["speculative"] = False
    elif rng.random() < 0.25:
        options["block_size"] = rng.randint(1, limits.block)
    end = None
    if rng.random() < 0.15:
        how = rng.choice(["cell", "close", "close", "drop"])
        end = Cancellation(how=how, turns=rng.choice([rng.randrange(4), rng.randrange(30)]))
    accepted: tuple[int, ...] = ()
    broken: tuple[int, ...] = ()
    if limits.scripted and rng.random() < 0.85:
        accepted = tuple(rng.randrange(limits.block) for _ in range(rng.randint(1, 8)))
        if rng.random() < 0.1:
            broken = tuple(rng.sample(range(most), 3))
    return AuditRequest(
        prompt=prompt[-(limits.max_length - options["max_tokens"]) :],
        options=options,
        answers=rng.choice([1, 1, 1, 1, 2, 3]),
        cancellation=end,
        accepted=accepted,
        broken=broken,
    )


def _text(rng: random.Random, limits: Limits, length: int) -> tuple[int, ...]:
    """Return `length` ids of the pool."""
    if not limits.ordered:
        return tuple(rng.choice(limits.pool) for _ in range(length))
    start = rng.randrange(len(limits.pool) - length)
    return limits.pool[start : start + length]


def _prompt(
    rng: random.Random, limits: Limits, documents: Sequence[tuple[int, ...]]
) -> tuple[int, ...]:
    """Return a prompt, often the start of a document up to near a chunk boundary."""
    document = rng.choice(documents)
    cut = rng.randrange(6) * limits.chunk + rng.choice([-1, 0, 0, 1])
    own = _text(rng, limits, rng.choice([0, 1, rng.randint(1, limits.chunk)]))
    return (*document[: max(cut, 0)], *own) or document[:1]


def _draw_ends(rng: random.Random, limits: Limits, options: dict[str, Any]) -> None:
    """Add stop tokens, stop strings and a minimum length, each to some requests."""
    options["ignore_eos"] = rng.random() < 0.5
    if rng.random() < 0.5:
        number = rng.choice([1, 4, limits.stop_tokens])
        options["stop_token_ids"] = sorted({rng.choice(limits.pool) for _ in range(number)})
    if limits.stop_texts and rng.random() < 0.25:
        texts = [rng.choice(limits.stop_texts) for _ in range(3)]
        options["stop"] = [*texts[:1], "".join(texts[1:])]
    if rng.random() < 0.12:
        options["min_tokens"] = rng.randint(0, options["max_tokens"])


def _recovery(rng: random.Random, limits: Limits, most: int) -> dict[str, Any]:
    """Draw recovery settings, with stop tokens and tools that trigger the rules."""
    settings = {
        "floor": rng.choice([0, 4, most, most]),
        "tool_prefix": rng.random() < 0.7,
        "tool_call_threshold": rng.choice([-100.0, -100.0, -100.0, -5.0]),
        "call_retry": rng.random() < 0.5,
        "empty_retry": rng.random() < 0.6,
        "repeat_limit": rng.choice([0, 0, 2, 3]),
        "loops": rng.random() < 0.5,
        "loop_tokens": rng.randint(2, 21),
        "watchdog": rng.random() < 0.5,
        "repeated_calls": rng.choice([0, 2, 3]),
        "answer_reserve": rng.choice([0, 10, 60]),
        "floor_in_thought": rng.random() < 0.3,
    }
    options: dict[str, Any] = {"recovery": settings}
    if rng.random() < 0.7:
        ids = [rng.choice(limits.pool) for _ in range(limits.stop_tokens)]
        options["stop_token_ids"] = sorted({*ids})
    if rng.random() < 0.7:
        options["tools"] = TOOLS
    return options


def _shaping(rng: random.Random, limits: Limits) -> dict[str, Any]:
    """Draw penalties, biases and log-probabilities."""
    options: dict[str, Any] = {}
    if rng.random() < 0.6:
        options |= rng.choice(
            [
                {"repetition_penalty": 1.3},
                {"frequency_penalty": 0.7, "presence_penalty": -0.3},
                {"repetition_penalty": 0.8, "frequency_penalty": 2.0},
            ]
        )
    if limits.inviting and rng.random() < 0.5:
        options["logit_bias"] = {str(i): rng.choice([2.0, 5.0]) for i in limits.inviting}
    if rng.random() < 0.4 or not options:
        options["logprobs"] = rng.randrange(4)
    return options
