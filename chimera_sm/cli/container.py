"""Commands that need what the container has (torch, tokenizers): run as a subprocess of the entrypoints."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from chimera_sm.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_RUN_FAILED, EXIT_USAGE, RunFailed


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


def cli_code(code: int, what: str) -> int:
    """Our exit code for one of `run_module`, which has said itself what was wrong. Raises RunFailed with `what` did not
    come about where a signal ended it: then nothing was said."""
    if code < 0:
        raise RunFailed(f"{what}: killed by signal {-code}")
    return code if code in (EXIT_DONE, EXIT_USAGE, EXIT_INTERRUPTED) else EXIT_RUN_FAILED
