"""`generate`: text sampled from a run's model."""

from __future__ import annotations

import click

from chimera_sm.errors import UsageError

from .container import cli_code, run_module
from .options import json_option, run_argument


@click.command(name="generate")
@run_argument
@click.option("--prompt", default="def ", show_default=True, help="Text to go on from.")
@click.option("--max-new-tokens", type=int, help="120 by default, or what the model's context leaves.")
@click.option("--temperature", type=float, default=0.8, show_default=True, help="0 always takes the likeliest token.")
@click.option(
    "--top-k", type=int, default=50, show_default=True, help="Sample from the K likeliest tokens; 0 from all."
)
@click.option("--seed", type=int, default=0, show_default=True)
@json_option
def command(
    run_id: str, prompt: str, max_new_tokens: int | None, temperature: float, top_k: int, seed: int, as_json: bool
) -> int:
    """Sample text from the newest checkpoint of RUN."""
    from chimera_sm.sdk import Run

    run = Run.attach(run_id)
    files = run.target.model_files(run.record)
    if files.tokenizer is None:
        raise UsageError(f"the shards of {run.id} have no tokenizer.json: text cannot be made from its tokens")
    arguments = ["--checkpoints", str(files.checkpoints), "--recipe", str(files.recipe)]
    arguments += ["--tokenizer", str(files.tokenizer), "--seed", str(seed), "--top-k", str(top_k)]
    arguments.append(f"--prompt={prompt}")  # a prompt may begin with a hyphen
    arguments += ["--temperature", str(temperature)]
    if max_new_tokens is not None:
        arguments += ["--max-new-tokens", str(max_new_tokens)]
    if as_json:
        arguments.append("--json")
    code = run_module("chimera_train.generate", arguments)
    return cli_code(code, f"no text from {run.id}")
