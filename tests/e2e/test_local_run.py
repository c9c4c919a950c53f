"""Real training on simulated hosts: whatever interrupts it, the loss curve is that of an uninterrupted run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import chimera_sm as ch
from chimera_sm.runs.record import RunRecord
from chimera_sm.targets.local.environment import host_environment
from chimera_sm.targets.local.layout import RunFolder, lay_out
from chimera_sm.targets.local.state import read_state

pytestmark = pytest.mark.train

NUM_STEPS = 60
VOCABULARY = 512


@pytest.fixture(scope="module")
def overrides(shards: Path) -> list[str]:
    return [
        "recipe=tiny",
        "data=local",
        f"data.uri={shards}",
        f"model.vocab_size={VOCABULARY}",
        "model.hidden_size=64",
        "model.intermediate_size=128",
        "model.num_layers=2",
        "model.num_heads=2",
        "model.num_kv_heads=1",
        "train.sequence_length=64",
        "train.global_batch_size=8",
        "train.micro_batch_size=2",
        f"train.num_steps={NUM_STEPS}",
        "optim.warmup_steps=5",
        "checkpoint.interval_steps=10",
        "evaluation.interval_steps=10",
        "target.grace_s=60",
    ]


Curve = list[tuple[int, float, float]]


def curve(run: ch.Run) -> Curve:
    """Exactly what was computed: no rounding."""
    return [(row["step"], row["loss"], row["grad_norm"]) for row in run.metrics()]


@pytest.fixture(scope="module")
def uninterrupted(runs: None, overrides: list[str]) -> Curve:
    run = ch.launch(ch.plan(ch.compose(overrides)))
    assert run.wait(timeout_s=180).state == "completed"
    found = curve(run)
    assert [step for step, _, _ in found] == list(range(1, NUM_STEPS + 1))
    assert found[-1][1] < 0.9 * found[0][1], "it learned something"
    assert state_of(run).attempt == 1
    return found


def state_of(run: ch.Run) -> Any:
    return read_state(run.record.path)


def launch_and_wait(overrides: list[str], step: int) -> ch.Run:
    """Start a run and return once it has done `step`."""
    run = ch.launch(ch.plan(ch.compose(overrides)))
    until(lambda: (run.status().step or 0) >= step)
    assert run.status().state == "running"
    return run


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.02)


def test_stop_and_resume(uninterrupted: Curve, overrides: list[str]) -> None:
    run = launch_and_wait(overrides, 13)
    run.stop()
    with pytest.raises(ch.RunStopped):
        run.wait(timeout_s=60)
    stopped_at = len(run.metrics())
    assert 13 <= stopped_at < NUM_STEPS
    run.resume()
    assert run.wait(timeout_s=180).state == "completed"
    assert curve(run) == uninterrupted
    log = (run.record.path / "logs" / "algo-1.log").read_text()
    assert f"steps {stopped_at + 1} to {NUM_STEPS}" in log, "no step was done twice"


@pytest.mark.parametrize("fault", ["kill:step:17:1", "kill:step:10:0", "kill:checkpoint_write:30"])
def test_a_worker_is_killed(
    uninterrupted: Curve, overrides: list[str], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL between steps, before a save, and in the middle of one; the run repairs itself."""
    monkeypatch.setenv("CHIMERA_FAULT", fault)
    run = ch.launch(ch.plan(ch.compose(overrides)))
    assert run.wait(timeout_s=240).state == "completed"
    assert state_of(run).attempt == 2
    assert curve(run) == uninterrupted
    log = (run.record.path / "driver.log").read_text()
    assert "was killed by SIGKILL" in log


def test_a_launcher_is_killed(uninterrupted: Curve, overrides: list[str]) -> None:
    run = launch_and_wait(overrides, 13)
    os.kill(state_of(run).hosts["algo-2"].process.pid, signal.SIGKILL)
    assert run.wait(timeout_s=240).state == "completed"
    assert state_of(run).attempt == 2
    assert curve(run) == uninterrupted


def test_the_driver_is_killed(uninterrupted: Curve, overrides: list[str]) -> None:
    run = launch_and_wait(overrides, 13)
    os.kill(state_of(run).driver.pid, signal.SIGKILL)
    until(lambda: run.status().state == "interrupted")
    run.resume()
    assert run.wait(timeout_s=240).state == "completed"
    assert curve(run) == uninterrupted


def test_ctrl_c_in_the_foreground(uninterrupted: Curve, overrides: list[str]) -> None:
    """The command line: SIGINT saves and leaves a resumable run (exit code 5); `resume` finishes it (0)."""
    before = set(RunRecord.list_ids())
    command = [sys.executable, "-m", "chimera_sm"]
    process = subprocess.Popen([*command, "launch", *overrides], stdout=subprocess.PIPE, text=True)
    until(lambda: bool(set(RunRecord.list_ids()) - before))
    (run_id,) = set(RunRecord.list_ids()) - before
    run = ch.Run.attach(run_id)
    until(lambda: (run.status().step or 0) >= 13)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=90)
    assert process.returncode == 5
    assert run.status().state == "stopped"
    done = subprocess.run([*command, "resume", run_id], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert curve(run) == uninterrupted


@pytest.mark.needs_root
def test_launch_py_as_pid_1_saves_at_sigterm(runs: None, overrides: list[str], tmp_path: Path) -> None:
    """As on SageMaker: launch.py is PID 1, SIGTERM comes from outside, a checkpoint is there in time."""
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", *([] if os.getuid() == 0 else ["--map-root-user"])]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode != 0:
        message = "no right to make a PID namespace (root, or user namespaces)"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    plan = ch.plan(ch.compose([*overrides, "instances.count=1", "train.num_steps=100000"]))
    artifacts = ch.render(plan, "pid-1")
    job_file = artifacts.files["local_job.json"]
    folder = RunFolder(tmp_path / "pid-1")
    (folder.path / "artifacts").mkdir(parents=True)
    (folder.path / "artifacts" / "local_job.json").write_bytes(job_file)
    job = folder.job()
    channels = {name: Path(channel.uri or "") for name, channel in job.channels.items()}
    lay_out(folder, job, artifacts.bundle.files, channels)
    ml = folder.ml("algo-1")
    environment = host_environment(job, 0, 29400, None) | {"CHIMERA_ML_ROOT": str(ml.root)}
    del environment["CHIMERA_PARENT_PID"]  # in the namespace the parent has no number
    process = subprocess.Popen(
        [*unshare, sys.executable, "-u", str(ml.channel("code") / "launch.py")],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics = ml.metrics / "host-0.jsonl"
    until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    started = time.monotonic()
    os.kill(int(children[0]), signal.SIGTERM)
    out, _ = process.communicate(timeout=70)
    assert process.returncode == 143, out
    assert time.monotonic() - started < job.grace_s
    last = len(metrics.read_text().splitlines())
    assert (ml.checkpoints / f"step-{last}" / "manifest.json").is_file()
