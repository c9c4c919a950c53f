"""The loader: every sample once an epoch, the same global batch at every world size, resume at any step."""

import json
import os
import subprocess
import sys
import threading
import time
import traceback

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_indexed import write_dataset

from chimera_train.config import DataConfig, TrainConfig
from chimera_train.data.dataset import TokenDataset
from chimera_train.data.errors import DataError
from chimera_train.data.loader import Loader

SEQUENCE = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """101 samples of 8 tokens (+ tail) in 5 shards; the token row is random, so that windows differ."""
    rng = np.random.default_rng(0)
    row = rng.integers(1, 1000, size=101 * SEQUENCE + 5)
    shards, at = [], 0
    while at < len(row):
        documents = []
        for _ in range(12):
            length = int(rng.integers(1, 40))
            if at < len(row):
                documents.append(row[at : at + length].tolist())
                at += length
        shards.append(documents)
    assert len(shards) > 3
    return write_dataset(tmp_path_factory.mktemp("data"), shards, vocab_size=1000)


def make(
    folder, ranks=1, rank=0, batch=12, micro=1, prefetch=0, seed=1234, shuffle=True, sequence=SEQUENCE, vocab=1000
):
    train = TrainConfig(
        num_steps=1, global_batch_size=batch, micro_batch_size=micro, sequence_length=sequence, seed=seed
    )
    return Loader(
        DataConfig(name="test", prefetch_batches=prefetch, shuffle=shuffle),
        train,
        folder=folder,
        data_rank=rank,
        data_parallel_size=ranks,
        accumulation_steps=batch // (micro * ranks),
        vocab_size=vocab,
    )


def take(loaders, steps):
    """Global batches of `steps` steps: rows of all ranks in their order, and their samples."""
    rows, samples = [], []
    for _ in range(steps):
        for loader in loaders:
            batch = loader.next_step()
            rows += [row for micro in batch.micro_batches for row in micro.tolist()]
            samples += batch.samples
    return rows, samples


def world(folder, ranks, **options):
    return [make(folder, ranks, rank, **options) for rank in range(ranks)]


def test_every_sample_once_an_epoch_over_many_epochs(folder):
    loader = make(folder, batch=4)
    assert loader.num_samples == 101
    indices = [
        sample.global_index for sample in take([loader], 101)[1]
    ]  # 404 samples: 4 epochs, steps across their ends
    epochs = [indices[i * 101 : (i + 1) * 101] for i in range(4)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(101))
        assert epoch != sorted(epoch)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_rows_are_the_windows_they_say(folder):
    dataset = TokenDataset(folder)
    row, _ = dataset.read(0, dataset.num_tokens)
    loader = make(folder)
    for step in range(9):
        batch = loader.next_step()
        rows = np.concatenate(batch.micro_batches)
        assert rows.dtype == np.int64
        assert rows.shape == (12, SEQUENCE + 1)
        for tokens, sample in zip(rows, batch.samples, strict=True):
            start = sample.global_index * SEQUENCE
            assert tokens.tolist() == row[start : start + SEQUENCE + 1].tolist()
            assert sample.source_id == 0
            assert sample.document_ids == dataset.read(start, start + SEQUENCE + 1)[1]
        assert loader.state_dict()["samples_consumed"] == 12 * (step + 1)


def test_without_shuffling_in_the_order_of_the_corpus(folder):
    loader = make(folder, shuffle=False)
    assert [s.global_index for s in take([loader], 9)[1]] == [q % 101 for q in range(108)]


@pytest.mark.parametrize(
    ("ranks", "micro"), [(1, 2), (1, 3), (1, 12), (2, 1), (2, 3), (3, 1), (3, 2), (4, 1), (4, 3), (12, 1)]
)
def test_the_global_batch_does_not_depend_on_the_layout(folder, ranks, micro):
    loaders = world(folder, ranks, micro=micro, prefetch=2)
    assert take(loaders, 20) == take([make(folder)], 20)
    for loader in loaders:
        loader.close()


def test_shapes_of_micro_batches(folder):
    batch = make(folder, ranks=2, micro=3).next_step()
    assert [tokens.shape for tokens in batch.micro_batches] == [(3, SEQUENCE + 1)] * 2
    assert len(batch.samples) == 6


def test_seeds_differ(folder):
    assert take([make(folder, seed=1)], 3) != take([make(folder, seed=2)], 3)


@settings(max_examples=25, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 15), min_size=1, max_size=4),
    layouts=st.lists(
        st.sampled_from([(1, 1), (1, 4), (2, 3), (3, 2), (4, 1), (6, 2), (12, 1)]), min_size=5, max_size=5
    ),
)
def test_resume_anywhere_at_any_world_size(folder, cuts, layouts):
    """A run that is stopped several times, each time going on at another world size, sees what an unbroken one does."""
    expected = take([make(folder)], sum(cuts) + 3)
    rows, samples = [], []
    state = None
    for steps, (ranks, micro) in zip([*cuts, 3], layouts, strict=False):
        loaders = world(folder, ranks, micro=micro)
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        more = take(loaders, steps)
        rows, samples = rows + more[0], samples + more[1]
        assert len({json.dumps(loader.state_dict()) for loader in loaders}) == 1
        state = json.loads(json.dumps(loaders[0].state_dict()))
    assert (rows, samples) == expected


def test_resume_in_a_new_process(folder):
    loader = make(folder, ranks=2, rank=1)
    take([loader], 13)
    code = (
        "import json, sys; from pathlib import Path; from test_data_loader import make\n"
        "loader = make(Path(sys.argv[1]), ranks=2, rank=1, prefetch=3)\n"
        "loader.load_state_dict(json.loads(sys.argv[2]))\n"
        "print(json.dumps([[t.tolist() for t in loader.next_step().micro_batches] for _ in range(5)]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), json.dumps(loader.state_dict())],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert json.loads(done.stdout) == [[t.tolist() for t in loader.next_step().micro_batches] for _ in range(5)]


def test_resume_with_another_global_batch_size_repeats_and_loses_nothing(folder):
    loader = make(folder, batch=12)
    _, first = take([loader], 3)
    other = make(folder, batch=5)
    other.load_state_dict(loader.state_dict())
    _, rest = take([other], 13)
    assert sorted(s.global_index for s in first + rest) == list(range(101))


def test_state_is_what_was_taken_not_what_was_read_ahead(folder):
    loader = make(folder, prefetch=50)
    loader.next_step()
    time.sleep(0.2)
    state = loader.state_dict()
    assert state["samples_consumed"] == 12
    following = loader.next_step()
    loader.load_state_dict(state)  # a loader that is running goes back too
    again = loader.next_step()
    assert [t.tolist() for t in again.micro_batches] == [t.tolist() for t in following.micro_batches]
    loader.close()


def test_prefetch_changes_nothing(folder):
    loaders = [make(folder, prefetch=p, micro=2) for p in (0, 1, 4, 100)]
    results = [take([loader], 25) for loader in loaders]
    assert all(result == results[0] for result in results)
    for loader in loaders:
        loader.close()


def test_prefetch_stays_within_its_bound(folder):
    loader = make(folder, prefetch=3)
    read = []
    original = loader.dataset.read
    loader.dataset.read = lambda start, stop: read.append(start) or original(start, stop)
    loader.next_step()
    time.sleep(0.3)
    assert len(read) <= 12 + 3 + 1  # the step, what waits, and the one in hand
    loader.close()


def test_wait_is_measured(folder):
    slow = make(folder, batch=2, prefetch=2)
    original = slow.dataset.read

    def read(start, stop):
        time.sleep(0.06)
        return original(start, stop)

    slow.dataset.read = read
    assert slow.next_step().wait_s > 0.1
    time.sleep(0.5)  # both micro-batches of the next step are read meanwhile
    assert slow.next_step().wait_s < 0.06
    slow.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_reaches_the_consumer_with_its_traceback_and_nothing_is_lost(folder, prefetch):
    loader = make(folder, prefetch=prefetch)
    expected = take([make(folder)], 3)
    first = take([loader], 1)
    original = loader.dataset.read
    broken = threading.Event()
    broken.set()

    def read_from_a_broken_disk(start, stop):
        if broken.is_set():
            raise OSError("Input/output error")
        return original(start, stop)

    loader.dataset.read = read_from_a_broken_disk
    with pytest.raises(OSError, match="Input/output") as caught:  # noqa: PT012 - what was read ahead comes first
        for _ in range(3):
            second = take([loader], 1)
            first = first[0] + second[0], first[1] + second[1]
    assert any(frame.name == "read_from_a_broken_disk" for frame in traceback.extract_tb(caught.value.__traceback__))
    broken.clear()
    while len(first[0]) < 36:
        second = take([loader], 1)
        first = first[0] + second[0], first[1] + second[1]
    assert first == expected
    loader.close()


def test_close_ends_the_thread(folder):
    loader = make(folder, prefetch=2)
    loader.next_step()
    assert any(thread.name == "data-prefetch" for thread in threading.enumerate())
    loader.close()
    loader.close()
    assert not any(thread.name == "data-prefetch" for thread in threading.enumerate())
    with pytest.raises(RuntimeError, match="closed"):
        loader.next_step()


def test_a_process_ends_without_close(folder):
    code = (
        "import sys; from pathlib import Path; from test_data_loader import make\n"
        "loader = make(Path(sys.argv[1]), prefetch=2); loader.next_step(); print('done')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_use_after_fork_is_an_error_not_a_hang(folder):
    loader = make(folder, prefetch=1, batch=1)
    loader.next_step()
    child = os.fork()
    if child == 0:
        try:
            loader.next_step()
        except RuntimeError as error:
            os._exit(0 if "after fork" in str(error) else 2)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    loader.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 5}, r"train\.seed has changed .*\(1234, now 5\)"),
        ({"sequence": 4}, r"train\.sequence_length has changed .*\(8, now 4\)"),
        ({"shuffle": False}, r"data\.shuffle has changed"),
    ],
)
def test_resume_with_another_meaning_of_the_count_is_refused(folder, change, message):
    state = make(folder).state_dict()
    with pytest.raises(DataError, match=message):
        make(folder, **change).load_state_dict(state)


def test_resume_on_other_data_is_refused(folder, tmp_path):
    other = make(write_dataset(tmp_path, [[list(range(1, 200))]], vocab_size=1000))
    with pytest.raises(DataError, match=r"content of .* has changed"):
        other.load_state_dict(make(folder).state_dict())


def test_a_model_with_fewer_ids_than_the_tokenizer_is_refused(folder):
    with pytest.raises(DataError, match=r"1000 ids, the model model\.vocab_size=512.*set model\.vocab_size=1000"):
        make(folder, vocab=512)
    make(folder, vocab=1024)


def test_too_little_data(tmp_path, caplog):
    write_dataset(tmp_path, [[[1, 2, 3, 0]]])
    with pytest.raises(DataError, match=r"4 tokens do not fill one sample of train\.sequence_length=8"):
        make(tmp_path, vocab=100)
    loader = make(tmp_path, vocab=100, sequence=3, batch=4)
    assert "holds 1 samples, fewer than train.global_batch_size=4" in caplog.text
    assert [s.global_index for s in take([loader], 1)[1]] == [0, 0, 0, 0]


def test_a_corrupt_shard_is_found_when_the_loader_is_made(tmp_path):
    write_dataset(tmp_path, [[list(range(1, 60))], [list(range(1, 60))]])
    path = tmp_path / "shard-00001.bin"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"shard-00001\.bin has 110 bytes .* 118"):
        make(tmp_path, vocab=100)
