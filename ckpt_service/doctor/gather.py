"""Finds the facts about a machine and a run directory; reads, and writes nothing but the probe's file. Shell."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from importlib import metadata

from ckpt_service import __version__, checksum, locate, memory, naming, ownership, scan
from ckpt_service.catalog import Checkpoint
from ckpt_service.doctor.facts import (
    Daemon,
    Disk,
    Facts,
    Machine,
    Mount,
    Newest,
    Run,
    SocketPlace,
    Space,
    Torch,
)
from ckpt_service.doctor.probe import try_out
from ckpt_service.newer import unreadable_newest
from ckpt_service.records import ServiceStatus

_DEFAULT_SLOTS = 2
_SHM = "/dev/shm"
_ASK_TORCH = """
import json, torch
devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps([torch.version.cuda, devices]))
"""


def gather(
    root: str,
    postfix: str | None,
    environ: Mapping[str, str],
    now: datetime,
    *,
    wants_direct: bool = True,
    torch_seconds: float = 60,
) -> Facts:
    """Return everything that is looked at. ``root`` is absolute, and need not exist.

    Raises:
        ValueError: it is, or lies below, something that is not a directory.
    """
    host = ownership.host_name(environ)
    place = nearest_directory(root)
    disk = _disk(root, place, postfix, wants_direct=wants_direct)
    run = _run(root, postfix, host, now)
    return Facts(_machine(root, postfix, host, environ, torch_seconds), disk, run)


def nearest_directory(root: str) -> str:
    """Return the root, or the nearest directory above it that exists."""
    place = root
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    if not os.path.isdir(place):
        raise ValueError(f"ROOT={root}: {place} is not a directory")
    return place


# --- the machine ------------------------------------------------------------------------------------------------------


def _machine(root: str, postfix: str | None, host: str, environ: Mapping[str, str], torch_seconds: float) -> Machine:
    return Machine(
        python=platform.python_version(),
        release=__version__,
        crc=str(checksum.crc32.__module__).partition(".")[0],
        memfd_problem=_memfd_problem(),
        shm_free_bytes=_free_bytes(_SHM),
        room=memory.room(),
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        torch=look_at_torch(environ, torch_seconds),
        socket=_socket_place(root, postfix, host, environ),
    )


def _limit(kind: int) -> int | None:
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _memfd_problem() -> str | None:
    """Make a page of shared memory and seal it as slots are sealed."""
    try:
        fd = os.memfd_create("ckpt-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return error.strerror
    try:
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as error:
        return error.strerror
    finally:
        os.close(fd)
    return None


def look_at_torch(environ: Mapping[str, str], seconds: float) -> Torch:
    """Return what a process that imports torch finds; this one never does."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Torch(None)
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _ASK_TORCH],
            cwd="/",  # not where a script of the user may be called torch.py
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Torch(version, f"importing it and looking for devices took more than {seconds:.0f} s")
    except OSError as error:
        return Torch(version, f"{sys.executable} cannot be run to look: {error.strerror}")
    if done.returncode != 0:
        return Torch(version, f"it cannot be imported: {done.stderr.strip().rpartition(chr(10))[2] or done.returncode}")
    cuda, devices = json.loads(done.stdout.strip().rpartition("\n")[2])
    return Torch(version, None, devices, cuda)


def _socket_place(root: str, postfix: str | None, host: str, environ: Mapping[str, str]) -> SocketPlace:
    refused: list[str] = []
    for place in locate.survey(os.path.realpath(root), postfix, host, environ):
        if place.problem is None:
            return SocketPlace(place.directory, tuple(refused), place.is_open)
        refused.append(place.problem)
    return SocketPlace(None, tuple(refused))


# --- the disk ---------------------------------------------------------------------------------------------------------


def _disk(root: str, place: str, postfix: str | None, *, wants_direct: bool) -> Disk:
    own = [ownership.service_path(root, postfix), *_stage_directories(root, postfix)]
    return Disk(
        root=root,
        place=place,
        user=os.geteuid(),
        mount=mount_of(os.path.realpath(place), _mountinfo()),
        probe=try_out(place),
        space=_space(place),
        wants_direct=wants_direct,
        unwritable=tuple(path for path in own if os.path.isdir(path) and not _may_write(path)),
    )


def _stage_directories(root: str, postfix: str | None) -> list[str]:
    try:
        return list(scan.stage_directories(root, postfix).values())
    except OSError:
        return []  # said of the run


def _may_write(path: str) -> bool:
    return os.access(path, os.W_OK | os.X_OK)


def _mountinfo() -> str:
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def mount_of(path: str, mountinfo: str) -> Mount | None:
    """Return what an absolute path without links lies on, from proc(5) mountinfo; of two at one point, the later."""
    found: Mount | None = None
    for mount in _parsed(mountinfo):
        inside = mount.point == "/" or path == mount.point or path.startswith(mount.point + "/")
        if inside and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def _parsed(mountinfo: str) -> Iterator[Mount]:
    for line in mountinfo.splitlines():
        ours, _, theirs = line.partition(" - ")
        front, back = ours.split(" "), theirs.split(" ")
        if len(front) >= 6 and len(back) >= 3:
            options = frozenset([*front[5].split(","), *back[2].split(",")])
            yield Mount(back[0], _unescaped(front[4]), options)


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _space(place: str) -> Space | None:
    try:
        found = os.statvfs(place)
    except OSError:
        return None
    return Space(found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None)


def _free_bytes(path: str) -> int | None:
    space = _space(path) if os.path.ismount(path) else None
    return space.free_bytes if space is not None else None


# --- the run ----------------------------------------------------------------------------------------------------------


def _run(root: str, postfix: str | None, host: str, now: datetime) -> Run:
    if not os.path.isdir(root):
        return Run(_DEFAULT_SLOTS)
    try:
        return _readable_run(root, postfix, host, now)
    except OSError as error:
        return Run(_DEFAULT_SLOTS, problem=f"{error.filename or root} cannot be read: {error.strerror}")


def _readable_run(root: str, postfix: str | None, host: str, now: datetime) -> Run:
    attempts = scan.load_attempts(root, postfix)
    statuses = scan.load_statuses(root, postfix)
    catalog = scan.load_catalog(root, postfix)
    newest = catalog.newest_complete()
    newer = unreadable_newest(catalog)
    changes = [shard.modified for shard in catalog.files() if not shard.unread]
    service = ownership.service_path(root, postfix)
    return Run(
        slots=attempts[-1].slots if attempts else _DEFAULT_SLOTS,
        newest=_newest(newest, [status for status in statuses if status.host == host]) if newest else None,
        daemons=tuple(_daemon(status, host, now) for status in statuses),
        unreadable=tuple(scan.unreadable_statuses(root, postfix)),
        daemon_lock=ownership.lock_holder(os.path.join(service, naming.daemon_lock(host))),
        run_lock=ownership.lock_holder(os.path.join(service, naming.run_lock())),
        files_ahead_seconds=max(changes) - now.timestamp() if changes else None,
        newer_format=f"step {newer.id.step} epoch {newer.id.epoch}: {newer.reason}" if newer is not None else None,
    )


def _newest(checkpoint: Checkpoint, mine: list[ServiceStatus]) -> Newest:
    """Measure the newest checkpoint; ``mine`` is the status of this host, if there is one."""
    written = {(shard.stage, shard.tp_rank) for status in mine for shard in status.shards if shard.kind == "train"}
    known = bool(written & checkpoint.ranks)
    here = [shard.bytes for shard in checkpoint.shards if not known or (shard.stage, shard.tp_rank) in written]
    found = checkpoint.id
    return Newest(found.step, found.epoch, len(checkpoint.shards), checkpoint.bytes, tuple(here), known)


def _daemon(status: ServiceStatus, host: str, now: datetime) -> Daemon:
    daemon, here = status.daemon, status.host == host
    return Daemon(
        host=status.host,
        here=here,
        pid=daemon.pid,
        state=daemon.state,
        version=daemon.version,
        protocol=daemon.protocol,
        age_seconds=(now - daemon.heartbeat_at).total_seconds(),
        ended=here and ownership.pid_start(daemon.pid) != daemon.pid_start,
    )
