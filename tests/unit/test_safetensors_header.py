"""Headers of safetensors by the format's own rules: what its package refuses is refused, by file and tensor."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from chimera_train.config import ConfigError
from chimera_train.config.safetensors_header import TensorHeader, read_header

BYTES = 4 * (6 + 3 + 0)
WHOLE = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "F32", "shape": [3], "data_offsets": [24, 36]},
    "empty": {"dtype": "F32", "shape": [0, 5], "data_offsets": [24, 24]},
}


def write(folder: Path, header: Any, size: int = BYTES) -> Path:
    file, text = folder / "x.safetensors", json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    return file


def test_a_whole_file_is_read(tmp_path):
    file = write(tmp_path, WHOLE | {"__metadata__": {"format": "pt"}})
    assert read_header(file)["a"] == TensorHeader(file, "F32", (2, 3))
    save_file({"x": torch.ones(3, dtype=torch.bfloat16), "y": torch.ones(2, 1).to(torch.float8_e4m3fn)}, file)
    assert {name: (t.dtype, t.shape) for name, t in read_header(file).items()} == {
        "x": ("BF16", (3,)),
        "y": ("F8_E4M3", (2, 1)),
    }


@pytest.mark.parametrize(
    ("name", "changed", "says"),
    [
        ("b", {"data_offsets": [0, 4]}, "b has 4 bytes, and F32 of shape [3] is 12"),
        ("b", {"data_offsets": [20, 32]}, "b overlaps a"),
        ("b", {"data_offsets": [28, 40]}, "b begins 4 bytes after the end of empty"),
        ("a", {"shape": [3, 3]}, "a has 24 bytes, and F32 of shape [3, 3] is 36"),
        ("a", {"dtype": "BF16"}, "a has 24 bytes, and BF16 of shape [2, 3] is 12"),
        ("a", {"dtype": "F33"}, "a has dtype='F33'"),
        ("a", {"dtype": ["F32"]}, "a has dtype=['F32']"),
        ("a", {"shape": [-2, -3]}, "a has shape=[-2, -3]"),
        ("a", {"shape": 6}, "a has shape=6"),
        ("a", {"shape": [6.0]}, "a has shape=[6.0]"),
        ("a", {"data_offsets": [24, 0]}, "a has data_offsets=[24, 0]"),
        ("a", {"data_offsets": [0]}, "a has data_offsets=[0]"),
        ("a", {"data_offsets": None}, "a has data_offsets=None"),
    ],
)
def test_a_damaged_header_names_file_and_tensor(tmp_path, name, changed, says):
    file = write(tmp_path, WHOLE | {name: WHOLE[name] | changed})
    with pytest.raises(ConfigError) as caught:
        read_header(file)
    assert str(caught.value).startswith(f"{file}: is damaged: {says}")
    with pytest.raises(SafetensorError):
        safe_open(file, framework="pt")


@pytest.mark.parametrize("header", [[], "x", {"a": []}, {"a": None}, {"a": {}}])
def test_a_header_of_another_form_is_damaged(tmp_path, header):
    with pytest.raises(ConfigError, match="is damaged"):
        read_header(write(tmp_path, header))


@pytest.mark.parametrize("size", [BYTES - 1, BYTES + 1, 0])
def test_bytes_without_a_tensor_and_tensors_without_bytes(tmp_path, size):
    with pytest.raises(ConfigError, match=f"is damaged: {BYTES} bytes of tensors are announced, and {size} are there"):
        read_header(write(tmp_path, WHOLE, size))
