"""The code bundle (contract; see below)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bundle:
    """The files that travel to the machines, by path inside the bundle.

    `files` maps the path ("launch.py", "chimera_train/loop.py", "recipe.json") to its bytes.
    """

    files: dict[str, bytes]

    @property
    def sha256(self) -> str:
        """Content address: over paths and bytes, independent of times, modes and of where the files lay."""
        raise NotImplementedError

    @property
    def manifest(self) -> dict[str, Any]:
        """`{"sha256": …, "files": [{"path", "size", "sha256"}…]}`, sorted by path."""
        raise NotImplementedError
