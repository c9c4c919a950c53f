"""What a checkpoint's manifests say: standard library only, so that the launching side can read them too.

A folder `step-<n>` holds data files, one `rank-<r>.json` a rank that names that rank's files, and `manifest.json`,
written last, that names the rank manifests. A file is trusted only through this chain of digests.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..config import ConfigError, ModelConfig, canonical_json, decode, encode
from ..config.contract import MANIFEST_FILE

SCHEMA_VERSION = 1
MANIFEST = MANIFEST_FILE
METADATA = "metadata.dcp"
"""torch.distributed.checkpoint's index. Torch's own name starts with a dot; whether SageMaker's sync takes hidden files
is nowhere documented."""

_NOT_IN_THE_WEIGHTS = {"name", "initializer_range", "max_position_embeddings", "router_aux_loss_coefficient"}
"""Fields of the model section that may change between a save and a resume."""

T = TypeVar("T")


class ManifestError(ValueError):
    """A manifest that cannot be trusted; the message completes the sentence "<file> …"."""


def rank_manifest_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def rng_name(rank: int) -> str:
    return f"rng-{rank:05d}.json"


@dataclass(frozen=True)
class LoopState:
    """Where a run stands: what the loop needs besides tensors and random generators."""

    step: int
    """Optimizer steps done."""
    tokens_seen: int
    samples_seen: int
    loader: dict[str, int] = field(default_factory=dict)
    """The data loader's own state; the same on every rank."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint, as it was written."""

    name: str
    size: int
    """Bytes."""
    checksum: str
    """`<algorithm>:<hex>` over the whole file; see `Checksum`."""
    dtypes: tuple[str, ...] = ()
    """Of the tensors in it, sorted: torch casts without a word when a checkpoint's type is not the model's."""


@dataclass(frozen=True)
class RankManifest:
    """Everything one rank wrote."""

    rank: int
    files: tuple[FileEntry, ...]
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class RankManifestEntry:
    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The global manifest: a folder without a valid one is no checkpoint."""

    step: int
    tokens_seen: int
    samples_seen: int
    loader: dict[str, int]
    world_size: int
    mesh: dict[str, int]
    """Axis → degree of the run that saved it."""
    run_id: str
    recipe_hash: str
    model: dict[str, Any]
    """The recipe's `model` section: what the weights mean."""
    time: str
    """UTC, ISO 8601, when the save began."""
    torch_version: str
    metadata: FileEntry
    rank_manifests: tuple[RankManifestEntry, ...]
    schema_version: int = SCHEMA_VERSION

    @property
    def loop_state(self) -> LoopState:
        return LoopState(self.step, self.tokens_seen, self.samples_seen, dict(self.loader))


class Checksum:
    """A running checksum. The algorithm's name is part of every value, so that a faster one can come later."""

    ALGORITHM = "crc32"  # zlib's, 1.3 GB/s a core; a third of the standard library's price for SHA-256

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Any) -> None:
        """`data`: anything with the buffer protocol."""
        self._value = zlib.crc32(data, self._value)

    def text(self) -> str:
        return f"{self.ALGORITHM}:{self._value:08x}"


def seal(manifest: Manifest | RankManifest) -> bytes:
    """The bytes to write: JSON with the SHA-256 of its own content, so that a damaged manifest shows."""
    content = encode(manifest)
    content["sha256"] = _content_hash(content)
    return (json.dumps(content, indent=1) + "\n").encode()


def unseal(cls: type[T], data: bytes) -> T:
    """The inverse of `seal`; ManifestError where the bytes are not what was sealed or are of a newer schema."""
    try:
        content = json.loads(data)
    except ValueError as error:
        raise ManifestError(f"is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ManifestError("is not a JSON object")
    version = content.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise ManifestError(f"has schema version {version}; this release reads up to {SCHEMA_VERSION}")
    if content.pop("sha256", None) != _content_hash(content):
        raise ManifestError("does not match its own SHA-256")
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    try:
        # A field that a later release of the same schema version added is not ours to understand.
        return decode(cls, {key: value for key, value in content.items() if key in known})
    except ConfigError as error:
        raise ManifestError(f"lacks or misstates a field: {error}") from None


def differing_model_fields(saved: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """What makes the weights of `saved` (a manifest's `model`) another model's: "model.<field> was …, is …".

    A field that the saving release did not know is passed over: it had no effect then.
    """
    return [
        f"model.{name} was {saved[name]!r}, is {value!r}"
        for name, value in encode(model).items()
        if name in saved and name not in _NOT_IN_THE_WEIGHTS and saved[name] != value
    ]


def _content_hash(content: Mapping[str, Any]) -> str:
    try:
        return hashlib.sha256(canonical_json(content).encode()).hexdigest()
    except ValueError:  # a lone surrogate or a NaN, which no sealed manifest has
        return ""
