"""Every way to spread a step over ranks. The model knows nothing of it; one technique a file, applied in `apply`."""

from .apply import parallelize
from .build import build_model, refresh_scales
from .fsdp import free_gathered, set_gradient_sync
from .meshes import Meshes
from .pipeline import Pipeline
from .router_bias import RouterBias

__all__ = [
    "Meshes",
    "Pipeline",
    "RouterBias",
    "build_model",
    "free_gathered",
    "parallelize",
    "refresh_scales",
    "set_gradient_sync",
]
