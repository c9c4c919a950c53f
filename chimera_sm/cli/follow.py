"""Watch a run in the foreground; Ctrl-C asks it to save and stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from chimera_sm.errors import EXIT_DONE

if TYPE_CHECKING:
    from chimera_sm.sdk import Run


def follow(run: Run) -> int:
    """Show progress until the run ends. The exit code, or the error of a run that failed or was stopped."""
    from chimera_sm.runs.progress import watch
    from chimera_sm.sdk import finished

    try:
        status = watch(run.status)
    except KeyboardInterrupt:
        click.echo("stopping: the run saves its state first (Ctrl-C again leaves it to itself)", err=True)
        run.stop()
        status = watch(run.status)
    finished(run.id, status)
    click.echo(f"run {run.id} completed")
    return EXIT_DONE
