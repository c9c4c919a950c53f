"""What stops a host before or while its workers run."""

from __future__ import annotations

from chimera_train.config.contract import EXIT_FAILED


class HostError(Exception):
    """A host that cannot go on; `exit_code` is what the container leaves with."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED):
        self.exit_code = exit_code
        super().__init__(message)


class StopRequested(Exception):
    """SIGTERM came before the workers were started: there is nothing to save."""
