"""``logs``: what the daemon of this host has said."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from typing import Annotated, BinaryIO

import typer

from ckpt_service import naming
from ckpt_service.cli.common import Exit, Postfix, Root, absolute_root, checked_postfix, complain, elsewhere
from ckpt_service.ownership import host_name, service_path

_LOOK_SECONDS = 0.2
_READ_BYTES = 1 << 20


def logs(
    root: Root = ".",
    postfix: Postfix = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written, until Ctrl-C.")] = False,
    lines: Annotated[int | None, typer.Option("-n", min=0, metavar="LINES", help="Only the last LINES lines.")] = None,
) -> None:
    """Print the log of the daemon of this host, the set-aside part first.

    A daemon that runs in the foreground (`run` without --detach) logs to its standard error, not here.
    """
    root, postfix = absolute_root(root), checked_postfix(postfix)
    service, host = service_path(root, postfix), host_name(os.environ)
    path = os.path.join(service, naming.daemon_log(host))
    with contextlib.ExitStack() as stack:
        parts = [_opened(os.path.join(service, naming.set_aside_log(host)), stack), _opened(path, stack)]
        if parts == [None, None]:
            hint = _other_hosts(service) or elsewhere(root, postfix)
            complain(f"no daemon of this host ({host}) has logged in {root}{hint}")
            sys.exit(Exit.FAILED)
        said = deque((line for part in parts if part is not None for line in part), lines)
        _put(b"".join(said))
        if follow:
            _follow(path, parts[-1], stack)


def _opened(path: str, stack: contextlib.ExitStack) -> BinaryIO | None:
    try:
        return stack.enter_context(open(path, "rb"))
    except FileNotFoundError:
        return None


def _other_hosts(service: str) -> str:
    """Return a hint that names the hosts whose daemons have logged, empty if there are none."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        hosts = sorted(host for entry in os.listdir(service) if (host := naming.parse_daemon_log(entry)) is not None)
        return f"; there are logs of {', '.join(hosts)} in {service}" if hosts else ""
    return ""


def _follow(path: str, file: BinaryIO | None, stack: contextlib.ExitStack) -> None:
    """Print what comes, for ever; a log that was set aside is read to its end before the new one."""
    while True:
        if file is not None and (data := file.read(_READ_BYTES)):
            _put(data)
            continue
        if _is_another(path, file):
            if file is not None:
                _put(file.read())  # what came before the rename
            file = _opened(path, stack)
            continue
        time.sleep(_LOOK_SECONDS)


def _is_another(path: str, file: BinaryIO | None) -> bool:
    """Return whether the log of this name is not the one that is open."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    return file is None or not os.path.samestat(found, os.fstat(file.fileno()))


def _put(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
