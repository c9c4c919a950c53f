"""What goes wrong, by who can mend it. The CLI turns each into one message and one exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chimera_train.config import Problem

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_USAGE = 2
EXIT_CHECKS = 3
EXIT_RUN_FAILED = 4
EXIT_RUN_STOPPED = 5
EXIT_AWS_REFUSED = 6
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141
"""As the shell says it: 128 + SIGINT, 128 + SIGPIPE."""


class ChimeraError(Exception):
    """An error with a message for the user; `exit_code` is what the CLI leaves with."""

    exit_code = EXIT_USAGE

    def __init__(self, message: str, *, fix: str = ""):
        self.message = message
        self.fix = fix
        super().__init__(message + (f"\n  fix: {fix}" if fix else ""))


class UsageError(ChimeraError):
    """The command is wrong: an unknown recipe, run or file."""


class RecipeError(ChimeraError):
    """The recipe is wrong. Holds every problem found, each with the file or override that set its key."""

    def __init__(self, problems: Sequence[Problem], origins: Mapping[str, str] | None = None):
        self.problems = tuple(problems)
        self.origins = {p.key: origin_of(p.key, origins or {}) for p in self.problems}
        lines = []
        for problem in self.problems:
            where = self.origins[problem.key]
            lines.append(f"{problem.key or 'recipe'}: {problem.message}" + (f"\n  set by: {where}" if where else ""))
            if problem.fix:
                lines[-1] += f"\n  fix: {problem.fix}"
        super().__init__("\n".join(lines))


def origin_of(key: str, origins: Mapping[str, str]) -> str:
    """The origin of a key, or of the nearest section above it that has one."""
    while key:
        if key in origins:
            return origins[key]
        key = key[: key.rindex("[")] if key.endswith("]") else key.rpartition(".")[0]
    return ""


class ChecksFailed(ChimeraError):
    """Checks found errors; nothing was submitted."""

    exit_code = EXIT_CHECKS


class RunFailed(ChimeraError):
    exit_code = EXIT_RUN_FAILED


class RunStopped(ChimeraError):
    exit_code = EXIT_RUN_STOPPED


class AwsRefused(ChimeraError):
    """AWS said no, or would: quota, capacity, permission, missing credentials or account values."""

    exit_code = EXIT_AWS_REFUSED
