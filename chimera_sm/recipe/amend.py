"""Another recipe for a run that exists: its recorded one, with some values changed."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chimera_sm.errors import RecipeError, UsageError
from chimera_train.config import ConfigError, Problem, decode, encode
from chimera_train.config.decode import fields_of

from .compose import build, session
from .lasting import as_typed, changes_refused
from .origins import Origins
from .schema import Recipe


@dataclass(frozen=True)
class Amended:
    recipe: Recipe
    notes: tuple[str, ...]
    """What follows from the overrides beyond their own keys, a line each."""


def amend(recorded: Mapping[str, Any], overrides: Sequence[str], *, saved_step: int | None = None) -> Amended:
    """`recorded` is a recipe as plain data; `overrides` are KEY=VALUE; `saved_step` is the step to go on from.

    A recorded value that the overrides leave without effect goes back to its default: the user did not type it now.
    A file of a group cannot be chosen: the recorded recipe no longer says from which files it was composed. Raises
    UsageError and RecipeError as `compose` does, and RecipeError for a change that the checkpoint cannot honour.
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
    origins = Origins(lambda: [(None, key, f"override {text}") for key, text in choices.value_keys])
    typed = {key for key, _ in choices.value_keys}
    try:
        before = decode(Recipe, dict(recorded))  # an older record lacks newer keys, and meant their defaults
    except ConfigError as error:
        raise RecipeError(error.problems, origins) from None
    # First of all: what else is wrong with such a value, and how to mend it, is beside the point.
    with contextlib.suppress(ConfigError):  # which `build` tells
        if problems := changes_refused(encode(before), encode(decode(Recipe, data))):
            raise RecipeError(problems, origins)
    recipe, notes = _without_what_has_no_effect(data, typed, origins)
    if problems := _steps_refused(before, recipe, typed, saved_step):
        raise RecipeError(problems, origins)
    if recipe.train.num_steps != before.train.num_steps and recipe.optim.spans_the_run:
        notes.append(
            f"optim.schedule={recipe.optim.schedule} now spans train.num_steps={recipe.train.num_steps} steps instead "
            f"of {before.train.num_steps}: the learning rate goes on from where that schedule has it"
        )
    return Amended(recipe, tuple(notes))


def _without_what_has_no_effect(data: dict[str, Any], typed: set[str], origins: Origins) -> tuple[Recipe, list[str]]:
    """The recipe, and a line for every recorded value that is back at its default."""
    notes: list[str] = []
    gone: set[str] = set()
    while True:
        try:
            return build(data, origins), notes
        except RecipeError as error:
            idle = {p.key: p for p in error.problems if p.no_effect and p.key not in typed | gone}
            if not idle:
                raise
            for key, problem in idle.items():
                section, _, name = key.rpartition(".")
                data[section][name] = default = _default(section, name)
                notes.append(f"{key} is back at its default, {as_typed(default)}: {problem.message}")
            gone |= set(idle)


def _default(section: str, name: str) -> Any:
    (field,) = (f for f in dataclasses.fields(fields_of(Recipe)[section]) if f.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return encode(field.default_factory())
    return encode(field.default)


def _steps_refused(before: Recipe, after: Recipe, typed: set[str], saved_step: int | None) -> list[Problem]:
    """Steps that were asked for and will never be made, because the run is past them."""
    if saved_step is None:
        return []
    problems = []
    num_steps, start_step = after.train.num_steps, after.profiling.start_step
    if num_steps <= saved_step and num_steps != before.train.num_steps:
        problems.append(
            Problem(
                "train.num_steps",
                f"{num_steps}, and the run has saved step {saved_step}: it would end without a step",
                f"set train.num_steps={saved_step + 1} or more",
            )
        )
    if "profiling.start_step" in typed and start_step is not None and start_step <= saved_step:
        problems.append(
            Problem(
                "profiling.start_step",
                f"{start_step} never comes: the run goes on after step {saved_step}",
                f"set profiling.start_step={saved_step + 1} or more",
            )
        )
    return problems
