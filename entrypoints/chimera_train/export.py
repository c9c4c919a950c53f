"""Write a model in Hugging Face's format: config.json, safetensors, tokenizer.

    python -m chimera_train.export --checkpoints FOLDER --recipe recipe.json --tokenizer tokenizer.json --out MODEL

At most one file of weights is in memory at a time, so a model that fits no machine can be exported on one.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .checkpoint import CheckpointError, CheckpointStore
from .checkpoint.checkpointer import store_of
from .checkpoint.manifest import MANIFEST
from .checkpoint.ranks import Ranks, RanksFailed
from .checkpoint.state import plain_name
from .command import EXIT_USAGE, Parser, call
from .config import ConfigError, MlRoot, ModelConfig, RecipeFile, decode
from .config.contract import EXIT_FAILED, EXIT_FINISHED, RUN_ID_VARIABLE
from .config.hf_config import hf_config
from .data.errors import DataError
from .model.hf import to_hf
from .weights import CheckpointWeights, Weights, empty_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_FILE_BYTES = 5_000_000_000
"""Of one safetensors file: what Hugging Face's own tools cut at."""
_EXPORTED = re.compile(
    r"(model|model-\d+-of-\d+)\.safetensors|model\.safetensors\.index\.json|(tokenizer|generation)?_?config\.json"
    r"|tokenizer\.json"
)
"""Names of the files that an export writes."""


_Held = list[dict[str, tuple[torch.Size, torch.dtype]]]
"""By rank: the tensors that it has anything of, with their whole shapes."""


class ExportError(RuntimeError):
    """The export was refused or failed; the message says why, and what it had written is removed."""

    exit_code = EXIT_FAILED


class WrongArgument(ExportError):
    """Nothing failed: another folder, file or step is needed."""


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer.json, and the token that ends a document."""

    path: Path
    vocab_size: int
    """Largest id + 1."""
    eod_id: int
    eod_token: str

    @classmethod
    def open(cls, path: Path) -> TokenizerFile:
        """The end-of-document token is the one that dataset.json beside it names, else one by a known name."""
        from .data.dataset import DATASET_FILE, read_info
        from .data.tokenizer import DocumentEncoder

        encoder = DocumentEncoder(path)
        eod_id = encoder.eod_id
        if (path.parent / DATASET_FILE).exists():
            eod_id = read_info(path.parent).eod_id
        eod_token = encoder.tokenizer.id_to_token(eod_id)
        if eod_token is None:
            raise ExportError(f"{path} has no token {eod_id}, which {DATASET_FILE} beside it names: they do not belong")
        return cls(path, encoder.vocab_size, eod_id, eod_token)

    def check_against(self, model: ModelConfig) -> None:
        """Raises ExportError where the model cannot have been trained with this tokenizer."""
        if self.vocab_size > model.vocab_size:
            raise WrongArgument(
                f"{self.path} has ids up to {self.vocab_size - 1}, and the model a vocabulary of {model.vocab_size}: "
                "it is not the tokenizer that the model was trained with"
            )


def export(
    weights: Weights,
    out: Path,
    *,
    dtype: str,
    tokenizer: TokenizerFile | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write the model of `weights` into the new or empty folder `out`. Raises ExportError."""
    sizes = {name: tensor.numel() for name, tensor in empty_model(weights.model).state_dict().items()}
    folder = _Folder(out, weights.model, dtype, tokenizer)
    try:
        folder.start()
        files = _plan(sizes, dtype, max_file_bytes)
        for file, names in files.items():
            folder.write_weights(file, {name: weights.read(name) for name in names})
        folder.write_rest(files)
    except BaseException as error:
        folder.discard()
        if isinstance(error, OSError):
            raise ExportError(f"the export to {out} failed: {error}") from None
        raise


def export_model(
    model: nn.Module, config: ModelConfig, out: Path, *, dtype: str, tokenizer: TokenizerFile | None = None
) -> None:
    """Write a live, possibly sharded model to the run's own output folder. Collective; rank 0 writes.

    A checkpoint cannot serve there: where each host has a folder of its own, none has all of it before the job ends.
    What an earlier attempt of the run exported, whole or not, is replaced; a folder with other files is refused.
    """
    ranks = Ranks(workers_per_host=1)
    folder = _Folder(out, config, dtype, tokenizer)
    model.state_dict()  # brings FSDP's parameters back to their shards
    tensors = {plain_name(name): t.detach() for name, t in [*model.named_parameters(), *model.named_buffers()]}
    device = next(iter(tensors.values())).device
    # A rank of a pipeline has the parameters of its own stages.
    held = ranks.together(lambda: {name: (t.shape, t.dtype) for name, t in tensors.items()})
    sizes = {name: tensor.numel() for name, tensor in empty_model(config).state_dict().items()}
    files = _plan(sizes, dtype, MAX_FILE_BYTES)
    try:
        ranks.together(lambda: folder.start(replace=True) if ranks.first else None)
        for file, names in files.items():
            whole = {}
            for name in names:
                tensor = _brought_to_first(name, tensors.get(name), held, ranks, device)
                if tensor is not None:
                    whole[name] = tensor.cpu()
            write = functools.partial(folder.write_weights, file, whole)
            ranks.together(write if ranks.first else lambda: None)
        ranks.together(lambda: folder.write_rest(files) if ranks.first else None)
    except RanksFailed as failure:
        if ranks.first:
            folder.discard()
        raise ExportError(f"the export to {out} failed: {failure}") from None


def _brought_to_first(
    name: str, tensor: Tensor | None, held: _Held, ranks: Ranks, device: torch.device
) -> Tensor | None:
    """The whole tensor, on rank 0. `tensor` is what this rank has of it, and `held` says, by rank, who has anything."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    holder = next(rank for rank, names in enumerate(held) if name in names)
    if holder == 0:
        return tensor if ranks.first else None
    if ranks.first:
        shape, dtype = held[holder][name]
        whole = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(whole, src=holder)
        return whole
    if ranks.rank == holder:
        assert tensor is not None
        dist.send(tensor.contiguous(), dst=0)
    return None


def _plan(sizes: Mapping[str, int], dtype: str, max_file_bytes: int) -> dict[str, list[str]]:
    """File name → our parameters in it, in the model's order; `sizes` are elements."""
    groups: list[list[str]] = [[]]
    room = max_file_bytes
    for name, size in sizes.items():
        size_bytes = size * DTYPES[dtype].itemsize
        if size_bytes > room and groups[-1]:
            groups.append([])
            room = max_file_bytes
        groups[-1].append(name)
        room -= size_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


def _replaceable(out: Path, *, replace: bool) -> list[Path]:
    """What stands in `out` and may go: nothing, or with `replace` the files of an earlier export. Raises WrongArgument
    where anything else is there."""
    if not out.exists():
        return []
    there = list(out.iterdir()) if out.is_dir() else [out]
    if there and not (replace and all(_EXPORTED.fullmatch(path.name) for path in there)):
        raise WrongArgument(f"{out} is not an empty folder; nothing is overwritten: name a new one")
    return there


class _Folder:
    """An exported model while it is written."""

    def __init__(self, out: Path, config: ModelConfig, dtype: str, tokenizer: TokenizerFile | None):
        self._out = out
        self._config = config
        self._dtype = dtype
        self._tokenizer = tokenizer
        self._written: list[Path] = []
        self._weight_map: dict[str, str] = {}
        self._total_bytes = 0

    def start(self, *, replace: bool = False) -> None:
        """Check that `out` may be written to; `replace` first removes the files of an earlier export from it."""
        if self._tokenizer is not None:
            self._tokenizer.check_against(self._config)
        for path in _replaceable(self._out, replace=replace):
            path.unlink()
        try:
            self._out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WrongArgument(f"{self._out} cannot be made: {error.strerror}; name another folder") from None

    def write_weights(self, file: str, whole: Mapping[str, Tensor]) -> None:
        """`whole`: our names → whole tensors."""
        from safetensors.torch import save_file

        tensors: dict[str, Tensor] = {}
        for name, tensor in whole.items():
            # The bias of a router stays as exact as it is in training.
            exact = tensor if name.endswith("expert_bias") else tensor.to(DTYPES[self._dtype])
            parts = to_hf(name, exact, self._config)
            # safetensors refuses tensors that share memory, as the experts of one stack do.
            tensors |= parts if len(parts) == 1 else {part: t.clone() for part, t in parts.items()}
        self._weight_map |= dict.fromkeys(tensors, file)
        self._total_bytes += sum(t.nbytes for t in tensors.values())
        path = self._new(file)
        try:
            save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata={"format": "pt"})
        except Exception as error:  # its own exception type, whatever the cause
            raise OSError(f"{path} could not be written: {error}") from None

    def write_rest(self, files: Mapping[str, Any]) -> None:
        if len(files) > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": self._weight_map}
            self._write_json("model.safetensors.index.json", index)
        config = hf_config(self._config, self._dtype) | {"bos_token_id": None, "eos_token_id": None}
        if (tokenizer := self._tokenizer) is not None:
            ids = {"bos_token_id": tokenizer.eod_id, "eos_token_id": tokenizer.eod_id}
            config |= ids
            shutil.copyfile(tokenizer.path, self._new("tokenizer.json"))
            self._write_json(
                "tokenizer_config.json",
                {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "bos_token": tokenizer.eod_token,
                    "eos_token": tokenizer.eod_token,
                    "model_max_length": self._config.max_position_embeddings,
                    "clean_up_tokenization_spaces": False,
                },
            )
            self._write_json("generation_config.json", ids | {"do_sample": True})
        self._write_json("config.json", config)

    def discard(self) -> None:
        for path in self._written:
            path.unlink(missing_ok=True)

    def _new(self, name: str) -> Path:
        self._written.append(self._out / name)
        return self._out / name

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        self._new(name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_recipe_file(path: Path) -> RecipeFile:
    """`recipe.json`; raises WrongArgument, or ConfigError for a recipe that is not valid."""
    try:
        return decode(RecipeFile, json.loads(path.read_text()))
    except FileNotFoundError:
        raise WrongArgument(
            f"{path}: no such file; it is to be the recipe.json that the run was started with"
        ) from None
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise WrongArgument(f"{path} cannot be read as a recipe: {error}") from None


def checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that name a checkpoint, for this command and for generate."""
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="a run's checkpoints, or one of them")
    parser.add_argument("--run-root", type=Path, metavar="ML_ROOT", help="or the run's /opt/ml; needs --recipe")
    parser.add_argument(
        "--recipe", type=Path, metavar="FILE", help="the run's recipe.json: the model must be its model"
    )
    parser.add_argument("--step", type=int, help="of the checkpoint; default: the newest complete one")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json of the data set")


def weights_of(options: argparse.Namespace, recipe: RecipeFile | None) -> CheckpointWeights:
    """The checkpoint that `checkpoint_arguments` name. Raises WrongArgument where there is none, CheckpointError where
    it cannot be read."""
    folder = options.checkpoints
    if folder is None:
        assert recipe is not None
        run_id = os.environ.get(RUN_ID_VARIABLE) or recipe.recipe.name
        folder = store_of(recipe.recipe.checkpoint, MlRoot(options.run_root), run_id).root
    if (folder / MANIFEST).exists():
        if options.step is not None:
            raise WrongArgument(f"--step {options.step} would be ignored: {folder} is one checkpoint already")
        return CheckpointWeights(folder, recipe=recipe)
    store = CheckpointStore(folder, shared=True)
    if not store.names():
        why = "is no folder" if not folder.is_dir() else "holds no checkpoint"
        raise WrongArgument(f"{folder} {why}: the run has not saved one yet, or it is elsewhere")
    steps = sorted({complete.manifest.step for complete in store.list().complete})
    if options.step is not None and steps and options.step not in steps:
        known = ", ".join(map(str, steps))
        raise WrongArgument(
            f"--step {options.step}: no complete checkpoint of that step in {folder}; there are: {known}"
        )
    return CheckpointWeights(folder, "newest" if options.step is None else options.step, recipe)


def existing_tokenizer(path: Path) -> TokenizerFile:
    """The tokenizer that an option names. Raises WrongArgument where it is not there, DataError where it is broken."""
    if not path.is_file():
        raise WrongArgument(f"{path}: no such file; it is to be the tokenizer.json of the data set")
    return TokenizerFile.open(path)


def say(error: Exception) -> int:
    """One error on stderr; the exit code for it."""
    print(f"error: {error}", file=sys.stderr)
    return EXIT_USAGE if isinstance(error, WrongArgument | ConfigError) else EXIT_FAILED


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="chimera_train.export", description=(__doc__ or "").split("\n")[0])
    checkpoint_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="new or empty folder")
    parser.add_argument("--dtype", choices=DTYPES, help="default: what the recipe computes in, else float32 as stored")
    options = parser.parse_args(arguments)
    if (options.checkpoints is None) == (options.run_root is None):
        parser.error("give either --checkpoints or --run-root")
    if options.run_root is not None and options.recipe is None:
        parser.error("--run-root needs --recipe, which says where in it the checkpoints are")
    try:
        _replaceable(options.out, replace=False)  # before every byte of a checkpoint is read
        recipe = read_recipe_file(options.recipe) if options.recipe is not None else None
        tokenizer = existing_tokenizer(options.tokenizer) if options.tokenizer is not None else None
        weights = weights_of(options, recipe)
        dtype = options.dtype or (recipe.recipe.precision.param_dtype if recipe is not None else "float32")
        export(weights, options.out, dtype=dtype, tokenizer=tokenizer)
    except (CheckpointError, ConfigError, DataError, ExportError) as error:
        return say(error)
    if tokenizer is None:
        print(
            f"warning: {options.out} has no tokenizer: give --tokenizer, or copy the data set's tokenizer.json into it",
            file=sys.stderr,
        )
    print(f"exported {weights.origin} to {options.out} in {dtype}")
    return EXIT_FINISHED


if __name__ == "__main__":
    call(main)
