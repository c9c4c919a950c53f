"""`resume`: go on from the newest complete checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import click

from .follow import follow
from .options import json_option, print_json, run_argument


@click.command(name="resume")
@run_argument
@click.argument("overrides", nargs=-1)
@click.option("--detach", is_flag=True, help="Return at once.")
@json_option
def command(run_id: str, overrides: Sequence[str], detach: bool, as_json: bool) -> int | None:
    """Go on with RUN from its newest complete checkpoint.

    OVERRIDES (KEY=VALUE) change the recorded recipe: another layout, batch, learning rate or number of steps (a
    completed run goes on to more). Parameters, optimizer and the place in the data are resharded. What the checkpoint
    cannot honour is refused: another model, data, sequence length, seed, or kind of optimizer.
    """
    from chimera_sm.sdk import Run

    run = Run.attach(run_id).resume(overrides, on_note=lambda note: click.echo(note, err=True))
    if as_json:
        print_json({"run_id": run.id, "state": run.status().state})
        return None
    if detach or run.target.name != "local":
        click.echo(f"{run.id} goes on; chimera_sm status {run.id} says how it does")
        return None
    return follow(run)
