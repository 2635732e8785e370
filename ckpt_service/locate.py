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

from ckpt_service import naming
from ckpt_service.errors import ServiceUnavailable

_MAX_SOCKET_PATH_BYTES = 107


def socket_path(root: str, postfix: str | None, host: str, environ: Mapping[str, str]) -> str:
    """Return the path of the socket, in a directory that exists, belongs to this user and is closed to others.

    Raises:
        ServiceUnavailable: no place is short enough, writable and safe; says why for each.
    """
    name = naming.socket_name(root, postfix, host)
    refused = []
    for directory in _places(environ):
        path = os.path.join(directory, name)
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
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
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return f"{directory} is not a directory of this user"
        if found.st_mode & 0o077:
            os.chmod(directory, 0o700)
    return None
