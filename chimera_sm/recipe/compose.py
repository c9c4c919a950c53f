"""Overrides to a Recipe: Hydra composes, the schema validates, and every error says where its value came from."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chimera_sm.errors import RecipeError, UsageError
from chimera_sm.paths import recipes_dir
from chimera_train.config import ConfigError, Problem, decode, nearest
from chimera_train.config.decode import fields_of

from .model_folder import fill_from_model_folder
from .origins import Origins, Setting
from .schema import Recipe

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.override_parser.types import Override

ROOT_CONFIG = "config"
SEARCH_VARIABLE = "CHIMERA_RECIPES"


def search_path(extra: Sequence[str | os.PathLike[str]] = ()) -> list[Path]:
    """Folders of recipes, the first that has a file wins: `extra` (`--recipes`), CHIMERA_RECIPES, the shipped one."""
    named = [(str(folder), "--recipes") for folder in extra]
    named += [(f, SEARCH_VARIABLE) for f in os.environ.get(SEARCH_VARIABLE, "").split(os.pathsep) if f]
    groups = {p.name for p in recipes_dir().iterdir() if p.is_dir()}
    for folder, source in named:
        if not Path(folder).is_dir():
            raise UsageError(f"{source}: {folder} is no folder", fix="name a folder with recipe/, env/, … inside")
        if not any((Path(folder) / name).is_dir() for name in groups):
            raise UsageError(
                f"{source}: {folder} holds none of {', '.join(f'{g}/' for g in sorted(groups))}",
                fix=f"did you mean {Path(folder).parent}?" if Path(folder).name in groups else "",
            )
    return [Path(folder).resolve() for folder, _ in named] + [recipes_dir()]


def compose(overrides: Sequence[str] = (), *, recipes: Sequence[str | os.PathLike[str]] = ()) -> Recipe:
    """Compose and validate a recipe.

    `overrides` are what the command line takes: `recipe=70b` picks a file of a group, `train.num_steps=10` sets a
    value; the last one wins. `recipes` are folders that are searched before the shipped one.

    Raises RecipeError with every broken rule, each with the file and line or the override that set it.

    >>> compose(["recipe=70b", "train.num_steps=10"]).parallel.tensor_parallel
    8
    """
    loader = session(recipes)
    choices = loader.split(overrides)
    data, settings = loader.compose(choices)
    return build(data, loader.origins(choices, settings))


def build(data: Any, origins: Origins) -> Recipe:
    """Decode and validate composed plain data."""
    if isinstance(data, dict) and isinstance(data.get("recipe"), dict):
        raise RecipeError(
            [
                Problem(
                    "recipe",
                    "a recipe file sets keys of the whole recipe, and this one does not say so",
                    "make its first line `# @package _global_`",
                )
            ],
            origins,
        )
    try:
        recipe = decode(Recipe, data)
    except ConfigError as error:
        raise RecipeError(error.problems, origins) from None
    problems = recipe.validate()
    if problems:
        raise RecipeError(problems, origins)
    return recipe.with_origins(origins)


@dataclass(frozen=True)
class Choices:
    """The user's overrides, sorted by what Hydra has to know of them."""

    groups: list[str]
    values: list[str]
    value_keys: list[tuple[str, str]]
    """(dotted key, the override as it was typed), in order."""
    parsed: list[tuple[str, Any]]
    """(dotted key, value) of `values`, in order."""


class Session:
    """One Hydra configuration loader over a search path."""

    def __init__(self, loader: ConfigLoader, folders: Sequence[Path]):
        self.loader = loader
        self.folders = folders

    def groups(self) -> list[str]:
        found = {
            p.name for folder in self.folders for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")
        }
        return sorted(found)

    def options(self, group: str) -> list[str]:
        """Names of a group's files over all folders."""
        found = {p.stem for folder in self.folders for p in (folder / group).glob("*.yaml")}
        return sorted(found)

    def split(self, overrides: Sequence[str]) -> Choices:
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException

        parser = OverridesParser.create()
        groups = self.groups()
        choices = Choices([], [], [], [])
        for text in overrides:
            if "=" not in text and not text.startswith("~"):
                hint = nearest(text, self.options("recipe"))
                raise UsageError(
                    f"{text!r} is no override", fix=f"recipe={hint}" if hint else "write KEY=VALUE, e.g. recipe=70b"
                )
            try:
                override = parser.parse_override(text)
            except (HydraException, RecursionError) as error:
                raise UsageError(
                    f"{text!r} cannot be read: {str(error).splitlines()[0]}", fix="quote odd characters: KEY='…'"
                ) from None
            self._check(override, text, groups)
            key = str(override.key_or_group)
            if key in groups and isinstance(override.value(), str | int):
                choices.groups.append(text)
            else:
                plain, value = text.lstrip("+"), override.value()
                if _is_text(key) and isinstance(value, int | float) and not isinstance(value, bool):
                    value = plain.partition("=")[2]
                    plain = f"{key}='{plain.partition('=')[2]}'"  # a version or an account number, not a quantity
                choices.values.append(text if text[0] == "~" else f"++{plain}")
                choices.parsed.append((key, value))
                choices.value_keys.extend((k, text) for k in _keys_within(key, override.value()))
        return choices

    def _check(self, override: Override, text: str, groups: list[str]) -> None:
        key = str(override.key_or_group)
        if override.is_sweep_override():
            raise UsageError(f"{text!r} is a sweep; one command runs one recipe", fix="quote a list: KEY='[a,b]'")
        if not all(key.split(".")):
            raise UsageError(f"{text!r} names no key", fix="write KEY=VALUE, e.g. train.num_steps=1000")
        head = key.split(".")[0]
        known = list(dict.fromkeys([*groups, *fields_of(Recipe)]))
        if head not in known:
            hint = nearest(head, known)
            raise RecipeError(
                [
                    Problem(
                        key, "no such key or group", f"did you mean {hint}?" if hint else f"known: {', '.join(known)}"
                    )
                ],
                {key: f"override {text}"},
            )
        value = override.value()
        if key in groups and isinstance(value, str | int):
            options = self.options(key)
            if str(value) not in options:
                hint = nearest(str(value), options)
                raise RecipeError(
                    [
                        Problem(
                            key,
                            f"{value!r} is not one of {', '.join(options)}",
                            f"did you mean {key}={hint}?" if hint else "",
                        )
                    ],
                    {key: f"override {text}"},
                )

    def compose(self, choices: Choices) -> tuple[Any, list[Setting]]:
        """Plain data, and what of it neither a file of the search path nor an override set."""
        from hydra.types import RunMode
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            config = self.loader.load_configuration(
                config_name=ROOT_CONFIG,
                overrides=[*choices.groups, *choices.values],
                run_mode=RunMode.RUN,
                from_shell=False,
            )
        except RecursionError:
            raise UsageError("the recipe does not compose: a defaults list includes itself") from None
        except Exception as error:  # whatever a team's file makes Hydra, OmegaConf or YAML stumble over
            cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
            raise UsageError(f"the recipe does not compose: {cause}") from None
        with _open(config):
            config.pop("hydra", None)
        try:
            with _open(config):  # before interpolations of what it fills are looked at
                settings = fill_from_model_folder(config)
            missing = sorted(OmegaConf.missing_keys(config))
            if missing:
                raise RecipeError([Problem(key, "must be set", f"{key}=…") for key in missing], self.origins(choices))
            return OmegaConf.to_container(config, resolve=True), settings
        except ConfigError as error:
            raise RecipeError(error.problems, self.origins(choices)) from None
        except OmegaConfBaseException as error:
            key = getattr(error, "full_key", None) or ""
            raise RecipeError([Problem(key, str(error).splitlines()[0])], self.origins(choices)) from None

    def origins(self, choices: Choices, before: Sequence[Setting] = ()) -> Origins:
        """`before`: settings that files and overrides replace."""
        return Origins(lambda: [*before, *self._settings(choices)])

    def _settings(self, choices: Choices) -> list[Setting]:
        from hydra.types import RunMode

        defaults = self.loader.compute_defaults_list(ROOT_CONFIG, choices.groups, RunMode.RUN)
        found: list[Setting] = []
        for item in defaults.defaults:
            if item.config_path is None or item.config_path.startswith("hydra"):
                continue
            for folder in self.folders:
                file = folder / f"{item.config_path}.yaml"
                if file.is_file():
                    found.append((file, item.package or "", ""))
                    break
        return found + [(None, key, f"override {text}") for key, text in choices.value_keys]


def _is_text(key: str) -> bool:
    """Whether the schema has text at `key`, so that `1` means "1" there."""
    import typing

    kind: Any = Recipe
    for part in key.split("."):
        inner = [a for a in typing.get_args(kind) if a is not type(None)]
        if typing.get_origin(kind) is dict:
            kind = inner[1]
            continue
        kind = inner[0] if inner else kind
        if not dataclasses.is_dataclass(kind) or part not in fields_of(typing.cast(type, kind)):
            return False
        kind = fields_of(typing.cast(type, kind))[part]
    return kind is str or str in typing.get_args(kind)


def _keys_within(key: str, value: Any) -> Iterator[str]:
    """`key`, and every key inside the mapping that an override may set."""
    yield key
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _keys_within(f"{key}.{name}", inner)


def session(recipes: Sequence[str | os.PathLike[str]] = ()) -> Session:
    """A Hydra configuration loader of its own. Hydra's public entry has one primary folder, which must hold the root
    file, and one global state, which is the caller's; the loader behind it takes any search path and touches neither.
    """
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
    from hydra.core.plugins import Plugins

    folders = search_path(recipes)
    Plugins.instance()  # registers the file:// and pkg:// sources
    path = ConfigSearchPathImpl()
    path.append("hydra", "pkg://hydra.conf")
    for number, folder in enumerate(folders):
        path.append("main" if number == 0 else f"recipes-{number}", f"file://{folder}")
    path.append("schema", "structured://")
    return Session(ConfigLoaderImpl(config_search_path=path), folders)


@contextmanager
def _open(config: Any) -> Iterator[None]:
    from omegaconf import open_dict, read_write

    with read_write(config), open_dict(config):
        yield
