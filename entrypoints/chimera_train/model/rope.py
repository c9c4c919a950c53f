"""Rotary positions: every pair of channels of a head turns by an angle of its own for each position."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..config import ModelConfig, RopeScaling


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Radians a position advances each pair of channels, shape [C / 2], float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    if scaling.type == "linear":
        return frequencies / scaling.factor
    if scaling.type == "llama3":
        keep = _kept_by_wavelength(frequencies, scaling)
    else:
        keep = _kept_by_channel(theta, scaling, exponents)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


def _kept_by_wavelength(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's rule: wavelengths that fit `high_freq_factor` times into the original context keep their frequency
    (1), those that do not fit `low_freq_factor` times are slowed (0), and those between are interpolated."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position_embeddings / wavelengths
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return keep.clamp(0.0, 1.0)


def _kept_by_channel(theta: float, scaling: RopeScaling, exponents: Tensor) -> Tensor:
    """YaRN's rule (arXiv 2309.00071, §3.2), linear over pairs of channels rather than over wavelengths, as its authors
    and DeepSeek compute it."""
    pairs = len(exponents)

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(scaling.original_max_position_embeddings / (times * 2 * math.pi)) / math.log(theta)

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    if first == last:
        last += 0.001
    slowed = (torch.arange(pairs, dtype=torch.float32, device=exponents.device) - first) / (last - first)
    return 1 - slowed.clamp(0.0, 1.0)


def rope_table(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles of every position (integers of any shape), each [*shape, C / 2], float32."""
    scaling = config.rope_scaling
    frequencies = rope_frequencies(config.rope_dim, config.rope_theta, scaling, positions.device)
    angles = positions[..., None].float() * frequencies
    if scaling is None or scaling.table_scale == 1.0:
        return angles.cos(), angles.sin()
    return angles.cos() * scaling.table_scale, angles.sin() * scaling.table_scale


def apply_rope(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate channel i of x_BHSC together with channel i + C / 2, in float32; the dtype of `x` comes back."""
    return _rotated(*x.float().chunk(2, dim=-1), cosine, sine).to(x.dtype)


def apply_rope_to_neighbours(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate channel 2 i of x_BHSC together with channel 2 i + 1, as DeepSeek's weights expect.

    The pairs come back apart, at i and i + C / 2: the same for queries and keys, whose products are all that counts.
    """
    return _rotated(*x.float().unflatten(-1, (-1, 2)).unbind(-1), cosine, sine).to(x.dtype)


def _rotated(first: Tensor, second: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
