"""Where the shipped folders are: inside an installed wheel, or at the root of a checkout."""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _shipped(name: str) -> Path:
    packaged = _PACKAGE / f"_{name}"
    return packaged if packaged.is_dir() else _PACKAGE.parent / name


def recipes_dir() -> Path:
    """The shipped Hydra configuration."""
    return _shipped("recipes")


def entrypoints_dir() -> Path:
    """What is shipped into the container."""
    return _shipped("entrypoints")


def runs_dir() -> Path:
    """Records of launches: `CHIMERA_RUNS`, or `runs/` in the current folder."""
    return Path(os.environ.get("CHIMERA_RUNS") or "runs")


def cache_dir() -> Path:
    """Prepared corpora: `CHIMERA_CACHE`, or the user's cache folder."""
    if chosen := os.environ.get("CHIMERA_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chimera_sm"
