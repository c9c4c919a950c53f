"""The store's rules, on checkpoints of a few bytes: what is complete, what is torn and why, what may be deleted."""

import dataclasses
import hashlib
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chimera_train.checkpoint import CheckpointError, CheckpointStore, LoopState
from chimera_train.checkpoint.manifest import (
    Checksum,
    FileEntry,
    Manifest,
    ManifestError,
    RankManifest,
    RankManifestEntry,
    rank_manifest_name,
    seal,
    unseal,
)
from chimera_train.checkpoint.store import UPLOADED, UPLOADING, share, victims, write_once


def write_file(folder: Path, name: str, data: bytes) -> FileEntry:
    write_once(folder / name, data)
    checksum = Checksum()
    checksum.update(data)
    return FileEntry(name, len(data), checksum.text(), ("float32",))


def make_checkpoint(store: CheckpointStore, step: int, world_size: int = 2) -> Path:
    folder = store.new_folder(step)
    source = random.Random(step)
    entries = []
    for rank in range(world_size):
        files = (
            write_file(folder, f"__{rank}_0.distcp", source.randbytes(400 + rank)),
            write_file(folder, f"rng-{rank:05d}.json", source.randbytes(50)),
        )
        data = seal(RankManifest(rank, files))
        write_once(folder / rank_manifest_name(rank), data)
        entries.append(RankManifestEntry(rank_manifest_name(rank), len(data), hashlib.sha256(data).hexdigest()))
    manifest = Manifest(
        step=step,
        tokens_seen=step * 1000,
        samples_seen=step * 10,
        loader={"samples": step * 10},
        world_size=world_size,
        mesh={"fully_sharded": world_size},
        run_id="run",
        recipe_hash="0" * 64,
        model={"vocab_size": 7},
        time="2026-01-01T00:00:00Z",
        torch_version="2.13.0",
        metadata=write_file(folder, "metadata.dcp", source.randbytes(90)),
        rank_manifests=tuple(entries),
    )
    store.commit(folder, manifest)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", shared=True)


def the_reason(store: CheckpointStore, name: str) -> str:
    (torn,) = [t for t in store.list().torn if t.name == name]
    return torn.reason


def test_a_whole_checkpoint_is_listed_with_what_it_says(store):
    make_checkpoint(store, 5)
    (found,) = store.list().complete
    assert found.manifest.loop_state == LoopState(5, 5000, 50, {"samples": 50})
    assert len(found.files) == 5
    assert store.verify(found.name, found.files) == []


def test_newest_is_by_number_not_by_text(store):
    for step in (9, 100, 20):
        make_checkpoint(store, step)
    assert [c.manifest.step for c in store.list().complete] == [100, 20, 9]
    assert store.open("newest").manifest.step == 100
    assert store.open(9).name == "step-9"


def test_opening_what_is_not_there_says_what_is(store):
    make_checkpoint(store, 5)
    (make_checkpoint(store, 7) / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"of step 7.*\n.*step-7: __1_0.distcp cannot be read.*\n.*here: 5"):
        store.open(7)


def test_an_empty_or_absent_folder_has_no_checkpoints(store):
    assert store.list().complete == store.list().torn == ()
    with pytest.raises(CheckpointError, match="no complete checkpoint in"):
        store.open()


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", "rng-00001.json", "metadata.dcp", "rank-00001.json"])
def test_a_missing_file_tears_it(store, name):
    (make_checkpoint(store, 5) / name).unlink()
    assert store.list().complete == ()
    assert the_reason(store, "step-5").startswith(f"{name} cannot be read")
    assert store.list().torn[0].committed


def test_without_its_manifest_it_was_never_committed(store):
    (make_checkpoint(store, 5) / "manifest.json").unlink()
    assert not store.list().torn[0].committed
    assert "did not finish" in the_reason(store, "step-5")


@pytest.mark.parametrize("name", ["__0_0.distcp", "metadata.dcp", "rank-00000.json", "manifest.json"])
@pytest.mark.parametrize("keep", [0, 10])
def test_a_truncated_file_tears_it(store, name, keep):
    path = make_checkpoint(store, 5) / name
    path.write_bytes(path.read_bytes()[:keep])
    assert store.list().complete == ()
    assert name in the_reason(store, "step-5")


@given(where=st.integers(0, 10_000), bit=st.integers(0, 7), file=st.integers(0, 7))
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_flipped_bit_anywhere_is_found(tmp_path_factory, where, bit, file):
    store = CheckpointStore(tmp_path_factory.mktemp("flip"), shared=True)
    folder = make_checkpoint(store, 5)
    original = store.list().complete[0].manifest
    path = sorted(folder.iterdir())[file]
    data = bytearray(path.read_bytes())
    data[where % len(data)] ^= 1 << bit
    path.write_bytes(data)
    listing = store.list()
    if listing.complete:
        (found,) = listing.complete
        # Whitespace of the global manifest may turn into other whitespace: what it says is what was sealed.
        assert store.verify(found.name, found.files) != [] or (
            path.name == "manifest.json" and found.manifest == original
        )


@given(present=st.sets(st.integers(0, 7), max_size=7), order=st.randoms())
@settings(deadline=None, max_examples=150)
def test_whatever_has_arrived_it_is_complete_only_when_all_has(tmp_path_factory, present, order):
    """SageMaker's restore brings files in any order: no strict subset of a checkpoint passes for one."""
    source = CheckpointStore(tmp_path_factory.mktemp("source"), shared=False)
    files = sorted(make_checkpoint(source, 5).iterdir())
    assert len(files) == 8
    arriving = CheckpointStore(tmp_path_factory.mktemp("arriving"), shared=False)
    (arriving.root / "step-5").mkdir()
    chosen = [files[i] for i in present]
    order.shuffle(chosen)
    for path in chosen:
        shutil.copy(path, arriving.root / "step-5")
        assert arriving.list().complete == ()


def test_the_union_of_two_hosts_folders_is_complete_where_neither_was(store, tmp_path):
    hosts = [CheckpointStore(tmp_path / f"host{i}", shared=False) for i in range(2)]
    folder = make_checkpoint(store, 5)
    for path in folder.iterdir():
        owner = hosts[1] if "_1" in path.name or "00001" in path.name else hosts[0]
        if path.name.startswith("__1"):
            owner = hosts[1]
        (owner.root / "step-5").mkdir(parents=True, exist_ok=True)
        shutil.copy(path, owner.root / "step-5")
    assert [h.list().complete for h in hosts] == [(), ()]
    merged = CheckpointStore(tmp_path / "merged", shared=False)
    for host in hosts:
        shutil.copytree(host.root, merged.root, dirs_exist_ok=True)
    assert merged.open().manifest.step == 5


def test_sagemakers_marker_files_are_not_checkpoints_and_do_no_harm(store):
    folder = make_checkpoint(store, 5)
    for path in list(folder.iterdir()):
        path.with_name(path.name + UPLOADED).touch()
    (store.root / f"step-6{UPLOADING}").touch()
    (store.root / "step-7.x").mkdir()
    (store.root / "notes").mkdir()
    assert [c.name for c in store.list().complete] == ["step-5"]
    assert store.list().torn == ()


def test_a_new_attempt_at_a_step_gets_a_new_folder_and_is_newer(store):
    first = make_checkpoint(store, 5)
    (first / "metadata.dcp").unlink()
    assert store.next_attempt(5) == 1
    second = make_checkpoint(store, 5)
    assert second.name == "step-5.1"
    assert store.open(5).name == "step-5.1"
    assert make_checkpoint(store, 5).name == "step-5.2"
    assert store.open().name == "step-5.2"
    assert store.next_attempt(50) == 0


def test_a_file_is_never_written_twice(store):
    folder = make_checkpoint(store, 5)
    with pytest.raises(FileExistsError):
        store.commit(folder, store.open().manifest)


def test_pruning_keeps_the_newest_and_clears_old_torn_folders(store):
    for step in (10, 20, 30, 40):
        make_checkpoint(store, step)
    for torn_step in (15, 35, 50):
        (make_checkpoint(store, torn_step) / "manifest.json").unlink()
    assert store.prune(2) == ["step-10", "step-15", "step-20", "step-35"]
    assert sorted(store.names()) == ["step-30", "step-40", "step-50"]


def test_pruning_without_a_complete_checkpoint_deletes_nothing(store):
    for step in (10, 20):
        (make_checkpoint(store, step) / "manifest.json").unlink()
    assert store.prune(2) == []
    assert len(store.names()) == 2


def test_a_folder_that_is_being_uploaded_is_not_deleted(store):
    for step in (10, 20, 30, 40):
        make_checkpoint(store, step)
    marker = store.root / "step-10" / f"__1_0.distcp{UPLOADING}"
    marker.touch()
    assert store.prune(2) == ["step-20"]
    assert (store.root / "step-10" / "__1_0.distcp").exists()
    marker.unlink()
    assert store.prune(2) == ["step-10"]


def test_removing_stops_at_an_upload_but_takes_the_manifest_first(store):
    folder = make_checkpoint(store, 10)
    (folder / f"__1_0.distcp{UPLOADING}").touch()
    assert not store.remove("step-10")
    assert not (folder / "manifest.json").exists()
    assert (folder / "__1_0.distcp").exists()
    assert store.list().complete == ()


def test_the_fallback_is_kept_while_the_one_after_it_is_not_yet_uploaded(store):
    for step in (10, 20, 30):
        make_checkpoint(store, step)
    marker = store.root / "step-20" / f"metadata.dcp{UPLOADING}"
    marker.touch()
    assert store.prune(2) == []
    marker.unlink()
    (store.root / "step-30" / f"metadata.dcp{UPLOADING}").touch()  # the newest always is, after a save
    assert store.prune(2) == ["step-10"]


@given(
    names=st.sets(st.integers(0, 20).map("step-{}".format), max_size=10),
    complete=st.sets(st.integers(0, 20).map("step-{}".format), max_size=10),
    uploading=st.sets(st.integers(0, 20).map("step-{}".format), max_size=4),
    keep=st.integers(2, 4),
)
def test_pruning_never_takes_the_newest_checkpoints_nor_anything_newer(names, complete, uploading, keep):
    complete &= names
    gone = set(victims(names, complete, uploading, keep))
    steps = sorted((int(n[5:]) for n in complete), reverse=True)
    assert not gone & {f"step-{s}" for s in steps[:keep]}
    assert not gone & uploading
    assert all(int(n[5:]) < steps[0] for n in gone)
    assert complete - gone or not complete


@given(sizes=st.lists(st.integers(0, 1000), max_size=12), parts=st.integers(1, 5))
def test_readers_share_files_out_completely_and_once(sizes, parts):
    files = [FileEntry(f"f{i}", size, "crc32:0") for i, size in enumerate(sizes)]
    shares = [share(files, part, parts) for part in range(parts)]
    assert sorted(f.name for s in shares for f in s) == sorted(f.name for f in files)


def test_a_checkpoint_of_a_later_release_is_refused_by_name(store):
    folder = make_checkpoint(store, 5)
    newer = dataclasses.replace(store.open().manifest, schema_version=2)
    (folder / "manifest.json").write_bytes(seal(newer))
    assert "schema version 2" in the_reason(store, "step-5")


def test_an_unknown_checksum_algorithm_is_a_problem_not_a_pass(store):
    make_checkpoint(store, 5)
    file = dataclasses.replace(store.open().files[0], checksum="xxh3:00")
    assert "xxh3" in store.verify("step-5", [file])[0]


def test_a_field_that_a_later_release_added_is_passed_over():
    manifest = RankManifest(0, (FileEntry("a", 1, "crc32:0"),))
    assert unseal(RankManifest, seal(manifest)) == manifest
    with pytest.raises(ManifestError, match="does not match its own"):
        unseal(RankManifest, seal(manifest).replace(b'"rank": 0', b'"rank": 1'))


def test_the_store_needs_neither_torch_nor_numpy():
    code = (
        "import sys; import chimera_train.checkpoint as c; c.CheckpointStore; c.LoopState\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
