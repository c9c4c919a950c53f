"""The checkpointer without a process group: resume, what is refused, what is told, faults."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_ranks import Odd, make_checkpointer, recipe_file

from chimera_train import faults
from chimera_train.checkpoint import CheckpointError, HistoryUnreadable, LoopState
from chimera_train.config import RopeScaling


def saved_run(root: Path, steps: int = 3, **options) -> Odd:
    run = Odd(sharded=False)
    checkpointer = make_checkpointer(root, world_size=1, **options)
    assert checkpointer.load(run.model, run.optimizer) is None
    for _ in range(steps):
        run.train(1)
        checkpointer.save(run.step, run.model, run.optimizer, run.state())
    return run


def store_folder(root: Path) -> Path:
    return root / "fsx" / "run"


def load(root: Path, run: Odd | None = None, **options) -> LoopState | None:
    run = run or Odd(sharded=False, seed=99)
    return make_checkpointer(root, world_size=1, **options).load(run.model, run.optimizer)


def test_resume_is_bit_exact(tmp_path):
    run = saved_run(tmp_path)
    expected = run.train(3)
    again = Odd(sharded=False, seed=99)
    state = load(tmp_path, again)
    assert state == LoopState(3, 96, 12, {"samples": 12})
    assert again.train(3) == expected
    assert again.digest() == run.digest()


def test_every_random_generator_goes_on(tmp_path):
    import random

    import numpy as np

    def draw():
        return random.gauss(0, 1), np.random.normal(), torch.rand(3).tolist(), random.random()

    draw()  # leaves half a pair of gaussians behind
    saved_run(tmp_path, steps=1)
    expected = draw()
    load(tmp_path)
    assert draw() == expected


def test_wrappers_and_compilation_leave_no_mark_on_names(tmp_path):
    wrapped = Odd(sharded=False, wrapped=True)
    wrapped.train(1)
    make_checkpointer(tmp_path, world_size=1).save(1, wrapped.model, wrapped.optimizer, wrapped.state())
    plain = Odd(sharded=False, seed=99)
    load(tmp_path, plain)
    assert plain.digest() == wrapped.digest()


def test_a_tied_matrix_is_stored_once_and_stays_tied(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(4, 3)
            self.head = torch.nn.Linear(3, 4, bias=False)
            self.head.weight = self.embedding.weight

    def build():
        model = Tied()
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer

    model, optimizer = build()
    model.head(model.embedding(torch.tensor([1, 2]))).sum().backward()
    optimizer.step()
    checkpointer = make_checkpointer(tmp_path, world_size=1)
    checkpointer.save(1, model, optimizer, LoopState(1, 0, 0))
    other, other_optimizer = build()
    make_checkpointer(tmp_path, world_size=1).load(other, other_optimizer)
    assert torch.equal(other.embedding.weight, model.embedding.weight)
    assert other.head.weight is other.embedding.weight
    names = checkpoint_tensors(store_folder(tmp_path) / "step-1")
    assert [n for n in names if n.startswith("model.")] == ["model.embedding.weight"]


def checkpoint_tensors(folder: Path) -> list[str]:
    from chimera_train.checkpoint.storage import OnceReader

    return sorted(OnceReader(folder).read_metadata().state_dict_metadata)


def test_saving_before_the_first_step_does_not_count_one(tmp_path):
    run = Odd(sharded=False)
    make_checkpointer(tmp_path, world_size=1).save(0, run.model, run.optimizer, run.state())
    assert not run.optimizer.state
    expected = run.train(2)
    again = Odd(sharded=False, seed=99)
    assert load(tmp_path, again).step == 0
    assert again.train(2) == expected


def test_a_parameter_that_never_had_a_gradient_has_no_state_after_resume(tmp_path):
    run = Odd(sharded=False)
    run.model[0][0].bias.requires_grad_(False)
    run.train(2)
    make_checkpointer(tmp_path, world_size=1).save(2, run.model, run.optimizer, run.state())
    again = Odd(sharded=False, seed=99)
    load(tmp_path, again)
    assert again.model[0][0].bias not in again.optimizer.state
    assert len(again.optimizer.state) == len(run.optimizer.state)


def test_keeps_the_last_ones_and_a_second_save_of_a_step_is_a_new_folder(tmp_path):
    run = saved_run(tmp_path, steps=4)
    assert sorted(p.name for p in store_folder(tmp_path).iterdir()) == ["step-3", "step-4"]
    checkpointer = make_checkpointer(tmp_path, world_size=1)
    checkpointer.load(run.model, run.optimizer)
    assert checkpointer.save(4, run.model, run.optimizer, run.state()).name == "step-4.1"
    assert sorted(p.name for p in store_folder(tmp_path).iterdir()) == ["step-4", "step-4.1"]


def test_saving_without_loading_first_does_not_forget_older_checkpoints(tmp_path):
    run = saved_run(tmp_path, steps=3)
    run.train(1)
    make_checkpointer(tmp_path, world_size=1).save(4, run.model, run.optimizer, run.state())
    assert sorted(p.name for p in store_folder(tmp_path).iterdir()) == ["step-3", "step-4"]


def test_falls_back_to_the_one_before_and_says_so(tmp_path, capsys):
    saved_run(tmp_path)
    path = store_folder(tmp_path) / "step-3" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert load(tmp_path).step == 2
    said = capsys.readouterr().out
    assert "skipped step-3: __0_0.distcp does not match its checksum" in said
    assert f"resuming at step 2 from {store_folder(tmp_path)}/step-2" in said


def test_damage_everywhere_is_an_error_that_names_all_of_it(tmp_path):
    saved_run(tmp_path)
    (store_folder(tmp_path) / "step-3" / "metadata.dcp").unlink()
    (store_folder(tmp_path) / "step-2" / "manifest.json").write_bytes(b"{")
    with pytest.raises(HistoryUnreadable) as caught:
        load(tmp_path)
    assert "step-3: metadata.dcp cannot be read" in str(caught.value)
    assert "step-2: manifest.json is not JSON" in str(caught.value)
    assert "Nothing was changed" in str(caught.value)
    assert caught.value.exit_code == 1


def test_a_first_save_that_was_never_committed_starts_at_zero_loudly(tmp_path, capsys):
    saved_run(tmp_path, steps=1, storage="per_host")
    (tmp_path / "checkpoints" / "step-1" / "manifest.json").unlink()
    assert load(tmp_path, storage="per_host") is None
    assert "STARTING AT STEP 0" in capsys.readouterr().out


def test_manifests_that_are_all_gone_are_a_past_that_cannot_be_read(tmp_path, capsys):
    saved_run(tmp_path, steps=3, storage="per_host")
    for manifest in (tmp_path / "checkpoints").glob("step-*/manifest.json"):
        manifest.unlink()
    with pytest.raises(HistoryUnreadable, match=r"step-3: no manifest\.json(.|\n)*step-2: no manifest\.json"):
        load(tmp_path, storage="per_host")
    # Two attempts at the first save, neither committed, are of one step.
    shutil.rmtree(tmp_path / "checkpoints" / "step-2")
    shutil.copytree(tmp_path / "checkpoints" / "step-3", tmp_path / "checkpoints" / "step-3.1")
    assert load(tmp_path, storage="per_host") is None
    assert "STARTING AT STEP 0" in capsys.readouterr().out


def test_a_witness_tells_an_unmounted_store_from_a_new_run(tmp_path):
    saved_run(tmp_path)
    witnesses = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert witnesses == ["witness-step-2.json", "witness-step-3.json"]
    shutil.rmtree(tmp_path / "fsx")
    with pytest.raises(HistoryUnreadable, match=r"step-3: committed \(a witness in .* says so\) and not there"):
        load(tmp_path)
    assert load(tmp_path, run_id="another") is None


def test_a_committed_checkpoint_that_is_gone_is_told(tmp_path, capsys):
    saved_run(tmp_path)
    shutil.rmtree(store_folder(tmp_path) / "step-3")
    assert load(tmp_path).step == 2
    assert "step-3 was committed once and is gone" in capsys.readouterr().out


def test_another_model_is_refused_by_its_fields(tmp_path):
    saved_run(tmp_path)
    with pytest.raises(CheckpointError, match=r"of another model: model\.num_layers was 1, is 2; model\.rope_theta"):
        load(tmp_path, recipe=recipe_file(num_layers=2, rope_theta=1e4))
    with pytest.raises(CheckpointError, match=r"model\.rope_scaling was None, is \{.*'factor': 8\.0"):
        load(tmp_path, recipe=recipe_file(rope_scaling=RopeScaling()))


def test_another_shape_under_the_same_name_is_refused(tmp_path):
    saved_run(tmp_path)
    run = Odd(sharded=False)
    run.model[2] = torch.nn.Linear(7, 2)
    run.optimizer = torch.optim.AdamW(run.model.parameters())
    with pytest.raises(CheckpointError, match=r"model\.2\.weight is torch\.float32 \[1, 7\] in the checkpoint"):
        load(tmp_path, run)


def test_a_changed_recipe_of_the_same_model_goes_on_and_says_so(tmp_path, capsys):
    saved_run(tmp_path)
    longer = replace(recipe_file(name="renamed", max_position_embeddings=16384), recipe_hash="b" * 64)
    assert load(tmp_path, recipe=longer).step == 3
    assert "the recipe is not the one that saved it" in capsys.readouterr().out


def test_a_failed_write_leaves_the_old_one_and_nothing_half_written(tmp_path, capsys):
    import resource

    run = saved_run(tmp_path, steps=2)
    checkpointer = make_checkpointer(tmp_path, world_size=1)
    checkpointer.load(run.model, run.optimizer)
    run.train(1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            checkpointer.save(3, run.model, run.optimizer, run.state())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "step-3 was not saved: rank 0: [Errno 27] File too large" in str(caught.value)
    assert f"The newest good checkpoint is {store_folder(tmp_path)}/step-2" in str(caught.value)
    assert sorted(p.name for p in store_folder(tmp_path).iterdir()) == ["step-1", "step-2"]
    assert checkpointer.save(3, run.model, run.optimizer, run.state()).name == "step-3.1"
    assert load(tmp_path).step == 3


@pytest.mark.needs_root
def test_a_full_disk_says_so(tmp_path):
    disk = tmp_path / "fsx"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small tmpfs: {mounted.stderr.decode().strip()}")
    try:
        with pytest.raises(
            CheckpointError, match=r"step-\d+ was not saved: rank 0: \[Errno 28\] No space left on device"
        ):
            saved_run(tmp_path, steps=50, keep_last=50)
        assert load(tmp_path).step >= 1
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_fault_fires_at_its_step_on_its_rank_on_the_first_attempt_only():
    def outcome(fault: str, attempt: str | None = None) -> int:
        code = "from chimera_train import faults; faults.at('step', step=4, rank=1)"
        environment = os.environ | {faults.FAULT_VARIABLE: fault} | ({"CHIMERA_ATTEMPT": attempt} if attempt else {})
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True).returncode

    assert outcome("kill:step:4") == outcome("kill:step:4:1") == outcome("kill:step:4", "1") == -9
    assert outcome("kill:step:5") == outcome("kill:step:4:0") == outcome("kill:checkpoint_write:4") == 0
    assert outcome("kill:step:4", "2") == 0
    assert outcome("kill:step:x") == 1


@pytest.mark.parametrize("fault", ["bogus", "kill", "kill:step", "kill:bogus:4", "kill:step:²", "kill:step:1:2:3", ":"])
def test_a_fault_of_another_form_is_refused(fault, monkeypatch):
    monkeypatch.setenv(faults.FAULT_VARIABLE, fault)
    with pytest.raises(ValueError, match=rf"CHIMERA_FAULT={re.escape(repr(fault))} is not kill:<point>:<step>"):
        faults.at("step", step=1, rank=0)


def test_the_manifest_says_what_was_saved(tmp_path):
    saved_run(tmp_path, steps=1)
    said = json.loads((store_folder(tmp_path) / "step-1" / "manifest.json").read_text())
    assert {k: said[k] for k in ("step", "tokens_seen", "samples_seen", "world_size", "run_id", "schema_version")} == {
        "step": 1,
        "tokens_seen": 32,
        "samples_seen": 4,
        "world_size": 1,
        "run_id": "run",
        "schema_version": 1,
    }
    files = json.loads((store_folder(tmp_path) / "step-1" / "rank-00000.json").read_text())["files"]
    assert [(f["name"], f["dtypes"]) for f in files] == [("__0_0.distcp", ["float32"]), ("rng-00000.json", [])]
    assert not [p.name for p in (store_folder(tmp_path) / "step-1").iterdir() if p.name.startswith(".")]
