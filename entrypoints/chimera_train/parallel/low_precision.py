"""Products of matrices in 8-bit floating point, by torchao. Weights, activations and gradients stay as they are and are
scaled and cast for each product; experts' grouped products, routers and the head are not cast. Weights may be cast
before they are gathered instead, once for all products: `float8_gather`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..config import ConfigError, PrecisionConfig, Problem
from ..config.precision import FLOAT8_CAPABILITY, FLOAT8_MULTIPLE, FLOAT8_REQUIREMENT, Float8, gather_problems
from ..model import Decoder
from ..model.local import Linear, local
from .meshes import SHARD, Meshes

if TYPE_CHECKING:
    from .float8_gather import Float8Gather

Product = Callable[[Tensor, Tensor], Tensor]
"""(x [..., in], weight [out, in]) → [..., out]"""


def apply_low_precision(model: Decoder, precision: PrecisionConfig, device_type: str) -> None:
    """Replace the product of every chosen projection of `model`'s blocks, after tensor parallel has cut them. On a CPU
    the products are emulated: operands are cast, and multiplied in a wider format.

    Raises ConfigError where torchao or the hardware lacks what it takes, or where no projection is chosen.
    """
    if precision.float8 == "none":
        return
    if device_type == "cuda":
        _check_hardware(precision.float8)
    product = _product(precision.float8, emulate=device_type == "cpu")
    chosen = [module for name, module in model.named_modules() if _is_chosen(name, module, precision)]
    if not chosen:
        message = f"{precision.float8}, but no projection's sizes are multiples of {FLOAT8_MULTIPLE[precision.float8]}"
        if precision.float8_filter:
            message += f", in names that contain one of {', '.join(precision.float8_filter)}"
        raise ConfigError([Problem("precision.float8", message, "set precision.float8=none")])
    for module in chosen:
        module.product = _with_bias(product)


def gather_in_float8(parts: Sequence[Decoder], precision: PrecisionConfig, meshes: Meshes) -> Float8Gather | None:
    """Have FSDP gather the chosen projections' weights of `parts`, which are all of this rank's, in 8 bits; None where
    it is not asked for. Raises ConfigError where nothing would be gathered."""
    if not precision.float8_all_gather:
        return None
    if problems := gather_problems(precision, meshes.layout.shard):
        raise ConfigError(problems)
    from .float8_gather import Float8Gather

    _, mm_config = _configs(precision.float8, emulate=meshes.device_type == "cpu")
    projections = {module for part in parts for module in part.modules() if "product" in vars(module)}
    return Float8Gather(parts, projections, mm_config, meshes.fsdp[SHARD].get_group())


def _is_chosen(name: str, module: torch.nn.Module, precision: PrecisionConfig) -> bool:
    if not isinstance(module, Linear) or name.endswith(".router"):
        return False
    if precision.float8_filter and not any(part in name for part in precision.float8_filter):
        return False
    return all(size % FLOAT8_MULTIPLE[precision.float8] == 0 for size in local(module.weight).shape)


def _with_bias(product: Product) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = product(x, weight)
        return out if bias is None else out + bias

    return linear


def _product(float8: Float8, *, emulate: bool) -> Product:
    try:
        return _mxfp8(emulate) if float8 == "mxfp8" else _scaled(float8, emulate)
    except ImportError as error:
        problem = Problem(
            "precision.float8", f"{float8} needs torchao ({error})", f"pip install '{FLOAT8_REQUIREMENT}'"
        )
        raise ConfigError([problem]) from None


def _scaled(float8: Float8, emulate: bool) -> Product:
    """A scale for each tensor, or for each row of the left and column of the right operand (arXiv 2209.05433)."""
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    config, mm_config = _configs(float8, emulate)

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return matmul_with_hp_or_float8_args.apply(x, weight.t(), mm_config, config)

    return product


def _configs(float8: Float8, emulate: bool) -> tuple[Any, Any]:
    """torchao's of casts, and of the three products of a projection's forward and backward."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

    config = Float8LinearConfig.from_recipe_name(float8)
    gemms = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
    return config, LinearMMConfig(
        *(ScaledMMConfig(emulate, gemm.use_fast_accum, False, config.pad_inner_dim) for gemm in gemms)
    )


def _mxfp8(emulate: bool) -> Product:
    """A power of two as scale for every 32 elements along the summed dimension (OCP Microscaling formats 1.0)."""
    from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    preference = KernelPreference.EMULATED if emulate else KernelPreference.AUTO

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return _to_mxfp8_then_scaled_mm(x, weight, preference, ScaleCalculationMode.RCEIL)

    return product


def _check_hardware(float8: Float8) -> None:
    has, needs = torch.cuda.get_device_capability(), FLOAT8_CAPABILITY[float8]
    if has < needs:
        message = (
            f"{float8} needs a GPU of compute capability {needs[0]}.{needs[1]}, and this is a "
            f"{torch.cuda.get_device_name()} of {has[0]}.{has[1]}"
        )
        fix = (
            "set precision.float8=rowwise"
            if float8 == "mxfp8" and has >= FLOAT8_CAPABILITY["rowwise"]
            else "set precision=bf16"
        )
        raise ConfigError([Problem("precision.float8", message, fix)])
