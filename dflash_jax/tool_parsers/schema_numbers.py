"""Numbers in JSON schemas, as the grammar compiler can follow them exactly.

The compiler holds numbers as doubles, and writes bounds digit by digit. Bounds that a double
cannot hold are moved inwards to one that it can, so that no output is outside of the schema.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeGuard

from dflash_jax.errors import RequestError

MOST_INTEGER = 2**53 - 1  # of JSON's common numbers (RFC 7493); the bound of integers without one
MOST_EXACT = 2**63 - 1024  # the largest double that the compiler takes for an integer
MOST_COEFFICIENT = 2**32 - 1  # the integer of a multipleOf, which is that times a power of ten

# Of that integer without its factors 2 and 5: an automaton has that many states, which the masks
# of a number visit.
MOST_STATES = 10_000
FRACTION = 1e-10  # numbers are multiples of it: the smallest power of ten that the compiler takes
LOWER = ("minimum", "exclusiveMinimum")
UPPER = ("maximum", "exclusiveMaximum")


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a JSON value is a number; booleans are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_literals(value: Any, path: str) -> None:
    """Check that the numbers of a `const` or `enum` are written with their exact digits.

    Raises:
      RequestError: one would not be.
    """
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif is_number(value):
            exact = abs(value) <= MOST_EXACT and int(float(value)) == value
            if isinstance(value, float):
                exact = math.isfinite(value) and abs(value) != 2.0**63
            if not exact:
                raise RequestError(
                    f"the JSON schema has the number {value} at {path}, whose digits cannot be"
                    " written exactly, as it is not a 64-bit floating-point number of less than"
                    " 2^63; write it as a string"
                )


def exact_bounds(schema: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the schema with bounds that a double can hold, and without those that bound nothing.

    Raises:
      RequestError: all numbers that a bound allows are too large to be exact.
    """
    exact = dict(schema)
    for names, sign in ((LOWER, 1), (UPPER, -1)):
        for name in names:
            if not is_number(value := schema.get(name)):
                continue
            if math.isnan(value) or value * sign > MOST_EXACT:
                raise RequestError(
                    f"the JSON schema has {name} {value} at {path}/{name}, beyond which no number"
                    f" is exact; expected {'at most' if sign > 0 else 'at least'}"
                    f" {sign * MOST_EXACT}: use a string with a pattern"
                )
            if value * sign < -MOST_EXACT:
                del exact[name]
            else:
                exact[name] = _inwards(value, sign)
    return exact


def _inwards(value: float, sign: int) -> int | float:
    """Return the nearest number, not outside of a bound, that is exact as a double and as text."""
    if 0 < abs(value) < FRACTION:
        return sign * FRACTION if value * sign > 0 else 0
    if isinstance(value, float) or abs(value) <= MOST_INTEGER:
        return value
    rounded = float(value)
    while min((int(rounded) - value) * sign, (Decimal(repr(rounded)) - value) * sign) < 0:
        rounded = math.nextafter(rounded, sign * math.inf)
    return int(rounded)


def _first_number(schema: Mapping[str, Any], names: Iterable[str]) -> float | None:
    """Return the number of the first of these keywords that has one, or None."""
    return next((schema[name] for name in names if is_number(schema.get(name))), None)


def default_bounds(schema: Mapping[str, Any], kinds: list[Any]) -> dict[str, int]:
    """Return the bounds that a schema of numbers lacks; without any, output could loop in digits.

    Args:
      kinds: the schema's types.
    """
    if not {"integer", "number"} & {kind for kind in kinds if isinstance(kind, str)}:
        return {}
    low = _first_number(schema, LOWER)
    high = _first_number(schema, UPPER)
    bounds: dict[str, int] = {}
    if low is None:
        bounds["minimum"] = -MOST_INTEGER if high is None or high > -MOST_INTEGER else -MOST_EXACT
    if high is None:
        bounds["maximum"] = MOST_INTEGER if low is None or low < MOST_INTEGER else MOST_EXACT
    return bounds


def check_multiple(value: Any, path: str) -> None:
    """Check that `multipleOf` is a number that the compiler follows exactly and fast.

    Raises:
      RequestError: it is not.
    """
    if not is_number(value):
        return  # the compiler reports the type
    states = 0
    if value > 0 and (exact := decimal(value)):
        states = exact[0]
        for factor in (2, 5):
            while states % factor == 0:
                states //= factor
    if not 0 < states <= MOST_STATES:
        raise RequestError(
            f"the JSON schema has multipleOf {value} at {path}/multipleOf; expected a number above"
            " 0 with few digits, such as 5 or 0.01: leave it out, and check the number afterwards"
        )


def decimal(value: float) -> tuple[int, int] | None:
    """Return a multiple as an integer and a number of decimals; None if the compiler errs in it.

    The compiler multiplies by ten until no fraction is left, which accumulates rounding errors.
    """
    if not math.isfinite(value):
        return None
    scaled = float(value)
    places = 0
    while scaled % 1 and scaled <= MOST_COEFFICIENT:
        scaled *= 10.0
        places += 1
    exact = Decimal(scaled).scaleb(-places) == Decimal(repr(value))
    return (int(scaled), places) if exact and scaled <= MOST_COEFFICIENT else None


def check_common_multiples(multiples: list[float]) -> None:
    """Check that the compiler can combine all these multiples, where a schema combines schemas.

    Raises:
      RequestError: two of them have a common multiple that is too large for it.
    """
    pairs: dict[float, tuple[int, int]] = {}
    for value in multiples:
        exact = decimal(value)
        if exact is not None:
            pairs[value] = exact
    for one, (first, places) in pairs.items():
        for other, (second, more) in pairs.items():
            if first * second * 10 ** abs(places - more) > MOST_COEFFICIENT:
                raise RequestError(
                    f"the JSON schema has multipleOf {one} and multipleOf {other} and combines"
                    " schemas; leave one out, and check the number afterwards"
                )


def multiples(schema: Any) -> Iterator[float]:
    """Yield the values of `multipleOf` in a schema, at any depth."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            multiple = value.get("multipleOf")
            if is_number(multiple) and multiple > 0:
                yield multiple
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
