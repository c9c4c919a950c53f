"""The local target's driver, with a fake train.py: start, stop, resume, and whatever is killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_bundle import bundle_files, wait_for

from chimera_sm.errors import RunFailed, UsageError
from chimera_sm.runs.progress import watch
from chimera_sm.runs.record import RunRecord
from chimera_sm.targets.local import LocalTarget
from chimera_sm.targets.local.job import JOB_FILE, Channel, JobCheckpoint, LocalJob
from chimera_sm.targets.local.layout import RunFolder, lay_out
from chimera_sm.targets.local.process import ProcessId
from chimera_sm.targets.local.state import read_state, write_state
from chimera_sm.targets.local.target import _start_driver
from chimera_train.config.contract import RECIPE_FILE

TARGET = LocalTarget()


class FakeRun:
    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str = "per_host"):
        monkeypatch.setenv("CHIMERA_RUNS", str(tmp_path / "runs"))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        self._monkeypatch = monkeypatch
        shards = tmp_path / "shards"
        shards.mkdir()
        path = "checkpoints" if storage == "per_host" else "input/data/fsx/checkpoints/fake-1"
        self.job = LocalJob(
            run_id="fake-1",
            recipe_hash="0" * 64,
            hosts=2,
            workers_per_host=1,
            entrypoint=("python3", "-u", "/opt/ml/input/data/code/launch.py"),
            environment={"CHIMERA_RUN_ID": "fake-1", "CHIMERA_GRACE_S": "8"},
            channels={"train": Channel(location="local", uri=str(shards), path="", vocab_size=64)},
            checkpoint=JobCheckpoint(storage=storage, path=path),  # type: ignore[arg-type]
            grace_s=8.0,
            max_attempts=2,
            num_steps=20,
        )
        code = bundle_files(2, 1)
        files = {JOB_FILE: self.job.to_bytes(), RECIPE_FILE: code[RECIPE_FILE]}
        self.record = RunRecord.create("fake-1", {"target": "local"}, files)
        self.folder = RunFolder(self.record.path)
        lay_out(self.folder, self.job, code, {"train": shards})

    def start(self, **fake: object) -> None:
        self._monkeypatch.setenv("FAKE", json.dumps(fake))
        _start_driver(self.folder)

    def resume(self, **fake: object) -> None:
        self._monkeypatch.setenv("FAKE", json.dumps(fake))
        TARGET.resume(self.record)

    def wait(self, state: str, seconds: float = 30.0) -> None:
        wait_for(lambda: self.status.state == state, seconds, f"{state}; it is {self.status}")

    def wait_step(self, step: int) -> None:
        wait_for(lambda: (self.status.step or 0) >= step, 30.0, f"step {step}")

    @property
    def status(self):
        return TARGET.status(self.record)

    @property
    def state(self):
        state = read_state(self.record.path)
        assert state is not None
        return state

    def host_pid(self, host: str) -> int:
        return wait_for(lambda: (h := self.state.hosts.get(host)) and h.process and h.process.pid)

    def worker_pid(self, host: str) -> int:
        pid = self.host_pid(host)
        children = wait_for(lambda: Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return int(children[0])

    def stored(self) -> set[str]:
        store = self.folder.checkpoints(self.job)
        return {str(p.relative_to(store)) for p in store.rglob("*") if p.is_file()}

    def clean_up(self) -> None:
        state = read_state(self.record.path)
        if state and state.driver.alive:
            os.kill(state.driver.pid, signal.SIGTERM)
            wait_for(lambda: not state.driver.alive, 15.0)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRun]:
    fake = FakeRun(tmp_path, monkeypatch)
    yield fake
    fake.clean_up()


def test_a_run_to_its_end(run: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.start(steps=20)
    status = watch(lambda: TARGET.status(run.record))
    assert (status.state, status.exit_code, status.step) == ("completed", 0, 20)
    assert "completed, step 20/20, loss 0.0500" in capsys.readouterr().out
    assert [row["loss"] for row in TARGET.metrics(run.record)] == [1 / step for step in range(1, 21)], "exact floats"
    expected = {f"step-{s:04}/host{h}-rank{h}" for s in range(1, 21) for h in (0, 1)}
    assert run.stored() == expected, "both hosts' files under one prefix"
    logs = list(TARGET.logs(run.record, follow=True))
    assert "algo-1 | chimera step=20 loss=0.05" in logs
    assert any(line.startswith("algo-2 | chimera: host algo-2 (2 of 2, resourceconfig.json)") for line in logs)
    with pytest.raises(UsageError, match="has completed"):
        TARGET.resume(run.record)


def test_stop_saves_and_resume_goes_on(run: FakeRun) -> None:
    run.start(steps=1000, step_s=0.05)
    run.wait_step(5)
    with pytest.raises(UsageError, match="only a run that is not running"):
        TARGET.resume(run.record)
    TARGET.stop(run.record)
    run.wait("stopped")
    assert run.status.exit_code == 143
    assert {"saved-rank-0", "saved-rank-1"} <= run.stored()
    stopped_at = run.status.step
    assert stopped_at is not None
    TARGET.stop(run.record)  # nothing to do
    run.resume(steps=stopped_at + 5)
    run.wait("completed")
    assert run.status.step == stopped_at + 5
    assert run.state.attempt == 2
    steps = [row["step"] for row in TARGET.metrics(run.record)]
    assert steps == list(range(1, stopped_at + 6)), "went on where it stopped"


def test_stop_at_once(run: FakeRun) -> None:
    """While launch.py is still starting, and has no handler yet."""
    run.start(steps=1000, step_s=0.05)
    TARGET.stop(run.record)
    run.wait("stopped")
    assert run.status.exit_code == 143
    assert "not all" not in run.status.reason


def test_a_killed_worker_is_restarted_from_the_union(run: FakeRun) -> None:
    run.start(steps=30, step_s=0.05, ranks={"1": {"at": 10, "do": "signal 9", "once": True}})
    run.wait("completed")
    assert run.state.attempt == 2
    for host in ("algo-1", "algo-2"):
        names = {p.name for p in run.folder.ml(host).checkpoints.glob("step-0005/host*") if "sagemaker" not in p.name}
        assert names == {"host0-rank0", "host1-rank1"}, "every host got every host's files"


def test_attempts_are_used_up(run: FakeRun) -> None:
    run.start(steps=30, ranks={"1": {"at": 3, "do": "signal 9"}})
    run.wait("failed")
    assert run.state.attempt == 2
    assert run.status.exit_code == 75
    assert "gave up after 2 attempts: rank 1 on algo-2 was killed by SIGKILL" in run.status.reason
    run.resume(steps=5)
    run.wait("completed")
    assert run.state.attempt == 3


@pytest.mark.parametrize("steps_made", [0, 2])
def test_a_recipe_that_made_no_step_does_not_outlive_its_start(run: FakeRun, steps_made: int) -> None:
    step = stopped(run)
    files = {JOB_FILE: replace(run.job, hosts=3).to_bytes(), RECIPE_FILE: bundle_files(3, 1)[RECIPE_FILE]}
    run.record.amend({}, files)
    run.resume(steps=1000, ranks={"0": {"at": step + 1 + steps_made, "do": "raise ValueError: no such state"}})
    run.wait("failed")
    assert "no such state" in run.status.reason
    taken_back = "`chimera_sm resume fake-1` goes on with the recipe before them"
    assert (taken_back in run.status.reason) == (not steps_made)
    assert any(line.startswith("algo-3 | ") for line in TARGET.logs(run.record)), "the log of the failed start is shown"
    assert run.folder.job().hosts == (3 if steps_made else 2)
    run.resume(steps=step + 5)
    run.wait("completed")
    assert run.folder.job().hosts == (3 if steps_made else 2)


def test_a_users_error_is_not_tried_again(run: FakeRun) -> None:
    run.start(steps=30, ranks={"0": {"at": 3, "do": "raise ValueError: bad batch"}})
    run.wait("failed")
    assert run.state.attempt == 1
    assert run.status.exit_code == 1
    assert run.status.reason.startswith("rank 0 on algo-1: ValueError: bad batch")


def test_a_killed_launcher_is_restarted(run: FakeRun) -> None:
    run.start(steps=2000, step_s=0.05)
    run.wait_step(5)
    worker = ProcessId.of(run.worker_pid("algo-2"))
    os.kill(run.host_pid("algo-2"), signal.SIGKILL)
    wait_for(lambda: not worker.alive, 5.0, "its worker to die")
    wait_for(lambda: run.state.attempt == 2, 20.0, "a restart, though the first host lives on")


def test_a_killed_driver_is_an_interruption(run: FakeRun) -> None:
    run.start(steps=1000, step_s=0.05)
    run.wait_step(5)
    hosts = [ProcessId.of(run.host_pid(host)) for host in ("algo-1", "algo-2")]
    os.kill(run.state.driver.pid, signal.SIGKILL)
    run.wait("interrupted")
    with pytest.raises(RunFailed, match="interrupted"):
        watch(lambda: TARGET.status(run.record))
    run.resume(steps=40, step_s=0.02)  # at once: the hosts are still saving
    wait_for(lambda: not any(host.alive for host in hosts), 10.0, "the old hosts to save and end")
    run.wait("completed")
    assert {"saved-rank-0", "saved-rank-1"} <= run.stored(), "they saved, and it was kept"
    assert [row["step"] for row in TARGET.metrics(run.record)][-1] == 40


def test_logs_of_an_interrupted_run_are_followed_until_its_hosts_have_ended(run: FakeRun) -> None:
    run.start(steps=1000, step_s=0.05, save_s=1.0)
    run.wait_step(3)
    hosts = [ProcessId.of(run.host_pid(host)) for host in ("algo-1", "algo-2")]
    os.kill(run.state.driver.pid, signal.SIGKILL)
    run.wait("interrupted")
    assert any(host.alive for host in hosts)
    assert [line for line in TARGET.logs(run.record, follow=True) if "worker got SIGTERM" in line]
    assert not any(host.alive for host in hosts)


def stopped(run: FakeRun) -> int:
    run.start(steps=1000, step_s=0.05)
    run.wait_step(3)
    TARGET.stop(run.record)
    run.wait("stopped")
    assert run.status.step is not None
    return run.status.step


@pytest.mark.parametrize("lost", ["store", "hosts"])
def test_a_resume_gives_back_what_vanished_meanwhile(run: FakeRun, lost: str) -> None:
    step = stopped(run)
    before = run.stored()
    assert f"step-{step:04}/manifest.json" in before
    folders = [run.folder.store] if lost == "store" else [run.folder.ml(h).checkpoints for h in run.job.host_names]
    for folder in folders:
        shutil.rmtree(folder)
        if lost == "hosts":
            folder.mkdir()
    run.resume(steps=step + 2)
    run.wait("completed")
    assert before <= run.stored()
    assert [row["step"] for row in TARGET.metrics(run.record)] == list(range(1, step + 3)), "went on where it stopped"


def test_a_run_whose_history_is_gone_does_not_begin_anew(run: FakeRun) -> None:
    stopped(run)
    for folder in (run.folder.store, *(run.folder.ml(h).checkpoints for h in run.job.host_names)):
        shutil.rmtree(folder)
    run.resume(steps=5)
    run.wait("failed")
    assert re.search(r"history of this run is gone: it had saved step \d+, and no complete", run.status.reason)
    assert run.status.exit_code == 1
    assert run.state.hosts.keys() == {"algo-1", "algo-2"}
    assert not list(run.folder.ml("algo-1").checkpoints.glob("*")), "no host was started"


def test_a_full_disk_ends_the_run_with_the_cause(run: FakeRun) -> None:
    step = stopped(run)
    log = run.folder.log("algo-2")
    log.unlink()
    log.symlink_to("/dev/full")
    run.resume(steps=1000, step_s=0.05)
    run.wait("failed")
    assert "could not go on: No space left on device" in run.status.reason
    assert re.search(r"; the checkpoint of step \d+ is kept$", run.status.reason)
    assert not any(host.process and host.process.alive for host in run.state.hosts.values())
    log.unlink()
    run.resume(steps=step + 20)
    run.wait("completed")


def test_of_three_resumes_at_once_one_wins(run: FakeRun) -> None:
    stopped(run)
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            code = 9
            try:
                run.resume(steps=1000, step_s=0.05)
                code = 0
            except UsageError:
                code = 2
            finally:
                os._exit(code)
        children.append(child)
    codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
    assert codes == [0, 2, 2]


def test_a_process_number_that_belongs_to_another_is_not_the_driver(run: FakeRun) -> None:
    run.start(steps=3)
    run.wait("completed")
    stale = ProcessId(os.getpid(), "another boot/1")
    assert not stale.alive
    write_state(run.record.path, replace(run.state, state="running", driver=stale))
    assert run.status.state == "interrupted"
    TARGET.stop(run.record)  # must not signal this process
    run.resume(steps=4)
    run.wait("completed")


def test_a_run_has_one_driver(run: FakeRun) -> None:
    run.start(steps=1000, step_s=0.05)
    run.wait_step(2)
    with pytest.raises(UsageError, match="is running: another driver is running this run"):
        _start_driver(run.folder)
    assert run.status.state == "running"


def test_grace_is_obeyed(run: FakeRun) -> None:
    run.start(steps=1000, step_s=0.05, ignore_sigterm=True)
    run.wait_step(3)
    started = time.monotonic()
    TARGET.stop(run.record)
    run.wait("stopped")
    assert 6.0 < time.monotonic() - started < 14.0
    assert "not all state was saved" in run.status.reason


def test_a_shared_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun(tmp_path, monkeypatch, storage="shared")
    link = run.folder.ml("algo-2").channel("fsx")
    assert link.resolve() == (run.record.path / "fsx").resolve()
    assert run.folder.checkpoints(run.job) == run.record.path / "fsx" / "checkpoints" / "fake-1"
    run.start(steps=2)
    run.wait("completed")
