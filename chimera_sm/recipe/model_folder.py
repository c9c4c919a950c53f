"""A recipe's model out of a folder of this machine: `model=hf model.path=FOLDER`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from chimera_train.config import ConfigError, Problem
from chimera_train.config.contract import MODEL_CHANNEL
from chimera_train.config.hf_config import CONFIG_FILE, read_config

from .origins import Setting

if TYPE_CHECKING:
    from omegaconf import DictConfig


def fill_from_model_folder(config: DictConfig) -> list[Setting]:
    """Fill the section `model` of a composed configuration from the config.json in `model.path`, under what the recipe
    sets itself; and train.initial_weights, where it is not set, with where the run finds the weights.

    `config` is open to new keys. Returns who set what. Raises ConfigError.
    """
    model, train = config.get("model"), config.get("train")
    if not hasattr(model, "get") or not hasattr(train, "get"):
        return []  # decoding says what is wrong
    from omegaconf import OmegaConf

    if OmegaConf.is_missing(model, "path"):
        raise ConfigError([Problem("model.path", "must be set", "model.path=…")])
    path, uri = model.get("path"), model.get("weights_uri")
    settings: list[Setting] = []
    if isinstance(path, str):
        folder = Path(path).expanduser().resolve()
        try:
            section = read_config(folder)
        except ConfigError as error:
            raise ConfigError([Problem("model.path", f"{p.key}: {p.message}", p.fix) for p in error.problems]) from None
        settings += [(None, f"model.{key}", str(folder / CONFIG_FILE)) for key in section]
        config.model = OmegaConf.merge(section, model)
    if "initial_weights" not in train and (path is not None or uri is not None):
        local = config.target.get("name") == "local"
        if local and path is not None:
            train.initial_weights = str(Path(str(path)).expanduser().resolve())
            settings.append((None, "train.initial_weights", "model.path"))
        elif uri is not None:
            train.initial_weights = MODEL_CHANNEL
            settings.append((None, "train.initial_weights", "model.weights_uri"))
        else:
            message = f"is required: model.path={path} is a folder of this machine, which the job cannot read"
            fix = (
                "an S3 prefix or a folder of env.fsx_file_system_id with the same files, or train.initial_weights=null "
                "to start from random weights"
            )
            raise ConfigError([Problem("model.weights_uri", message, fix)])
    return settings
