"""The commits of a daemon, with what belongs to a directory and not to one snapshot: sweeping and litter. Shell.

Used on the commit threads. Directories do not wait for each other: one on a disk that hangs stops its own shards only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from dataclasses import dataclass, field

from ckpt_service import naming
from ckpt_service.intake import Held
from ckpt_service.storage import Directory
from ckpt_service.writer import CommitResult, Watcher, WriteOptions, commit, sweep


@dataclass
class _Place:
    """A directory, whatever its path. ``litter``: names that tries left, if they could not remove them."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    swept: bool = False
    litter: set[str] = field(default_factory=set)


class Committer:
    """Writes snapshots for the daemon of ``host``."""

    def __init__(self, host: str, options: WriteOptions) -> None:
        self._host = host
        self._options = options
        self._places: dict[tuple[int, int], _Place] = {}
        self._lock = threading.Lock()

    def commit(self, held: Held, watcher: Watcher) -> CommitResult:
        """Clean up what earlier writes left, then commit; raises what :func:`ckpt_service.writer.commit` does."""
        place = self._place(held)
        newest = held.offer.manifest.attempt
        with place.lock:  # nobody creates a file here before the sweep is over
            if not place.swept:
                with contextlib.suppress(OSError):  # litter costs space only
                    sweep(held.directory, lambda name: name.is_of(self._host) and name.attempt <= newest)
                place.swept = True
            place.litter = {name for name in place.litter if not _removed(held.directory, name)}
        token = secrets.token_hex(4)
        try:
            return commit(
                held.snapshot,
                held.directory,
                mode=0o666 & ~held.offer.umask,
                host=self._host,
                token=token,
                options=self._options,
                watcher=watcher,
            )
        except BaseException:
            m = held.offer.manifest
            name = naming.partial(
                held.snapshot.final_name, attempt=m.attempt, sequence=m.sequence, host=self._host, token=token
            )
            if not _removed(held.directory, name):
                with place.lock:
                    place.litter.add(name)
            raise

    def _place(self, held: Held) -> _Place:
        found = os.fstat(held.directory.fd)
        with self._lock:
            return self._places.setdefault((found.st_dev, found.st_ino), _Place())


def _removed(directory: Directory, name: str) -> bool:
    """Remove a file if it is there; False if the directory does not let go of it."""
    try:
        directory.remove(name)
    except OSError:
        return False
    return True
