"""`check`: everything that would go wrong, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence

import click

from chimera_sm.errors import EXIT_CHECKS, EXIT_DONE

from .options import json_option, print_findings, print_json, recipe_options


@click.command(name="check")
@recipe_options
@json_option
def command(overrides: Sequence[str], recipes: Sequence[str], as_json: bool) -> int:
    """Run every offline check on a recipe. Exits 3 when one finds an error."""
    from chimera_sm import sdk
    from chimera_train.config import encode

    plan = sdk.plan(sdk.compose(overrides, recipes=recipes))
    findings = sdk.check(plan)
    if as_json:
        print_json(encode(findings))
    else:
        print_findings(plan, findings)
        count = sum(f.severity == "error" for f in findings)
        click.echo(f"{count} error{'s' * (count != 1)}, {len(findings) - count} other findings")
    return EXIT_CHECKS if any(f.severity == "error" for f in findings) else EXIT_DONE
