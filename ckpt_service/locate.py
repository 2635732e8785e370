"""Where the socket of a run directory's daemon lies. Shell: looks at the directories that it proposes.

A socket path may have 107 bytes, and a job's TMPDIR may be longer, so the first of several places that is short enough
and ours alone is taken. Client and daemon come to the same answer in the same environment; in another one, the client
finds the path in the status file.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckpt_service import naming
from ckpt_service.errors import ServiceUnavailable

_MAX_SOCKET_PATH_BYTES = 107


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
            problem = _secure(directory)
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
    return None


def _is_too_long(path: str) -> bool:
    return len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES


def _places(environ: Mapping[str, str]) -> Iterator[str]:
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime):
        yield os.path.join(runtime, "ckpt-service")
    for base in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/dev/shm")):
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
