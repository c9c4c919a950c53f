"""`recipe=tiny` on two ranks, spread over each axis in turn, stopped on its way and resumed spread otherwise: the loss
curve is that of one process."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import chimera_sm as ch

pytestmark = pytest.mark.train

NUM_STEPS, STOP_AFTER = 12, 4
ONE_PROCESS = ["instances.count=1", "instances.workers_per_host=1"]
ONE_HOST = ["instances.count=1", "instances.workers_per_host=2"]  # tensor parallel stays inside a host
AXES = {
    # name: the model, the layout that starts, and the one that resumes
    "pipeline": (
        "llama3_tiny",
        ["parallel.pipeline_parallel=2", "parallel.pipeline_schedule=gpipe"],
        [*ONE_PROCESS, "parallel.pipeline_parallel=1"],
    ),
    "tensor": ("llama3_tiny", [*ONE_HOST, "parallel.tensor_parallel=2"], ["parallel.tensor_parallel=1"]),
    "context": (
        "llama3_tiny",
        ["parallel.context_parallel=2", "parallel.context_backend=ring"],
        ["parallel.context_parallel=1", "parallel.pipeline_parallel=2"],
    ),
    "expert": ("mixtral_tiny", ["parallel.expert_parallel=2"], [*ONE_PROCESS, "parallel.expert_parallel=1"]),
}


def recipe(shards: Path, model: str) -> list[str]:
    return [
        "recipe=tiny",
        f"model={model}",
        "data=local",
        f"data.uri={shards}",
        "train.sequence_length=64",
        "train.micro_batch_size=1",
        f"train.num_steps={NUM_STEPS}",
        "optim.warmup_steps=3",
        # Else Adam's first steps are the gradient's sign, and one of nothing but rounding moves a weight as far as any
        # other: enough to send a token to another expert.
        "optim.eps=1e-4",
        "checkpoint.interval_steps=5",
        "target.grace_s=60",
    ]


def losses(run: ch.Run) -> list[float]:
    rows = {row["step"]: row["loss"] for row in run.metrics()}
    assert sorted(rows) == list(range(1, NUM_STEPS + 1))
    return [rows[step] for step in sorted(rows)]


@pytest.fixture(scope="module")
def one_process(runs: None, shards: Path):
    found: dict[str, list[float]] = {}

    def of(model: str) -> list[float]:
        if model not in found:
            run = ch.launch(ch.plan(ch.compose([*recipe(shards, model), *ONE_PROCESS])))
            run.wait(timeout_s=240)
            found[model] = losses(run)
        return found[model]

    return of


@pytest.mark.parametrize("axis", AXES)
def test_stopped_on_one_layout_and_resumed_on_another(one_process, shards: Path, axis: str) -> None:
    model, layout, other = AXES[axis]
    run = ch.launch(ch.plan(ch.compose([*recipe(shards, model), *layout])))
    deadline = time.monotonic() + 240
    while (run.status().step or 0) < STOP_AFTER and time.monotonic() < deadline:
        assert not run.status().ended, run.status()
        time.sleep(0.05)
    run.stop()
    with pytest.raises(ch.RunStopped):
        run.wait(timeout_s=120)
    assert STOP_AFTER <= len(run.metrics()) < NUM_STEPS
    run.resume(other)
    assert run.wait(timeout_s=240).state == "completed"
    assert losses(run) == pytest.approx(one_process(model), abs=5e-5)
    log = (run.record.path / "logs" / "algo-1.log").read_text()
    assert "resuming at step" in log


def test_a_completed_run_goes_on_and_a_change_that_cannot_start_is_taken_back(runs: None, shards: Path) -> None:
    run = ch.launch(ch.plan(ch.compose([*recipe(shards, "llama3_tiny"), *ONE_PROCESS, "train.num_steps=4"])))
    assert run.wait(timeout_s=240).state == "completed"
    before = sorted(run.record.path.glob("resumes/*"))
    for refused in ("train.num_steps=3", "train.log_interval=2", "optim.name=muon", "train.sequence_length=32"):
        with pytest.raises(ch.ChimeraError) as caught:
            run.resume([refused])
        assert caught.value.exit_code == 2
    assert (run.status().state, sorted(run.record.path.glob("resumes/*"))) == ("completed", before), "untouched"
    run.resume(["train.num_steps=6", "optim.offload=true"])  # which a CPU cannot
    with pytest.raises(ch.RunFailed, match="so they are taken back"):
        run.wait(timeout_s=120)
    notes: list[str] = []
    run.resume(["train.num_steps=7"], on_note=notes.append)
    assert run.wait(timeout_s=120).state == "completed"
    assert [row["step"] for row in run.metrics()] == [1, 2, 3, 4, 5, 6, 7]
    assert [note.partition(" ")[0] for note in notes] == ["optim.schedule=cosine"]
