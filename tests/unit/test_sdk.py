"""The public functions: their documented examples, and that nothing before `launch` reaches for the network."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys

import pytest

import chimera_sm as ch
from chimera_sm import sdk


def test_the_examples_in_the_docstrings_hold():
    names = {"compose": ch.compose, "plan": ch.plan, "render": ch.render, "check": ch.check, "launch": ch.launch}
    result = doctest.testmod(sdk, extraglobs=names)
    assert result.attempted >= 4
    assert result.failed == 0


def test_the_examples_of_the_package_hold():
    assert doctest.testmod(ch).failed == 0


def test_every_public_name_loads():
    for name in ch.__all__:
        assert getattr(ch, name) is not None
        assert name in dir(ch)
    with pytest.raises(AttributeError, match="nothing"):
        _ = ch.nothing


def test_render_is_stable_bytes():
    first = ch.render(ch.plan(ch.compose(["recipe=70b"])))
    second = ch.render(ch.plan(ch.compose(["recipe=70b"])))
    assert first.files == second.files
    assert first.sha256 == second.sha256
    assert first.run_id == second.run_id
    assert ch.render(ch.plan(ch.compose(["recipe=70b", "train.seed=2"]))).run_id != first.run_id


def test_a_plan_is_json_with_a_schema_version():
    data = json.loads(json.dumps(ch.plan(ch.compose(["recipe=70b"])).to_json()))
    assert data["schema_version"] == 2
    assert {"segments", "instances", "costs", "memory", "step", "layout", "batch"} <= set(data)


@pytest.mark.parametrize("recipe", ["70b", "8b", "tiny"])
def test_nothing_before_submit_opens_a_socket(recipe):
    code = (
        "import sys\n"
        "def hook(event, arguments):\n"
        "    if event.startswith('socket.'):\n"
        "        raise RuntimeError(event)\n"
        "sys.addaudithook(hook)\n"
        "import chimera_sm as ch\n"
        f"plan = ch.plan(ch.compose(['recipe={recipe}']))\n"
        "artifacts = ch.render(plan)\n"
        "assert isinstance(ch.check(plan, artifacts), list)\n"
        "assert not {'torch', 'sagemaker'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_launch_without_an_account_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("CHIMERA_RUNS", str(tmp_path / "runs"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(ch.AwsRefused) as caught:
        ch.launch(ch.plan(ch.compose(["recipe=8b"])))
    assert "env.role_arn is not set" in str(caught.value)
    assert "no AWS credentials" in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_online_checks_say_that_they_are_not_there():
    with pytest.raises(NotImplementedError):
        ch.check(ch.plan(ch.compose([])), online=True)
