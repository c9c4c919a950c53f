"""Which files of a folder travel: what git would track, less what .chimeraignore names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IGNORE_FILES = (".gitignore", ".chimeraignore")
"""Later ones win over earlier ones of the same folder; deeper folders win over higher ones, as in git."""
ALWAYS = frozenset({".git", "__pycache__", ".venv", ".DS_Store", ".ipynb_checkpoints"})


@dataclass(frozen=True)
class _Rules:
    folder: Path
    spec: Any

    @classmethod
    def of(cls, folder: Path) -> _Rules | None:
        import pathspec

        lines = [
            line
            for name in IGNORE_FILES
            if (folder / name).is_file()
            for line in (folder / name).read_text("utf-8", "replace").splitlines()
        ]
        return cls(folder, pathspec.GitIgnoreSpec.from_lines(lines)) if lines else None

    def verdict(self, path: Path, is_folder: bool) -> bool | None:
        """True: ignored; False: expressly not; None: says nothing."""
        relative = path.relative_to(self.folder).as_posix() + ("/" if is_folder else "")
        ignored: bool | None = self.spec.check_file(relative).include
        return ignored


def walk(root: Path) -> Iterator[Path]:
    """The files (and links) under `root` that are not ignored, sorted. Links are not followed."""
    yield from _walk(root, _above(root))


def _above(root: Path) -> tuple[_Rules, ...]:
    """The rules of the folders above `root`, up to the top of its git repository, nearest first."""
    parents = list(root.parents)
    top = next((i for i, folder in enumerate([root, *parents]) if (folder / ".git").exists()), 0)
    return tuple(rules for folder in parents[:top] if (rules := _Rules.of(folder)))


def _walk(folder: Path, rules: tuple[_Rules, ...]) -> Iterator[Path]:
    own = _Rules.of(folder)
    rules = (own, *rules) if own else rules
    for entry in sorted(os.scandir(folder), key=lambda e: e.name):
        path = folder / entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        if entry.name in ALWAYS or entry.name.endswith(".pyc"):
            continue
        verdicts = (rule.verdict(path, is_folder) for rule in rules)
        if next((v for v in verdicts if v is not None), False):
            continue
        if is_folder:
            yield from _walk(path, rules)
        else:
            yield path
