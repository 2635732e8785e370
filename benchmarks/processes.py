"""CPU time, memory and descriptors of processes, from proc(5)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

_TICKS = os.sysconf("SC_CLK_TCK")


def parse_stat(text: str) -> tuple[int, float]:
    """Return (parent, CPU seconds) of a ``stat``; the seconds include those of children that were waited for."""
    fields = text.rpartition(")")[2].split()
    return int(fields[1]), sum(map(int, fields[11:15])) / _TICKS


def parse_pss(text: str) -> int:
    """Return the bytes of memory that a ``smaps_rollup`` counts: its own, and its share of what is shared; no files."""
    kilobytes = dict(line.split()[:2] for line in text.splitlines()[1:])
    return 1024 * (int(kilobytes["Pss_Anon:"]) + int(kilobytes["Pss_Shmem:"]))


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        if (text := _read(int(name), "stat")) is not None:
            children.setdefault(parse_stat(text)[0], []).append(int(name))
    found = [pid]
    for each in found:  # grows meanwhile
        found += children.get(each, [])
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time that these processes have taken so far."""
    return sum(parse_stat(text)[1] for pid in pids if (text := _read(pid, "stat")) is not None)


def memory_bytes(pids: Iterable[int]) -> int:
    """Return the memory of these processes together; what they share counts once."""
    return sum(parse_pss(text) for pid in pids if (text := _read(pid, "smaps_rollup")))


def descriptors(pids: Iterable[int]) -> int:
    """Return the open descriptors of these processes together."""
    return sum(map(_descriptors, pids))


@dataclass
class Peaks:
    """While it is entered, a thread looks again and again at some processes and keeps the highest figures."""

    pids: Callable[[], list[int]]
    memory_bytes: int = 0
    descriptors: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Peaks:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self._look()

    def _look(self) -> None:
        pids = self.pids()
        self.memory_bytes = max(self.memory_bytes, memory_bytes(pids))
        self.descriptors = max(self.descriptors, descriptors(pids))


def _descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def _read(pid: int, name: str) -> str | None:
    try:
        with open(f"/proc/{pid}/{name}", errors="replace") as file:
            return file.read()
    except OSError:  # it has ended
        return None
