"""`status`: how a run is doing."""

from __future__ import annotations

import click

from .options import json_option, print_json, run_argument


@click.command(name="status")
@run_argument
@json_option
def command(run_id: str, as_json: bool) -> None:
    """Say how RUN is doing (the newest one by default)."""
    from chimera_sm.runs.progress import describe
    from chimera_sm.sdk import Run
    from chimera_train.config import encode

    run = Run.attach(run_id)
    status = run.status()
    if as_json:
        print_json({"run_id": run.id, **encode(status)})
    else:
        click.echo(f"{run.id}: {describe(status)}")
