"""Optimizers on one process, against torch's own or the formulas of the papers."""

import copy

import pytest
import torch

from chimera_train.config.optim import QUANTISATION_BLOCK
from chimera_train.optim import states as storage
from chimera_train.optim.newton_schulz import COEFFICIENTS, orthogonalise
from chimera_train.optim.rounding import key_of, random_bits, round_stochastically
from chimera_train.optim.rules import ADAMW, LION
from chimera_train.optim.sharded import ShardedOptimizer

STEPS = 20


def parameters(dtype=torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in [(7, 300), (5,), (64, 2)]
    ]


def optimizer(params, rule, *, state_dtype="float32", **defaults) -> ShardedOptimizer:
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, **defaults}
    decayed = [{"params": params[:1], "weight_decay": 0.3}, {"params": params[1:], "weight_decay": 0.0}]
    names = {p: f"p{i}" for i, p in enumerate(params)}
    return ShardedOptimizer(
        decayed, rule, names=names, seed=1, state_dtype=state_dtype, on_host=False, defaults=options
    )


def train(params, optimizer, steps=STEPS, start=0) -> None:
    """Gradients of a bowl around one, with noise that depends on the step alone."""
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(100 + step)
        for p in params:
            noise = torch.randn(p.shape, generator=generator)
            p.grad = (p.detach().float() - 1 + noise).to(p.dtype)
        optimizer.step()


def test_adamw_equals_torchs(monkeypatch):
    monkeypatch.setattr("chimera_train.optim.sharded.CHUNK_ELEMENTS", 900)  # three rows at a time
    ours, theirs = parameters(), parameters()
    groups = [{"params": theirs[:1], "weight_decay": 0.3}, {"params": theirs[1:], "weight_decay": 0.0}]
    mine, torchs = optimizer(ours, ADAMW), torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    train(ours, mine)
    train(theirs, torchs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
        kept = [{n: (s.shape, s.dtype) for n, s in of.state[p].items()} for of, p in ((mine, a), (torchs, b))]
        assert kept[0] == kept[1], "a checkpoint of one serves the other, when optim.offload changes"


def test_lion_equals_the_papers_algorithm():
    ours, theirs = parameters(), parameters()
    train(ours, optimizer(ours, LION, betas=(0.9, 0.99)))
    momenta = [torch.zeros_like(p) for p in theirs]

    class Plain:
        def step(self):
            with torch.no_grad():
                for p, m, decay in zip(theirs, momenta, (0.3, 0.0, 0.0), strict=True):
                    update = torch.sign(0.9 * m + (1 - 0.9) * p.grad)
                    p -= 0.01 * (update + decay * p)
                    m.copy_(0.99 * m + (1 - 0.99) * p.grad)

    train(theirs, Plain())
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("rule", [ADAMW, LION], ids=["adamw", "lion"])
@pytest.mark.parametrize(("state_dtype", "band"), [("bfloat16", 0.02), ("int8", 0.05)])
def test_states_of_fewer_bits_stay_near_those_of_float32(rule, state_dtype, band):
    """The distance travelled differs by no more than `band` of itself; Lion's signs are coarser than its states."""
    start, exact, small = parameters(), parameters(), parameters()
    train(exact, optimizer(exact, rule))
    used = optimizer(small, rule, state_dtype=state_dtype)
    train(small, used)
    for a, b, origin in zip(exact, small, start, strict=True):
        error = (a - b).norm() / (a - origin).norm()
        assert error < (band if rule is ADAMW else 4 * band)
    stored = used.state[small[0]]["exp_avg"]
    assert stored.dtype == {"bfloat16": torch.bfloat16, "int8": torch.uint8}[state_dtype]
    assert used.state[small[1]]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("columns", [1, 100, QUANTISATION_BLOCK, 300])
def test_eight_bits_keep_each_element_to_its_place_in_the_code(name, columns):
    value = torch.randn(3, columns, generator=torch.Generator().manual_seed(1))
    value *= torch.tensor([[1e-6], [1.0], [1e4]])
    value = value.abs() if name == "exp_avg_sq" else value
    states = storage.allocate(value, name, "int8", on_host=False)
    assert torch.equal(storage.read(states, name, slice(None), value.device), torch.zeros(3, columns))
    storage.write(states, name, slice(None), value, None)
    back = storage.read(states, name, slice(None), value.device)
    for block in range(0, columns, QUANTISATION_BLOCK):
        part = slice(block, block + QUANTISATION_BLOCK)
        largest = value[:, part].abs().amax(dim=1, keepdim=True)
        decade = (value[:, part].abs() / largest).clamp(min=1e-7).log10().floor().clamp(max=-1) + 7
        step = 0.9 * 10 ** (decade - 6) / 2 ** (decade + (name == "exp_avg_sq"))
        # Half a step, but three times as much at the border to the next decade, whose step is five times as wide.
        assert ((back[:, part] - value[:, part]).abs() <= 1.5 * step * largest).all()


def test_stochastic_rounding_is_exact_on_average_and_never_leaves_the_neighbours():
    x = torch.tensor([1.0, 1.001, -1.003, 3e-30, 65536.1, -0.0]).repeat(20_000, 1)
    rounded = round_stochastically(x, random_bits(key_of("test"), tuple(x.shape), (0, 0), x.device)).float()
    assert torch.equal(rounded[:, 0], x[:, 0]), "what bfloat16 can hold stays"
    step = x[0].abs() * 2**-7
    assert ((rounded - x).abs() <= step).all()
    assert [len(rounded[:, i].unique()) for i in range(6)] == [1, 2, 2, 2, 2, 1]
    # Standard error of the mean of 20,000 draws that are a step apart: step / 2 / sqrt(20000) at most.
    assert ((rounded.mean(0) - x[0]).abs() <= 4 * step / 2 / 20_000**0.5).all()
    special = torch.tensor([float("inf"), float("-inf"), float("nan")])
    assert torch.equal(
        round_stochastically(special, torch.full((3,), 0xFFFF)).isfinite(), torch.zeros(3, dtype=torch.bool)
    )


def test_random_bits_are_a_function_of_the_place_alone():
    whole = random_bits(7, (50, 40), (0, 0), torch.device("cpu"))
    assert torch.equal(random_bits(7, (10, 5), (20, 30), torch.device("cpu")), whole[20:30, 30:35])
    assert whole.min() >= 0
    assert whole.max() < 1 << 16
    other = random_bits(8, (50, 40), (0, 0), torch.device("cpu"))
    bits = torch.stack([whole.flatten(), other.flatten(), whole.T.flatten()]).double()
    assert torch.corrcoef(bits)[0, 1:].abs().max() < 4 / 2000**0.5
    big = random_bits(9, (512, 512), (3, 5), torch.device("cpu")).flatten()
    counts = torch.bincount(big >> 8, minlength=256).double()
    assert ((counts - 1024) ** 2 / 1024).sum() < 255 + 5 * (2 * 255) ** 0.5, "chi-square of the upper eight bits"
    counts = torch.bincount(big & 255, minlength=256).double()
    assert ((counts - 1024) ** 2 / 1024).sum() < 255 + 5 * (2 * 255) ** 0.5, "and of the lower eight"


def test_bfloat16_parameters_follow_float32_ones_where_rounding_to_nearest_stands_still():
    """A decay of 1e-4 a step is below half a step of bfloat16: to the nearest, nothing would ever move."""
    exact = [torch.nn.Parameter(torch.ones(64, 64)) for _ in range(3)]
    rounded = [torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16)) for _ in range(3)]
    for params in (exact, rounded):
        used = optimizer(params, ADAMW, lr=1e-4)
        for _ in range(100):
            for p in params:
                p.grad = torch.ones_like(p)
            used.step()
    for a, b in zip(exact, rounded, strict=True):
        assert a[0, 0] < 0.995
        assert b.float().mean().item() == pytest.approx(a.mean().item(), abs=3e-4)


def test_a_resumed_bfloat16_run_is_the_same_bit_for_bit():
    straight, resumed = parameters(torch.bfloat16), parameters(torch.bfloat16)
    train(straight, optimizer(straight, ADAMW, state_dtype="bfloat16"), steps=6)
    first = optimizer(resumed, ADAMW, state_dtype="bfloat16")
    train(resumed, first, steps=3)
    saved = [copy.deepcopy(first.state[p]) for p in resumed]
    second = optimizer(resumed, ADAMW, state_dtype="bfloat16")
    second.allocate()
    for p, states in zip(resumed, saved, strict=True):
        for key, value in states.items():
            second.state[p][key].copy_(value)
    train(resumed, second, steps=3, start=3)
    for a, b in zip(straight, resumed, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(6, 6), (5, 12), (12, 5)])
def test_newton_schulz_maps_singular_values_by_its_polynomial(shape):
    matrix = torch.randn(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    expected = u @ torch.diag_embed(s) @ vt
    torch.testing.assert_close(orthogonalise(matrix), expected, atol=1e-5, rtol=0)
    assert torch.equal(orthogonalise(torch.zeros(1, *shape)), torch.zeros(1, *shape))
