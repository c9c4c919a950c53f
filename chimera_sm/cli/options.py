"""Options and output that several commands share."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from chimera_sm.planner.types import Plan
    from chimera_sm.targets.base import Finding

Command = TypeVar("Command", bound=Callable[..., Any])


def recipe_options(function: Command) -> Command:
    """OVERRIDES and --recipes."""
    function = click.argument("overrides", nargs=-1)(function)
    return click.option(
        "--recipes",
        "recipes",
        multiple=True,
        type=click.Path(),
        metavar="DIR",
        help="Folder of your team's recipes, searched before the shipped ones. May be given more than once.",
    )(function)


def json_option(function: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else on stdout.")(function)


def run_argument(function: Command) -> Command:
    return click.argument("run_id", metavar="RUN", default="last")(function)


def print_json(value: Any) -> None:
    """JSON has no NaN: what is not finite is null."""
    click.echo(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def print_findings(plan: Plan, findings: Sequence[Finding]) -> None:
    """One line a finding; what set its key and the fix below it."""
    from chimera_sm.sdk import said

    for finding in findings:
        click.echo(f"{finding.severity}: {said(plan, finding)}")
