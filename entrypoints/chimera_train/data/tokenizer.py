"""Byte-level BPE: load one from a `tokenizer.json`, train one, and turn documents into ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EOD_TOKEN = "<|endoftext|>"
_EOD_NAMES = (EOD_TOKEN, "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "[EOS]")
_LONGEST_TEXT = 1 << 20
"""Characters encoded in one call; an encoding takes some hundred bytes of memory a token."""


class DocumentEncoder:
    """A tokenizer with its end-of-document token. Special tokens in the text are encoded as the text they are, and no
    begin-of-text token is added: documents are told apart by the end-of-document token alone."""

    def __init__(self, path: Path, eod_token: str | None = None):
        from tokenizers import Tokenizer

        try:
            self.tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises the bare class
            raise DataError(f"{path} is no tokenizer.json of the tokenizers library: {error}") from error
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        names = [eod_token] if eod_token else [name for name in _EOD_NAMES if name in vocabulary]
        if not names or names[0] not in vocabulary:
            what = (
                f"{eod_token!r} is not in its vocabulary"
                if eod_token
                else "it has no end-of-text token by a known name"
            )
            raise DataError(f"{path}: {what}", "name the token that ends a document with --eod-token")
        self.eod_id = vocabulary[names[0]]

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, int64 [length + 1], the end-of-document id last."""
        pieces = [list(_cut_long(text)) for text in texts]
        encodings = iter(
            self.tokenizer.encode_batch_fast(
                [piece for of_text in pieces for piece in of_text], add_special_tokens=False
            )
        )
        return [
            np.asarray([*(id_ for _ in of_text for id_ in next(encodings).ids), self.eod_id], dtype=np.int64)
            for of_text in pieces
        ]


def _cut_long(text: str) -> Iterator[str]:
    """The text in pieces that end with a line where they can, so that one huge document does not fill the memory."""
    start = 0
    while len(text) - start > _LONGEST_TEXT:
        end = text.rfind("\n", start, start + _LONGEST_TEXT) + 1 or start + _LONGEST_TEXT
        yield text[start:end]
        start = end
    yield text[start:]


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE with GPT-2's pre-tokenization and write it as `tokenizer.json`. The same texts give the
    same file. Id 0 is the end-of-document token, ids 1 to 256 are the bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    tokenizer.save(str(path))
