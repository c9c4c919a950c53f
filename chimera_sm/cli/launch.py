"""`launch`: plan, check, ask once, run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from chimera_sm.errors import AwsRefused, UsageError

from .follow import follow
from .options import is_terminal, json_option, print_findings, recipe_options

if TYPE_CHECKING:
    from chimera_sm.planner.types import Plan
    from chimera_sm.targets.base import Artifacts


@click.command(name="launch")
@recipe_options
@click.option("--dry-run", is_flag=True, help="Show all that would be sent, and send nothing. Needs no credentials.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="With --dry-run: a folder, made if missing, for all that would be sent, a file each.",
)
@click.option("--yes", is_flag=True, help="Do not ask before spending money.")
@click.option("--detach", is_flag=True, help="Return when the run is submitted (the default away from this machine).")
@click.option(
    "--run-id", help="Id of the run. That of a launch whose submit failed takes it up again; nothing starts twice."
)
@json_option
def command(
    overrides: Sequence[str],
    recipes: Sequence[str],
    dry_run: bool,
    out: Path | None,
    yes: bool,
    detach: bool,
    run_id: str | None,
    as_json: bool,
) -> int | None:
    """Plan a recipe, check it, and run it on its target.

    With --dry-run --json, stdout is the exact request and nothing else.
    """
    from chimera_sm import sdk, targets
    from chimera_sm.planner.render_text import format_plan

    if out is not None and not dry_run:
        raise UsageError("--out keeps what a dry run shows", fix="add --dry-run, or leave --out out")
    plan = sdk.plan(sdk.compose(overrides, recipes=recipes))
    target = targets.get(plan.recipe.target.name)
    if dry_run:
        _dry_run(plan, sdk.render(plan, run_id), out, as_json)
        return None
    if not as_json:
        click.echo(format_plan(plan))
    try:
        sdk.refuse(target, plan, sdk.render(plan))
    except AwsRefused as error:
        raise AwsRefused(
            error.message, fix="set them in your team's env/*.yaml; --dry-run shows all that would be sent without them"
        ) from None
    if not _agreed(plan, yes):
        raise click.Abort
    run = sdk.launch(plan, run_id=run_id, on_record=lambda run_id: click.echo(f"run {run_id}", err=as_json))
    if as_json:
        click.echo(json.dumps({"run_id": run.id}))
    if detach or as_json or plan.recipe.target.name != "local":
        if not as_json:
            click.echo(f"submitted; chimera_sm status {run.id} says how it does")
        return None
    return follow(run)


def _dry_run(plan: Plan, artifacts: Artifacts, out: Path | None, as_json: bool) -> None:
    from chimera_sm import sdk, targets
    from chimera_sm.planner.render_text import format_plan

    findings = sdk.check(plan, artifacts)
    sdk.raise_errors(plan, findings)
    request = artifacts.files[targets.get(artifacts.target).request_file]
    if out is not None:
        _write(artifacts.files, out)
    if as_json:
        click.echo(request.decode(), nl=False)
        return
    click.echo(format_plan(plan))
    print_findings(plan, findings)
    for name, content in artifacts.files.items():
        click.echo(f"\n--- {name} ({len(content):,} bytes)")
        if content is request:
            click.echo(content.decode(), nl=False)
    for placeholder in artifacts.placeholders:
        click.echo(f"placeholder for {placeholder.key}: {placeholder.value}")


def _write(files: Mapping[str, bytes], out: Path) -> None:
    for name, content in files.items():
        path = out / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError as error:
            raise UsageError(f"--out {out}: {path} cannot be written: {error.strerror}") from None


def _agreed(plan: Plan, yes: bool) -> bool:
    """Ask once before money is spent. Where nobody can be asked, --yes has to say it."""
    if yes or plan.recipe.target.name == "local":
        return True
    if not is_terminal():
        raise UsageError("launch spends money and there is no terminal to ask on", fix="add --yes, or --dry-run")
    cost = next((c for c in plan.costs if c.chosen), None)
    price = "at an unknown price"
    if cost and cost.usd_per_hour is not None:
        price = f"at ${cost.usd_per_hour:,.2f} an hour"
        if cost.usd is not None:
            price += f", about ${cost.usd.p50:,.0f} in all (${cost.usd.p10:,.0f} to ${cost.usd.p90:,.0f})"
    choice = plan.recipe.instances
    return click.confirm(f"Launch {choice.count} × {choice.type} {price}?", default=False)
