"""This machine, under SageMaker's container contract: simulated hosts, one launch.py each, and a driver over them."""

from .target import LocalTarget

__all__ = ["LocalTarget"]
