"""Small values passed between the ranks of one start without stopping any of them. Shell.

A collective waits for the slowest rank; these do not: one rank puts a value down, another looks for it. Over a TCP
store of our own where ``torch.distributed`` is up, else as files in the directory in which the ranks of a launch meet.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from ckpt_service.storage import write_small

_POLL_SECONDS = 0.01
_tcp_store: Any = getattr(dist, "TCPStore", None)  # absent, like the groups, from builds without torch.distributed


class Exchange(Protocol):
    """A place where ranks leave values for each other."""

    def put(self, key: str, value: bytes) -> None:
        """Leave a value, in place of an earlier one of this key."""
        ...

    def peek(self, key: str) -> bytes | None:
        """Return a value, None if it is not there; never waits for it."""
        ...

    def take(self, key: str) -> bytes | None:
        """Return a value and remove it, None if it is not there."""
        ...


class FileExchange:
    """Values as files; ``directory`` is one that all ranks see, ``prefix`` what their names begin with."""

    def __init__(self, directory: str, prefix: str) -> None:
        self._directory = directory
        self._prefix = prefix

    def put(self, key: str, value: bytes) -> None:
        """Write the file as a whole."""
        write_small(self._path(key), value, durable=False)

    def peek(self, key: str) -> bytes | None:
        """Read the file."""
        try:
            with open(self._path(key), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def take(self, key: str) -> bytes | None:
        """Read the file and delete it."""
        value = self.peek(key)
        if value is not None:
            os.unlink(self._path(key))
        return value

    def _path(self, key: str) -> str:
        return os.path.join(self._directory, f"{self._prefix}.{key.replace('/', '.')}")


class StoreExchange:
    """Values in a TCP store; it lives in the process of rank 0."""

    def __init__(self, store: Any) -> None:
        self._store = store

    @classmethod
    def serve(cls, host: str, timeout_seconds: float) -> tuple[StoreExchange, int]:
        """Start the store in this process; return it and its port."""
        timeout = timedelta(seconds=timeout_seconds)
        store = _tcp_store(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        return cls(store), int(store.port)

    @classmethod
    def reach(cls, host: str, port: int, timeout_seconds: float) -> StoreExchange:
        """Connect to the store of rank 0."""
        timeout = timedelta(seconds=timeout_seconds)
        return cls(_tcp_store(host, port, is_master=False, timeout=timeout, wait_for_workers=False))

    def put(self, key: str, value: bytes) -> None:
        """Set the key."""
        self._store.set(key, value)

    def peek(self, key: str) -> bytes | None:
        """Look whether the key is there, and get it."""
        if not self._store.check([key]):
            return None
        value: bytes = self._store.get(key)
        return value

    def take(self, key: str) -> bytes | None:
        """Get the key and delete it."""
        value = self.peek(key)
        if value is not None:
            self._store.delete_key(key)
        return value


def take_all(exchange: Exchange, keys: dict[int, str], patience_seconds: float) -> dict[int, bytes]:
    """Return the values that are there within ``patience_seconds``, by the numbers that ``keys`` gives them.

    A store that fails (its rank has died) counts as empty.
    """
    found: dict[int, bytes] = {}
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            for number in keys.keys() - found.keys():
                value = exchange.take(keys[number])
                if value is not None:
                    found[number] = value
        except (RuntimeError, OSError):
            return found
        if len(found) == len(keys) or time.monotonic() >= deadline:
            return found
        time.sleep(_POLL_SECONDS)
