"""The decoder, its initialisation, and its names in Hugging Face's format."""

from .decoder import Decoder
from .init import initialize

__all__ = ["Decoder", "initialize"]
