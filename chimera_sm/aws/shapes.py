"""Checks a request against AWS's own description of it: the service model that ships with botocore.

botocore itself validates types, required members and minima only. Maxima, patterns and enums stand in the same model
and are checked here. The model's file is read directly, because importing botocore costs ten times as much as parsing
the one file a dry run needs. Nothing is copied out of the model: a new instance type is valid once botocore knows it.
"""

from __future__ import annotations

import datetime
import functools
import gzip
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from chimera_train.config import nearest

Rule = Literal["type", "required", "unknown", "min", "max", "pattern", "enum", "union"]


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One broken rule of a shape."""

    path: str
    """Dotted, from the request's top: `InputDataConfig[0].DataSource`; "" is the request itself."""
    rule: Rule
    value: Any
    """What stands there; None for a missing member."""
    message: str
    """The rule in words, without the value."""
    fix: str = ""


@dataclass(frozen=True)
class ServiceModel:
    """The shapes and operations of one AWS service."""

    service: str
    shapes: Mapping[str, Any]
    operations: Mapping[str, Any]

    def validate(self, operation: str, request: Any) -> list[Violation]:
        """Every violation of the input shape of `operation`, in the order of the request."""
        return self.validate_shape(self.operations[operation]["input"]["shape"], request)

    def validate_shape(self, shape: str, value: Any) -> list[Violation]:
        return list(self._walk(shape, value, ""))

    def enum(self, shape: str) -> tuple[str, ...]:
        """The values that a string shape may take."""
        return tuple(self.shapes[shape]["enum"])

    def _walk(self, name: str, value: Any, path: str) -> Iterator[Violation]:
        shape = self.shapes[name]
        kind = shape["type"]
        if not _has_type(kind, value):
            yield Violation(
                path=path, rule="type", value=value, message=f"expected {_WORDS[kind]}, found {_describe(value)}"
            )
        elif kind == "structure":
            yield from self._structure(shape, value, path)
        elif kind == "list":
            yield from _bounds(shape, value, path, len(value), "items")
            for index, item in enumerate(value):
                yield from self._walk(shape["member"]["shape"], item, f"{path}[{index}]")
        elif kind == "map":
            yield from _bounds(shape, value, path, len(value), "entries")
            for key, item in value.items():
                yield from self._walk(shape["key"]["shape"], key, f"{path}.{key} (key)")
                yield from self._walk(shape["value"]["shape"], item, f"{path}.{key}")
        elif kind == "string":
            yield from _string(shape, value, path)
        elif kind in ("integer", "long", "float", "double"):
            yield from _bounds(shape, value, path, value, "")

    def _structure(self, shape: Mapping[str, Any], value: Mapping[str, Any], path: str) -> Iterator[Violation]:
        members = shape["members"]
        prefix = f"{path}." if path else ""
        for name in shape.get("required", ()):
            if name not in value:
                yield Violation(path=f"{prefix}{name}", rule="required", value=None, message="is required")
        if shape.get("union") and len(value) != 1:
            yield Violation(
                path=path, rule="union", value=sorted(value), message=f"takes exactly one of {', '.join(members)}"
            )
        for name, item in value.items():
            if name in members:
                yield from self._walk(members[name]["shape"], item, f"{prefix}{name}")
            else:
                hint = nearest(str(name), list(members))
                yield Violation(
                    path=f"{prefix}{name}",
                    rule="unknown",
                    value=item,
                    message="no such member",
                    fix=f"did you mean {hint}?" if hint else f"known here: {', '.join(members)}",
                )


@functools.cache
def service_model(service: str) -> ServiceModel:
    """The newest model of `service` ("sagemaker", "fsx", …) in the installed botocore."""
    spec = importlib.util.find_spec("botocore")
    assert spec is not None
    assert spec.origin is not None  # boto3 is a dependency of the package
    folder = max((Path(spec.origin).parent / "data" / service).iterdir(), key=lambda p: p.name)
    packed, plain = folder / "service-2.json.gz", folder / "service-2.json"
    data = json.loads(gzip.decompress(packed.read_bytes()) if packed.exists() else plain.read_bytes())
    return ServiceModel(service=service, shapes=data["shapes"], operations=data["operations"])


_TYPES: dict[str, tuple[type, ...]] = {
    "structure": (dict,),
    "map": (dict,),
    "list": (list, tuple),
    "string": (str,),
    "integer": (int,),
    "long": (int,),
    "float": (int, float),
    "double": (int, float),
    "boolean": (bool,),
    "timestamp": (str, int, float, datetime.datetime),
    "blob": (bytes, bytearray, str),
}
_WORDS = {
    "structure": "a structure",
    "map": "a map",
    "list": "a list",
    "string": "a string",
    "integer": "an integer",
    "long": "an integer",
    "float": "a number",
    "double": "a number",
    "boolean": "true or false",
    "timestamp": "a time",
    "blob": "bytes",
}


def _has_type(kind: str, value: Any) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind])


def _describe(value: Any) -> str:
    if value is None:
        return "null"
    for kind in ("structure", "list", "string", "boolean", "integer", "float"):
        if _has_type(kind, value):
            return _WORDS[kind]
    return type(value).__name__


def _bounds(shape: Mapping[str, Any], value: Any, path: str, size: float, unit: str) -> Iterator[Violation]:
    """`size` is the value itself for numbers, its length for what has one."""
    how = f"has {size} {unit}, which is" if unit else "is"
    if size < shape.get("min", size):
        text = f"{how} below the minimum of {shape['min']}"
        yield Violation(path=path, rule="min", value=value, message=text)
    if size > shape.get("max", size):
        text = f"{how} above the maximum of {shape['max']}"
        yield Violation(path=path, rule="max", value=value, message=text)


def _string(shape: Mapping[str, Any], value: str, path: str) -> Iterator[Violation]:
    yield from _bounds(shape, value, path, len(value), "characters")
    if "enum" in shape:
        if value not in shape["enum"]:
            hint = nearest(value, shape["enum"])
            few = f": {', '.join(shape['enum'])}" if len(shape["enum"]) <= 8 else ""
            yield Violation(
                path=path,
                rule="enum",
                value=value,
                message=f"is not one of the {len(shape['enum'])} values that AWS takes{few}",
                fix=f"did you mean {hint}?" if hint else "",
            )
    elif "pattern" in shape:
        pattern = _compiled(shape["pattern"])
        if pattern is not None and not pattern.fullmatch(value):
            yield Violation(
                path=path, rule="pattern", value=value, message=f"does not match the pattern {shape['pattern']}"
            )


# Unicode classes of AWS's (Java's) patterns, as they stand inside a character class. Python's \w is letters, numbers
# and the underscore, which is close enough for \p{L} and \p{N}: the tag patterns have all three.
_UNICODE_CLASSES = {
    r"\p{Alnum}": "a-zA-Z0-9",
    r"\p{L}": r"\w",
    r"\p{N}": r"\w",
    r"\p{Z}": "\\ \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000",
}


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str] | None:
    """AWS matches patterns against the whole value. None for the few that are no pattern in Python."""
    for theirs, ours in _UNICODE_CLASSES.items():
        pattern = pattern.replace(theirs, ours)
    try:
        return re.compile(pattern)
    except re.error:
        return None
