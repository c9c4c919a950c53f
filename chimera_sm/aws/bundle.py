"""The code bundle: everything that travels to the machines, addressed by its content.

The trainer as shipped (`entrypoints/`), with requirements.txt as the recipe needs it, the planned recipe as
`recipe.json`, and, under `user/`, a folder of the team's own. It is equal whether built from a checkout or from an
installed wheel.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from chimera_sm.aws import ignore, secrets
from chimera_sm.errors import ChecksFailed, UsageError
from chimera_sm.paths import entrypoints_dir
from chimera_sm.planner.types import Plan
from chimera_sm.recipe.schema import CodeConfig
from chimera_train.config import LayoutConfig, RecipeFile, encode
from chimera_train.config.contract import RECIPE_FILE, USER_FOLDER
from chimera_train.config.precision import FLOAT8_REQUIREMENT

REQUIREMENTS_FILE = "requirements.txt"
SHIPPED = ("launch.py", "train.py", REQUIREMENTS_FILE, "chimera_train")
MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Bundle:
    """The files that travel to the machines, by path inside the bundle.

    `files` maps the path ("launch.py", "chimera_train/loop.py", "recipe.json") to its bytes.
    """

    files: dict[str, bytes]

    @cached_property
    def sha256(self) -> str:
        """Content address: over paths and bytes, independent of times, modes and of where the files lay."""
        digest = hashlib.sha256()
        for path in sorted(self.files):
            digest.update(f"{path}\0{len(self.files[path])}\0".encode())
            digest.update(self.files[path])
        return digest.hexdigest()

    @property
    def size_bytes(self) -> int:
        return sum(len(content) for content in self.files.values())

    @property
    def manifest(self) -> dict[str, Any]:
        """`{"sha256": …, "files": [{"path", "size", "sha256"}…]}`, sorted by path."""
        files = [
            {"path": path, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for path, content in sorted(self.files.items())
        ]
        return {"sha256": self.sha256, "files": files}


def recipe_file(plan: Plan) -> RecipeFile:
    """What the container reads as `recipe.json`."""
    return RecipeFile(
        recipe=plan.recipe.train_recipe,
        layout=LayoutConfig(hosts=plan.layout.hosts, workers_per_host=plan.layout.workers_per_host),
        recipe_hash=plan.recipe_hash,
        peak_tflops=plan.instances[0].peak_tflops,
    )


def build_bundle(recipe_file: RecipeFile, code: CodeConfig) -> Bundle:
    """Collect the files.

    Raises UsageError if `code.path` is no readable folder, ChecksFailed if it holds secrets, links that leave it, or
    more than `code.max_size_mb`. Nothing of a secret is printed.
    """
    files = dict(_shipped(entrypoints_dir()))
    text = json.dumps(encode(recipe_file), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    files[RECIPE_FILE] = f"{text}\n".encode()
    if recipe_file.recipe.precision.float8 != "none":
        files[REQUIREMENTS_FILE] += f"{FLOAT8_REQUIREMENT}\n".encode()
    if code.path is not None:
        user = _user_files(Path(code.path).expanduser(), code.max_size_mb)
        files |= {f"{USER_FOLDER}/{path}": content for path, content in user.items()}
    return Bundle(dict(sorted(files.items())))


def _shipped(folder: Path) -> Iterator[tuple[str, bytes]]:
    for name in SHIPPED:
        path = folder / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            relative = file.relative_to(folder)
            hidden = any(part.startswith((".", "__pycache__")) for part in relative.parts)
            if file.is_file() and not hidden and file.suffix != ".pyc":
                yield relative.as_posix(), file.read_bytes()


def _user_files(folder: Path, max_size_mb: float) -> dict[str, bytes]:
    if not folder.is_dir():
        raise UsageError(f"code.path: {folder} is no folder")
    folder = folder.resolve()
    try:
        paths = list(ignore.walk(folder))
        _refuse_nothing(folder, paths)
        _refuse_names(folder, paths)
        _refuse_links(folder, paths)
        _refuse_size(folder, paths, max_size_mb)
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    except PermissionError as error:
        raise UsageError(
            f"code.path: {error.filename} cannot be read", fix="change its mode, or name it in .chimeraignore"
        ) from error
    found = [secret for path, content in files.items() for secret in secrets.scan_file(path, content)]
    if found:
        lines = [f"  {secret.where}: {secret.kind}" for secret in found[:20]]
        more = [f"  and {len(found) - 20} more"] if len(found) > 20 else []
        raise ChecksFailed(
            "\n".join([f"code.path: {folder} holds what looks like credentials", *lines, *more]),
            fix="remove them and refer to a secret by its ARN, or name the files in .chimeraignore",
        )
    return files


def _refuse_nothing(folder: Path, paths: list[Path]) -> None:
    if any(path.name not in ignore.IGNORE_FILES for path in paths):
        return
    if any(entry.name not in (*ignore.IGNORE_FILES, ".git") for entry in folder.iterdir()):
        raise UsageError(
            f"code.path: every file of {folder} is ignored by a .gitignore, .chimeraignore or .git/info/exclude in it "
            "or above it; nothing of it would travel",
            fix="re-include files with a line such as `!*.py` in its .chimeraignore, or name another folder",
        )
    raise UsageError(f"code.path: {folder} holds no files", fix="name the folder with your code, or code.path=null")


def _refuse_names(folder: Path, paths: list[Path]) -> None:
    """S3 keys are UTF-8, at most 1,024 bytes; the prefix of a bundle takes less than 200."""
    for path in paths:
        name = os.fsencode(path.relative_to(folder))
        try:
            name.decode()
            fits = len(name) <= 800
        except UnicodeDecodeError:
            fits = False
        if not fits:
            raise ChecksFailed(
                f"code.path: the file name {name!r} cannot be a key of S3 (UTF-8, at most 800 bytes)",
                fix="rename the file, or name it in .chimeraignore",
            )


def _refuse_links(folder: Path, paths: list[Path]) -> None:
    """A link may point to a file inside the folder; that file's bytes travel."""
    for path in paths:
        target = path.resolve()
        if not target.is_file() or not target.is_relative_to(folder):
            where = path.relative_to(folder).as_posix()
            what = f"a link to {os.readlink(path)}" if path.is_symlink() else "no regular file"
            raise ChecksFailed(
                f"code.path: {where} is {what}; only files inside {folder} travel",
                fix="replace it by a copy, or name it in .chimeraignore",
            )


def _refuse_size(folder: Path, paths: list[Path], max_size_mb: float) -> None:
    sizes = sorted(((path.stat().st_size, path.relative_to(folder).as_posix()) for path in paths), reverse=True)
    total = sum(size for size, _ in sizes)
    if total > max_size_mb * MEGABYTE:
        largest = "\n".join(f"  {size / MEGABYTE:10.1f} MB  {name}" for size, name in sizes[:5])
        raise ChecksFailed(
            f"code.path: {folder} has {total / MEGABYTE:.1f} MB in {len(sizes)} files, more than "
            f"code.max_size_mb={max_size_mb:g}; the largest:\n{largest}",
            fix="name what need not travel in .chimeraignore, or raise code.max_size_mb",
        )
