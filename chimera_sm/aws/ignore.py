"""Which files of a folder travel: what git would track, less what .chimeraignore names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chimera_sm.errors import UsageError

IGNORE_FILES = (".gitignore", ".chimeraignore")
"""Later ones win over earlier ones of the same folder; deeper folders win over higher ones, as in git."""
ALWAYS = frozenset({".git", "__pycache__", ".venv", ".DS_Store", ".ipynb_checkpoints"})


@dataclass(frozen=True)
class _Rules:
    folder: Path
    spec: Any

    @classmethod
    def of(cls, folder: Path) -> _Rules | None:
        """The rules of the folder's own files, or None where it has none. Raises UsageError, as `read` does."""
        return cls.read(folder, [folder / name for name in IGNORE_FILES])

    @classmethod
    def read(cls, folder: Path, files: Iterable[Path]) -> _Rules | None:
        """The patterns of `files`, relative to `folder`. Raises UsageError with the line of one that is no pattern."""
        import pathspec

        patterns: list[Any] = []
        for file in files:
            if not file.is_file():
                continue
            for number, line in enumerate(file.read_text("utf-8", "replace").splitlines(), 1):
                try:
                    patterns += pathspec.GitIgnoreSpec.from_lines([line]).patterns
                except (ValueError, re.error) as error:
                    raise UsageError(
                        f"{file}:{number}: {line!r} is no pattern of a gitignore file ({error})",
                        fix="mend the line, or take it out",
                    ) from error
        return cls(folder, pathspec.GitIgnoreSpec(patterns)) if patterns else None

    def verdict(self, path: Path, is_folder: bool) -> bool | None:
        """True: ignored; False: expressly not; None: says nothing."""
        relative = path.relative_to(self.folder).as_posix() + ("/" if is_folder else "")
        ignored: bool | None = self.spec.check_file(relative).include
        return ignored


def walk(root: Path) -> Iterator[Path]:
    """The files (and links) under `root` that are not ignored, sorted. Links are not followed."""
    yield from _walk(root, _above(root))


def _above(root: Path) -> tuple[_Rules, ...]:
    """The rules of the folders above `root`, up to the top of its git repository, nearest first; the repository's own
    `info/exclude` comes last, as in git."""
    parents = list(root.parents)
    top = next((i for i, folder in enumerate([root, *parents]) if (folder / ".git").exists()), None)
    if top is None:
        return ()
    repository = [root, *parents][top]
    found = [_Rules.of(folder) for folder in parents[:top]]
    found.append(_Rules.read(repository, [_git_folder(repository) / "info" / "exclude"]))
    return tuple(rules for rules in found if rules)


def _git_folder(repository: Path) -> Path:
    """`.git`, or what it names: in a worktree or submodule it is a file, and a worktree shares the main one's info."""
    git = repository / ".git"
    if git.is_file():
        git = repository / git.read_text().removeprefix("gitdir:").strip()
        if (git / "commondir").is_file():
            git = git / (git / "commondir").read_text().strip()
    return git


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
