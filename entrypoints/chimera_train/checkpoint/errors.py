"""What can go wrong with checkpoints. Standard library only."""

from __future__ import annotations

from ..config.contract import EXIT_FAILED


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says what was kept.

    `exit_code` is what the container should leave with: 1, or 75 where the cause may pass (a file system went away).
    """

    explains_itself = True

    def __init__(self, message: str, *, exit_code: int = EXIT_FAILED):
        self.exit_code = exit_code
        super().__init__(message)


class HistoryUnreadable(CheckpointError):
    """The run has a past that cannot be read; starting again from zero would throw it away in silence."""
