"""What a result was measured on: nothing that names the machine or its directories."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from ckpt_service.doctor.gather import mount_of

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "torch_checkpointing", "lightning", "isal")


def facts(directory: str) -> dict[str, Any]:
    """Return the facts of this machine, and of the filesystem of a directory."""
    mount = mount_of(os.path.realpath(directory), _text("/proc/self/mountinfo"))
    return {
        "measured_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cores": len(os.sched_getaffinity(0)),
        "processor": _field("/proc/cpuinfo", "model name"),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "filesystem": mount.type if mount is not None else "unknown",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def kind(facts: dict[str, Any]) -> str:
    """Return a short name of this kind of machine, for a file name."""
    return f"{facts['cores']}cores-{facts['memory_bytes'] / 1e9:.0f}gb-{facts['filesystem']}"


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _field(path: str, name: str) -> str:
    lines = (line.partition(":") for line in _text(path).splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "unknown")


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
