"""Command lines of the tools that people call: one line an error, exit code 2 for wrong arguments."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import NoReturn

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as a shell says it."""


def call(main: Callable[[], int]) -> NoReturn:
    """Leave with `main`'s exit code; Ctrl-C is an end, not an error to trace back."""
    try:
        code = main()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    sys.exit(code)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is what --help is for."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"error: {message}\n")


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """Type of an option: an integer from `least` to `most`, both included."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no integer") from None
        if value < least or (most is not None and value > most):
            bound = f"at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text} is out of range: {bound}")
        return value

    return parse


def not_negative(text: str) -> float:
    """Type of an option: a finite number from 0 on."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text} is out of range: a finite number, at least 0")
    return value


def unicode_text(text: str) -> str:
    """Type of an option: text; bytes of a command line that are no UTF-8 arrive as half surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("is no UTF-8 text") from None
    return text
