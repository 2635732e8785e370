"""Judges the disk and the run directory: facts in, lines out. Pure."""

from __future__ import annotations

from ckpt_service.doctor.facts import Daemon, Disk, Facts, Probe, Run
from ckpt_service.doctor.findings import Finding, fail, ok, warn
from ckpt_service.memory import gigabytes
from ckpt_service.messages import PROTOCOL

_NO_SPACE = frozenset({"ENOSPC", "EDQUOT"})
_SLOW_SYNC_SECONDS = 1.0
_CLOCK_SECONDS = 2.0
_AHEAD = 2  # how many checkpoints there must be room for
_SPARE_INODES = 16  # status, attempts, locks and their temporary names

_NFS = "clocks, locks and caching are the server's: the mount must be hard, and locks must work between hosts"
_SHARED = {
    **dict.fromkeys(("nfs", "nfs4"), _NFS),
    **dict.fromkeys(("cifs", "smb3", "smbfs"), "a rename or an fsync may be answered before it is durable"),
    "lustre": "record locks need the mount option flock; without it two hosts do not exclude each other",
    **dict.fromkeys(("gpfs", "beegfs", "ceph", "wekafs", "gfs2", "ocfs2", "afs", "glusterfs", "pvfs2"), _NFS),
    **dict.fromkeys(("9p", "virtiofs"), "what is durable is decided by the host of this virtual machine"),
}
_FUSE = "what fsync, rename and locks are worth is decided by the program behind it"
_PASSING = {
    **dict.fromkeys(
        ("tmpfs", "ramfs"), "it lies in memory: it is gone after a reboot, and takes memory from the slots"
    ),
    "overlay": "it is a container's own layer: it may be gone with the container",
}


def judge(facts: Facts, stale_seconds: float) -> list[Finding]:
    """Return a line for each thing about the disk and the run; ``stale_seconds`` as readers of the status judge it."""
    disk, run = facts.disk, facts.run
    return [
        _filesystem(disk),
        _writing(disk),
        *_beyond_writing(disk),
        _space(disk, run),
        *_inodes(disk, run),
        _clock(disk, run),
        *_contents(run),
        *(_daemon(daemon, run, stale_seconds) for daemon in run.daemons),
        *_owners(run),
    ]


def _filesystem(disk: Disk) -> Finding:
    mount = disk.mount
    if mount is None:
        return warn("filesystem", f"what {disk.place} lies on cannot be found out", "mount /proc")
    where = f"{disk.place} lies on {mount.type} at {mount.point}"
    meaning = _FUSE if mount.type.startswith("fuse") else _SHARED.get(mount.type)
    if meaning is not None:
        if "nolock" in mount.options:
            meaning = "it is mounted with nolock, so locks hold on this host only"
        fix = "start only one run on it at a time, and keep the clocks of all hosts the same"
        return warn("filesystem", f"{where}: {meaning}", fix)
    if mount.type in _PASSING:
        return warn("filesystem", f"{where}: {_PASSING[mount.type]}", "save to a disk")
    return ok("filesystem", where)


def _writing(disk: Disk) -> Finding:
    probe, failure = disk.probe, disk.probe.failure
    where = disk.place if disk.place == disk.root else f"{disk.place} ({disk.root} does not exist yet)"
    if failure is not None and failure.code in _NO_SPACE:
        message = f"{failure.op} in {where} failed: {failure.reason}"
        return fail("writing", message, "free space on this filesystem, or raise the quota", lacks_space=True)
    if failure is not None:
        return fail("writing", f"{failure.op} in {where} failed: {failure.reason}", _remedy(failure.code, disk))
    if disk.unwritable:
        message = f"user {disk.user} may not write to {', '.join(disk.unwritable)}"
        return fail("writing", message, "give them to this user, or train as the user who made them")
    seconds = probe.sync_seconds or 0.0
    done = f"create, write, fsync, rename and fsync of the directory work in {where}"
    if seconds > _SLOW_SYNC_SECONDS:
        return warn("writing", f"{done}, and take {seconds:.1f} s", "see what else keeps this disk busy")
    return ok("writing", f"{done} ({seconds * 1000:.0f} ms)")


def _remedy(code: str | None, disk: Disk) -> str:
    match code:
        case "EACCES" | "EPERM":
            return f"give user {disk.user} write permission on {disk.place}, or choose another root"
        case "EROFS":
            return "mount it read-write, or choose another root"
        case "EMFILE" | "ENFILE":
            return "raise the limit of open files (ulimit -n)"
        case _:
            return "check the disk and the kernel log, or choose another root"


def _beyond_writing(disk: Disk) -> list[Finding]:
    """Judge what could only be tried where a file could be written."""
    probe = disk.probe
    if probe.direct is None:
        return []
    return [_direct(disk, probe), *_locks(probe)]


def _direct(disk: Disk, probe: Probe) -> Finding:
    if probe.direct:
        return ok("direct I/O", "writes go past the page cache")
    if not disk.wants_direct:
        return ok("direct I/O", "switched off by direct_io")
    message = "this filesystem takes no direct writes: they go through the page cache, slower and with more CPU"
    return warn("direct I/O", message, "use a filesystem with O_DIRECT (ext4, xfs) where speed matters")


def _locks(probe: Probe) -> list[Finding]:
    if probe.locks is None:
        return []
    if probe.locks.exclusive:
        return [ok("locks", "a second process is refused a record lock")]
    message = f"record locks do not work here: {probe.locks.problem}; two runs are told apart by heartbeats only"
    return [warn("locks", message, "mount with locks (nfs: without nolock; lustre: flock), or start one run at a time")]


def _space(disk: Disk, run: Run) -> Finding:
    space, newest = disk.space, run.newest
    if space is None:
        return warn("space", "what is free cannot be found out", "check the mount")
    free = f"{gigabytes(space.free_bytes)} free"
    if newest is None:
        if disk.probe.failure is not None and disk.probe.failure.code in _NO_SPACE:
            return fail("space", free, "free space on this filesystem, or raise the quota", lacks_space=True)
        return ok("space", f"{free}; there is no checkpoint yet to measure by")
    need = _AHEAD * newest.bytes
    what = f"the next {_AHEAD} checkpoints like step {newest.step} take {gigabytes(need)}"
    if space.free_bytes < need:
        fix = "free space on this filesystem, lower keep_last, or choose another root"
        return fail("space", f"{free}, and {what}", fix, lacks_space=True)
    return ok("space", f"{free}; {what}")


def _inodes(disk: Disk, run: Run) -> list[Finding]:
    free = disk.space.free_inodes if disk.space is not None else None
    if free is None:
        return []
    need = _SPARE_INODES + (_AHEAD * run.newest.files if run.newest is not None else _AHEAD)
    if free < need:
        message, fix = f"{free} more files can be made, and {need} are needed", "delete files on this filesystem"
        return [fail("inodes", message, fix, lacks_space=True)]
    return [ok("inodes", f"{free} more files can be made, {need} are needed")]


def _clock(disk: Disk, run: Run) -> Finding:
    fix = "keep the clocks of all hosts the same (NTP)"
    skew = disk.probe.clock_ahead_seconds
    if skew is not None and abs(skew) > _CLOCK_SECONDS:
        way = "ahead of" if skew > 0 else "behind"
        return warn("clock", f"the clock of the filesystem is {abs(skew):.0f} s {way} ours", fix)
    ahead = [(d.host, -d.age_seconds) for d in run.daemons if d.age_seconds < -_CLOCK_SECONDS]
    if ahead:
        said = ", ".join(f"{host} by {seconds:.0f} s" for host, seconds in ahead)
        return warn("clock", f"status files come from the future: {said}; a dead daemon is noticed late", fix)
    if run.files_ahead_seconds is not None and run.files_ahead_seconds > _CLOCK_SECONDS:
        message = f"our clock is behind: the newest checkpoint is {run.files_ahead_seconds:.0f} s ahead of it"
        return warn("clock", f"{message} (nothing is decided by it)", fix)
    return ok("clock", "it agrees with the files and the status")


def _contents(run: Run) -> list[Finding]:
    found = [warn("status", problem, "use the release that wrote it") for problem in run.unreadable]
    if run.problem is not None:
        found.append(fail("run", run.problem, "give this user permission to read it"))
    if run.newer_format is not None:
        message = f"a resume stops at a checkpoint of a newer release: {run.newer_format}"
        found.append(warn("format", message, "upgrade ckpt-service, or go back on purpose with resume(step=...)"))
    return found


def _daemon(daemon: Daemon, run: Run, stale_seconds: float) -> Finding:
    who = f"on {daemon.host}, pid {daemon.pid}, release {daemon.version}"
    if daemon.state == "stopped":
        return ok("daemon", f"the last one ({who}) has left")
    if daemon.ended or (daemon.here and run.daemon_lock is None):
        fix = "nothing: the next trainer starts another; its log says why"
        return warn("daemon", f"it ended without a word ({who})", fix)
    if daemon.age_seconds > stale_seconds:
        message = f"its status is {daemon.age_seconds:.0f} s old ({who}): it hangs, or its host is down"
        return warn("daemon", message, "look at its log and at the disk; kill it, and the next trainer starts another")
    if daemon.protocol != PROTOCOL:
        message = f"a live one speaks protocol {daemon.protocol}, and this release speaks {PROTOCOL} ({who})"
        return warn("daemon", message, "use one release on both sides; a newer trainer has an older daemon leave")
    return ok("daemon", f"{daemon.state} ({who})")


def _owners(run: Run) -> list[Finding]:
    found = []
    here = [daemon for daemon in run.daemons if daemon.here]
    if not run.daemons and run.daemon_lock is None:
        found.append(ok("daemon", "none has served here yet"))
    if run.daemon_lock and not any(daemon.pid == run.daemon_lock for daemon in here):
        message = f"pid {run.daemon_lock} holds the daemon's lock, and no status names it"
        found.append(warn("daemon", message, "it may be starting; else see what it is, and end it"))
    trains = f"pid {run.run_lock} trains here now" if run.run_lock is not None else "nobody trains here now"
    return [*found, ok("run lock", f"{trains} (on this host)")]
