"""What is read: the recipe's `data` section."""

from __future__ import annotations

from dataclasses import dataclass

from .problem import Problem

MIN_TRAINED_VOCAB_SIZE = 257
"""Of a tokenizer that is trained on the corpus: 256 bytes and the end-of-document token."""
MAX_TRAINED_VOCAB_SIZE = 1 << 24
"""Far above any in use (262,144 in 2025); training reserves memory for what is asked for."""


def leaves_channel(path: str) -> bool:
    """Whether a folder that should be inside of a channel is not."""
    return path.startswith("/") or ".." in path.split("/")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Tokenised shards (Megatron `.bin`/`.idx` and a `dataset.json`), as `chimera_sm data prepare` writes them."""

    name: str
    channel: str = "train"
    """Input channel that holds the shards: `<ml root>/input/data/<channel>`."""
    path: str = ""
    """Folder of the shards inside the channel."""
    shuffle: bool = True
    """False: samples in the order of the corpus."""
    separate_documents: bool = False
    """Attention stays inside a document, and positions start again at each. False: a sequence is one text, and a token
    sees the documents before its own. The loss is of the same tokens either way."""
    prefetch_batches: int = 4
    """Micro-batches that one background thread reads ahead; 0 reads in the step itself."""

    def validate(self) -> list[Problem]:
        problems = []
        if self.prefetch_batches < 0:
            problems.append(Problem("data.prefetch_batches", f"{self.prefetch_batches} is negative"))
        if leaves_channel(self.path):
            problems.append(
                Problem("data.path", f"{self.path!r} leaves the channel", "give a folder inside the channel")
            )
        return problems
