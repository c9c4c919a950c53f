"""How far a preparation is, on a terminal or in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

_LINE_INTERVAL_S = 5.0


@dataclass(frozen=True)
class Progress:
    phase: Literal["tokenizer", "shards"]
    bytes_done: int
    """Of the input; finished shards of earlier runs included."""
    bytes_kept: int
    """Of `bytes_done`, what earlier runs had done."""
    bytes_total: int
    num_tokens: int
    """Of this run."""
    shards_done: int
    shards_total: int
    elapsed_s: float

    @property
    def bytes_per_s(self) -> float:
        return (self.bytes_done - self.bytes_kept) / self.elapsed_s if self.elapsed_s > 0 else 0.0

    def __str__(self) -> str:
        if self.phase == "tokenizer":
            return f"training the tokenizer ({self.bytes_total / 1e6:,.1f} MB of input)"
        share = self.bytes_done / self.bytes_total if self.bytes_total else 1.0
        text = (
            f"{self.bytes_done / 1e6:,.1f} of {self.bytes_total / 1e6:,.1f} MB ({share:.0%}), "
            f"{self.num_tokens / 1e6:,.2f} M tokens, shard {self.shards_done} of {self.shards_total}, "
            f"{self.bytes_per_s / 1e6:,.1f} MB/s"
        )
        if self.bytes_per_s > 0:
            text += f", about {(self.bytes_total - self.bytes_done) / self.bytes_per_s:,.0f} s left"
        return text


ShowProgress = Callable[[Progress], None]


@contextmanager
def show_progress() -> Iterator[ShowProgress]:
    """Progress on stderr: a bar on a terminal where rich is there, else a line every five seconds."""
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar
        except ImportError:
            pass
        else:
            with Bar(BarColumn(), TextColumn("{task.description}"), console=Console(stderr=True)) as bar:
                task = bar.add_task("reading the inputs", total=None)
                yield lambda state: bar.update(
                    task,
                    description=str(state),
                    completed=state.bytes_done,
                    total=None if state.phase == "tokenizer" else state.bytes_total,
                )
            return
    yield _lines()


def _lines() -> ShowProgress:
    last_time, last_phase = 0.0, ""

    def show(state: Progress) -> None:
        nonlocal last_time, last_phase
        if state.phase != last_phase or time.monotonic() - last_time >= _LINE_INTERVAL_S:
            last_time, last_phase = time.monotonic(), state.phase
            print(f"prepare: {state}", file=sys.stderr, flush=True)

    return show
