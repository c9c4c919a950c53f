"""Which file and line, or which override, set a value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

Setting = tuple[Path | None, str, str]
"""(file, package, "") for a file, (None, key, what set it) for a value, in the order of merging."""


class Origins(Mapping[str, str]):
    """Dotted key → "file:line", "override KEY=VALUE" or the like, of the last setting, which wins.

    Worked out on the first look-up: a recipe without errors never pays for it.
    """

    def __init__(self, settings: Callable[[], Sequence[Setting]]):
        self._settings = settings

    def __getstate__(self) -> dict[str, dict[str, list[str]]]:
        """A recipe may travel to another process; the loader behind it may not."""
        return {"_history": self._history}

    def history(self, key: str) -> list[str]:
        """Every setting of `key`, in the order of merging; the last one holds."""
        return self._history.get(key, [])

    @cached_property
    def _history(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for file, where, text in self._settings():
            if file is None:
                found.setdefault(where, []).append(text)
                continue
            for key, line in _keys(file, where):
                found.setdefault(key, []).append(f"{_shown(file)}:{line}")
        return found

    def __getitem__(self, key: str) -> str:
        return self._history[key][-1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._history)

    def __len__(self) -> int:
        return len(self._history)


def _keys(file: Path, package: str) -> Iterator[tuple[str, int]]:
    import yaml

    try:
        root = yaml.compose(file.read_text(), Loader=yaml.SafeLoader)
    except (OSError, ValueError, yaml.YAMLError):  # the error that brought us here says so already
        return
    if root is not None:
        yield from _walk(root, "" if package in ("", "_global_") else package, top=True)


def _walk(node: Any, prefix: str, top: bool = False) -> Iterator[tuple[str, int]]:
    import yaml

    if not isinstance(node, yaml.MappingNode):
        return
    for name, value in node.value:
        if top and name.value == "defaults":
            continue
        key = f"{prefix}.{name.value}" if prefix else str(name.value)
        yield key, name.start_mark.line + 1
        yield from _walk(value, key)


def _shown(file: Path) -> str:
    """Relative to the current folder where that is shorter to read."""
    try:
        return str(file.relative_to(Path.cwd()))
    except ValueError:
        return str(file)
