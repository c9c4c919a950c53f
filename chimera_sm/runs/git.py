"""Which commit a launch was made from."""

from __future__ import annotations

import subprocess
from typing import Any


def describe_checkout() -> dict[str, Any] | None:
    """Commit of the current folder's checkout and whether it has uncommitted changes; None outside of git."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return None if commit is None else {"commit": commit, "dirty": bool(git("status", "--porcelain"))}
