"""Where the socket of a run directory's daemon lies. Shell: looks at the directories that it proposes.

A socket path may have 107 bytes, and a job's TMPDIR may be longer, so the first of several places that is short enough
and ours alone is taken. Client and daemon come to the same answer in the same environment; in another one, the client
finds the path in the status file. A daemon that is killed leaves its socket behind; the next one that comes to the same
directory removes it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from ckpt_service import naming
from ckpt_service.errors import ServiceUnavailable
from ckpt_service.records import ServiceStatus

_MAX_SOCKET_PATH_BYTES = 107
_YOUNG_SECONDS = 60.0  # a socket that is so young may be one whose daemon does not listen yet


@dataclass(frozen=True)
class Place:
    """A directory that may hold the socket. ``problem``: why it cannot; ``is_open``: others can reach into it yet."""

    directory: str
    problem: str | None
    is_open: bool = False


def socket_path(root: str, postfix: str | None, host: str, environ: Mapping[str, str]) -> str:
    """Return the path of the socket, in a directory that exists, belongs to this user and is closed to others.

    Raises:
        ServiceUnavailable: no place is short enough, writable and safe; says why for each.
    """
    name = naming.socket_name(root, postfix, host)
    refused = []
    for directory in _places(environ):
        path = os.path.join(directory, name)
        if _is_too_long(path):
            refused.append(f"{directory} is too long for a socket")
            continue
        try:
            problem = _secure(directory) or _in_the_way(path)
        except OSError as error:
            problem = f"{directory}: {error.strerror}"
        if problem is None:
            return path
        refused.append(problem)
    raise ServiceUnavailable(
        f"no place for a socket: {'; '.join(refused)}", op="start", hint="set XDG_RUNTIME_DIR to a short directory"
    )


def survey(root: str, postfix: str | None, host: str, environ: Mapping[str, str]) -> Iterator[Place]:
    """Yield the places in the order in which they are tried, as they are now; makes and changes nothing."""
    name = naming.socket_name(root, postfix, host)
    for directory in _places(environ):
        if _is_too_long(os.path.join(directory, name)):
            yield Place(directory, f"{directory} is too long for a socket")
        else:
            yield _as_it_is(directory)


def _as_it_is(directory: str) -> Place:
    try:
        found = os.lstat(directory)
    except FileNotFoundError:
        parent = os.path.dirname(directory)
        can_be_made = os.access(parent, os.W_OK | os.X_OK)
        return Place(directory, None if can_be_made else f"{parent} is not writable for this user")
    except OSError as error:
        return Place(directory, f"{directory}: {error.strerror}")
    return Place(directory, _strange(directory, found), is_open=bool(found.st_mode & 0o077))


def _strange(directory: str, found: os.stat_result) -> str | None:
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return f"{directory} is not a directory of this user"
    if not os.access(directory, os.W_OK | os.X_OK):  # its owner may write, and the filesystem is read-only
        return f"{directory} is not writable"
    return None


def _in_the_way(path: str) -> str | None:
    """Say what has the name of the socket, if that is no socket: it is not ours, and so it is not removed."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return f"{path} is there and is not a socket"
    return None


def _is_too_long(path: str) -> bool:
    return len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES


def _places(environ: Mapping[str, str]) -> Iterator[str]:
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime):
        yield os.path.join(runtime, "ckpt-service")
    # Not tempfile's answer: that depends on the working directory when there is no place for temporary files.
    for base in dict.fromkeys((environ.get("TMPDIR", ""), "/tmp", "/var/tmp", "/dev/shm")):
        if os.path.isabs(base):
            yield os.path.join(base, f"ckpt-service-{os.getuid()}")


def _secure(directory: str) -> str | None:
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        found = os.lstat(directory)
        if (problem := _strange(directory, found)) is not None:
            return problem
        if found.st_mode & 0o077:
            os.chmod(directory, 0o700)
    return None


def has_listener(path: str) -> bool:
    """Whether a program listens at a socket; False where there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # it is there and cannot take one more just now
    return True


def sweep(directory: str, host: str, now: float) -> list[str]:
    """Delete what killed daemons of this host have left in a directory of sockets; return the sockets.

    ``now`` is the time of day in seconds. A directory for temporary files may be shared, and of a socket of another
    host nobody can say here whether its daemon lives; whose it is says the copy of the status beside it.
    """
    dead = [path for path in _sockets(directory) if _is_dead(path, host, now)]
    for path in dead:
        for name in (path, status_beside(path)):
            with contextlib.suppress(OSError):  # another daemon sweeps as well
                os.unlink(name)
    return dead


def _sockets(directory: str) -> list[str]:
    return [entry.path for entry in os.scandir(directory) if entry.name.endswith(".sock")]


def _is_dead(path: str, host: str, now: float) -> bool:
    try:
        if now - os.lstat(path).st_mtime < _YOUNG_SECONDS:
            return False
        with open(status_beside(path), "rb") as file:
            status = ServiceStatus.model_validate_json(file.read())
    except (OSError, ValidationError):
        return False
    return status.host == host and not has_listener(path)


def status_beside(socket_path: str) -> str:
    """Return the path of the copy of the status that lies beside a socket."""
    return f"{socket_path.removesuffix('.sock')}.status.json"
