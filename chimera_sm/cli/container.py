"""Commands that need what the container has (torch, tokenizers): run as a subprocess of the entrypoints."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence


def run_module(module: str, arguments: Sequence[str], *, quiet: bool = False) -> int:
    """`python -m module arguments` with the entrypoints on the path; its exit code. Ctrl-C is the child's to handle.

    `quiet` sends what it prints to stderr, so that stdout is the caller's.
    """
    from chimera_sm.paths import entrypoints_dir

    path = os.pathsep.join(p for p in (str(entrypoints_dir()), os.environ.get("PYTHONPATH", "")) if p)
    child = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        stdout=sys.stderr if quiet else None,
    )
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue
