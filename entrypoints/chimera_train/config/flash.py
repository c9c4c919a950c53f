"""What attention's fused kernels ask of a recipe."""

from __future__ import annotations

from .problem import Problem
from .recipe import TrainRecipe


def flash_problems(recipe: TrainRecipe) -> list[Problem]:
    """What is wrong where the recipe's device is a GPU: the kernel of `model.flash` and `ring` is in 16 bits only, and
    would fail in the first step."""
    window = recipe.model.sliding_window
    uses = {
        "parallel.context_parallel": recipe.parallel.context_parallel > 1,
        "data.separate_documents": recipe.data.separate_documents,
        "model.sliding_window": window is not None and window < recipe.train.sequence_length,
    }
    keys = [key for key, used in uses.items() if used]
    if not keys or recipe.precision.param_dtype != "float32":
        return []
    message = f"float32, but {' and '.join(keys)} run on flash attention, which a GPU has in 16 bits only"
    return [Problem("precision.param_dtype", message, "set precision=bf16")]
