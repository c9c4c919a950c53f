"""The other frameworks, pinned, in a virtual environment of their own: none is a dependency of the project."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

TORCH_VERSION = version("torch").partition("+")[0]  # ours, so that all run the same kernels
FOLDER = Path(__file__).parents[1] / ".venvs" / f"peers-torch-{TORCH_VERSION}"
PYTHON = FOLDER / "bin" / "python"
TORCH = f"torch=={TORCH_VERSION}"

WITH_DEPENDENCIES = (
    "transformers==5.24.0",
    "accelerate==1.15.0",
    "lightning==2.6.6",
    "jsonargparse==4.53.0",
    "torchdata==0.11.0",
    "torch_checkpointing==0.1.1",
    "datasets==4.7.0",
    "tyro==1.0.17",
    "tensorboard==2.21.0",
    "einops==0.8.2",
    "pillow==13.0.0",
    "spmd_types==0.2.3",
    "triton",  # torchtitan imports it without a GPU too; torch says which where it needs it
)
ALONE = (
    # wandb, which it wants, is never imported here.
    "torchtitan==0.3.0",
    # It wants an older huggingface-hub than transformers, which its model and loop do not use.
    "litgpt==0.5.13",
)


def python_of_peers() -> Path:
    """Install what is missing, once; the interpreter that runs the drivers."""
    wanted = hashlib.sha256("\n".join((TORCH, *WITH_DEPENDENCIES, *ALONE)).encode()).hexdigest()
    stamp = FOLDER / "installed"
    if not (stamp.exists() and stamp.read_text() == wanted):
        print(f"installing the other frameworks into {FOLDER} (once, some minutes)", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
        pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, TORCH], check=True)
        subprocess.run([*pip, TORCH, *WITH_DEPENDENCIES], check=True)
        subprocess.run([*pip, "--no-deps", *ALONE], check=True)
        stamp.write_text(wanted)
    return PYTHON
