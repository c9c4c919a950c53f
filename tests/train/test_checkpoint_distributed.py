"""Checkpoints of several FSDP ranks: resharding, hosts with folders of their own, kill -9, a failed write."""

import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
from checkpoint_ranks import Odd, make_checkpointer
from spawn import run_ranks

from chimera_train.checkpoint import CheckpointStore

pytestmark = pytest.mark.train


def train_and_save(rank: int, root: Path, world_size: int, steps: int, then: int = 0, **options):
    """Load if there is something, train and save `steps` times, then train `then` steps more."""
    run = Odd(sharded=True)
    checkpointer = make_checkpointer(host_root(root, rank, world_size, options), world_size=world_size, **options)
    state = checkpointer.load(run.model, run.optimizer)
    run.step = state.step if state else 0
    names = []
    for _ in range(steps):
        run.train(1)
        names.append(checkpointer.save(run.step, run.model, run.optimizer, run.state()).name)
    digest = run.digest()
    return {"names": names, "digest": digest, "losses": run.train(then), "end": run.digest()}


def load_only(rank: int, root: Path, world_size: int, then: int = 0, **options):
    run = Odd(sharded=True, seed=99)
    checkpointer = make_checkpointer(host_root(root, rank, world_size, options), world_size=world_size, **options)
    state = checkpointer.load(run.model, run.optimizer)
    digest = run.digest()
    return {"step": state and state.step, "digest": digest, "losses": run.train(then), "end": run.digest()}


def host_root(root: Path, rank: int, world_size: int, options: dict) -> Path:
    if options.get("storage") != "per_host":
        return root
    return root / f"host{rank // (world_size // options['hosts'])}"


def saving_per_host(rank, root, world_size, hosts, steps):
    return train_and_save(rank, root, world_size, steps, storage="per_host", hosts=hosts)


def loading_per_host(rank, root, world_size, hosts):
    return load_only(rank, root, world_size, storage="per_host", hosts=hosts)


def merge_and_restore(root: Path, restored: Path, hosts: int) -> None:
    """What SageMaker does between two jobs: all hosts' files under one S3 prefix, then all of them on every host."""
    merged = root / "s3"
    for host in sorted(root.glob("host*")):
        for path in sorted((host / "checkpoints").rglob("*")):
            target = merged / path.relative_to(host / "checkpoints")
            if path.is_file():
                assert not target.exists() or target.read_bytes() == path.read_bytes(), f"two hosts wrote {target}"
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
    for host in range(hosts):
        shutil.copytree(merged, restored / f"host{host}" / "checkpoints")


def test_four_ranks_save_and_any_number_loads(tmp_path):
    saved = run_ranks(4, train_and_save, tmp_path, 4, 2, 2)
    assert saved[0]["names"] == ["step-1", "step-2"]
    alone = Odd(sharded=False, seed=99)
    assert make_checkpointer(tmp_path, world_size=1).load(alone.model, alone.optimizer).step == 2
    assert alone.digest() == saved[0]["digest"]
    for world_size in (1, 2, 3, 4):
        loaded = run_ranks(world_size, load_only, tmp_path, world_size, 2)
        assert [one["step"] for one in loaded] == [2] * world_size
        assert {one["digest"] for one in loaded} == {saved[0]["digest"]}
        if world_size == 4:  # the same world goes on bit for bit, every rank with its own random generators
            assert [one["losses"] for one in loaded] == [one["losses"] for one in saved]
            assert {one["end"] for one in loaded} == {saved[0]["end"]}


def test_one_process_saves_and_three_ranks_load(tmp_path):
    run = Odd(sharded=False)
    run.train(2)
    make_checkpointer(tmp_path, world_size=1).save(2, run.model, run.optimizer, run.state())
    assert {one["digest"] for one in run_ranks(3, load_only, tmp_path, 3)} == {run.digest()}


def test_hosts_with_their_own_folders_save_merge_restore_and_prune(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    saved = run_ranks(4, saving_per_host, first, 4, 2, 4)
    for host in range(2):
        store = CheckpointStore(first / f"host{host}" / "checkpoints", shared=False)
        assert store.list().complete == ()  # neither has it all
        assert store.names() == ["step-4", "step-3"]
    assert not list((first / "host1").rglob("manifest.json"))

    merge_and_restore(first, second, hosts=2)
    assert [
        c.manifest.step for c in CheckpointStore(second / "host1" / "checkpoints", shared=False).list().complete
    ] == [4, 3]
    assert {one["digest"] for one in run_ranks(2, loading_per_host, second, 2, 2)} == {saved[0]["digest"]}

    again = run_ranks(4, saving_per_host, second, 4, 2, 1)
    assert again[0]["names"] == ["step-5"]
    for host in range(2):  # the restored copies of step 3 are gone from both
        assert CheckpointStore(second / f"host{host}" / "checkpoints", shared=False).names() == ["step-5", "step-4"]


def test_hosts_agree_on_what_all_of_them_have(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    run_ranks(2, saving_per_host, first, 2, 2, 3)
    merge_and_restore(first, second, hosts=2)
    (second / "host1" / "checkpoints" / "step-3" / "__0_0.distcp").unlink()
    assert [one["step"] for one in run_ranks(2, loading_per_host, second, 2, 2)] == [2, 2]
    # A new attempt at step 3 has one name on both hosts, although one of them could not use the old folder.
    (second / "host1" / "checkpoints" / "step-3" / "manifest.json").unlink()
    shutil.rmtree(second / "host0" / "checkpoints" / "step-3")
    again = run_ranks(2, saving_per_host, second, 2, 2, 1)
    assert [one["names"] for one in again] == [["step-3.1"], ["step-3.1"]]
    shutil.rmtree(second / "host0" / "checkpoints")
    for kind, message in run_ranks(2, loading_per_host, second, 2, 2):
        assert kind == "HistoryUnreadable"
        assert "step-2: complete on 1 of 2 hosts only" in message


def test_a_byte_flipped_in_any_ranks_file_is_found_by_whoever_reads_it(tmp_path):
    run_ranks(2, train_and_save, tmp_path, 2, 2)
    for rank in range(2):
        path = tmp_path / "fsx" / "run" / "step-2" / f"__{rank}_0.distcp"
        whole = path.read_bytes()
        path.write_bytes(whole[:700] + bytes([whole[700] ^ 4]) + whole[701:])
        assert [one["step"] for one in run_ranks(2, load_only, tmp_path, 2)] == [1, 1]
        path.write_bytes(whole)


@pytest.mark.parametrize("victim", [0, 1])
def test_kill_9_in_the_middle_of_a_write_leaves_the_one_before(tmp_path, victim):
    fault = {"CHIMERA_FAULT": f"kill:checkpoint_write:2:{victim}"}
    killed = run_ranks(2, train_and_save, tmp_path, 2, 3, environment=fault)
    assert killed[victim] == -signal.SIGKILL
    assert (tmp_path / "fsx" / "run" / "step-2" / f"__{victim}_0.distcp").exists()
    store = CheckpointStore(tmp_path / "fsx" / "run", shared=True)
    assert [c.name for c in store.list().complete] == ["step-1"]
    assert [t.name for t in store.list().torn] == ["step-2"]

    # The next attempt, in which the fault does not fire again, ends where an uninterrupted run ends.
    resumed = run_ranks(2, train_and_save, tmp_path, 2, 2, environment=fault | {"CHIMERA_ATTEMPT": "2"})
    assert resumed[0]["names"] == ["step-2.1", "step-3"]
    assert "step-2" not in store.names()
    (tmp_path / "whole").mkdir()
    uninterrupted = run_ranks(2, train_and_save, tmp_path / "whole", 2, 3)
    assert resumed[0]["digest"] == uninterrupted[0]["digest"]


def save_with_a_full_disk_on_one_rank(rank: int, root: Path, world_size: int):
    run = Odd(sharded=True)
    checkpointer = make_checkpointer(root, world_size=world_size)
    checkpointer.load(run.model, run.optimizer)
    run.train(1)
    checkpointer.save(1, run.model, run.optimizer, run.state())
    run.train(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        checkpointer.save(2, run.model, run.optimizer, run.state())
    except RuntimeError as error:
        message = f"{type(error).__name__}: {error}"
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    names = sorted(os.listdir(checkpointer.store.root))
    return message, names, checkpointer.save(2, run.model, run.optimizer, run.state()).name


def test_a_failed_write_on_one_rank_is_one_clear_error_on_all(tmp_path):
    for message, names, next_name in run_ranks(3, save_with_a_full_disk_on_one_rank, tmp_path, 3):
        assert message.startswith(
            "CheckpointError: step-2 was not saved: rank 1: [Errno 27] File too large. The newest"
        )
        assert f"{tmp_path}/fsx/run/step-1" in message
        assert names == ["step-1"]
        assert next_name == "step-2.1"
