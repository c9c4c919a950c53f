"""Save and restore a run, collectively: the only door between the loop and the store."""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from .. import faults
from ..config import AXES, CheckpointConfig, MeshLayout, MlRoot, RecipeFile, encode
from .errors import CheckpointError
from .history import History
from .manifest import (
    METADATA,
    Checksum,
    FileEntry,
    LoopState,
    Manifest,
    RankManifest,
    RankManifestEntry,
    differing_model_fields,
    rank_manifest_name,
    rng_name,
    seal,
)
from .ranks import Ranks, RanksFailed, describe
from .state import (
    OPTIMIZER,
    drop_optimizer_state,
    fill_optimizer_state,
    model_tensors,
    optimizer_tensors,
    random_state,
    restore_random_state,
)
from .storage import OnceReader, OnceWriter
from .store import CheckpointStore, folder_name, utc_now, write_once


class Checkpointer:
    """Saves and loads one run's checkpoints. Every rank constructs it and calls its methods in the same order."""

    def __init__(self, config: CheckpointConfig, *, root: MlRoot, run_id: str, recipe: RecipeFile, layout: MeshLayout):
        self._config = config
        self._run_id = run_id
        self._recipe = recipe
        self._layout = layout
        self._ranks = Ranks(layout.workers_per_host)
        self.store = store_of(config, root, run_id)
        self._history = History(self.store, self._ranks, run_id=run_id, witnesses=root.checkpoints)
        self._attempts: dict[int, int] = {}
        """Step → next attempt: a name that this process used is not used again, even if its folder is gone."""

    @property
    def newest(self) -> str | None:
        """Name of the newest checkpoint that is complete, as far as `load` and `save` have seen."""
        return next(iter(self._history.complete or ()), None)

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: LoopState) -> Path:
        """Write a checkpoint and prune old ones; returns its folder. Collective; it is durable on return.

        A failed write on any rank raises CheckpointError on every rank; what was half written is removed, and
        earlier checkpoints are untouched.
        """
        assert step == state.step, (step, state.step)
        if self._history.complete is None:
            self._history.survey()
        folder = self._agree_on_folder(step)
        started = utc_now()
        try:
            files = self._write_tensors(folder, step, model, optimizer)
            entries = self._ranks.together(lambda: self._write_rank_files(folder, files))
            self._ranks.together(lambda: self._commit(folder, started, state, files, entries))
        except RanksFailed as failure:
            self._history.abandon(folder.name)
            kept = self._history.complete
            good = f"The newest good checkpoint is {self.store.root / kept[0]}" if kept else "There is no earlier one"
            raise CheckpointError(
                f"{folder.name} was not saved: {failure}. {good}; earlier checkpoints are untouched, the partial files "
                "are removed. If the disk is full, free space or lower checkpoint.keep_last",
                exit_code=failure.exit_code,
            ) from None
        self._history.committed(folder.name)
        self._history.prune(self._config.keep_last)
        return folder

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> LoopState | None:
        """Restore the newest checkpoint that is complete on every host; None where the run has no past.

        Collective. Reshards to whatever world size there is; random generators are restored where it is the one that
        saved. Raises HistoryUnreadable where there is a past that cannot be read, CheckpointError where the
        checkpoint is of another model.
        """
        found = self._history.newest(verify=self._config.verify_checksums)
        if found is None:
            return None
        folder, manifest = self.store.root / found.name, found.manifest
        if differing := differing_model_fields(manifest.model, self._recipe.recipe.model):
            raise CheckpointError(
                f"{folder} is of another model: {'; '.join(differing)}. Use the recipe that it was trained with, or "
                "another checkpoint.path for a new run"
            )
        self._ranks.say(f"resuming at step {manifest.step} from {folder}")
        same_world = manifest.world_size == self._ranks.world_size
        try:
            self._read_tensors(folder, model, optimizer)
            if same_world:
                self._ranks.together(lambda: self._read_random_state(folder))
        except RanksFailed as failure:
            raise CheckpointError(
                f"{folder} could not be loaded: {failure}. Nothing was changed in it", exit_code=failure.exit_code
            ) from None
        if not same_world:
            self._ranks.say(
                f"resharded from {manifest.world_size} to {self._ranks.world_size} ranks; the random generators "
                "go on from this start's seeds"
            )
        if manifest.recipe_hash != self._recipe.recipe_hash:
            self._ranks.say("the recipe is not the one that saved it; the model is the same, so the new recipe counts")
        if manifest.run_id != self._run_id:
            self._ranks.say(f"it was saved by another run, {manifest.run_id}")
        return manifest.loop_state

    def _agree_on_folder(self, step: int) -> Path:
        taken = self._ranks.together(lambda: self.store.next_attempt(step) if self._history.reads_store else 0)
        attempt = max([*taken, self._attempts.get(step, 0)])
        self._attempts[step] = attempt + 1
        return self.store.root / folder_name(step, attempt)

    def _write_tensors(
        self, folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> list[FileEntry]:
        tensors = model_tensors(model)
        for state in optimizer_tensors(model, optimizer).values():
            tensors |= state
        strike = functools.partial(faults.at, "checkpoint_write", step=step, rank=self._ranks.rank)
        writer = OnceWriter(folder, on_write=strike)
        self._run(dcp.save, tensors, storage_writer=writer)
        return writer.files

    def _write_rank_files(self, folder: Path, files: list[FileEntry]) -> RankManifestEntry:
        """Write what belongs to this rank alone: its random generators and its manifest."""
        rank = self._ranks.rank
        random_bytes = json.dumps(random_state()).encode()
        write_once(folder / rng_name(rank), random_bytes)
        checksum = Checksum()
        checksum.update(random_bytes)
        own = [f for f in files if f.name != METADATA]
        own.append(FileEntry(rng_name(rank), len(random_bytes), checksum.text()))
        data = seal(RankManifest(rank, tuple(own)))
        write_once(folder / rank_manifest_name(rank), data)
        return RankManifestEntry(rank_manifest_name(rank), len(data), hashlib.sha256(data).hexdigest())

    def _commit(
        self,
        folder: Path,
        started: str,
        state: LoopState,
        files: list[FileEntry],
        entries: list[RankManifestEntry],
    ) -> None:
        if not self._ranks.first:
            return
        (metadata,) = (f for f in files if f.name == METADATA)
        manifest = Manifest(
            step=state.step,
            tokens_seen=state.tokens_seen,
            samples_seen=state.samples_seen,
            loader=state.loader,
            world_size=self._ranks.world_size,
            mesh={axis: getattr(self._layout, axis) for axis in AXES},
            run_id=self._run_id,
            recipe_hash=self._recipe.recipe_hash,
            model=encode(self._recipe.recipe.model),
            time=started,
            torch_version=torch.__version__,
            metadata=metadata,
            rank_manifests=tuple(entries),
        )
        self.store.commit(folder, manifest)

    def _read_tensors(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        reader = OnceReader(folder)

        def prepare() -> dict[str, Tensor]:
            saved = reader.read_metadata().state_dict_metadata
            tensors = model_tensors(model)
            tensors |= _optimizer_targets(model, optimizer, set(saved))
            _refuse_mismatch(tensors, saved)
            return tensors

        targets: dict[str, Tensor] = {}
        self._ranks.together(lambda: targets.update(prepare()))
        self._run(dcp.load, targets, storage_reader=reader)

    def _read_random_state(self, folder: Path) -> None:
        restore_random_state(json.loads((folder / rng_name(self._ranks.rank)).read_bytes()))

    def _run(self, function: Any, tensors: dict[str, Tensor], **arguments: Any) -> None:
        """Call dcp.save or dcp.load; torch gathers the ranks' exceptions itself."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                function(tensors, process_group=self._ranks.group, **arguments)
        except CheckpointException as error:
            raise RanksFailed({rank: describe(cause) for rank, (cause, _) in error.failures.items()}) from None


def store_of(config: CheckpointConfig, root: MlRoot, run_id: str) -> CheckpointStore:
    """The store that a run's checkpoint section names."""
    return CheckpointStore(root.root / config.path.replace("{run_id}", run_id), shared=config.storage == "shared")


def _optimizer_targets(model: nn.Module, optimizer: torch.optim.Optimizer, saved: set[str]) -> dict[str, Tensor]:
    """The optimizer's tensors that the checkpoint holds, allocated if need be.

    A parameter that had no state then (it never had a gradient) gets none now.
    """
    if not any(name.startswith(OPTIMIZER) for name in saved):
        optimizer.state.clear()
        return {}
    if not optimizer.state:
        fill_optimizer_state(optimizer)
    by_parameter = optimizer_tensors(model, optimizer)
    without = {prefix for prefix, state in by_parameter.items() if not saved.intersection(state)}
    drop_optimizer_state(model, optimizer, without)
    return {n: t for prefix, state in by_parameter.items() if prefix not in without for n, t in state.items()}


def _refuse_mismatch(tensors: dict[str, Tensor], saved: dict[str, Any]) -> None:
    """Torch would cast types and report shapes one by one, rank by rank."""
    problems = []
    for name, tensor in tensors.items():
        if name not in saved:
            problems.append(f"{name} is missing")
            continue
        there = (list(saved[name].size), saved[name].properties.dtype)
        here = (list(tensor.shape), tensor.dtype)
        if there != here:
            problems.append(f"{name} is {there[1]} {there[0]} in the checkpoint and {here[1]} {here[0]} in the model")
    if problems:
        more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError("; ".join(problems[:5]) + more)
