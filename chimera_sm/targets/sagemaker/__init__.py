"""SageMaker training jobs."""

from .target import SageMakerTarget

__all__ = ["SageMakerTarget"]
