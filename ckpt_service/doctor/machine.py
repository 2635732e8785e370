"""Judges the machine: facts in, lines out. Pure."""

from __future__ import annotations

import re

from ckpt_service.doctor.facts import Facts, Machine, Run
from ckpt_service.doctor.findings import Finding, fail, ok, warn
from ckpt_service.memory import WAYS_OUT, gigabytes, shortage

_OLDEST_TORCH = (2, 6)
_FEW_SHM_BYTES = 64 << 20
_FILES_OF_A_PROCESS = 64  # what Python, the log, the socket and the status need at most


def judge(facts: Facts) -> list[Finding]:
    """Return a line for each thing about the machine."""
    machine, run = facts.machine, facts.run
    return [
        _versions(machine),
        _torch(machine),
        _memfd(machine),
        _shm(machine),
        _memory(machine, run),
        _pinning(machine, run),
        _open_files(machine, run),
        _socket(machine),
    ]


def _versions(machine: Machine) -> Finding:
    versions = f"ckpt-service {machine.release}, Python {machine.python}, checksums by {machine.crc}"
    if machine.crc == "isal":
        return ok("versions", versions)
    fix = "pip install isal, if there is a wheel for this platform"
    return warn("versions", f"{versions}: a quarter of the speed, the same values", fix)


def _torch(machine: Machine) -> Finding:
    torch = machine.torch
    if torch.version is None:
        message = "this Python has no torch: the daemon and the command line work, a trainer does not"
        return warn("torch", message, "pip install torch in the environment that trains")
    if _parsed(torch.version) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        return fail("torch", f"torch {torch.version} is too old", f"install torch {oldest} or newer")
    if torch.problem is not None:
        return warn("torch", f"torch {torch.version}: {torch.problem}", 'see what `python -c "import torch"` says')
    if torch.devices:
        return ok("torch", f"torch {torch.version}, CUDA {torch.cuda}, {torch.devices} devices")
    if torch.cuda is not None:
        message = f"torch {torch.version} is made for CUDA {torch.cuda} and finds no device"
        return warn("torch", message, "look at nvidia-smi and CUDA_VISIBLE_DEVICES, unless this host trains on the CPU")
    return ok("torch", f"torch {torch.version}, without CUDA")


def _parsed(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _memfd(machine: Machine) -> Finding:
    if machine.memfd_problem is None:
        return ok("memfd", "sealed shared memory can be made")
    message = f"sealed shared memory cannot be made: {machine.memfd_problem}"
    return fail("memfd", message, "allow memfd_create(2) (a sandbox may forbid it), or train with async_ckpt=False")


def _shm(machine: Machine) -> Finding:
    free = machine.shm_free_bytes
    if free is None or free < _FEW_SHM_BYTES:
        found = "is not there" if free is None else f"has {gigabytes(free)} left"
        message = f"/dev/shm {found}; snapshots do not need it, data loaders and collectives do"
        return warn("/dev/shm", message, "mount it larger (container: --shm-size; Kubernetes: an emptyDir in memory)")
    return ok("/dev/shm", f"{gigabytes(free)} free (snapshots lie in memfds, which it does not bound)")


def _memory(machine: Machine, run: Run) -> Finding:
    room, newest = machine.room, run.newest
    if room is None:
        return warn("memory", "what is free cannot be found out", "mount /proc")
    free = f"{gigabytes(room.bytes)} can be had ({room.bound})"
    if newest is None:
        return ok("memory", f"{free}; there is no checkpoint yet to measure the slots by")
    need = run.slots * sum(newest.here)
    what = f"{run.slots} slots for {len(newest.here)} shards like step {newest.step} take {gigabytes(need)}"
    if run.run_lock is not None:
        return ok("memory", f"{free}; {what}, and a live run has taken them already")
    if shortage(need, room) is not None:
        if newest.known:
            return fail("memory", f"{free}, and {what}", WAYS_OUT)
        return warn("memory", f"{free}, and {what}, if this host writes all of them", WAYS_OUT)
    if need + max(newest.here, default=0) > room.bytes:
        return warn("memory", f"{free}; {what}: too little for one more if the state grows", "leave room for one image")
    return ok("memory", f"{free}; {what}")


def _pinning(machine: Machine, run: Run) -> Finding:
    limit = machine.memlock_bytes
    said = "without limit" if limit is None else f"up to {gigabytes(limit)}"
    if not machine.torch.devices:
        return ok("memlock", f"memory may be locked {said}; without CUDA nothing is pinned")
    need = run.slots * max(run.newest.here, default=0) if run.newest is not None else 0
    what = f"a trainer pins {gigabytes(need)}" if need else "there is no checkpoint yet to measure the slots by"
    if limit is None or need <= limit:
        return ok("memlock", f"memory may be locked {said}; {what}")
    message = f"memory may be locked {said}, and {what}: where the driver counts it, copies from the device are slower"
    return warn("memlock", message, "raise ulimit -l (systemd: LimitMEMLOCK=infinity; container: --ulimit memlock=-1)")


def _open_files(machine: Machine, run: Run) -> Finding:
    shards = len(run.newest.here) if run.newest is not None else 1
    need = _FILES_OF_A_PROCESS + shards * (2 + 4 * run.slots)
    limit = machine.open_files
    if limit is None or limit >= need:
        return ok("nofile", f"{'any number of' if limit is None else limit} files may be open, {need} are needed")
    return fail("nofile", f"{limit} files may be open, and {need} are needed", f"raise ulimit -n to {need} or more")


def _socket(machine: Machine) -> Finding:
    place = machine.socket
    if place.directory is None:
        message = f"no place for the socket: {'; '.join(place.refused)}"
        return fail("socket", message, "set XDG_RUNTIME_DIR to a short directory of this user")
    where = f"the socket lies in {place.directory}"
    if place.is_open:
        return warn("socket", f"{where}, which others can reach into", f"chmod 700 {place.directory}")
    if place.refused:
        message = f"{where}, since {'; '.join(place.refused)}"
        return warn("socket", message, "set XDG_RUNTIME_DIR to a short directory of this user, for trainer and daemon")
    return ok("socket", f"{where}, for this user only")
