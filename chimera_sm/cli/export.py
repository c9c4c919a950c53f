"""`export`: a run's model in Hugging Face format."""

from __future__ import annotations

import click

from chimera_sm.errors import EXIT_DONE, RunFailed

from .container import run_module
from .options import run_argument


@click.command(name="export")
@run_argument
@click.option("--out", required=True, type=click.Path(), metavar="FOLDER", help="New folder for the model.")
@click.option("--step", type=int, help="Checkpoint to export; the newest complete one by default.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="bfloat16", show_default=True)
def command(run_id: str, out: str, step: int | None, dtype: str) -> int:
    """Write the model of RUN (its newest checkpoint) as config.json, safetensors and tokenizer."""
    from chimera_sm.sdk import Run

    run = Run.attach(run_id)
    files = run.target.model_files(run.record)
    arguments = ["--checkpoints", str(files.checkpoints), "--recipe", str(files.recipe), "--out", out, "--dtype", dtype]
    if step is not None:
        arguments += ["--step", str(step)]
    if files.tokenizer is not None:
        arguments += ["--tokenizer", str(files.tokenizer)]
    if run_module("chimera_train.export", arguments) != EXIT_DONE:
        raise RunFailed(f"the export of {run.id} failed; nothing else was touched")
    return EXIT_DONE
