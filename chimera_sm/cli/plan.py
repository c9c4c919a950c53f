"""`plan`: what a recipe will need, take and cost."""

from __future__ import annotations

from collections.abc import Sequence

import click

from .options import json_option, print_json, recipe_options


@click.command(name="plan")
@recipe_options
@json_option
def command(overrides: Sequence[str], recipes: Sequence[str], as_json: bool) -> None:
    """Predict memory, step time, days and dollars of a recipe. Opens no connection and needs no GPU."""
    from chimera_sm import sdk
    from chimera_sm.planner.render_text import format_plan

    plan = sdk.plan(sdk.compose(overrides, recipes=recipes))
    if as_json:
        print_json(plan.to_json())
    else:
        click.echo(format_plan(plan))
