"""Accelerators of this host, counted without importing torch."""

from __future__ import annotations

import glob
import shutil
import subprocess
from collections.abc import Mapping

from .errors import HostError


def count_accelerators(environment: Mapping[str, str]) -> int:
    """GPUs that a worker would see: what the driver lists, cut down to CUDA_VISIBLE_DEVICES where that is set."""
    found = _listed_by_driver()
    if found is None:
        found = len(glob.glob("/dev/nvidia[0-9]*"))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    return min(found, len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")]))


def _listed_by_driver() -> int | None:
    """Lines of `nvidia-smi -L`, or None where it is missing or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def check_accelerators(workers: int, found: int, expected: bool) -> None:
    """Raise HostError where the workers planned for this host have no accelerator each.

    `expected`: the plan knows the accelerator's peak, so a host without one is broken and must not train on its CPU.
    """
    if found < workers and (found or expected):
        raise HostError(
            f"the recipe was planned for {workers} workers on this host, one an accelerator, but only {found} "
            "accelerators were found (nvidia-smi -L, CUDA_VISIBLE_DEVICES); "
            "check the instance type, or set instances.workers_per_host"
        )
