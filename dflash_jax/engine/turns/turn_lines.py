"""Events of turns from their JSON, as `TurnRecorder` writes them, for an engine that follows."""

import dataclasses
from typing import Any

from dflash_jax.engine.engine import Engine
from dflash_jax.engine.request import make_requests
from dflash_jax.engine.running_request import RunningRequest
from dflash_jax.engine.sampling_params import SamplingParams
from dflash_jax.engine.scheduler import variants_of
from dflash_jax.engine.state_machine import Recovery
from dflash_jax.engine.state_machine.speculation import BreakEven
from dflash_jax.engine.structured.grammars import CallGrammars
from dflash_jax.engine.turns.turn_events import END_REASONS, CallRetry, End, TurnEvents
from dflash_jax.engine.turns.turn_recorder import Line
from dflash_jax.graph.keys import Variant


def events_of(engine: Engine, line: Line) -> TurnEvents:
    """Return the events of a turn, once an engine has the programs that they need.

    Raises:
      DFlashError, ValueError, TypeError, KeyError, AttributeError: they are not valid.
    """
    steps = line.get("steps", 1)
    if type(steps) is not int or not 1 <= steps <= max(engine.plan.steps_per_call, 1):
        raise ValueError(f"steps is {steps!r}; expected 1 to {engine.plan.steps_per_call}")
    names = set(line.get("use", ()))
    use = tuple(key for key in engine.core.runner.compiled.programs if str(key) in names)
    # Those of no variant run for all requests once they are in use.
    engine.core.runner.compiled.compile_keys(key for key in use if key.variant is None)
    break_even = line.get("break_even")
    return TurnEvents(
        admit=tuple(_admission(engine, fields) for fields in line.get("admit", ())),
        end=tuple(_end(*fields) for fields in line.get("end", ())),
        retry=tuple(_retry(engine, *fields) for fields in line.get("retry", ())),
        use=use,
        steps=steps,
        break_even=None if break_even is None else _break_even(*break_even),
    )


def _admission(engine: Engine, fields: Line) -> RunningRequest:
    options = dict(fields["params"])
    if "recovery" in options:
        recovery = Recovery.parse(options["recovery"])
        options["recovery"] = dataclasses.replace(recovery, log_directory=None)
    params = SamplingParams(**options)
    parts = (engine.plan, engine.graph.config, engine.tokenizer)
    drafts = engine.graph.pair.drafter is not None
    [request] = make_requests(fields["prompt"], params, 1, *parts, drafts=drafts)
    request = dataclasses.replace(request, seed=_integer(fields["seed"]))
    number = _integer(fields["number"])
    if number in engine.core.requests:
        raise ValueError(f"request {number} is running already")
    sequence = engine._sequence(request, number=number, group=_integer(fields["group"]))
    engine.warm_up(*variants_of(sequence))
    return sequence


def _end(number: Any, reason: Any) -> End:
    if reason not in END_REASONS:
        raise ValueError(f"a request ends by {reason!r}; expected one of {', '.join(END_REASONS)}")
    return End(_integer(number), reason)


def _retry(engine: Engine, number: Any, structure: Any, error: Any) -> CallRetry:
    if structure is None:
        return CallRetry(_integer(number), None, error=str(error))
    grammar = engine.core.grammars.make(structure)
    engine.warm_up(Variant.CONSTRAINED, Variant.RECOVERY)
    return CallRetry(_integer(number), structure, grammar)


def _break_even(rows: Any, positions: Any, blocks: Any, lengths: Any) -> BreakEven:
    table = tuple(tuple(tuple(map(float, row)) for row in each) for each in lengths)
    return BreakEven(_integers(rows), _integers(positions), _integers(blocks), table)


def _integers(values: Any) -> tuple[int, ...]:
    return tuple(map(_integer, values))


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is no integer")
    return value


class NoCallGrammars(CallGrammars):
    """Compiles no grammar of a call: events tell what became of it."""

    def __init__(self, engine: Engine):
        super().__init__(engine.core.grammars, lambda variants: None, engine.tokenizer)

    def begin(self, request: Any, before: str, made: Any) -> None:
        """Do nothing: a later turn tells what became of it."""
