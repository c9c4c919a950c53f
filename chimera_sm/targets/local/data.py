"""The shards and weights that a local run reads: where they are, whether they do, and how the demo's corpus is made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from chimera_sm.errors import EXIT_USAGE, UsageError
from chimera_sm.paths import cache_dir, entrypoints_dir
from chimera_train.config import ConfigError, ModelConfig
from chimera_train.config.contract import ERROR_FILE_VARIABLE
from chimera_train.config.hf_config import read_config
from chimera_train.config.hf_weights import WeightsFolder

from .job import Channel
from .process import end_with_parent
from .shards import shards_problem

DATASET_FILE = "dataset.json"


def channel_folder(channel: Channel) -> Path:
    """The folder that hosts see as the channel."""
    if channel.location == "stdlib":
        version = f"py{sys.version_info.major}.{sys.version_info.minor}"
        return cache_dir() / "data" / f"stdlib-{version}-v{channel.vocab_size}"
    assert channel.uri is not None, "the recipe's validation requires it"
    return Path(channel.uri).expanduser().resolve()


def is_prepared(channel: Channel) -> bool:
    return (channel_folder(channel) / channel.path / DATASET_FILE).is_file()


def check_shards(
    channel: Channel, model_vocab_size: int, *, vocab_size: int | None = None, sequence_length: int = 1
) -> str | None:
    """What is wrong with the shards, in words. A stdlib corpus that is not there yet will be prepared.

    `vocab_size`: what the recipe says of the tokenizer, if it does. Tokens themselves are not read.
    """
    folder = channel_folder(channel) / channel.path
    file = folder / DATASET_FILE
    if not file.is_file():
        if channel.location == "stdlib":
            return None
        if not folder.is_dir():
            return f"data.uri: no folder {folder}"
        return f"data.uri: {folder} holds no {DATASET_FILE}; make shards with `chimera_sm data prepare`"
    try:
        dataset = json.loads(file.read_bytes())
        found = int(dataset["vocab_size"])
    except (OSError, ValueError, LookupError, TypeError):
        return f"data.uri: {file} is damaged; prepare the shards anew"
    if found > model_vocab_size:
        return f"model.vocab_size={model_vocab_size} is smaller than the {found} of the tokenizer that made {folder}"
    if vocab_size is not None and channel.location != "stdlib" and found != vocab_size:
        return f"data.vocab_size={vocab_size} is not the {found} of the tokenizer that made {folder}"
    if problem := shards_problem(folder, dataset):
        return f"data.uri: {problem}; copy the shards again, or prepare them anew"
    if dataset["num_tokens"] <= sequence_length:
        return (
            f"train.sequence_length={sequence_length} needs {sequence_length + 1} tokens a sample, "
            f"and {folder} holds {dataset['num_tokens']}"
        )
    return None


def num_samples(channel: Channel, sequence_length: int) -> int | None:
    """Samples an epoch; None where the shards are not there yet, or are damaged."""
    try:
        dataset = json.loads((channel_folder(channel) / channel.path / DATASET_FILE).read_bytes())
        return (int(dataset["num_tokens"]) - 1) // sequence_length
    except (OSError, ValueError, LookupError, TypeError):
        return None


def check_held_out(channel: Channel, sources: Mapping[str, str]) -> str | None:
    """What is wrong with the folders of `evaluation.sources`, in words, where the training data itself is there."""
    if not is_prepared(channel):
        return None
    for name, path in sources.items():
        key, folder = f"evaluation.sources.{name}", channel_folder(channel) / path
        try:
            dataset = json.loads((folder / DATASET_FILE).read_bytes())
        except FileNotFoundError:
            return (
                f"{key}: no held-out documents in {folder}; prepare the data with `--held-out PERCENT`, "
                "or train without them: evaluation=none"
            )
        except (OSError, ValueError):
            return f"{key}: {folder / DATASET_FILE} is damaged; prepare the shards anew"
        if problem := shards_problem(folder, dataset):
            return f"{key}: {problem}; copy the shards again, or prepare them anew"
    return None


def check_initial_weights(model: ModelConfig, initial_weights: str | None) -> str | None:
    """What is wrong with the files of the model to start from, in words, by their headers."""
    if initial_weights is None or not os.path.isabs(initial_weights):
        return None
    try:
        read_config(Path(initial_weights))
        problems = WeightsFolder(Path(initial_weights)).problems(model)
    except ConfigError as error:
        problems = error.problems
    first = next(iter(problems), None)
    if first is None:
        return None
    return f"train.initial_weights: {first.key}: {first.message}" + (f" ({first.fix})" if first.fix else "")


def prepare_corpus(channel: Channel) -> None:
    """Make the stdlib corpus and its tokenizer, once a machine; shows its own progress on stderr. Raises UsageError
    with the reason."""
    folder = channel_folder(channel)
    command = [sys.executable, "-m", "chimera_train.data.prepare", "--source", "stdlib"]
    command += ["--train-tokenizer", str(channel.vocab_size), "--output", str(folder)]
    path = os.pathsep.join(p for p in (str(entrypoints_dir()), os.environ.get("PYTHONPATH", "")) if p)
    with tempfile.TemporaryDirectory(prefix="chimera-") as scratch:
        error_file = Path(scratch) / "error.json"
        environment = {**os.environ, "PYTHONPATH": path, ERROR_FILE_VARIABLE: str(error_file)}
        done = subprocess.run(command, env=environment, stdout=2, preexec_fn=end_with_parent, check=False)
        if done.returncode == 0:
            return
        try:
            reason = json.loads(error_file.read_bytes())["message"]
        except (OSError, ValueError, LookupError, TypeError):  # it was killed, or met what nobody foresaw
            reason = f"exit code {done.returncode}"
            reason = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"{reason}; see above"
    # What is wrong with the input or the recipe is as wrong the next time.
    again = done.returncode != EXIT_USAGE
    raise UsageError(
        f"the corpus could not be prepared in {folder}: {reason}",
        fix="launch again once that is mended: what is done is kept" if again else "",
    )
