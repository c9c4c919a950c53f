import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from chimera_train.config import ModelConfig
from chimera_train.loss import IGNORE_INDEX, chunked_cross_entropy
from chimera_train.model import Decoder, initialize

TOKENS, HIDDEN, VOCAB = 50, 24, 301


def case(dtype=torch.float32, ignored: int = 0):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, TOKENS // 2, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (2, TOKENS // 2), generator=generator)
    labels.view(-1)[:ignored] = IGNORE_INDEX
    return hidden, weight, labels


@pytest.mark.parametrize("chunk", [0, 1, 7, 25, 50, 64])
@pytest.mark.parametrize("ignored", [0, 9, TOKENS])
def test_equals_the_plain_loss(chunk, ignored):
    hidden, weight, labels = case(ignored=ignored)
    loss = chunked_cross_entropy(hidden, weight, labels, chunk).total
    (loss * 0.5).backward()
    h, w, _ = case()
    plain = F.cross_entropy((h @ w.T).flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    (plain * 0.5).backward()
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(hidden.grad, h.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.grad, w.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [0, 7])
def test_z_loss_is_in_the_gradient_and_not_in_the_loss(chunk):
    hidden, weight, labels = case(ignored=9)
    loss = chunked_cross_entropy(hidden, weight, labels, chunk, z_loss=0.03).total
    loss.backward()
    h, w, _ = case()
    logits, target = (h @ w.T).flatten(0, 1), labels.flatten()
    plain = F.cross_entropy(logits, target, ignore_index=IGNORE_INDEX, reduction="sum")
    z = 0.03 * logits.logsumexp(dim=-1)[target != IGNORE_INDEX].square().sum()
    (plain + z).backward()
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=1e-6)
    assert z > 0.1 * plain
    torch.testing.assert_close(hidden.grad, h.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weight.grad, w.grad, rtol=1e-5, atol=1e-5)


def test_bfloat16_keeps_the_sum_over_chunks_in_float32():
    hidden, weight, labels = case(torch.bfloat16)
    chunked_cross_entropy(hidden, weight, labels, 5).total.backward()
    h, w, _ = (t.double() if t.is_floating_point() else t for t in case(torch.bfloat16))
    h, w = h.detach().requires_grad_(), w.detach().requires_grad_()
    F.cross_entropy((h @ w.T).flatten(0, 1), labels.flatten(), reduction="sum").backward()
    assert weight.grad.dtype == torch.bfloat16
    error = (weight.grad.double() - w.grad).norm() / w.grad.norm()
    assert error < 8e-3  # one rounding to bfloat16 is 2^-9 at most; ten of them in a row would be more


def test_without_gradients_gives_the_loss_alone():
    hidden, weight, labels = case()
    expected = chunked_cross_entropy(hidden, weight, labels, 8).total.item()
    with torch.no_grad():
        assert chunked_cross_entropy(hidden, weight, labels, 8).total.item() == expected


def test_a_kept_graph_can_be_gone_through_again():
    hidden, weight, labels = case()
    loss = chunked_cross_entropy(hidden, weight, labels, 8).total
    (3 * loss).backward(retain_graph=True)
    first = hidden.grad.clone(), weight.grad.clone()
    (3 * loss).backward()
    torch.testing.assert_close((hidden.grad, weight.grad), tuple(2 * grad for grad in first))


class LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("tied", [False, True])
def test_logits_never_stand_whole(tied):
    config = ModelConfig(
        name="t", vocab_size=VOCAB, hidden_size=8, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=2,
        tie_embeddings=tied,
    )  # fmt: skip
    tokens = torch.randint(0, VOCAB, (2, 257))
    seen = {}
    for chunk in (0, 32):
        model = Decoder(config, loss_chunk_tokens=chunk)
        initialize(model, 0)
        with LargestTensor() as largest:
            model(tokens[:, :-1], tokens[:, 1:]).total.backward()
        seen[chunk] = largest.elements
    assert seen[0] >= 512 * VOCAB
    assert seen[32] < 512 * 256 / 4  # attention's scores are the largest that is left, at most
