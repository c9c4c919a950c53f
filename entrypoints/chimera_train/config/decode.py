"""Plain data to frozen dataclasses and back, with errors that a person can act on.

One decoder serves Hydra's composed YAML on the launching side and `recipe.json` in the container.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from .problem import Problem

T = TypeVar("T")
_MISSING = object()


class ConfigError(ValueError):
    """One or more broken rules of a recipe."""

    explains_itself = True

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        super().__init__("\n".join(f"{p.key}: {p.message}" + (f" ({p.fix})" if p.fix else "") for p in problems))


@functools.cache
def fields_of(cls: type) -> dict[str, Any]:
    """Field name → resolved type, in the order of definition."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def nearest(word: str, known: typing.Iterable[str]) -> str | None:
    """The known word that `word` was most likely meant to be, or None."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def decode(cls: type[T], data: Any, key: str = "") -> T:
    """Build `cls` from plain data.

    Raises ConfigError with every unknown key (and the nearest known one), every missing key and every value of a
    wrong type. `key` is the dotted prefix that errors start with.
    """
    problems: list[Problem] = []
    value = _decode(cls, data, key, problems)
    if problems:
        raise ConfigError(problems)
    return typing.cast(T, value)


def _decode(kind: Any, data: Any, key: str, problems: list[Problem]) -> Any:
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(typing.cast(type, kind), data, key, problems)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        if data in arguments and not isinstance(data, bool):
            return data
        hint = nearest(str(data), [str(a) for a in arguments])
        problems.append(
            Problem(
                key,
                f"{data!r} is not one of {', '.join(str(a) for a in arguments)}",
                f"did you mean {hint}?" if hint else "",
            )
        )
        return _MISSING
    if origin in (typing.Union, types.UnionType):
        if data is None:
            if type(None) in arguments:
                return None
            problems.append(Problem(key, "may not be null"))
            return _MISSING
        (inner,) = (a for a in arguments if a is not type(None))
        return _decode(inner, data, key, problems)
    if origin is tuple:
        if not isinstance(data, list | tuple):
            problems.append(Problem(key, f"expected a list, found {_describe(data)}"))
            return _MISSING
        return tuple(_decode(arguments[0], item, f"{key}[{i}]", problems) for i, item in enumerate(data))
    if origin is dict:
        if not isinstance(data, Mapping):
            problems.append(Problem(key, f"expected a mapping, found {_describe(data)}"))
            return _MISSING
        return {str(k): _decode(arguments[1], v, f"{key}.{k}", problems) for k, v in data.items()}
    return _decode_scalar(kind, data, key, problems)


def _decode_dataclass(cls: type, data: Any, key: str, problems: list[Problem]) -> Any:
    if not isinstance(data, Mapping):
        problems.append(Problem(key, f"expected a section with keys, found {_describe(data)}"))
        return _MISSING
    known = fields_of(cls)
    prefix = f"{key}." if key else ""
    for name in data:
        if name not in known:
            hint = nearest(str(name), known)
            problems.append(
                Problem(
                    f"{prefix}{name}",
                    "no such key",
                    f"did you mean {prefix}{hint}?" if hint else f"known here: {', '.join(known)}",
                )
            )
    values = {}
    for f in dataclasses.fields(cls):
        if f.name in data:
            value = _decode(known[f.name], data[f.name], f"{prefix}{f.name}", problems)
            if value is not _MISSING:
                values[f.name] = value
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            problems.append(Problem(f"{prefix}{f.name}", "is required and not set"))
    try:
        return cls(**values)
    except TypeError:  # a required field failed to decode: the problem is already recorded
        return _MISSING


def _decode_scalar(kind: Any, data: Any, key: str, problems: list[Problem]) -> Any:
    if kind is Any:
        return data
    if kind is float and isinstance(data, int | float) and not isinstance(data, bool):
        if not math.isfinite(data):
            problems.append(Problem(key, f"{data} is not a finite number"))
            return _MISSING
        return float(data)
    if kind is str and isinstance(data, str) and not data.isascii():
        try:
            data.encode()
        except UnicodeEncodeError:
            problems.append(Problem(key, f"{data!r} is not valid UTF-8"))
            return _MISSING
    if kind is int and isinstance(data, float) and data.is_integer():
        return int(data)  # 1e6 is how people write a count
    if isinstance(data, kind) and not (isinstance(data, bool) and kind is not bool):
        return data
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    fix = f'quote it: "{data}"' if kind is str and isinstance(data, int | float) else ""
    problems.append(Problem(key, f"expected {names.get(kind, kind)}, found {_describe(data)}", fix))
    return _MISSING


def _describe(data: Any) -> str:
    if data is None:
        return "null"
    if isinstance(data, Mapping):
        return "a mapping"
    if isinstance(data, list | tuple):
        return "a list"
    return f"{data!r}"


def encode(value: Any) -> Any:
    """Dataclasses to plain data (dicts, lists, scalars), in the order of definition."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    return value


def canonical_json(value: Any) -> str:
    """The one byte-stable JSON of a value: sorted keys, no blanks. What hashes are taken of."""
    return json.dumps(encode(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sha256_of(value: Any) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()
