"""The command line: one module a command, imported when the command is called."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

import click

from chimera_sm import __version__
from chimera_sm.errors import (
    EXIT_BUG,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_PIPE_CLOSED,
    EXIT_USAGE,
    ChimeraError,
)

COMMANDS = {
    "recipes": ("recipes", "List, show and explain recipes."),
    "plan": ("plan", "Predict memory, time and cost of a recipe."),
    "check": ("check", "Say what would go wrong, before anything is sent."),
    "launch": ("launch", "Plan, check and run a recipe."),
    "runs": ("runs", "List the runs recorded here."),
    "status": ("status", "Say how a run is doing."),
    "logs": ("logs", "Print a run's log."),
    "stop": ("stop", "Ask a run to save and stop."),
    "resume": ("resume", "Go on from the newest complete checkpoint."),
    "data": ("data", "Turn text into tokenised shards."),
    "export": ("export", "Write a run's model in Hugging Face format."),
    "generate": ("generate", "Sample text from a run's model."),
}


class Commands(click.Group):
    """Imports a command's module only when that command is called, so that `--help` stays quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        from importlib import import_module

        module, _ = COMMANDS[cmd_name]
        command: click.Command = import_module(f"chimera_sm.cli.{module}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from chimera_train.config import nearest

        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            hint = nearest(args[0], COMMANDS)
            raise click.UsageError(f"no command {args[0]!r}." + (f" Did you mean {hint}?" if hint else ""), ctx)
        return super().resolve_command(ctx, args)


@click.command(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 a bug of ours, 2 the recipe or the command is wrong, 3 checks found errors, "
    "4 the run failed, 5 the run was stopped, 6 AWS refused, 130 interrupted here (Ctrl-C, or no to the question).",
)
@click.version_option(__version__, prog_name="chimera_sm")
def cli() -> None:
    """Plan, check and run large language model training on Amazon SageMaker and HyperPod.

    A recipe is composed from overrides, `recipe=70b train.num_steps=100`, wherever a command takes OVERRIDES.
    """


def run(arguments: Sequence[str]) -> int:
    """Run one command line; the exit code. An expected error is one message on stderr, without a traceback."""
    try:
        result = cli.main(list(arguments), prog_name="chimera_sm", standalone_mode=False)
        return result if isinstance(result, int) else EXIT_DONE
    except ChimeraError as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except SystemExit as left:
        # How click leaves when the reader of our output has gone; it has put a wrapper around stdout by then.
        if type(sys.stdout).__name__ == "PacifyFlushWrapper":
            return EXIT_PIPE_CLOSED
        return left.code if isinstance(left.code, int) else EXIT_BUG
    except OSError as error:
        # A full disk, a folder without permission: told by the system, and nothing of ours to trace back.
        with contextlib.suppress(OSError):
            click.echo(f"error: {error.strerror}" + (f": {error.filename}" if error.filename else ""), err=True)
        return EXIT_USAGE
    except Exception:
        import traceback

        traceback.print_exc()
        click.echo("error: this is a bug of chimera_sm; the traceback above says where", err=True)
        return EXIT_BUG
