"""`export`: a run's model in Hugging Face format."""

from __future__ import annotations

from pathlib import Path

import click

from chimera_sm.errors import EXIT_DONE, UsageError

from .container import cli_code, run_module
from .options import json_option, print_json, run_argument


@click.command(name="export")
@run_argument
@click.option("--out", required=True, type=click.Path(), metavar="FOLDER", help="New folder for the model.")
@click.option("--step", type=int, help="Checkpoint to export; the newest complete one by default.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="bfloat16", show_default=True)
@json_option
def command(run_id: str, out: str, step: int | None, dtype: str, as_json: bool) -> int:
    """Write the model of RUN (its newest checkpoint) as config.json, safetensors and tokenizer."""
    from chimera_sm.sdk import Run

    if Path(out).is_file() or (Path(out).is_dir() and any(Path(out).iterdir())):
        raise UsageError(f"--out {out} is there and not empty; nothing is overwritten", fix="name a new folder")
    run = Run.attach(run_id)
    files = run.target.model_files(run.record)
    arguments = [
        "--checkpoints",
        str(files.checkpoints),
        "--recipe",
        str(files.recipe),
        f"--out={out}",
        "--dtype",
        dtype,
    ]
    if step is not None:
        arguments += ["--step", str(step)]
    if files.tokenizer is not None:
        arguments += ["--tokenizer", str(files.tokenizer)]
    code = run_module("chimera_train.export", arguments, quiet=as_json)
    code = cli_code(code, f"no export of {run.id}")
    if as_json and code == EXIT_DONE:
        print_json({"run_id": run.id, "out": out, "dtype": dtype})
    return code
