"""Attention over windows, documents and the last tokens of a sequence, against softmax with a mask."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from chimera_train.config import ModelConfig
from chimera_train.model import Decoder, initialize
from chimera_train.model.flash import CPU_QUERIES, OPERATOR, Segments, flash_attention
from chimera_train.model.sequence import WholeSequence, document_positions, document_segments

CPU = torch.device("cpu")
END = 1


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


def masked(q, k, v, window=None, same=None):
    """`same`: bool [B, S, T], query and key are of one document."""
    queries, keys = torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None], torch.arange(k.shape[2])
    seen = keys <= queries
    if window is not None:
        seen &= keys > queries - window
    if same is not None:
        seen = (seen & same)[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


def assert_same(inputs, found, expected, tolerance):
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    upstream = torch.randn_like(expected)
    pairs = zip(
        torch.autograd.grad(found, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=5 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 1, 5, CPU_QUERIES + 2, 1000])
@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (8, 300), (300, 300), (300, 311)])
def test_a_window_and_the_last_queries_equal_a_mask(queries, keys, window):
    torch.manual_seed(0)
    inputs = random(2, 6, queries, 16), random(2, 2, keys, 16), random(2, 2, keys, 12)
    assert_same(inputs, flash_attention(*inputs, window=window), masked(*inputs, window), 1e-6)


def test_bfloat16_is_as_near_as_its_mantissa():
    torch.manual_seed(0)
    inputs = tuple(random(1, heads, 200, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
    assert_same(inputs, flash_attention(*inputs, window=70), masked(*inputs, 70), 2e-2)


@st.composite
def packed(draw):
    batch, length = draw(st.integers(1, 3)), 2 * draw(st.integers(1, 12))
    ends = st.lists(st.sampled_from([0, 0, 0, END]), min_size=length, max_size=length)
    tokens = np.array(draw(st.lists(ends, min_size=batch, max_size=batch)), dtype=np.int64)
    start = draw(st.integers(0, length - 1))
    return tokens, range(start, draw(st.integers(start + 1, length)))


@settings(max_examples=40, deadline=None)
@given(packed(), st.sampled_from([None, 3]))
def test_documents_of_any_piece_of_a_sequence_equal_a_mask(case, window):
    tokens, piece = case
    torch.manual_seed(0)
    batch = len(tokens)
    inputs = random(batch, 2, len(piece), 8), random(batch, 1, piece.stop, 8), random(batch, 1, piece.stop, 8)
    query_ends, key_ends, longest = document_segments(document_positions(tokens, END), piece)
    segments = Segments(torch.from_numpy(query_ends), torch.from_numpy(key_ends), longest)
    document = torch.from_numpy(np.cumsum(tokens == END, axis=1) - (tokens == END))
    same = document[:, piece.start : piece.stop, None] == document[:, None, : piece.stop]
    assert_same(inputs, flash_attention(*inputs, segments, window=window), masked(*inputs, window, same), 1e-6)


def test_segments_are_cut_at_the_ends_and_counts_are_few():
    tokens = np.array([[0, END, END, 0, 0, 0], [0, 0, 0, 0, 0, END]])
    assert document_positions(tokens, END).tolist() == [[0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5]]
    query_ends, key_ends, longest = document_segments(document_positions(tokens, END), range(6))
    assert query_ends.tolist() == key_ends.tolist() == [0, 2, 3, 6, 12]
    assert longest == 8
    # The last two tokens: the first two documents of the first row have no query left.
    query_ends, key_ends, _ = document_segments(document_positions(tokens, END), range(4, 6))
    assert query_ends.tolist() == [0, 0, 2, 4, 4]
    assert key_ends.tolist() == [0, 3, 6, 12, 12]


def test_the_operator_is_one_to_the_compiler():
    q, k, v = random(1, 4, 6, 8), random(1, 2, 9, 8), random(1, 2, 9, 8)
    torch.library.opcheck(OPERATOR, (q, k, v, None, None, 9, 3, None))


def test_a_packed_sequence_equals_its_documents_alone():
    config = ModelConfig(
        name="m", vocab_size=32, hidden_size=24, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2,
        initializer_range=0.2,
    )  # fmt: skip
    model = Decoder(config)
    initialize(model, 0)
    random_ids = np.random.default_rng(0)
    micro_batch = random_ids.integers(2, 32, (2, 17))
    micro_batch[0, [4, 5, 11]] = END
    micro_batch[1, [15, 16]] = END
    sequence = WholeSequence()
    sequence.end_of_document = END
    inputs = sequence.feed(micro_batch, CPU)
    logits = model(inputs.tokens_BS, None, inputs.documents)
    weight = torch.randn_like(logits)
    grads = torch.autograd.grad((logits * weight).sum(), list(model.parameters()))
    alone = torch.zeros_like(logits)
    for row, borders in enumerate(([0, 5, 6, 12, 16], [0, 16])):
        for start, end in itertools.pairwise(borders):
            alone[row, start:end] = model(inputs.tokens_BS[row : row + 1, start:end])[0]
    torch.testing.assert_close(logits, alone, atol=1e-5, rtol=1e-5)
    expected = torch.autograd.grad((alone * weight).sum(), list(model.parameters()))
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)
    crossing = model(inputs.tokens_BS)
    assert not torch.allclose(logits[0, 5:], crossing[0, 5:], atol=1e-2)
