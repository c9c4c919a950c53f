"""What goes wrong with a corpus, its shards or its tokenizer."""

from __future__ import annotations


class DataError(Exception):
    """Bad input: the file, what is wrong with it, and what to do. Nothing was started."""

    explains_itself = True

    def __init__(self, message: str, fix: str = ""):
        super().__init__(message, fix)  # both in args: the error crosses process boundaries
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message} (fix: {self.fix})" if self.fix else self.message


class PrepareFailed(DataError):
    """Preparation failed or was stopped under way; the message says what was kept."""
