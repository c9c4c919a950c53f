"""What there is to choose from, and why a key has its value."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from chimera_sm.errors import ChimeraError, RecipeError
from chimera_train.config import Problem, encode, nearest, num_parameters

from .compose import compose, search_path
from .origins import Origins
from .schema import Recipe


def list_recipes(recipes: Sequence[str | os.PathLike[str]] = ()) -> list[dict[str, Any]]:
    """Every recipe of the search path by size; one that does not compose has an `error` instead of its facts."""
    names = {p.stem for folder in search_path(recipes) for p in (folder / "recipe").glob("*.yaml")}
    rows: list[dict[str, Any]] = []
    for name in sorted(names):
        try:
            recipe = compose([f"recipe={name}"], recipes=recipes)
        except ChimeraError as error:
            rows.append({"recipe": name, "error": str(error).splitlines()[0]})
            continue
        parameters = num_parameters(recipe.model)
        rows.append(
            {
                "recipe": name,
                "parameters": parameters,
                "size": short_count(parameters),
                "target": recipe.target.name,
                "instance": recipe.instances.type,
                "count": recipe.instances.count,
                "capacity": "-" if recipe.target.name == "local" else recipe.capacity.kind,
                "description": recipe.description,
            }
        )
    return sorted(rows, key=lambda row: row.get("parameters", 0))


def short_count(number: int) -> str:
    """1,235,814,400 → "1.24B"."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def explain_key(recipe: Recipe, key: str) -> dict[str, Any]:
    """The value of a dotted key and every setting of it, the last of which holds. Raises RecipeError."""
    value = encode(recipe)
    path: list[str] = []
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            known = [".".join([*path, name]) for name in value] if isinstance(value, dict) else [".".join(path)]
            hint = nearest(key, known)
            raise RecipeError(
                [Problem(key, "no such key", f"did you mean {hint}?" if hint else f"known: {', '.join(known)}")]
            )
        value = value[part]
        path.append(part)
    origins = recipe.origins
    settings = origins.history(key) if isinstance(origins, Origins) else []
    return {"key": key, "value": value, "settings": settings or ["the schema's default"]}
