"""What the local target renders, and what it refuses before anything starts."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from chimera_sm.errors import UsageError
from chimera_sm.planner.plan import plan
from chimera_sm.planner.types import Plan
from chimera_sm.recipe.compose import compose
from chimera_sm.runs.record import RunRecord
from chimera_sm.targets.local import LocalTarget
from chimera_sm.targets.local import target as local_target
from chimera_sm.targets.local.environment import host_environment, import_path, visible_devices
from chimera_sm.targets.local.job import LocalJob, local_job

TARGET = LocalTarget()


def tiny(*overrides: str) -> Plan:
    return plan(compose(["recipe=tiny", *overrides]))


def test_render_is_the_same_twice_and_names_no_path_of_this_machine() -> None:
    one, two = (TARGET.render(tiny(), "tiny-1") for _ in range(2))
    assert one.sha256 == two.sha256
    assert sorted(one.files) == ["bundle.json", "local_job.json", "recipe.json"]
    job = json.loads(one.files["local_job.json"])
    assert job["entrypoint"] == ["python3", "-u", "/opt/ml/input/data/code/launch.py"]
    assert job["environment"] == {"CHIMERA_RUN_ID": "tiny-1", "CHIMERA_GRACE_S": "120"}
    assert (job["hosts"], job["workers_per_host"]) == (2, 1)
    assert str(Path.home()) not in one.files["local_job.json"].decode()
    assert LocalJob.from_bytes(one.files["local_job.json"]).to_bytes() == one.files["local_job.json"]


def test_the_recipe_s_environment_and_run_id_reach_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join([*import_path(), "/mine"]))
    monkeypatch.setenv("CHIMERA_FAULT", "kill:step:3")
    job = local_job(tiny("+target.environment.NCCL_DEBUG=INFO", "target.grace_s=7.5"), "run-7")
    env = host_environment(job, 1, 4321, ["0", "1"])
    assert env["NCCL_DEBUG"] == "INFO"
    assert (env["CHIMERA_RUN_ID"], env["CHIMERA_GRACE_S"], env["CHIMERA_MASTER_PORT"]) == ("run-7", "7.5", "4321")
    assert env["PYTHONPATH"] == "/mine", "the bundle's chimera_train must be the one that is imported"
    assert env["CUDA_VISIBLE_DEVICES"] == "1", "two hosts, a GPU each"
    assert env["CHIMERA_FAULT"] == "kill:step:3"


@pytest.mark.parametrize(("visible", "devices"), [("0,1", ["0", "1"]), ("4,5,6", ["4", "5", "6"]), ("0", []), ("", [])])
def test_gpus_are_dealt_out_or_left_alone(visible: str, devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts of one worker need two; with fewer, NCCL would refuse two ranks on one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_devices(local_job(tiny(), "r")) == devices


def write_dataset(folder: Path, content: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "dataset.json").write_text(content)
    return folder


def test_shards_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    good = write_dataset(tmp_path / "good", json.dumps({"vocab_size": 4096}))
    assert TARGET.ready(tiny("data=local", f"data.uri={good}")) == []
    large = write_dataset(tmp_path / "large", json.dumps({"vocab_size": 50_000}))
    torn = write_dataset(tmp_path / "torn", "{")
    (tmp_path / "empty").mkdir()
    for folder, told in (
        (large, "model.vocab_size=4096 is smaller than the 50000 of the tokenizer that made"),
        (torn, "is damaged"),
        (tmp_path / "empty", "holds no dataset.json"),
        (tmp_path / "none", "no folder"),
    ):
        (problem,) = TARGET.ready(tiny("data=local", f"data.uri={folder}"))
        assert told in problem
        assert str(folder) in problem
    inside = tmp_path / "channel"
    write_dataset(inside / "v2", json.dumps({"vocab_size": 512}))
    assert TARGET.ready(tiny("data=local", f"data.uri={inside}", "data.path=v2")) == []


def test_a_checkpoint_folder_that_would_not_be_kept_is_refused(tmp_path: Path) -> None:
    good = write_dataset(tmp_path / "good", json.dumps({"vocab_size": 4096}))
    data = ("data=local", f"data.uri={good}")
    (problem,) = TARGET.ready(tiny(*data, "checkpoint.path=output/ckpt"))
    assert "only checkpoints/ is kept" in problem
    (problem,) = TARGET.ready(tiny(*data, "checkpoint=fsx", "checkpoint.path=input/data/train/ckpt"))
    assert "training data" in problem
    assert TARGET.ready(tiny(*data, "checkpoint=fsx")) == []


def test_submit_refuses_before_it_starts_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHIMERA_RUNS", str(tmp_path / "runs"))
    unfit = tiny("data=local", f"data.uri={tmp_path / 'none'}")
    artifacts = TARGET.render(unfit, "r-1")
    record = RunRecord.create("r-1", {"target": "local"}, artifacts.files)
    with pytest.raises(UsageError, match="no folder"):
        TARGET.submit(unfit, artifacts, record)
    assert TARGET.status(record).state == "failed"
    TARGET.stop(record)
    with pytest.raises(UsageError, match="never started"):
        TARGET.resume(record)
    assert not (record.path / "hosts").exists()
    assert list(TARGET.logs(record, follow=True)) == [], "whoever follows it does not wait for ever"


def test_a_launch_that_is_killed_while_it_prepares_has_failed_and_can_be_launched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHIMERA_RUNS", str(tmp_path / "runs"))
    data = write_dataset(tmp_path / "data", json.dumps({"vocab_size": 4096}))
    fit = tiny("data=local", f"data.uri={data}")
    artifacts = TARGET.render(fit, "r-1")
    record = RunRecord.create("r-1", {"target": "local"}, artifacts.files)
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(local_target, "lay_out", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        TARGET.submit(fit, artifacts, record)
        os._exit(1)
    os.waitpid(child, 0)
    status = TARGET.status(record)
    assert (status.state, status.ended) == ("failed", True)
    assert "cut short" in status.reason
    assert list(TARGET.logs(record, follow=True)) == []
    with pytest.raises(UsageError, match="--run-id r-1"):
        TARGET.resume(record)
    started = []
    monkeypatch.setattr(local_target, "_start_driver", started.append)
    TARGET.submit(fit, artifacts, record)
    assert len(started) == 1
