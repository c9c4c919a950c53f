"""One worker of a training job.

    torchrun --nproc-per-node 2 train.py      (launch.py does the same)

Needs torchrun's environment variables, or none for a single process, and the recipe: `recipe.json` beside this file,
or the file that CHIMERA_RECIPE names. Exit codes: 0 finished, 143 stopped with state saved, 1 failed, 75 failed but
worth a retry.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from chimera_train import flight_recorder
from chimera_train.config import ConfigError, MlRoot, Problem, RecipeFile, decode
from chimera_train.config.contract import RECIPE_FILE, RUN_ID_VARIABLE
from chimera_train.signals import ProfileRequest, StopRequest
from chimera_train.worker_errors import leave

RECIPE_VARIABLE = "CHIMERA_RECIPE"


def read_recipe(path: Path) -> RecipeFile:
    """Read and validate; raises ConfigError."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError([Problem(str(path), f"cannot be read as JSON: {error}")]) from error
    recipe_file = decode(RecipeFile, data)
    problems = recipe_file.recipe.validate()
    if problems:
        raise ConfigError(problems)
    return recipe_file


def run(stop: StopRequest, profile: ProfileRequest) -> int:
    recipe_file = read_recipe(Path(os.environ.get(RECIPE_VARIABLE) or Path(__file__).with_name(RECIPE_FILE)))
    flight_recorder.enable(MlRoot())
    # Torch takes seconds to load; a signal in that time must find the handler, a bad recipe need not wait for it.
    import torch.distributed

    from chimera_train.distributed import start, worker_from
    from chimera_train.loop import Trainer

    train = recipe_file.recipe.train
    worker = worker_from(os.environ, recipe_file.layout)
    start(worker, collective_timeout_s=train.collective_timeout_s, deterministic=train.deterministic)
    run_id = os.environ.get(RUN_ID_VARIABLE) or recipe_file.recipe.name
    code = Trainer(recipe_file, worker, MlRoot(), run_id).run(stop, profile)
    torch.distributed.destroy_process_group()
    return code


def main() -> int:
    stop, profile = StopRequest().install(), ProfileRequest().install()
    try:
        return run(stop, profile)
    except BaseException as error:
        leave(error, rank=int(os.environ.get("RANK", "0")))


if __name__ == "__main__":
    sys.exit(main())
