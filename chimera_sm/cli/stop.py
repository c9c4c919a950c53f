"""`stop`: save and stop."""

from __future__ import annotations

import click

from .options import json_option, print_json, run_argument


@click.command(name="stop")
@run_argument
@json_option
def command(run_id: str, as_json: bool) -> None:
    """Ask RUN to save its state and stop. `resume` goes on from there."""
    from chimera_sm.runs.progress import describe
    from chimera_sm.sdk import Run

    run = Run.attach(run_id)
    before = run.status()
    idle = before.ended or before.needs_resume
    if not idle:
        run.stop()
    if as_json:
        print_json({"run_id": run.id, "asked": not idle, "state": run.status().state})
    elif idle:
        click.echo(f"{run.id} is not running: {describe(before)}")
    else:
        click.echo(f"{run.id} was asked to stop")
