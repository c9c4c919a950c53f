"""What a team's folder leaves behind: git's own rules, told where they are broken."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from chimera_sm.aws.bundle import build_bundle, recipe_file
from chimera_sm.aws.ignore import walk
from chimera_sm.aws.secrets import scan_file
from chimera_sm.errors import UsageError
from chimera_sm.planner.plan import plan
from chimera_sm.recipe.compose import compose
from chimera_sm.recipe.schema import CodeConfig
from chimera_train.config import RecipeFile

KEY_ID = "AK" + "IA" + "Q3EXAMPLEKEY4567"


@pytest.fixture(scope="module")
def tiny() -> RecipeFile:
    return recipe_file(plan(compose(["recipe=tiny"])))


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in walk(folder)}


@pytest.mark.parametrize("line", ["[z-a]", "!", "\\", "x\\"])
@pytest.mark.parametrize("file", [".gitignore", ".chimeraignore", "deep/.gitignore", "../.gitignore"])
def test_a_line_that_is_no_pattern_is_named(tiny: RecipeFile, tmp_path: Path, file: str, line: str) -> None:
    code = tmp_path / "repository" / "code"
    (code / "deep").mkdir(parents=True)
    (code.parent / ".git").mkdir()
    (code / "main.py").write_text("")
    ignore = code / file
    ignore.write_text(f"# ours\n*.log\n{line}\n")
    with pytest.raises(UsageError, match=re.escape(f"{ignore.resolve()}:3")):
        build_bundle(tiny, CodeConfig(path=str(code)))


@pytest.mark.parametrize(
    ("ignored", "where"),
    [("*\n", ".gitignore"), ("*\n", ".chimeraignore"), ("code/\n", "../.gitignore"), ("*.py\n", "../.gitignore")],
)
def test_a_folder_of_which_nothing_travels_is_refused(
    tiny: RecipeFile, tmp_path: Path, ignored: str, where: str
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (tmp_path / ".git").mkdir()
    (code / "main.py").write_text("")
    (code / where).write_text(ignored)
    with pytest.raises(UsageError, match=r"every file of .* is ignored"):
        build_bundle(tiny, CodeConfig(path=str(code)))


def test_an_empty_folder_is_refused(tiny: RecipeFile, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no files"):
        build_bundle(tiny, CodeConfig(path=str(tmp_path)))


def test_the_repositorys_exclude_file_counts_and_comes_last(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / ".git" / "info" / "exclude").write_text("*.tmp\n/data\n")
    for name in ("a.py", "a.tmp", "keep.tmp", "data/x", "code/b.py", "code/b.tmp", "code/data/y"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / ".gitignore").write_text("!keep.tmp\n")
    assert names(tmp_path) == {".gitignore", "a.py", "keep.tmp", "code/b.py", "code/data/y"}
    assert names(tmp_path / "code") == {"b.py", "data/y"}
    tracked = subprocess.run(
        ["git", "ls-files", "--others", "--exclude-standard"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert names(tmp_path) == set(tracked.stdout.splitlines())


def test_a_worktree_has_the_exclude_file_of_its_repository(tmp_path: Path) -> None:
    main, tree = tmp_path / "main", tmp_path / "tree"
    main.mkdir()
    git(main, "init", "-q")
    git(main, "commit", "-q", "--allow-empty", "-m", "first")
    git(main, "worktree", "add", "-q", str(tree))
    (main / ".git" / "info" / "exclude").write_text("*.tmp\n")
    (tree / "a.tmp").write_text("")
    (tree / "b.py").write_text("")
    assert names(tree) == {"b.py"}


def test_a_broken_exclude_file_is_named(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / ".git" / "info" / "exclude").write_text("[z-a]\n")
    with pytest.raises(UsageError, match=r"info/exclude:1"):
        names(tmp_path)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_secrets_are_found_in_every_encoding_of_text(encoding: str) -> None:
    text = f"# credentials of the team\nkey = {KEY_ID}\n"
    assert [s.where for s in scan_file("conf.txt", text.encode(encoding))] == ["conf.txt:2"]


def test_binary_files_are_no_text() -> None:
    noise = bytes(range(256)) * 8
    assert scan_file("x.bin", noise + KEY_ID.encode()) == []
    assert scan_file("zeros.bin", bytes(4096)) == []
    assert scan_file("odd.bin", b"\0") == []
