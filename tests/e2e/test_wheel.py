"""The wheel: what it holds, and that it works from another folder, where no checkout is near."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = out.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """An unpacked installation, first on the path of every process that `run` starts."""
    site = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)],
        check=True,
        timeout=120,
    )
    return site


def run(installed: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "chimera_sm", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_nothing_but_the_two_packages_lands_in_site_packages(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"chimera_sm", "chimera_train"}
    assert "chimera_sm/_recipes/config.yaml" in names
    assert "chimera_sm/_entrypoints/launch.py" in names
    assert "chimera_sm/_entrypoints/chimera_train/config/recipe.py" in names
    assert "chimera_sm/py.typed" in names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_it_is_the_wheel_that_runs(installed, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", "import chimera_sm, chimera_train; print(chimera_sm.__file__, chimera_train.__file__)"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count(str(installed)) == 2


def test_recipes_and_dry_run_equal_those_of_the_checkout(installed, tmp_path):
    assert "32 × ml.p4d.24xlarge" in run(installed, tmp_path, "recipes").stdout
    arguments = ("launch", "recipe=70b", "target=sagemaker", "--dry-run", "--json")
    from_wheel = run(installed, tmp_path, *arguments)
    assert from_wheel.returncode == 0, from_wheel.stderr
    from_checkout = run(ROOT, tmp_path, *arguments)
    assert from_wheel.stdout == from_checkout.stdout, "the bundle's content address is the same from either"
    assert json.loads(from_wheel.stdout)["ResourceConfig"]["InstanceCount"] == 32
