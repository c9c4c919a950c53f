"""`data prepare`: text to tokenised shards."""

from __future__ import annotations

from collections.abc import Sequence

import click

from .container import run_module


@click.group(name="data")
def command() -> None:
    """Turn text into tokenised shards."""


@command.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def prepare(arguments: Sequence[str]) -> int:
    """Tokenise text, JSONL (plain, gzip, zstd) or Parquet into Megatron .bin/.idx shards.

    `data prepare --help` lists the options.
    """
    return run_module("chimera_train.data.prepare", arguments)
