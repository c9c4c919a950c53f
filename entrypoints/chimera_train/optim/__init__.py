"""What moves the weights: optimizers, the learning rate, and gradients made ready for a step."""

from .build import build_optimizer
from .gradients import clip_factor, local_grad_norm_squared, scale_gradients, sum_over_tensor
from .schedule import learning_rate, set_learning_rate

__all__ = [
    "build_optimizer",
    "clip_factor",
    "learning_rate",
    "local_grad_norm_squared",
    "scale_gradients",
    "set_learning_rate",
    "sum_over_tensor",
]
