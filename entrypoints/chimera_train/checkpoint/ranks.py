"""The ranks of a run as the checkpoints need them: a gloo group of their own, and errors that reach every rank."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ..config.contract import EXIT_FAILED, EXIT_RETRY
from ..worker_errors import exit_code_of

T = TypeVar("T")


class RanksFailed(Exception):
    """Work failed on some ranks; raised on all of them. `problems`: rank → what to tell, and the exit code it asks."""

    def __init__(self, problems: dict[int, tuple[str, int]]):
        codes = {code for _, code in problems.values()}
        self.exit_code = EXIT_RETRY if codes == {EXIT_RETRY} else EXIT_FAILED
        first = [f"rank {rank}: {text}" for rank, (text, _) in sorted(problems.items())[:4]]
        more = [f"and {len(problems) - 4} ranks more"] if len(problems) > 4 else []
        super().__init__("; ".join(first + more))


def describe(error: BaseException) -> tuple[str, int]:
    """Text and exit code of an error, as RanksFailed takes them."""
    return str(error) if _for_users(error) else f"{type(error).__name__}: {error}", exit_code_of(error)


def _for_users(error: BaseException) -> bool:
    """Errors whose message says it all; of others, the traceback is wanted."""
    return isinstance(error, OSError) or hasattr(error, "exit_code")


class Ranks:
    """Collectives over all ranks of the job; in a single process without a process group they are the identity.

    The group is separate from training's: a collective of a checkpoint on the default group could meet one of
    FSDP's, and gloo aborts on the mismatch.
    """

    def __init__(self, workers_per_host: int):
        self.distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self.distributed else 0
        self.world_size = dist.get_world_size() if self.distributed else 1
        self.group = dist.new_group(backend="gloo") if self.distributed else None
        self.local_size = min(workers_per_host, self.world_size)
        self.local_rank = self.rank % self.local_size

    @property
    def first(self) -> bool:
        return self.rank == 0

    def say(self, text: str) -> None:
        if self.first:
            print(f"checkpoint: {text}", flush=True)

    def together(self, work: Callable[[], T]) -> list[T]:
        """Do `work` on every rank; every rank's value, in rank order, on every rank.

        Where it raises on any rank, RanksFailed is raised on all: no rank is left waiting for another.
        """
        value, problem = None, None
        try:
            value = work()
        except Exception as error:
            problem = describe(error)
            if not _for_users(error):
                traceback.print_exc(file=sys.stderr)
        gathered: list[Any] = [(value, problem)]
        if self.distributed:
            gathered = [None] * self.world_size
            dist.all_gather_object(gathered, (value, problem), group=self.group)
        problems = {rank: found for rank, (_, found) in enumerate(gathered) if found is not None}
        if problems:
            raise RanksFailed(problems)
        return [v for v, _ in gathered]

    def from_first(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if not self.distributed:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]
