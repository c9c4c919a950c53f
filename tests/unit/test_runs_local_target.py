"""What the local target renders, and what it refuses before anything starts."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from chimera_sm.errors import RecipeError, UsageError
from chimera_sm.planner.plan import plan
from chimera_sm.planner.types import Plan
from chimera_sm.recipe.compose import compose
from chimera_sm.runs.record import RunRecord
from chimera_sm.targets.local import LocalTarget
from chimera_sm.targets.local import target as local_target
from chimera_sm.targets.local.data import prepare_corpus
from chimera_sm.targets.local.environment import host_environment, import_path, visible_devices
from chimera_sm.targets.local.job import Channel, LocalJob, local_job
from chimera_sm.targets.local.layout import RunFolder, check_checkpoint_path, lay_out
from chimera_sm.targets.local.process import ProcessId
from chimera_sm.targets.local.state import LocalState, read_state, write_state
from chimera_train.data.dataset import DatasetInfo, TokenizerInfo, file_sha256, write_json
from chimera_train.data.indexed import ShardWriter

TARGET = LocalTarget()


def tiny(*overrides: str) -> Plan:
    return plan(compose(["recipe=tiny", "evaluation=none", *overrides]))


def test_what_is_evaluated_on_must_be_there(tmp_path: Path) -> None:
    data = ("data=local", f"data.uri={write_shards(tmp_path / 'train')}", "evaluation=held_out")
    (problem,) = TARGET.ready(tiny(*data))
    assert problem.startswith(f"evaluation.sources.held_out: no held-out documents in {tmp_path / 'train' / 'val'}; ")
    write_shards(tmp_path / "train" / "val")
    assert TARGET.ready(tiny(*data)) == []


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


def write_shards(folder: Path, vocab_size: int = 4096, num_tokens: int = 1000) -> Path:
    """Whole shards, by the trainer's own writer."""
    folder.mkdir(parents=True)
    with ShardWriter(folder / "shard-0", "uint16") as writer:
        writer.add(np.zeros(num_tokens, dtype=np.uint16))
        info = writer.finish()
    assert info is not None
    (folder / "tokenizer.json").write_text("{}")
    tokenizer = TokenizerInfo(file="tokenizer.json", sha256=file_sha256(folder / "tokenizer.json"))
    dataset = DatasetInfo(
        schema_version=1,
        shards=(info,),
        num_documents=1,
        num_tokens=num_tokens,
        vocab_size=vocab_size,
        dtype="uint16",
        eod_id=0,
        tokenizer=tokenizer,
        source={},
    )
    write_json(folder / "dataset.json", dataset)
    return folder


def test_shards_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    good = write_shards(tmp_path / "good")
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
    write_shards(inside / "v2", vocab_size=512)
    assert TARGET.ready(tiny("data=local", f"data.uri={inside}", "data.path=v2")) == []


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps({k: v for k, v in {**json.loads(file.read_text()), **values}.items() if v is not None}))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda f: (f / "shard-0.bin").unlink(), "shard-0.bin is missing"),
        (lambda f: (f / "shard-0.idx").unlink(), "shard-0.idx is missing"),
        (lambda f: cut(f / "shard-0.bin"), "shard-0.bin has 1999 bytes where dataset.json says 2000"),
        (lambda f: cut(f / "shard-0.idx"), "shard-0.idx has 61 bytes where its header needs 62"),
        (lambda f: (f / "shard-0.idx").write_bytes(b"x" * 62), "shard-0.idx is no Megatron index"),
        (lambda f: (f / "shard-0.idx").write_bytes(b""), "shard-0.idx is no Megatron index"),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda f: (f / "tokenizer.json").write_text("[]"), "is not the tokenizer that made the shards"),
        (lambda f: change(f / "dataset.json", shards=None), "dataset.json is damaged: no 'shards'"),
        (lambda f: change(f / "dataset.json", shards=[]), "dataset.json names no shard"),
        (lambda f: change(f / "dataset.json", shards=[{"prefix": 1}]), "dataset.json is damaged"),
        (lambda f: change(f / "dataset.json", shards=["a"]), "dataset.json is damaged"),
        (lambda f: change(f / "dataset.json", tokenizer=None), "dataset.json is damaged: no 'tokenizer'"),
        (lambda f: change(f / "dataset.json", num_tokens=5), "5 tokens, 1000 over its shards"),
        (lambda f: (f / "dataset.json").write_text("[]"), "dataset.json is damaged"),
    ],
)
def test_shards_that_are_not_whole_are_refused(tmp_path: Path, damage: Callable[[Path], None], told: str) -> None:
    folder = write_shards(tmp_path / "shards")
    damage(folder)
    (problem,) = TARGET.ready(tiny("data=local", f"data.uri={folder}"))
    assert problem.startswith("data.uri: ")
    assert told in problem
    assert str(folder) in problem


def test_shards_that_the_recipe_cannot_use_are_refused(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "shards", num_tokens=256)
    data = ("data=local", f"data.uri={folder}")
    assert TARGET.ready(tiny(*data, "train.sequence_length=255")) == []
    (problem,) = TARGET.ready(tiny(*data, "train.sequence_length=256"))
    assert problem.startswith("train.sequence_length=256 needs 257 tokens a sample")
    assert TARGET.ready(tiny(*data, "train.sequence_length=64", "data.vocab_size=4096")) == []
    (problem,) = TARGET.ready(tiny(*data, "train.sequence_length=64", "data.vocab_size=4000"))
    assert problem.startswith("data.vocab_size=4000 is not the 4096")


def test_a_checkpoint_folder_that_would_not_be_kept_is_refused(tmp_path: Path) -> None:
    good = write_shards(tmp_path / "good")
    data = ("data=local", f"data.uri={good}")
    (problem,) = TARGET.ready(tiny(*data, "checkpoint.path=output/ckpt"))
    assert "only checkpoints/ is kept" in problem
    (problem,) = TARGET.ready(tiny(*data, "checkpoint=fsx", "checkpoint.path=input/data/train/ckpt"))
    assert "training data" in problem
    assert TARGET.ready(tiny(*data, "checkpoint=fsx")) == []


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (".", "names no folder"),
        ("model", "lies in model/"),
        ("output", "lies in output/"),
        ("output/data/x", "lies in output/"),
        ("input", "what the platform writes itself"),
        ("input/config", "what the platform writes itself"),
        ("input/config/x", "what the platform writes itself"),
        ("input/data", "what the platform writes itself"),
        ("input/data/code", "the channel of the code"),
        ("input/data/code/x", "the channel of the code"),
        ("input/data/train", "the channel of the training data"),
    ],
)
def test_a_shared_checkpoint_folder_lies_where_nothing_else_does(tmp_path: Path, path: str, told: str) -> None:
    data = ("data=local", f"data.uri={write_shards(tmp_path / 'good')}")
    (problem,) = TARGET.ready(tiny(*data, "checkpoint=fsx", f"checkpoint.path={path}"))
    assert problem.startswith("checkpoint.path=")
    assert told in problem


@pytest.mark.parametrize("path", ["checkpoints", "checkpoints/x", "fsx", "input/data/fsx", "input/data/fsx/a/b"])
def test_shared_checkpoint_folders_that_can_be_laid_out(tmp_path: Path, path: str) -> None:
    job = local_job(tiny("checkpoint=fsx", f"checkpoint.path={path}"), "r-1")
    assert check_checkpoint_path(job) is None
    run = RunFolder(tmp_path / "r-1")
    lay_out(run, job, {}, {})
    for host in job.host_names:
        assert (run.ml(host).root / path).resolve() == run.checkpoints(job).resolve()


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
    data = write_shards(tmp_path / "data")
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


@pytest.mark.parametrize("name", ["CHIMERA_RUN_ID", "CHIMERA_ML_ROOT", "RANK", "MASTER_PORT"])
def test_a_variable_that_the_launcher_sets_is_refused_in_the_recipe(name: str) -> None:
    with pytest.raises(RecipeError, match=f"target.environment.{name}: is set by the launcher"):
        compose(["recipe=tiny", f"+target.environment.{name}=1"])
    compose(["recipe=tiny", "+target.environment.CHIMERA_FAULT=kill:step:3", "+target.environment.SM_X=1"])


def state_of(driver: ProcessId, **values: object) -> LocalState:
    return LocalState(**{"state": "running", "driver": driver, "attempt": 1, **values})  # type: ignore[arg-type]


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunRecord:
    monkeypatch.setenv("CHIMERA_RUNS", str(tmp_path / "runs"))
    return RunRecord.create("r-1", {"target": "local"}, TARGET.render(tiny(), "r-1").files)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"state": "running"}', "\x00" * 40])
def test_a_damaged_state_is_named(record: RunRecord, content: str) -> None:
    (record.path / "state.json").write_text(content)
    for question in (TARGET.status, TARGET.stop, TARGET.resume):
        with pytest.raises(UsageError, match=r"the state of run r-1 cannot be read: .*/r-1/state.json"):
            question(record)


def test_a_damaged_job_is_named(record: RunRecord) -> None:
    write_state(record.path, state_of(ProcessId(1, "gone")))
    (record.path / "artifacts" / "local_job.json").write_text("{")
    with pytest.raises(UsageError, match=r"local_job.json"):
        TARGET.status(record)


def test_a_run_without_its_driver_is_not_running(record: RunRecord) -> None:
    write_state(record.path, state_of(ProcessId(os.getpid(), "another boot/1")))
    status = TARGET.status(record)
    assert (status.state, status.needs_resume) == ("interrupted", True)
    TARGET.stop(record)  # signals nobody
    write_state(record.path, state_of(ProcessId(os.getpid(), "another boot/1"), attempt=0))
    status = TARGET.status(record)
    assert (status.state, status.needs_resume, status.ended) == ("failed", False, True)


def test_a_full_disk_still_takes_the_last_state(record: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    write_state(record.path, state_of(ProcessId.of(os.getpid())))

    def full(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "replace", full)
    size = (record.path / "state.json").stat().st_size
    write_state(record.path, state_of(ProcessId.of(os.getpid()), state="failed", reason="no space " * 200))
    state = read_state(record.path)
    assert state is not None
    assert (state.state, state.reason[:9]) == ("failed", "no space ")
    assert (record.path / "state.json").stat().st_size == size, "no block more"
    assert not list(record.path.glob(".state.json.*"))
    with pytest.raises(OSError, match="No space left"):
        write_state(record.path, state_of(ProcessId.of(os.getpid()), reason="x" * 10_000))


def test_a_launch_on_a_full_disk_is_one_message(
    record: RunRecord, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fit = tiny("data=local", f"data.uri={write_shards(tmp_path / 'data')}")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "some/file")

    monkeypatch.setattr(local_target, "lay_out", full)
    with pytest.raises(UsageError, match="could not be laid out: No space left on device: some/file"):
        TARGET.submit(fit, TARGET.render(fit, "r-1"), record)
    assert "No space left" in TARGET.status(record).reason


@pytest.mark.parametrize(("code", "again"), [(2, False), (4, True)])
def test_why_preparing_failed_is_told_and_whether_to_launch_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, again: bool
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho \'{{"message": "the corpus is empty"}}\' > $CHIMERA_ERROR_FILE\nexit {code}\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(UsageError, match=r"could not be prepared in .*: the corpus is empty") as caught:
        prepare_corpus(Channel(location="stdlib", uri=None, path="", vocab_size=512))
    assert ("launch again" in str(caught.value)) is again


@pytest.mark.skipif(sys.platform != "linux", reason="a child learns of its parent's death on Linux only")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_preparing_ends_with_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/part && mv {tmp_path}/part {tmp_path}/pid\nexec sleep 60\n")
    python.chmod(0o755)
    child = os.fork()
    if child == 0:
        try:
            monkeypatch.setattr(sys, "executable", str(python))
            prepare_corpus(Channel(location="stdlib", uri=None, path="", vocab_size=512))
        finally:  # an exception must not go on in a second copy of pytest
            os._exit(1)
    deadline = time.monotonic() + 30
    while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    preparing = ProcessId.of(int((tmp_path / "pid").read_text()))
    assert preparing.alive
    os.kill(child, number)
    os.waitpid(child, 0)
    while preparing.alive and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not preparing.alive


def test_a_completed_run_goes_on_only_to_more_steps(
    record: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_shards(tmp_path / "data")
    launched, longer = (tiny("data=local", f"data.uri={data}", f"train.num_steps={n}") for n in (30, 40))
    run = RunFolder(record.path)
    record.amend({"code_sha256": "", "git": "", "chimera_sm_version": ""}, TARGET.render(launched, "r-1").files)
    lay_out(run, run.job(), {}, {"train": data})
    saved = run.checkpoints(run.job()) / "step-30" / "manifest.json"
    saved.parent.mkdir(parents=True)
    saved.touch()
    write_state(record.path, state_of(ProcessId(1, "gone"), state="completed"))
    started: list[RunFolder] = []
    monkeypatch.setattr(local_target, "_start_driver", started.append)
    assert TARGET.saved_step(record) == 30
    for go_on in (
        lambda: TARGET.resume(record),
        lambda: TARGET.amend(record, TARGET.render(launched, "r-1"), {}),
    ):
        with pytest.raises(UsageError, match="has completed: there is nothing to resume") as caught:
            go_on()
        assert "chimera_sm resume r-1 train.num_steps=N goes on to a step N above 30" in caught.value.fix
    TARGET.amend(record, TARGET.render(longer, "r-1"), {})
    assert not started
    TARGET.resume(record)
    assert len(started) == 1
    assert TARGET.status(record).num_steps == 40
