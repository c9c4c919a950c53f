"""The header of a file of safetensors: what tensors it holds, checked by the format's own rules.

Without the safetensors package, whose errors name neither the file nor, for most rules, the tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .decode import ConfigError
from .problem import Problem

Shape = tuple[int, ...]
_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorHeader:
    file: Path
    dtype: str
    """Safetensors' name of it."""
    shape: Shape


def read_header(file: Path) -> dict[str, TensorHeader]:
    """By name. Raises ConfigError, whose key is the file, where it is damaged, missing or cannot be read.

    Format: eight bytes, little-endian, with the length of the JSON that follows; then the tensors' bytes.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError("the header is longer than the file")
            header = json.loads(stream.read(length))
        if not isinstance(header, dict):
            raise ValueError("the header is no JSON object")
        header.pop("__metadata__", None)
        tensors = {name: _tensor(name, value) for name, value in header.items()}
        _check_ranges(tensors, size - 8 - length)
    except FileNotFoundError:
        raise unreadable(file, "is named by the index and not there") from None
    except OSError as error:
        raise unreadable(file, f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise unreadable(file, f"is damaged: {error}") from None
    return {name: TensorHeader(file, dtype, shape) for name, (dtype, shape, _, _) in tensors.items()}


def _tensor(name: str, value: Any) -> tuple[str, Shape, int, int]:
    """Dtype, shape and the range of bytes of a tensor; ValueError where they do not belong together."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is described by {value!r}")
    dtype, shape, offsets = value.get("dtype"), _sizes(value.get("shape")), _sizes(value.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"{name} has dtype={dtype!r}, which is none of safetensors'")
    if shape is None:
        raise ValueError(f"{name} has shape={value.get('shape')!r}")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{name} has data_offsets={value.get('data_offsets')!r}")
    start, end = offsets
    bits = math.prod(shape) * _BITS[dtype]
    if bits != 8 * (end - start):
        raise ValueError(f"{name} has {end - start} bytes, and {dtype} of shape {list(shape)} is {-(-bits // 8)}")
    return dtype, shape, start, end


def _sizes(values: Any) -> Shape | None:
    if isinstance(values, list) and all(type(value) is int and value >= 0 for value in values):
        return tuple(values)
    return None


def _check_ranges(tensors: Mapping[str, tuple[str, Shape, int, int]], size: int) -> None:
    """Every byte belongs to one tensor: one after the other from the first byte to the last."""
    at, before = 0, "the header"
    for name, (_, _, start, end) in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if start != at:
            what = "overlaps" if start < at else f"begins {start - at} bytes after the end of"
            raise ValueError(f"{name} {what} {before}")
        at, before = end, name
    if at != size:
        raise ValueError(f"{at} bytes of tensors are announced, and {size} are there")


def unreadable(path: Path, message: str, fix: str = "") -> ConfigError:
    """What is wrong with a file, or a folder of them."""
    return ConfigError([Problem(str(path), message, fix)])
