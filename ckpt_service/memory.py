"""How much memory may still be taken: by the machine and by every limit around this process. Shell reads, pure judges.

Slots are shared memory, so they count against the machine and against the memory limit of the control group (container,
job, service) that this process runs in, and swap does not help: what runs out ends in the out-of-memory killer, in the
middle of training. So it is asked beforehand. Formats: proc(5), cgroups(7), and the kernel's documents of the memory
controller, version 1 and 2.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

WAYS_OUT = "use fewer slots, save a smaller state, or give it more memory"
_UNLIMITED_BYTES = 1 << 60  # version 1 has no word for "no limit", only a number near 2**63


@dataclass(frozen=True)
class Room:
    """Bytes that may still be taken, and who sets that bound: the machine, or a control group with its limit."""

    bytes: int
    bound: str


def room(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> Room | None:
    """Return the tightest bound on memory that holds for this process, None where nothing can be found out."""
    found = [*_machine(os.path.join(proc, "meminfo")), *_groups(os.path.join(proc, "self/cgroup"), cgroups)]
    return min(found, key=lambda each: each.bytes, default=None)


def shortage(needed_bytes: int, available: Room | None) -> str | None:
    """Return None if ``needed_bytes`` of slots fit (each as large as a snapshot), else what lacks and the way out."""
    if available is None or needed_bytes <= available.bytes:
        return None
    return (
        f"{gigabytes(needed_bytes)} are needed, and {gigabytes(available.bytes)} can be had ({available.bound}): "
        f"{WAYS_OUT}"
    )


def gigabytes(nbytes: int) -> str:
    """Return a size for people, in decimal units."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


# --- the machine ------------------------------------------------------------------------------------------------------


def _machine(path: str) -> Iterator[Room]:
    available = parse_meminfo(_read(path))
    if available is not None:
        yield Room(available, "free on this machine")


def parse_meminfo(text: str) -> int | None:
    """Return MemAvailable in bytes: what can be taken without swapping, page cache that can go included."""
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["MemAvailable:"] and len(words) == 3 and words[1].isdigit():
            return int(words[1]) << 10
    return None


# --- control groups ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Version:
    """Where a version of the memory controller keeps its figures."""

    directory: str
    limit: str
    usage: str
    cache: str


_V1 = _Version("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version("", "memory.max", "memory.current", "inactive_file")


def parse_cgroup(text: str) -> list[tuple[str, str]]:
    """Return (version, path) of the control groups that may limit memory: "1" for version 1, "2" for version 2."""
    found = []
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            found.append(("1", path))
        elif number == "0" and not controllers:
            found.append(("2", path))
    return found


def _groups(membership: str, cgroups: str) -> Iterator[Room]:
    """Yield the bound of each group that this process is in; one limits what is in the groups below it too."""
    for version, path in parse_cgroup(_read(membership)):
        files = _V1 if version == "1" else _V2
        for group in _with_parents(path):
            bound = _group(os.path.join(cgroups, files.directory, group.lstrip("/")), files, group)
            if bound is not None:
                yield bound


def _with_parents(path: str) -> Iterator[str]:
    """Yield a group and those above it. Inside a container the path may be the host's: only its root is there then."""
    while path not in ("", "/"):
        yield path
        path = os.path.dirname(path)
    yield "/"


def _group(directory: str, files: _Version, name: str) -> Room | None:
    limit = _number(os.path.join(directory, files.limit))
    usage = _number(os.path.join(directory, files.usage))
    if limit is None or usage is None or limit >= _UNLIMITED_BYTES:
        return None
    free = limit - usage + parse_stat(_read(os.path.join(directory, "memory.stat")), files.cache)
    return Room(max(0, min(free, limit)), f"the limit of control group {name} is {gigabytes(limit)}")


def parse_stat(text: str, field: str) -> int:
    """Return one figure of memory.stat in bytes, 0 if it is not there: page cache that goes when memory is short."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == field and value.isdigit():
            return int(value)
    return 0


def _number(path: str) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
