"""What a local run has printed and measured, read from its files by any process."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

TAIL_BYTES = 64 * 1024
RECENT_STEPS = 20
"""Steps whose mean time gives the ETA."""
FOLLOW_S = 0.3


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """One dict a logged step, ascending, as exact as it was written.

    A resume repeats steps since its checkpoint: the later attempt counts, and what an earlier one did beyond it is no
    longer part of the run.
    """
    rows: list[dict[str, Any]] = []
    for file in sorted(folder.glob("*.jsonl")):
        rows += _rows(file.read_text().splitlines())
    return _without_repeats(rows)


def recent_metrics(folder: Path) -> list[dict[str, Any]]:
    """The last steps only: what a status needs, in constant time."""
    rows: list[dict[str, Any]] = []
    for file in sorted(folder.glob("*.jsonl")):
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            stream.seek(max(0, size - TAIL_BYTES))
            rows += _rows(stream.read().decode(errors="replace").splitlines())
    return _without_repeats(rows)[-RECENT_STEPS:]


def _rows(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # the first line of a tail, or the last of a worker that was killed
            continue
        if isinstance(row, dict) and "step" in row:
            yield row


def _without_repeats(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    for row in rows:
        while kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
        kept.append(row)
    return kept


def eta_s(recent: Sequence[dict[str, Any]], num_steps: int) -> float | None:
    """Seconds to the last step, by the mean of the recent ones."""
    times = [row["step_s"] for row in recent if row.get("step_s")]
    if not times:
        return None
    return float((num_steps - recent[-1]["step"]) * sum(times) / len(times))


def read_logs(files: dict[str, Path], *, follow: bool, ended: Callable[[], bool]) -> Iterator[str]:
    """Lines of the hosts' logs, host by host, with the host's name in front where there are several.

    `follow`: go on until the run has ended.
    """
    tails = {name: _Tail(file) for name, file in files.items()}
    while True:
        last_round = not follow or ended()  # asked before reading, so that what was written before the end is read
        for name, tail in tails.items():
            for line in tail.lines(last_round):
                yield f"{name} | {line}" if len(files) > 1 else line
        if last_round:
            return
        time.sleep(FOLLOW_S)


class _Tail:
    def __init__(self, file: Path):
        self._file = file
        self._position = 0
        self._rest = b""

    def lines(self, last: bool) -> Iterator[str]:
        """Whole lines since the last call; at the end also one without a newline."""
        if not self._file.exists():
            return
        with self._file.open("rb") as stream:
            stream.seek(self._position)
            data = self._rest + stream.read()
            self._position = stream.tell()
        *whole, self._rest = data.split(b"\n")
        if last and self._rest:
            whole.append(self._rest)
        for line in whole:
            yield line.decode(errors="replace")
