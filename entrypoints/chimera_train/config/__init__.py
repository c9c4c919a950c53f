"""Definitions that the launching side and the container share: stdlib only, never torch."""

from .batch import BatchPlan, batch_plan
from .checkpoint import CheckpointConfig
from .contract import MlRoot
from .data import DataConfig
from .decode import ConfigError, canonical_json, decode, encode, nearest, sha256_of
from .evaluation import EvaluationConfig
from .flash import flash_problems
from .flops import flops_per_token, num_active_parameters, num_parameters
from .latent_attention import LatentAttention
from .mesh import AXES, MeshLayout, layout
from .model import ModelConfig
from .optim import OptimConfig
from .parallel import ParallelConfig
from .precision import PrecisionConfig
from .problem import Problem
from .profiling import ProfilingConfig
from .recipe import SCHEMA_VERSION, LayoutConfig, RecipeFile, TrainRecipe
from .rope import RopeScaling
from .train import TrainConfig

__all__ = [
    "AXES",
    "SCHEMA_VERSION",
    "BatchPlan",
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "EvaluationConfig",
    "LatentAttention",
    "LayoutConfig",
    "MeshLayout",
    "MlRoot",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "Problem",
    "ProfilingConfig",
    "RecipeFile",
    "RopeScaling",
    "TrainConfig",
    "TrainRecipe",
    "batch_plan",
    "canonical_json",
    "decode",
    "encode",
    "flash_problems",
    "flops_per_token",
    "layout",
    "nearest",
    "num_active_parameters",
    "num_parameters",
    "sha256_of",
]
