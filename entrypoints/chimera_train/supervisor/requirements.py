"""Installs what the image lacks, before the first import of it."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .errors import HostError, StopRequested
from .signals import Signals

REQUIREMENTS_VARIABLE = "CHIMERA_REQUIREMENTS"
"""`check` (set by the local target) only checks: a user's own environment is not ours to change."""


def missing_requirements(text: str) -> list[str]:
    """Lines of a requirements file whose distribution is not installed, whatever its version.

    Raises HostError for an option line (`-r`, `--index-url`): pip's own configuration is the place for those.
    """
    missing = []
    for raw in text.splitlines():
        line = re.sub(r"(^|\s)#.*$", "", raw).strip()
        if not line:
            continue
        match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line)
        if match is None:
            raise HostError(f"requirements.txt: {line!r} is no requirement; options belong into pip's configuration")
        try:
            importlib.metadata.distribution(match.group())
        except importlib.metadata.PackageNotFoundError:
            missing.append(line)
    return missing


def install_requirements(code: Path, environment: Mapping[str, str], signals: Signals) -> None:
    """Install what `requirements.txt` names and is missing: from the bundle's `wheels/` if any, else from an index."""
    file = code / "requirements.txt"
    missing = missing_requirements(file.read_text()) if file.is_file() else []
    if not missing:
        return
    if environment.get(REQUIREMENTS_VARIABLE) == "check":
        raise HostError(f"not installed here: {', '.join(missing)}; pip install them, or chimera_sm[train]")
    wheels = code / "wheels"
    source = ["--no-index", "--find-links", str(wheels)] if wheels.is_dir() else []
    command = [sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *source, *missing]
    print(f"chimera: installing {', '.join(missing)}" + (" from the bundle's wheels" if source else ""), flush=True)
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            signals.wait(1.0)
            if signals.stop_requested:
                process.terminate()
                process.wait()
                raise StopRequested
        log.seek(0)
        tail = log.read()[-600:]
    if process.returncode != 0:
        advice = (
            "the bundle's wheels/ lacks it, or holds it for another Python"
            if source
            else "in a network without a way out, put the wheels into the bundle's wheels/"
        )
        raise HostError(f"pip could not install {', '.join(missing)}: {advice}\n{tail}")
