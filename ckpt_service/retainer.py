"""Retention on a thread of its own: at most one pass under way, and nobody waits long for it. Shell.

A disk that hangs in a deletion keeps its pass; commits go on, and what it left is deleted by the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timezone

from ckpt_service.errors import CkptError, from_os_error
from ckpt_service.ledger import Ledger
from ckpt_service.messages import Retention
from ckpt_service.prune import Pruner
from ckpt_service.records import ShardManifest
from ckpt_service.storage import LocalDirectory
from ckpt_service.threads import Recurring, started_pool


class Retainer:
    """Deletes what the policies allow, and writes down what came of it; ``changed`` is called then."""

    def __init__(self, root: str, postfix: str | None, ledger: Ledger, changed: Callable[[], None]) -> None:
        self._root = root
        self._ledger = ledger
        self._changed = changed
        self._pruner = Pruner(root, postfix)
        self._executor = started_pool(1, "ckpt-prune")
        self._passes = Recurring(self._pass)

    def committed(self, manifest: ShardManifest, directory: LocalDirectory, policy: Retention) -> None:
        """Note a commit; the next pass looks after its history as well."""
        try:
            self._pruner.note(manifest, directory, policy)
        except OSError as error:
            self._complain(error)

    async def retain(self, patience_seconds: float) -> None:
        """Have a pass made, and wait for it that long at most."""
        done, _ = await asyncio.wait([self._passes.request()], timeout=patience_seconds)
        for task in done:
            task.result()  # a bug must not stay unseen

    async def _pass(self) -> None:
        try:
            done = await asyncio.get_running_loop().run_in_executor(self._executor, self._pruner.retain)
        except OSError as error:
            self._complain(error)
            return
        now = datetime.now(timezone.utc)
        for retained in done:
            self._ledger.retained(retained)
            for problem in retained.errors:
                self._ledger.complain(problem, now, retained.history.manifest)
        self._changed()

    def _complain(self, error: OSError) -> None:
        problem = from_os_error(error, op="retention", kind=CkptError, path=error.filename or self._root)
        self._ledger.complain(problem, datetime.now(timezone.utc))
        self._changed()
