"""Start a run from a model in Hugging Face's format: every rank reads what its shards need, and no more."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import nn

from .checkpoint.ranks import Ranks
from .config import ConfigError, MlRoot, ModelConfig, Problem
from .config.hf_config import differences, read_config
from .config.hf_weights import WeightsFolder
from .model.hf import HfReader
from .model.shards import shards

KEY = "train.initial_weights"


def folder_of(value: str, root: MlRoot) -> Path:
    """What train.initial_weights names: an absolute path, or `<channel>/<folder>` among the input channels."""
    return root.root / "input" / "data" / value


def load_initial_weights(model: nn.Module, config: ModelConfig, folder: Path) -> list[str]:
    """Fill every parameter and buffer of `model`, sharded in whatever way, from `folder`. Collective.

    Returns, in words, where config.json there differs from `config`, which holds. Raises ConfigError, the same on every
    rank, where the folder is not of this model: before any weight is read if the headers tell it. Raises RanksFailed
    where the file system fails.
    """
    ranks = Ranks(workers_per_host=1)
    headers: list[WeightsFolder] = []

    def examine() -> tuple[list[Problem], list[str]]:
        try:
            unlike = differences(read_config(folder), config)
            headers.append(WeightsFolder(folder))
        except ConfigError as error:
            return error.problems, []
        return headers[0].problems(config), unlike

    answers = ranks.together(examine)
    _raise_first(problems for problems, _ in answers)
    reader = HfReader(headers[0], config)

    def fill() -> list[Problem]:
        try:
            for shard in shards(model):
                reader.fill(shard)
        except ConfigError as error:
            return error.problems
        return []

    _raise_first(ranks.together(fill))
    return answers[0][1]


def _raise_first(found: Iterable[list[Problem]]) -> None:
    """Raise what the first rank found that found anything, the same on all."""
    if problems := next((problems for problems in found if problems), []):
        raise ConfigError([Problem(KEY, f"{p.key}: {p.message}", p.fix) for p in problems])
