"""What a recipe may say about evaluation, and the held-out data as batches."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_indexed import write_dataset

from chimera_sm.errors import RecipeError
from chimera_sm.recipe.compose import compose
from chimera_train.config import EvaluationConfig
from chimera_train.data.dataset import file_sha256
from chimera_train.data.errors import DataError
from chimera_train.data.held_out import HeldOut
from chimera_train.loss import IGNORE_INDEX

SEQUENCE, NUM_TOKENS = 8, 101 * 8 + 6  # 102 windows, the last with five labels


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    documents = [[*range(i, i + 10), 0] for i in range(1, 75)]
    assert sum(map(len, documents)) == NUM_TOKENS
    return write_dataset(tmp_path_factory.mktemp("val"), [documents[:30], documents[30:]])


def held_out(folder, max_samples=None, sequence_length=SEQUENCE) -> HeldOut:
    sha256 = file_sha256(folder / "tokenizer.json")
    return HeldOut(folder, key="k", sequence_length=sequence_length, max_samples=max_samples, tokenizer_sha256=sha256)


@settings(deadline=None, max_examples=40)
@given(
    ranks=st.integers(1, 8),
    batch_size=st.integers(1, 7),
    max_samples=st.one_of(st.none(), st.integers(1, 150)),
)
def test_every_layout_evaluates_the_same_rows_in_as_many_batches_on_every_rank(folder, ranks, batch_size, max_samples):
    data = held_out(folder, max_samples)
    by_rank = [list(data.batches(batch_size, rank, ranks)) for rank in range(ranks)]
    counts = {len(batches) for batches in by_rank}
    assert counts == {data.num_batches(batch_size, ranks)}
    rows = [row for batches in by_rank for batch in batches for row in batch.tolist()]
    real = sorted(row for row in rows if row[0] != IGNORE_INDEX)
    assert all(set(row) == {IGNORE_INDEX} for row in rows if row[0] == IGNORE_INDEX)
    assert real == sorted(row for batch in data.batches(1, 0, 1) for row in batch.tolist())


@pytest.mark.parametrize("sequence_length", [1, 8, 12, NUM_TOKENS - 1, NUM_TOKENS + 100])
def test_every_token_but_the_first_is_a_label_once(folder, sequence_length):
    data = held_out(folder, sequence_length=sequence_length)
    rows = np.concatenate(list(data.batches(1, 0, 1)))
    labels = rows[:, 1:]
    tokens, _ = data.dataset.read(0, data.dataset.num_tokens)
    assert labels[labels != IGNORE_INDEX].tolist() == tokens[1:].tolist()
    assert rows[:, 0].tolist() == tokens[:-1:sequence_length].tolist()


def test_a_part_is_spread_over_the_whole(folder):
    starts = [batch[0, 0] for batch in held_out(folder, max_samples=4).batches(1, 0, 1)]
    tokens, _ = held_out(folder).dataset.read(0, NUM_TOKENS)
    assert starts == [tokens[window * SEQUENCE] for window in (0, 25, 51, 76)]


def test_another_tokenizer_is_refused(folder):
    with pytest.raises(DataError, match=r"k: the tokenizer of .* is not the training data's"):
        HeldOut(folder, key="k", sequence_length=8, max_samples=None, tokenizer_sha256="0" * 64)


def test_a_single_token_is_nothing_to_predict(tmp_path):
    with pytest.raises(DataError, match="no two tokens"):
        held_out(write_dataset(tmp_path / "one", [[[0]]]))


SOURCES = "evaluation.sources={books: val/books}"


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        ([SOURCES, "evaluation.interval_steps=-1"], "evaluation.interval_steps", "-1 is negative"),
        ([SOURCES, "evaluation.max_samples=0"], "evaluation.max_samples", "0 is not positive"),
        (["evaluation.sources={Books: val}"], "evaluation.sources.Books", "metric names"),
        (["evaluation.sources={books: ../val}"], "evaluation.sources.books", "leaves the channel"),
        (["evaluation.sources={books: train/}", "data.path=train"], "evaluation.sources.books", "the training data"),
        (["evaluation.interval_steps=10"], "evaluation.interval_steps", "nothing is evaluated"),
        (["evaluation.max_samples=10"], "evaluation.max_samples", "nothing is evaluated"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_key(overrides, key, message):
    with pytest.raises(RecipeError, match=message) as caught:
        compose(["recipe=8b", *overrides])
    assert key in str(caught.value)


def test_sources_are_few():
    many = EvaluationConfig(sources={f"s{i}": f"val/{i}" for i in range(9)})
    assert [problem.key for problem in many.validate()] == ["evaluation.sources"]
    assert replace(many, sources=dict(list(many.sources.items())[:8])).validate() == []
