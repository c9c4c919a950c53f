"""What all hosts together know of a run's past: which checkpoint to resume from, when to refuse, what may be deleted.

Every method is collective. On storage of each host's own, one rank a host looks into its folder, and a checkpoint
counts where all of them hold it whole (SageMaker restored the union); on shared storage rank 0 looks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from .errors import CheckpointError, HistoryUnreadable
from .ranks import Ranks, RanksFailed
from .store import UPLOADING, CheckpointStore, Complete, Torn, position, utc_now, victims, write_once

T = TypeVar("T")
_SHOWN = 10


@dataclass(frozen=True)
class _Report:
    """What one reader found: name → digest of `manifest.json`, torn folders, steps that witnesses swear to."""

    complete: dict[str, str]
    torn: tuple[Torn, ...]
    witnessed: dict[str, int]


class History:
    """`witnesses`: the folder that outlives the job (/opt/ml/checkpoints) and holds, for a shared store, one small
    file a checkpoint: it tells an empty store from one that is not mounted."""

    def __init__(self, store: CheckpointStore, ranks: Ranks, *, run_id: str, witnesses: Path):
        self.store = store
        self.complete: list[str] | None = None
        """Names of the checkpoints that are complete everywhere, newest first; None before the first survey."""
        self._ranks = ranks
        self._run_id = run_id
        self._witnesses = witnesses
        self._found: dict[str, Complete] = {}
        self._torn: dict[str, Torn] = {}
        self._witnessed: dict[str, int] = {}

    @property
    def reads_store(self) -> bool:
        """Whether this rank looks into the folder, and deletes there, for others."""
        return self._ranks.first if self.store.shared else self._ranks.local_rank == 0

    def survey(self) -> None:
        """Look into every host's folder and work out what is complete everywhere."""
        reports = [r for r in self._together(self._report) if r is not None]
        self._torn = {t.name: t for r in reports for t in r.torn}
        self._witnessed = {name: step for r in reports for name, step in r.witnessed.items()}
        everywhere = []
        for name in {n for r in reports for n in r.complete}:
            holders = [r for r in reports if name in r.complete]
            if len(holders) == len(reports) and len({r.complete[name] for r in holders}) == 1:
                everywhere.append(name)
            elif name not in self._torn:
                reason = f"complete on {len(holders)} of {len(reports)} hosts only, or not the same on all"
                self._torn[name] = Torn(name, self.store.root / name, reason, True)
        self.complete = sorted(everywhere, key=position, reverse=True)

    def newest(self, *, verify: bool) -> Complete | None:
        """The newest checkpoint that is complete everywhere, its contents checked if `verify`; None for a run without
        a past. Raises HistoryUnreadable for a past that cannot be read."""
        self.survey()
        assert self.complete is not None
        for name in list(self.complete):
            found = self._ranks.from_first(self._found.get(name))
            assert found is not None
            problems = self._verify(found) if verify else []
            if not problems:
                self._tell_skipped(name)
                return found
            self.complete.remove(name)
            self._torn[name] = Torn(name, self.store.root / name, "; ".join(problems[:3]), True)
        # A first save that was cut off leaves folders of one step. Of more steps, the manifests must have been lost:
        # a run gets past a save only by committing it, and pruning needs a newer one that is complete.
        steps = {position(name)[0] for name in self._torn}
        if self._witnessed or len(steps) > 1 or any(t.committed for t in self._torn.values()):
            raise HistoryUnreadable(self._refusal())
        for torn in self._newest_torn():
            self._ranks.say(f"{torn.name} in {self.store.root} is no checkpoint: {torn.reason}")
        if self._torn:
            self._ranks.say("NO CHECKPOINT WAS EVER COMMITTED HERE: STARTING AT STEP 0")
        return None

    def committed(self, name: str) -> None:
        """Take note of a checkpoint that this run has just completed."""
        assert self.complete is not None
        self.complete.insert(0, name)
        self.complete.sort(key=position, reverse=True)
        if self.store.shared and self._ranks.first:
            try:
                self._witnesses.mkdir(parents=True, exist_ok=True)
                content = {"run_id": self._run_id, "step": position(name)[0], "time": utc_now()}
                content |= {"store": str(self.store.root), "folder": name}
                write_once(self._witness(name), json.dumps(content).encode())
            except OSError as error:  # the checkpoint itself is good
                self._ranks.say(f"could not write the witness of {name}: {error}")

    def prune(self, keep_last: int) -> None:
        """Delete what `store.victims` allows, on every host. A failure is told, not raised: nothing is lost by it."""
        assert self.complete is not None
        try:
            seen = [s for s in self._together(self._names_and_uploads) if s is not None]
            names = {n for names, _ in seen for n in names}
            gone = victims(names, self.complete, {n for _, busy in seen for n in busy}, keep_last)
            # Manifests first, on all hosts: a half-deleted folder is no checkpoint for any reader.
            self._together(lambda: self._each(self.store.retract, gone))
            self._together(lambda: self._each(self.store.remove, gone))
            if self._ranks.first:
                for name in gone:
                    self._forget_witness(name)
        except CheckpointError as error:
            self._ranks.say(f"old checkpoints were not deleted: {error}")
            return
        self.complete = [name for name in self.complete if name not in gone]

    def abandon(self, name: str) -> None:
        """Remove a folder whose save failed, on every host."""
        try:
            self._together(lambda: self.store.retract(name))
            self._together(lambda: self.store.remove(name))
        except CheckpointError as error:  # the failed save is the news; a torn folder is no harm
            self._ranks.say(f"{name} could not be removed: {error}")

    def _together(self, work: Callable[[], T]) -> list[T | None]:
        """`work` on the ranks that read the store; None stands for the others."""
        try:
            return self._ranks.together(lambda: work() if self.reads_store else None)
        except RanksFailed as failure:
            raise CheckpointError(f"{self.store.root}: {failure}", exit_code=failure.exit_code) from None

    @staticmethod
    def _each(work: Callable[[str], object], names: list[str]) -> None:
        for name in names:
            work(name)

    def _report(self) -> _Report:
        listing = self.store.list()
        self._found = {c.name: c for c in listing.complete}
        return _Report({c.name: c.digest for c in listing.complete}, listing.torn, self._read_witnesses())

    def _names_and_uploads(self) -> tuple[list[str], list[str]]:
        names = self.store.names()
        return names, [name for name in names if self.store.uploading(name)]

    def _verify(self, found: Complete) -> list[str]:
        """Share the reading out: over all ranks of shared storage, over the ranks of each host else."""
        ranks = self._ranks
        part, parts = (ranks.rank, ranks.world_size) if self.store.shared else (ranks.local_rank, ranks.local_size)
        shares = ranks.together(lambda: self.store.verify(found.name, found.files, part=part, parts=parts))
        return sorted({problem for problems in shares for problem in problems})

    def _newest_torn(self) -> list[Torn]:
        return sorted(self._torn.values(), key=lambda t: position(t.name), reverse=True)

    def _tell_skipped(self, chosen: str) -> None:
        for torn in self._newest_torn():
            if position(torn.name) > position(chosen):
                self._ranks.say(f"skipped {torn.name}: {torn.reason}")
        lost = {n for n in self._witnessed if position(n) > position(chosen)} - set(self._torn)
        for name in sorted(lost, key=position):
            self._ranks.say(f"{name} was committed once and is gone from {self.store.root}")

    def _refusal(self) -> str:
        torn = self._newest_torn()
        lines = [f"{self.store.root} holds the past of this run, and none of it can be read:"]
        lines += [f"  {t.name}: {t.reason}" for t in torn[:_SHOWN]]
        if len(torn) > _SHOWN:
            lines.append(f"  and {len(torn) - _SHOWN} folders more")
        missing = sorted(set(self._witnessed) - set(self._torn), key=position, reverse=True)
        lines += [f"  {n}: committed (a witness in {self._witnesses} says so) and not there" for n in missing[:_SHOWN]]
        lines.append(
            "Nothing was changed. Check that the storage is mounted and that its restore is complete, or bring the "
            "files back from a backup or S3 versions. To begin again from zero on purpose, use another run id or "
            "checkpoint.path, or move these folders and witnesses away"
        )
        return "\n".join(lines)

    def _witness(self, name: str) -> Path:
        return self._witnesses / f"witness-{name}.json"

    def _read_witnesses(self) -> dict[str, int]:
        found = {}
        if self.store.shared and self._witnesses.is_dir():
            for path in self._witnesses.glob("witness-step-*.json"):
                try:
                    content = json.loads(path.read_bytes())
                except ValueError:
                    continue  # killed while it was written
                if content.get("run_id") == self._run_id:
                    found[content["folder"]] = content["step"]
        return found

    def _forget_witness(self, name: str) -> None:
        path = self._witness(name)
        if not path.with_name(path.name + UPLOADING).exists():
            path.unlink(missing_ok=True)
