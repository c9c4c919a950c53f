"""The corpus that every machine has: the source code of the running Python's standard library."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from .errors import DataError
from .sources import InputFile

_LEFT_OUT = {
    "site-packages",  # not the standard library
    "dist-packages",
    "__pycache__",
    "test",  # as large as the rest, and Debian packages it apart: the corpus would differ from machine to machine
    "tests",
    "idle_test",
    "encodings",  # a tenth of the corpus, nearly all of it code-page tables
}


def stdlib_inputs() -> list[InputFile]:
    """Every UTF-8 `.py` file under the standard library's folder, sorted; tests and installed packages left out."""
    root = Path(sysconfig.get_path("stdlib"))
    inputs = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - _LEFT_OUT)
        for name in sorted(files):
            path = Path(folder, name)
            if name.endswith(".py") and _is_utf8(path):
                stat = path.stat()
                inputs.append(InputFile(str(path), "text", stat.st_size, stat.st_mtime_ns))
    if not inputs:
        raise DataError(
            f"{root} holds no .py file: this Python keeps its standard library elsewhere (in an archive)",
            "use a Python that was installed with its sources, or give --source a folder of text",
        )
    return inputs


def stdlib_description() -> str:
    return f"standard library of Python {sys.version.split()[0]}"


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
