"""Plan, check and run large language model training on Amazon SageMaker and HyperPod.

    >>> import chimera_sm as ch
    >>> recipe = ch.compose(["recipe=tiny"])        # Hydra overrides → typed, validated recipe
    >>> plan = ch.plan(recipe)                      # layout, memory, time, cost: no network
    >>> artifacts = ch.render(plan)                 # the exact bytes that would be sent
    >>> findings = ch.check(plan, artifacts)        # what would go wrong
    >>> run = ch.launch(plan)                       # doctest: +SKIP
    >>> run.wait().state, run.metrics()[-1]["loss"] # doctest: +SKIP

Everything is loaded on first use: `import chimera_sm` itself imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import (
        AwsRefused,
        ChecksFailed,
        ChimeraError,
        RecipeError,
        RunFailed,
        RunStopped,
        UsageError,
    )
    from .planner.types import Plan
    from .recipe.schema import Recipe
    from .runs.status import RunStatus
    from .sdk import Run, check, compose, launch, plan, render
    from .targets.base import Artifacts, Finding

__version__ = "0.1.0"

_HOMES = {
    "sdk": ("Run", "check", "compose", "launch", "plan", "render"),
    "errors": ("AwsRefused", "ChecksFailed", "ChimeraError", "RecipeError", "RunFailed", "RunStopped", "UsageError"),
    "planner.types": ("Plan",),
    "recipe.schema": ("Recipe",),
    "runs.status": ("RunStatus",),
    "targets.base": ("Artifacts", "Finding"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Artifacts",
    "AwsRefused",
    "ChecksFailed",
    "ChimeraError",
    "Finding",
    "Plan",
    "Recipe",
    "RecipeError",
    "Run",
    "RunFailed",
    "RunStatus",
    "RunStopped",
    "UsageError",
    "check",
    "compose",
    "launch",
    "plan",
    "render",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'chimera_sm' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"chimera_sm.{module}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
