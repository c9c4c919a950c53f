"""Another recipe for a run that exists: its recorded one, with some values changed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from chimera_sm.errors import UsageError

from .compose import build, session
from .origins import Origins
from .schema import Recipe


def amend(recorded: Mapping[str, Any], overrides: Sequence[str]) -> Recipe:
    """`recorded` is a recipe as plain data; `overrides` are KEY=VALUE.

    A file of a group cannot be chosen: the recorded recipe no longer says from which files it was composed. Raises
    UsageError and RecipeError as `compose` does.
    """
    loader = session()
    choices = loader.split(overrides)
    if removals := [text for text in overrides if text.startswith("~")]:
        raise UsageError(f"{removals[0]!r} removes a key; a recorded recipe takes values only", fix="write KEY=null")
    if choices.groups:
        raise UsageError(
            f"{choices.groups[0]!r} picks a file, and a recorded recipe takes values only",
            fix="name the keys that shall change, e.g. parallel.tensor_parallel=2",
        )
    if any(key == "model.path" for key, _ in choices.parsed):
        raise UsageError("model.path would be ignored: a recorded recipe has its model", fix="leave it out")
    data = copy.deepcopy(dict(recorded))
    for key, value in choices.parsed:
        *sections, name = key.split(".")
        inner = data
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                raise UsageError(f"{key}: {section} is no section")
        inner[name] = value
    return build(data, Origins(lambda: [(None, key, f"override {text}") for key, text in choices.value_keys]))
