"""The imitation of SageMaker's checkpoint sync."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from chimera_sm.targets.local.sync import UPLOADED, UPLOADING, CheckpointSync


@pytest.fixture
def hosts(tmp_path: Path) -> dict[str, Path]:
    folders = {name: tmp_path / name / "checkpoints" for name in ("algo-1", "algo-2")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    return folders


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "s3" / "checkpoints"


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def tree(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): p.read_text()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and not p.name.endswith((UPLOADING, UPLOADED))
    }


def test_the_union_of_all_hosts_is_restored_on_every_host(hosts: dict[str, Path], store: Path) -> None:
    write(hosts["algo-1"], "step-5/a", "1")
    write(hosts["algo-2"], "step-5/b", "2")
    sync = CheckpointSync(hosts, store)
    assert sync.scan(0) == []
    assert tree(store) == {"step-5/a": "1", "step-5/b": "2"}
    assert (hosts["algo-1"] / f"step-5/a{UPLOADED}").exists()
    assert not list(hosts["algo-1"].rglob(f"*{UPLOADING}"))
    assert sync.restore() == 2
    for folder in hosts.values():
        assert tree(folder) == {"step-5/a": "1", "step-5/b": "2"}
        assert not list(folder.rglob("*sagemaker*")), "a fresh host has no markers"


def test_files_of_a_peer_are_not_pulled_while_the_hosts_run(hosts: dict[str, Path], store: Path) -> None:
    write(hosts["algo-1"], "a", "1")
    CheckpointSync(hosts, store).scan(0)
    assert tree(hosts["algo-2"]) == {}


def test_a_deletion_on_one_host_deletes_in_the_store_and_does_not_come_back(
    hosts: dict[str, Path], store: Path
) -> None:
    for step in (1, 2):
        write(hosts["algo-1"], f"step-{step}/a", "1")
    sync = CheckpointSync(hosts, store)
    sync.scan(0)
    sync.restore()
    shutil.rmtree(hosts["algo-1"] / "step-1")
    assert tree(hosts["algo-2"]).keys() == {"step-1/a", "step-2/a"}, "the other host still has its restored copy"
    for _ in range(2):
        sync.scan(0)
        assert tree(store).keys() == {"step-2/a"}
    assert not (store / "step-1").exists()
    again = CheckpointSync(hosts, store)  # another driver: it knows what this one copied and deleted
    again.gather()
    again.restore()
    assert tree(hosts["algo-2"]).keys() == {"step-2/a"}
    assert not (hosts["algo-2"] / "step-1").exists()


def test_a_file_that_is_being_written_is_not_copied(hosts: dict[str, Path], store: Path) -> None:
    file = write(hosts["algo-1"], "big", "half")
    sync = CheckpointSync(hosts, store)
    sync.scan(settle_s=5.0)
    assert tree(store) == {}
    past = time.time_ns() - 6 * 10**9
    os.utime(file, ns=(past, past))
    sync.scan(settle_s=5.0)
    assert tree(store) == {"big": "half"}


def test_a_file_that_changes_while_it_is_copied_does_not_appear(
    hosts: dict[str, Path], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(hosts["algo-1"], "big", "half")
    copy = shutil.copyfile

    def copy_and_grow(source: Path, target: Path) -> None:
        copy(source, target)
        with file.open("a") as stream:
            stream.write(" and the rest")

    monkeypatch.setattr(shutil, "copyfile", copy_and_grow)
    sync = CheckpointSync(hosts, store)
    sync.scan(0)
    assert tree(store) == {}
    monkeypatch.setattr(shutil, "copyfile", copy)
    sync.scan(0)
    assert tree(store) == {"big": "half and the rest"}


def test_a_lost_host_deletes_nothing_and_gets_everything_back(hosts: dict[str, Path], store: Path) -> None:
    write(hosts["algo-1"], "a", "1")
    write(hosts["algo-2"], "b", "2")
    CheckpointSync(hosts, store).scan(0)
    shutil.rmtree(hosts["algo-2"].parent)
    sync = CheckpointSync(hosts, store)
    sync.scan(0)
    assert tree(store).keys() == {"a", "b"}
    sync.restore()
    assert tree(hosts["algo-2"]).keys() == {"a", "b"}


@pytest.mark.parametrize("ledger", ["kept", "gone", "", "{", "[]", '{"hosts": {"algo-1": {"a": [1]}}, "deleted": []}'])
@pytest.mark.parametrize("lost", ["store", "hosts", "one file each"])
def test_what_vanishes_while_no_host_runs_is_given_back(
    hosts: dict[str, Path], store: Path, lost: str, ledger: str
) -> None:
    write(hosts["algo-1"], "step-5/a", "1")
    write(hosts["algo-2"], "step-5/b", "2")
    before = CheckpointSync(hosts, store)
    before.scan(0)
    before.restore()
    if lost == "store":
        shutil.rmtree(store)
    elif lost == "hosts":
        for folder in hosts.values():
            shutil.rmtree(folder)
            folder.mkdir()
    else:
        (store / "step-5/a").unlink()
        (hosts["algo-1"] / "step-5/b").unlink()
        (hosts["algo-2"] / "step-5/b").unlink()
    file = store.with_name("checkpoints.ledger.json")
    if ledger != "kept":
        file.unlink()
        if ledger != "gone":
            file.write_text(ledger)
    sync = CheckpointSync(hosts, store)
    assert sync.gather() == []
    assert sync.restore() == 2
    for folder in (store, *hosts.values()):
        assert tree(folder) == {"step-5/a": "1", "step-5/b": "2"}


def test_a_store_that_vanishes_under_running_hosts_is_filled_again(hosts: dict[str, Path], store: Path) -> None:
    write(hosts["algo-1"], "a", "1")
    sync = CheckpointSync(hosts, store)
    sync.scan(0)
    shutil.rmtree(store)
    assert sync.scan(0) == []
    assert tree(store) == {"a": "1"}
    assert tree(hosts["algo-1"]) == {"a": "1"}


def test_a_ledger_that_cannot_be_written_is_told_and_costs_nothing(
    hosts: dict[str, Path], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(hosts["algo-1"], "a", "1")

    def full(self: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    sync = CheckpointSync(hosts, store)
    monkeypatch.setattr(Path, "write_text", full)
    assert sync.scan(0) == ["checkpoints.ledger.json was not written: No space left on device"]
    monkeypatch.undo()
    assert tree(store) == {"a": "1"}


def test_a_full_disk_is_told_and_loses_nothing(
    hosts: dict[str, Path], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(hosts["algo-1"], "a", "1")

    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    sync = CheckpointSync(hosts, store)
    monkeypatch.setattr(shutil, "copyfile", full)
    assert sync.scan(0) == ["algo-1: a was not copied: No space left on device"]
    sync.restore()
    assert tree(hosts["algo-1"]) == {"a": "1"}
    monkeypatch.undo()
    assert sync.scan(0) == []
    assert tree(store) == {"a": "1"}
