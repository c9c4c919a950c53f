"""Shards: byte for byte Megatron's layout, and a clear error for every way in which one can be damaged."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chimera_train.data.dataset import (
    DatasetInfo,
    TokenDataset,
    TokenizerInfo,
    file_sha256,
    read_info,
    write_json,
)
from chimera_train.data.errors import DataError
from chimera_train.data.indexed import IndexedShard, ShardWriter, token_dtype


def write_shard(prefix, documents, dtype="uint16"):
    with ShardWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add(np.asarray(document))
        return writer.finish()


def write_dataset(folder, shards, vocab_size=100):
    """A data set of given documents: one list of them a shard."""
    folder.mkdir(parents=True, exist_ok=True)
    infos = tuple(write_shard(folder / f"shard-{i:05d}", documents) for i, documents in enumerate(shards))
    (folder / "tokenizer.json").write_text("{}")
    info = DatasetInfo(
        schema_version=1,
        shards=infos,
        num_documents=sum(i.num_documents for i in infos),
        num_tokens=sum(i.num_tokens for i in infos),
        vocab_size=vocab_size,
        dtype=token_dtype(vocab_size),
        eod_id=0,
        tokenizer=TokenizerInfo(file="tokenizer.json", sha256=file_sha256(folder / "tokenizer.json")),
        source={"description": "test"},
    )
    write_json(folder / "dataset.json", info)
    return folder


@pytest.mark.parametrize(("dtype", "code", "letter"), [("uint16", 8, "H"), ("int32", 4, "i")])
def test_bytes_are_those_of_the_format(tmp_path, dtype, code, letter):
    """Built by hand from the description of the layout; megatron-core 0.16.1's own writer gives the same bytes."""
    info = write_shard(tmp_path / "s", [[5, 6, 7], [1], [2, 0]], dtype)
    size = struct.calcsize(letter)
    assert (tmp_path / "s.bin").read_bytes() == struct.pack(f"<6{letter}", 5, 6, 7, 1, 2, 0)
    assert (tmp_path / "s.idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<B", code)
        + struct.pack("<Q", 3)
        + struct.pack("<Q", 4)
        + struct.pack("<3i", 3, 1, 2)
        + struct.pack("<3q", 0, 3 * size, 4 * size)
        + struct.pack("<4q", 0, 1, 2, 3)
    )
    assert (info.num_documents, info.num_tokens, info.bin_bytes) == (3, 6, 6 * size)
    assert info.bin_sha256 == file_sha256(tmp_path / "s.bin")
    assert info.idx_sha256 == file_sha256(tmp_path / "s.idx")


@settings(max_examples=50, deadline=None)
@given(documents=st.lists(st.lists(st.integers(0, 65_535), min_size=1, max_size=20), min_size=1, max_size=30))
def test_round_trip(tmp_path_factory, documents):
    prefix = tmp_path_factory.mktemp("shard") / "s"
    write_shard(prefix, documents)
    shard = IndexedShard(prefix)
    shard.check_index()
    assert [shard.document(i).tolist() for i in range(shard.num_documents)] == documents
    owners = [i for i, document in enumerate(documents) for _ in document]
    assert [shard.document_of(t) for t in range(shard.num_tokens)] == owners


def test_documents_of_several_sequences(tmp_path):
    """Megatron allows them, and empty documents; this one is written by hand."""
    lengths, index = [2, 3, 1], [0, 2, 2, 3]
    (tmp_path / "m.bin").write_bytes(struct.pack("<6H", *range(6)))
    (tmp_path / "m.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, 3, 4)
        + struct.pack("<3i", *lengths)
        + struct.pack("<3q", 0, 4, 10)
        + struct.pack("<4q", *index)
    )
    shard = IndexedShard(tmp_path / "m")
    shard.check_index()
    assert [shard.document(i).tolist() for i in range(3)] == [[0, 1, 2, 3, 4], [], [5]]
    assert [shard.document_of(t) for t in range(6)] == [0, 0, 0, 0, 0, 2]


def test_dtype_by_vocabulary():
    assert [token_dtype(n) for n in (4096, 65_535, 65_536, 128_256)] == ["uint16", "uint16", "int32", "int32"]


def test_an_exception_leaves_no_file(tmp_path):
    with pytest.raises(OverflowError), ShardWriter(tmp_path / "s", "uint16") as writer:
        writer.add(np.full(3, 2**70))
    assert list(tmp_path.iterdir()) == []


def test_no_document_no_file(tmp_path):
    assert write_shard(tmp_path / "s", []) is None
    assert list(tmp_path.iterdir()) == []


def patch(path, offset, data):
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


# 3 documents of 3, 1 and 2 tokens: lengths at 34, pointers at 46, document index at 70, end at 102
DAMAGE = {
    "no bin": (lambda s: (s / "s.bin").unlink(), r"s\.bin is missing"),
    "no idx": (lambda s: (s / "s.idx").unlink(), r"s\.idx is missing"),
    "empty idx": (lambda s: (s / "s.idx").write_bytes(b""), r"s\.idx is no Megatron index"),
    "wrong magic": (lambda s: patch(s / "s.idx", 0, b"PARQUET"), r"s\.idx is no Megatron index"),
    "torn header": (lambda s: (s / "s.idx").write_bytes((s / "s.idx").read_bytes()[:20]), r"s\.idx is truncated: 20"),
    "version": (lambda s: patch(s / "s.idx", 9, struct.pack("<Q", 2)), r"s\.idx has version 2"),
    "type": (lambda s: patch(s / "s.idx", 17, b"\x09"), r"s\.idx has token type 9"),
    "torn idx": (lambda s: (s / "s.idx").write_bytes((s / "s.idx").read_bytes()[:-5]), r"s\.idx has 97 bytes .* 102"),
    "torn bin": (lambda s: (s / "s.bin").write_bytes((s / "s.bin").read_bytes()[:-2]), r"s\.bin has 10 bytes .* 12"),
    "longer bin": (lambda s: (s / "s.bin").write_bytes(bytes(14)), r"s\.bin has 14 bytes .* 12"),
    "empty": (lambda s: patch(s / "s.idx", 18, struct.pack("<QQ", 0, 1)), r"s\.idx is an empty shard"),
    "last document": (lambda s: patch(s / "s.idx", 94, struct.pack("<q", 9)), r"s\.idx: its document index .* range"),
    "middle document": (lambda s: patch(s / "s.idx", 86, struct.pack("<q", 99)), r"s\.idx: document 2 is out of range"),
    "length": (lambda s: patch(s / "s.idx", 34, struct.pack("<i", 2)), r"s\.idx: sequence 1 does not begin"),
    "pointer": (lambda s: patch(s / "s.idx", 54, struct.pack("<q", 2)), r"s\.idx: sequence 1 does not begin"),
    "negative": (lambda s: patch(s / "s.idx", 34, struct.pack("<i", -3)), r"s\.idx: sequence 0 does not begin"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_before_anything_is_read(tmp_path, name):
    write_shard(tmp_path / "s", [[5, 6, 7], [1], [2, 0]])
    damage, message = DAMAGE[name]
    damage(tmp_path)
    with pytest.raises(DataError, match=message):
        IndexedShard(tmp_path / "s").check_index()


def test_dataset_reads_across_shards(tmp_path):
    shards = [[[1, 2, 0], [3, 0]], [[4, 5, 6, 0]], [[7, 0], [8, 0]]]
    dataset = TokenDataset(write_dataset(tmp_path, shards))
    row = [token for documents in shards for document in documents for token in document]
    owners = [0] * 3 + [1] * 2 + [2] * 4 + [3] * 2 + [4] * 2
    for start in range(len(row)):
        for stop in range(start + 1, len(row) + 1):
            tokens, documents = dataset.read(start, stop)
            assert tokens.tolist() == row[start:stop]
            assert tokens.dtype == np.int64
            assert documents == tuple(sorted(set(owners[start:stop])))


def test_more_shards_than_may_be_open(tmp_path, monkeypatch):
    monkeypatch.setattr("chimera_train.data.dataset._OPEN_SHARDS", 2)
    dataset = TokenDataset(write_dataset(tmp_path, [[[i + 1, 0]] for i in range(9)]))
    for i in (0, 8, 3, 0, 5, 8):
        assert dataset.read(2 * i, 2 * i + 2)[0].tolist() == [i + 1, 0]
    assert dataset._shard.cache_info().currsize == 2


def edit(folder, change):
    path = folder / "dataset.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


DATASET_DAMAGE = {
    "missing": (lambda f: (f / "dataset.json").unlink(), r"dataset\.json is missing.*fix: make it with"),
    "no json": (lambda f: (f / "dataset.json").write_text("{"), r"dataset\.json is damaged"),
    "no key": (lambda f: edit(f, lambda c: c.pop("eod_id")), r"damaged: eod_id: is required"),
    "newer": (lambda f: edit(f, lambda c: c.update(schema_version=2)), r"schema version 2; this loader knows 1"),
    "no shards": (lambda f: edit(f, lambda c: c.update(shards=[])), r"names no shard"),
    "totals": (lambda f: edit(f, lambda c: c.update(num_tokens=1)), r"its totals are not the sums"),
    "shard gone": (lambda f: (f / "shard-00001.bin").unlink(), r"shard-00001\.bin is missing"),
    "tokenizer": (lambda f: (f / "tokenizer.json").write_text("[]"), r"is not the tokenizer that made the shards"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
    "other shard": (
        lambda f: write_shard(f / "shard-00001", [[1, 2, 3, 4, 0]]),
        r"shard-00001\.idx: tokens 5 where dataset\.json says 4",
    ),
    "other type": (
        lambda f: write_shard(f / "shard-00001", [[4, 5, 6, 0]], "int32"),
        r"shard-00001\.idx: tokens of type int32 where dataset\.json says uint16",
    ),
}


@pytest.mark.parametrize("name", DATASET_DAMAGE)
def test_a_damaged_dataset_does_not_open(tmp_path, name):
    write_dataset(tmp_path, [[[1, 2, 0], [3, 0]], [[4, 5, 6, 0]]])
    damage, message = DATASET_DAMAGE[name]
    damage(tmp_path)
    with pytest.raises(DataError, match=message):
        TokenDataset(tmp_path)


def test_a_flipped_bit_is_found_by_checksums(tmp_path):
    write_dataset(tmp_path, [[[1, 2, 0], [3, 0]], [[4, 5, 6, 0]]])
    TokenDataset(tmp_path, verify_checksums=True)
    patch(tmp_path / "shard-00001.bin", 2, b"\x07")
    TokenDataset(tmp_path)
    with pytest.raises(DataError, match=r"shard-00001\.bin is damaged: its SHA-256"):
        TokenDataset(tmp_path, verify_checksums=True)


def test_a_token_outside_the_vocabulary_names_the_shard(tmp_path):
    write_dataset(tmp_path, [[[1, 2, 0]], [[100, 0]]], vocab_size=100)
    dataset = TokenDataset(tmp_path)
    assert dataset.read(0, 3)[0].tolist() == [1, 2, 0]
    with pytest.raises(
        DataError, match=r"shard-00001\.bin holds token 100 .* vocab_size 100.*tokenizer does not match"
    ):
        dataset.read(2, 5)


def test_identity_is_of_the_content(tmp_path):
    one = TokenDataset(write_dataset(tmp_path / "a", [[[1, 2, 0]], [[3, 0]]]))
    same = TokenDataset(write_dataset(tmp_path / "b", [[[1, 2, 0]], [[3, 0]]]))
    other = TokenDataset(write_dataset(tmp_path / "c", [[[1, 2, 0]], [[4, 0]]]))
    assert one.identity == same.identity != other.identity
    assert 0 <= one.identity < 2**63
    assert read_info(tmp_path / "a") == one.info
