"""`runs`: what was launched from here."""

from __future__ import annotations

import click

from chimera_sm.errors import UsageError

from .options import json_option, print_json


@click.command(name="runs")
@json_option
def command(as_json: bool) -> None:
    """List the runs recorded in CHIMERA_RUNS (or ./runs), oldest first."""
    from chimera_sm.runs.record import RunRecord

    rows = []
    for run_id in RunRecord.list_ids():
        try:
            lock = RunRecord.find(run_id).lock
        except UsageError as error:
            click.echo(f"warning: {error.message}", err=True)
            continue
        rows.append({"run_id": run_id, "target": lock["target"], "created": lock["created"]})
    if as_json:
        print_json(rows)
        return
    for row in rows:
        click.echo(f"{row['created']}  {row['target']:<10}  {row['run_id']}")
