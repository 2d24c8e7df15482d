"""What a tool's JSON schema says about its parameters, with references and combined schemas merged.

A schema may say it directly, by `$ref`, `allOf`, `anyOf`, `oneOf`, `if`, or by patterns of names.
Types, requirements and grammars of parameters are all derived from what is merged here.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from dflash_jax.tool_parsers.bounded_schema import ANNOTATIONS
from dflash_jax.tool_parsers.finite_schema import KINDS, of_type, resolved

# The type to which a keyword applies, where a schema states none.
IMPLIED = {
    "properties": "object", "additionalProperties": "object", "patternProperties": "object",
    "required": "object", "minProperties": "object", "maxProperties": "object",
    "items": "array", "prefixItems": "array", "minItems": "array", "maxItems": "array",
    "pattern": "string", "format": "string", "minLength": "string", "maxLength": "string",
    "minimum": "number", "maximum": "number", "multipleOf": "number",
}  # fmt: skip
MOST_FORMS = 32  # forms of the arguments of one tool; more are merged into one
MOST_DEPTH = 100  # schemas inside each other that are followed
MOST_WORK = 200_000  # parameters that are merged for one tool; of hostile schemas, the rest is left
# Keywords whose meaning depends on others of the same schema.
DEPENDENT = {"$ref", "properties", "patternProperties", "additionalProperties", "items",
             "prefixItems", "anyOf", "oneOf", "allOf", "if", "then", "else", "$defs"}  # fmt: skip
LONGEST_NAME = 64  # characters of a parameter's name that patterns are matched with
QUANTIFIER = re.compile(r"[*+?{]")
MOST_QUANTIFIERS = 3  # in a pattern that is matched, which takes time in the power of them

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Form:
    """One of the forms that arguments may take.

    Attributes:
      properties: schemas of parameters by name, among them all required ones.
      required: names of the parameters that have to be given.
      patterns: schemas of further parameters, by patterns of their names.
      others: the schema of all others; None if there is none.
    """

    properties: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    required: tuple[str, ...] = ()
    patterns: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    others: Any = None

    def schema_of(self, name: str) -> Any:
        """Return the schema of a parameter, which need not be named."""
        if name in self.properties:
            return self.properties[name]
        fitting = [x for pattern, x in self.patterns.items() if may_match(pattern, name)]
        if not fitting:
            return True if self.others is None else self.others
        return fitting[0] if len(fitting) == 1 else {"anyOf": fitting}


@dataclasses.dataclass(frozen=True)
class Meaning:
    """Which values a schema allows.

    Attributes:
      kinds: their JSON types; empty if it does not say.
      values: all of them; None if it does not list them.
    """

    kinds: frozenset[str] = frozenset()
    values: tuple[Any, ...] | None = None


class Parameters:
    """The parameters of a tool.

    Attributes:
      forms: what the arguments may be; at least one.
      properties: schemas of the parameters that are named in some form.
      required: names of the parameters that are required in each form.
    """

    def __init__(self, schema: Mapping[str, Any]):
        self._root = schema
        self._work = MOST_WORK
        self._forms_at: dict[str, list[Form]] = {}
        self._meanings_at: dict[str, Meaning] = {}
        self._meanings: dict[str, Meaning] = {}  # by name of a parameter
        whole = {key: value for key, value in schema.items() if key != "type"}
        self.forms = [_complete(x) for x in self._forms(whole, 0) or [_own_form(whole)]]
        merged = self.forms[0] if len(self.forms) == 1 else self._either(self.forms)
        self.properties: Mapping[str, Any] = merged.properties
        self.required = list(merged.required)

    def meaning(self, name: str) -> Meaning:
        """Return which values a parameter may have."""
        if name not in self._meanings:
            schemas = [form.schema_of(name) for form in self.forms]
            told = [self.meaning_of(schema) for schema in schemas if isinstance(schema, Mapping)]
            self._meanings[name] = _either_meaning(told)
        return self._meanings[name]

    def meaning_of(self, schema: Any) -> Meaning:
        """Return which values a schema of a parameter allows."""
        return self._meaning(schema, 0)

    def fit(self, names: Iterable[str]) -> bool:
        """Return whether some form requires none but these parameters."""
        return any(set(form.required) <= set(names) for form in self.forms)

    @property
    def is_object(self) -> bool:
        """Return whether the schema itself says that the arguments are an object."""
        return self._states_object(self._root, 0)

    def _states_object(self, schema: Any, depth: int) -> bool:
        if not isinstance(schema, Mapping) or depth > MOST_DEPTH:
            return False
        if schema.get("type") == "object":
            return True
        parts = _listed(schema, "allOf")
        if isinstance(place := schema.get("$ref"), str):
            parts = [*parts, resolved(self._root, place)]
        if any(self._states_object(part, depth + 1) for part in parts):
            return True
        several = _alternatives(schema)
        return any(all(self._states_object(x, depth + 1) for x in some) for some in several)

    # -- forms --------------------------------------------------------------------------------

    def _forms(self, schema: Any, depth: int) -> list[Form]:
        """Return the forms of objects that a schema allows."""
        if not isinstance(schema, Mapping) or depth > MOST_DEPTH:
            return [] if schema is False else [Form()]
        kinds = _stated_kinds(schema)
        if kinds and "object" not in kinds:
            return []
        forms = [_own_form(schema)]
        if isinstance(place := schema.get("$ref"), str):
            target = self._referred(place, self._forms_at, [], self._forms, depth)
            forms = self._products(forms, target)
        for part in _listed(schema, "allOf"):
            forms = self._products(forms, self._forms(part, depth + 1))
        for parts in _alternatives(schema):
            some = [form for part in parts for form in self._forms(part, depth + 1)]
            forms = self._products(forms, self._few(some))
        return forms

    def _products(self, first: list[Form], second: list[Form]) -> list[Form]:
        """Return the forms that are one of the first and one of the second."""
        if len(first) * len(second) > MOST_FORMS:
            second = [self._either(second)]
        return [self._both(one, other) for one in first for other in second]

    def _few(self, forms: list[Form]) -> list[Form]:
        return [self._either(forms)] if len(forms) > MOST_FORMS else forms

    def _both(self, one: Form, other: Form) -> Form:
        """Return the form of arguments that have both forms."""
        self._work -= 1 + len(other.properties) + len(one.properties)
        if self._work < 0 or other == Form():
            return one
        names = dict.fromkeys((*one.properties, *other.properties))
        return Form(
            {name: all_of(one.schema_of(name), other.schema_of(name)) for name in names},
            tuple(dict.fromkeys((*one.required, *other.required))),
            {**one.patterns, **other.patterns},
            other.others if one.others is None else all_of(one.others, other.others),
        )

    def _either(self, forms: Sequence[Form]) -> Form:
        """Return a form that all arguments have that have one of the forms."""
        schemas: dict[str, list[Any]] = {}
        patterns: dict[str, list[Any]] = {}
        for form in forms:
            self._work -= 1 + len(form.properties)
            for name, schema in form.properties.items():
                schemas.setdefault(name, []).append(schema)
            for pattern, schema in form.patterns.items():
                patterns.setdefault(pattern, []).append(schema)
        common = [set(form.required) for form in forms]
        others = [form.others for form in forms if form.others not in (None, False)]
        further = None
        if others:
            further = any_of(others)
        elif forms and all(form.others is False for form in forms):
            further = False
        return Form(
            {name: any_of(several) for name, several in schemas.items()},
            tuple(x for x in forms[0].required if all(x in y for y in common)) if forms else (),
            {pattern: any_of(several) for pattern, several in patterns.items()},
            further,
        )

    # -- values -------------------------------------------------------------------------------

    def _meaning(self, schema: Any, depth: int) -> Meaning:
        """Return which values a schema allows."""
        if not isinstance(schema, Mapping) or depth > MOST_DEPTH:
            return Meaning()
        told = [_own_meaning(schema)]
        if isinstance(place := schema.get("$ref"), str):
            known = self._meanings_at
            told.append(self._referred(place, known, Meaning(), self._meaning, depth))
        told += [self._meaning(part, depth + 1) for part in _listed(schema, "allOf")]
        for parts in _alternatives(schema):
            told.append(_either_meaning([self._meaning(part, depth + 1) for part in parts]))
        meaning = functools.reduce(_both_meanings, told)
        if not meaning.kinds:
            implied = frozenset(kind for key, kind in IMPLIED.items() if key in schema)
            meaning = dataclasses.replace(meaning, kinds=implied)
        if schema.get("nullable") is True and meaning.kinds:  # a keyword of OpenAPI
            values = None if meaning.values is None else (*meaning.values, None)
            meaning = Meaning(meaning.kinds | {"null"}, values)
        return meaning

    def _referred(
        self,
        place: str,
        known: dict[str, T],
        nothing: T,
        read: Callable[[Any, int], T],
        depth: int,
    ) -> T:
        """Return what is read at the place of a reference, or nothing within that place itself."""
        if place not in known:
            known[place] = nothing
            known[place] = read(resolved(self._root, place), depth + 1)
        return known[place]


def all_of(one: Any, other: Any) -> Any:
    """Return a schema of what two schemas allow both."""
    for schema, rest in ((one, other), (other, one)):
        if schema is True or schema is None or schema == {} or schema == rest:
            return rest
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        shared = (set(one) & set(other)) - ANNOTATIONS
        same = all(one[key] == other[key] for key in shared)
        if same and not DEPENDENT & (set(one) | set(other)):
            return {**other, **one}
    return {"allOf": [one, other]}


def any_of(schemas: Sequence[Any]) -> Any:
    """Return a schema of what one of the schemas allows."""
    different: list[Any] = []
    for schema in schemas[:MOST_FORMS]:
        if schema not in different:
            different.append(schema)
    return different[0] if len(different) == 1 else {"anyOf": different}


def may_match(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a name, or might: matching it could take very long."""
    count = len(QUANTIFIER.findall(pattern))
    if len(name) > LONGEST_NAME or count > MOST_QUANTIFIERS or re.search(r"\)[*+?{]", pattern):
        return True
    try:
        return re.search(pattern, name) is not None
    except (re.error, RecursionError, OverflowError):
        return True


def _complete(form: Form) -> Form:
    """Return a form whose properties contain those that are required only."""
    missing = {name: form.schema_of(name) for name in form.required if name not in form.properties}
    return dataclasses.replace(form, properties={**form.properties, **missing})


def _own_form(schema: Mapping[str, Any]) -> Form:
    """Return the form that a schema states, without those that it refers to."""
    others = schema.get("additionalProperties", schema.get("unevaluatedProperties"))
    return Form(
        _mapping(schema.get("properties")),
        tuple(dict.fromkeys(x for x in _listed(schema, "required") if isinstance(x, str))),
        {str(key): value for key, value in _mapping(schema.get("patternProperties")).items()},
        others if isinstance(others, bool | Mapping) else None,
    )


def _own_meaning(schema: Mapping[str, Any]) -> Meaning:
    """Return what a schema states, without those that it refers to."""
    kinds = _stated_kinds(schema)
    values: tuple[Any, ...] | None = None
    if "const" in schema:
        values = (schema["const"],)
    elif isinstance(listed := schema.get("enum"), list) and listed:
        values = tuple(listed)
    elif kinds == {"null"}:
        values = (None,)
    if values is not None and kinds:
        values = tuple(of_type(list(values), schema.get("type"))) or None
    if values is not None and not kinds:
        kinds = frozenset(kind for kind, types in KINDS.items() for x in values if type(x) in types)
    return Meaning(kinds, values)


def _stated_kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    stated = schema.get("type")
    names = stated if isinstance(stated, list) else [stated]
    return frozenset(name for name in names if isinstance(name, str))


def _both_meanings(one: Meaning, other: Meaning) -> Meaning:
    """Return what two schemas allow both; of schemas that exclude each other, the first counts."""
    kinds = _with_integers(one.kinds) & _with_integers(other.kinds) or one.kinds or other.kinds
    if one.values is None or other.values is None:
        return Meaning(kinds, other.values if one.values is None else one.values)
    return Meaning(kinds, tuple(x for x in one.values if x in other.values) or one.values)


def _with_integers(kinds: frozenset[str]) -> frozenset[str]:
    return kinds | {"integer"} if "number" in kinds else kinds


def _either_meaning(meanings: Sequence[Meaning]) -> Meaning:
    """Return what one of the schemas allows; those that do not say are left out."""
    kinds = frozenset(kind for meaning in meanings for kind in meaning.kinds)
    listed = [meaning.values for meaning in meanings if meaning.values is not None]
    if not listed or len(listed) < len(meanings):
        return Meaning(kinds)
    return Meaning(kinds, tuple(value for values in listed for value in values))


def _alternatives(schema: Mapping[str, Any]) -> list[list[Any]]:
    """Return the lists of schemas one of which applies."""
    alternatives = [_listed(schema, word) for word in ("anyOf", "oneOf")]
    if "if" in schema and ("then" in schema or "else" in schema):
        chosen = {"allOf": [schema["if"], schema.get("then", True)]}
        alternatives.append([chosen, schema.get("else", True)])
    return [parts for parts in alternatives if parts]


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
