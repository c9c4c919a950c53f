"""`logs`: a run's log."""

from __future__ import annotations

import json

import click

from .options import json_option, run_argument


@click.command(name="logs")
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends.")
@json_option
def command(run_id: str, follow: bool, as_json: bool) -> None:
    """Print the log of RUN. With --json, one string a line."""
    from chimera_sm.sdk import Run

    for line in Run.attach(run_id).logs(follow=follow):
        click.echo(json.dumps(line) if as_json else line)
