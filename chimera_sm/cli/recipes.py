"""`recipes`: list, show, explain."""

from __future__ import annotations

from collections.abc import Sequence

import click

from chimera_sm.errors import UsageError

from .options import json_option, print_json

folders_option = click.option(
    "--recipes", "folders", multiple=True, type=click.Path(), metavar="DIR", help="Your team's recipes."
)


@click.group(name="recipes", invoke_without_command=True)
@folders_option
@json_option
@click.pass_context
def command(ctx: click.Context, folders: Sequence[str], as_json: bool) -> None:
    """List recipes with their size, target and instances."""
    ctx.obj = folders
    if ctx.invoked_subcommand is None:
        _list(folders, as_json)


def _list(folders: Sequence[str], as_json: bool) -> None:
    from chimera_sm.recipe.listing import list_recipes

    rows = list_recipes(folders)
    if as_json:
        print_json(rows)
        return
    table = [["RECIPE", "PARAMETERS", "TARGET", "INSTANCES", "CAPACITY", "DESCRIPTION"]]
    for row in rows:
        if "error" in row:
            table.append([row["recipe"], "-", "-", "-", "-", f"broken: {row['error']}"])
        else:
            instances = f"{row['count']} × {row['instance']}"
            table.append([row["recipe"], row["size"], row["target"], instances, row["capacity"], row["description"]])
    widths = [max(len(line[i]) for line in table) for i in range(5)]
    for line in table:
        click.echo("  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[5]]))


def _overrides(recipe: str, overrides: Sequence[str]) -> list[str]:
    return [recipe if "=" in recipe else f"recipe={recipe}", *overrides]


@command.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1)
@folders_option
@json_option
@click.pass_obj
def show(before: Sequence[str], recipe: str, overrides: Sequence[str], folders: Sequence[str], as_json: bool) -> None:
    """Print the composed recipe as YAML."""
    from chimera_sm.sdk import compose
    from chimera_train.config import encode

    composed = encode(compose(_overrides(recipe, overrides), recipes=[*before, *folders]))
    if as_json:
        print_json(composed)
        return
    import yaml

    click.echo(yaml.safe_dump(composed, sort_keys=False, allow_unicode=True), nl=False)


@command.command()
@click.argument("recipe")
@click.argument("key")
@click.argument("overrides", nargs=-1)
@folders_option
@json_option
@click.pass_obj
def explain(
    before: Sequence[str], recipe: str, key: str, overrides: Sequence[str], folders: Sequence[str], as_json: bool
) -> None:
    """Say which file and line, or which override, set KEY (the last line holds)."""
    from chimera_sm.recipe.listing import explain_key
    from chimera_sm.sdk import compose

    if "=" in key:
        raise UsageError(f"{key!r} is an override, not a key", fix="recipes explain RECIPE KEY [OVERRIDES]")
    found = explain_key(compose(_overrides(recipe, overrides), recipes=[*before, *folders]), key)
    if as_json:
        print_json(found)
        return
    for setting in found["settings"]:
        click.echo(setting)
    click.echo(f"{key} = {found['value']}")
