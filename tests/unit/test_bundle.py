"""The code bundle: same bytes wherever it is built, and nothing in it that should stay."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from pathlib import Path

import pytest

from chimera_sm import paths
from chimera_sm.aws.bundle import Bundle, build_bundle, recipe_file
from chimera_sm.errors import ChecksFailed, UsageError
from chimera_sm.planner.plan import plan
from chimera_sm.recipe.compose import compose
from chimera_sm.recipe.schema import CodeConfig
from chimera_train.config import RecipeFile, decode


@pytest.fixture(scope="module")
def tiny() -> RecipeFile:
    return recipe_file(plan(compose(["recipe=tiny"])))


def user_files(bundle: Bundle) -> set[str]:
    return {path.removeprefix("user/") for path in bundle.files if path.startswith("user/")}


def write(folder: Path, **files: str) -> None:
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_holds_the_trainer_and_the_recipe(tiny: RecipeFile) -> None:
    bundle = build_bundle(tiny, CodeConfig())
    assert {"launch.py", "recipe.json", "chimera_train/config/recipe.py"} <= set(bundle.files)
    assert not [path for path in bundle.files if "__pycache__" in path or path.endswith(".pyc")]
    assert decode(RecipeFile, json.loads(bundle.files["recipe.json"])) == tiny
    assert [file["path"] for file in bundle.manifest["files"]] == sorted(bundle.files)


def test_two_builds_are_equal_and_the_address_is_of_the_content(tiny: RecipeFile) -> None:
    first, second = build_bundle(tiny, CodeConfig()), build_bundle(tiny, CodeConfig())
    assert first == second
    assert first.sha256 == second.sha256 == first.manifest["sha256"]
    changed = Bundle({**first.files, "launch.py": first.files["launch.py"] + b"\n"})
    renamed = Bundle({("x" if path == "launch.py" else path): content for path, content in first.files.items()})
    assert len({first.sha256, changed.sha256, renamed.sha256}) == 3


def test_float8_alone_asks_for_torchao(tiny: RecipeFile) -> None:
    """Which the image lacks. Other runs do not wait for its installation, and keep their bytes."""
    shipped = (paths.entrypoints_dir() / "requirements.txt").read_bytes()
    assert build_bundle(tiny, CodeConfig()).files["requirements.txt"] == shipped
    float8 = recipe_file(plan(compose(["recipe=tiny", "precision=fp8"])))
    asked = build_bundle(float8, CodeConfig()).files["requirements.txt"]
    assert asked == shipped + b"torchao>=0.18\n"
    extras = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
    assert extras["optional-dependencies"]["float8"] == ["torchao>=0.18"], "the same where a user installs it"


def test_equal_from_an_installed_wheel(tiny: RecipeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = build_bundle(tiny, CodeConfig())
    package = tmp_path / "chimera_sm"
    shutil.copytree(paths.entrypoints_dir(), package / "_entrypoints")
    (package / "_entrypoints" / "__pycache__").mkdir(exist_ok=True)
    (package / "_entrypoints" / "chimera_train" / "x.pyc").write_bytes(b"\0")
    for file in package.rglob("*.py"):
        os.utime(file, (0, 0))
    monkeypatch.setattr(paths, "_PACKAGE", package)
    assert paths.entrypoints_dir() == package / "_entrypoints"
    assert build_bundle(tiny, CodeConfig()).sha256 == here.sha256


def test_gitignore_chimeraignore_and_nested_ones(tiny: RecipeFile, tmp_path: Path) -> None:
    write(
        tmp_path,
        DOTgitignore="*.log\n/data/\n!keep.log\nsub/*.tmp\n",
        DOTchimeraignore="notebooks/\n",
        **{
            "main.py": "",
            "a.log": "",
            "keep.log": "",
            "data__big.bin": "",
            "sub__data__small.txt": "",
            "sub__x.tmp": "",
            "sub__y.py": "",
            "sub__DOTgitignore": "!x.tmp\ny.py\n",
            "notebooks__n.ipynb": "",
            "DOTgit__config": "",
            "DOTvenv__lib.py": "",
            "__init__.py".replace("__", "@@"): "",
        },
    )
    write(tmp_path / "pkg" / "__pycache__", **{"m.pyc": ""})
    files = user_files(build_bundle(tiny, CodeConfig(path=str(tmp_path))))
    assert files == {
        ".gitignore",
        ".chimeraignore",
        "@@init@@.py",
        "main.py",
        "keep.log",
        "sub/.gitignore",
        "sub/data/small.txt",
        "sub/x.tmp",
    }


def test_the_repositorys_gitignore_counts_for_a_folder_inside_it(tiny: RecipeFile, tmp_path: Path) -> None:
    write(tmp_path, DOTgitignore="*.bin\n", DOTgit__HEAD="", src__a="a", **{"src__w.bin": ""})
    assert user_files(build_bundle(tiny, CodeConfig(path=str(tmp_path / "src")))) == {"a"}


def test_too_large_names_the_largest_files_and_the_fix(tiny: RecipeFile, tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"\1" * 3_000_000)
    (tmp_path / "a.py").write_text("")
    with pytest.raises(ChecksFailed, match=r"(?s)3\.0 MB in 2 files.*max_size_mb=2.*weights\.bin.*\.chimeraignore"):
        build_bundle(tiny, CodeConfig(path=str(tmp_path), max_size_mb=2))
    (tmp_path / ".chimeraignore").write_text("*.bin\n")
    assert "a.py" in user_files(build_bundle(tiny, CodeConfig(path=str(tmp_path), max_size_mb=2)))


@pytest.mark.parametrize("target", ["/etc/hostname", "../outside.txt", "nowhere", "folder"])
def test_links_that_leave_the_folder_are_refused(tiny: RecipeFile, tmp_path: Path, target: str) -> None:
    (tmp_path / "outside.txt").write_text("")
    folder = tmp_path / "code"
    (folder / "folder").mkdir(parents=True)
    (folder / "link").symlink_to(target)
    with pytest.raises(ChecksFailed, match="link is a link to"):
        build_bundle(tiny, CodeConfig(path=str(folder)))


def test_a_link_to_a_file_inside_travels_as_the_file(tiny: RecipeFile, tmp_path: Path) -> None:
    (tmp_path / "real.py").write_text("x = 1")
    (tmp_path / "link.py").symlink_to("real.py")
    assert build_bundle(tiny, CodeConfig(path=str(tmp_path))).files["user/link.py"] == b"x = 1"


def test_no_folder(tiny: RecipeFile, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"code\.path: .*nowhere is no folder"):
        build_bundle(tiny, CodeConfig(path=str(tmp_path / "nowhere")))


def test_a_name_that_s3_cannot_hold(tiny: RecipeFile, tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"bad\xff.py")).write_text("")
    with pytest.raises(ChecksFailed, match="cannot be a key of S3"):
        build_bundle(tiny, CodeConfig(path=str(tmp_path)))


def test_an_unreadable_file_is_named(tiny: RecipeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("")

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    shipped = tmp_path.parent / "shipped"
    shipped.mkdir()
    monkeypatch.setattr("chimera_sm.aws.bundle.entrypoints_dir", lambda: shipped)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UsageError, match=r"a\.py cannot be read"):
        build_bundle(tiny, CodeConfig(path=str(tmp_path)))
