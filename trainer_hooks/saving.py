"""A planned state to the daemon, or (``async_ckpt=False``) to the disk: slot, copy, finish, deliver. Shell.

On the training thread happens what must: taking a slot and copying. What other replicas contribute is waited for on a
thread of its own, in the order of the saves. Nothing here raises into training but a mistake of the caller.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ckpt_service import naming, prune, writer
from ckpt_service.errors import CkptError, SaveFailed, from_os_error
from ckpt_service.messages import Hello, Offer, Retention
from ckpt_service.naming import Kind
from ckpt_service.prune import History
from ckpt_service.records import ShardManifest
from ckpt_service.storage import LocalDirectory
from ckpt_service.threads import Worker
from ckpt_service.writer import RateLimit, Snapshot, Watcher, WriteOptions
from trainer_hooks import capture, replicas
from trainer_hooks.admission import Admission
from trainer_hooks.capture import Blueprint
from trainer_hooks.client import Pending, ServiceClient
from trainer_hooks.group import Solo
from trainer_hooks.overlap import BackgroundCopy, Later
from trainer_hooks.slots import Slot, SlotPool
from trainer_hooks.start import Run
from trainer_hooks.tickets import SaveTicket

_PATIENT_NICE = 10
_NOTABLE_SECONDS = 0.01  # a slot that is free is had faster
_RESERVE_BYTES = 256 << 10  # for what each other replica contributes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """Where saves of one kind go: an absolute directory, and what is kept there."""

    kind: Kind
    directory: str
    retention: Retention


@dataclass(frozen=True)
class _Staged:
    """A snapshot whose private copy is whole, on its way out of this process."""

    plan: Blueprint
    manifest: ShardManifest
    target: Target
    slot: Slot
    ticket: SaveTicket
    final: bool


class Saver:
    """The way of a snapshot out of the training process. ``client`` is None for a rank that writes by itself."""

    def __init__(self, run: Run, client: ServiceClient | None) -> None:
        self._run = run
        self._client = client
        self._pool = SlotPool(run.slots)
        self._copier = Worker("ckpt-copy") if client is not None else None
        self._finisher = Worker("ckpt-finish") if run.topology.dp > 1 and client is not None else None
        self._finishing: set[Future[None]] = set()
        self._failures: deque[SaveFailed] = deque()
        self._swept: set[str] = set()
        place = run.topology
        votes = run.on_full != "block" and run.attempt is not None and place.pp * place.tp > 1
        self._admission = Admission(run.on_full, self._pool, client, run.writers() if votes else Solo())

    def admit(self, manifest: ShardManifest, ticket: SaveTicket, *, final: bool) -> bool:
        """Let ``on_full`` decide whether this snapshot is made; a refusal goes to the ticket. It may vote."""
        try:
            self._admission.wait(ticket.step, final=final)
        except SaveFailed as error:
            self._lose(manifest, ticket, error)
            return False
        return True

    def save(
        self,
        plan: Blueprint,
        manifest: ShardManifest,
        target: Target,
        ticket: SaveTicket,
        *,
        with_replicas: bool,
        final: bool,
        later: Later | None = None,
    ) -> None:
        """Copy an admitted state and see to its delivery; the outcome goes to the ticket.

        What ``later`` names is copied on another thread; ``ticket.staged`` says when.
        """
        manifest = manifest.model_copy(update={"tensors": plan.plan.tensors})
        try:
            slot = self._slot(plan, manifest, reserve=_RESERVE_BYTES * (manifest.dp - 1))
        except SaveFailed as error:
            self._lose(manifest, ticket, error)
            return
        staged = _Staged(plan, manifest, target, slot, ticket, final)
        work = self._finish if with_replicas else self._deliver
        try:
            left = capture.stage(plan, slot, later.handles if later else frozenset())
            copy = BackgroundCopy(left, later) if later and left else None
        except MemoryError as error:
            self._pool.give_back(slot)
            self.lose(manifest, ticket, error)
            return
        except BaseException:
            self._pool.give_back(slot)
            raise
        if copy is not None and self._copier is not None:
            self._spawn(self._copier, partial(self._carefully, partial(self._copied, copy, work), staged))
            return
        ticket.staged.set_result(None)
        if with_replicas and self._finisher is not None:
            self._spawn(self._finisher, partial(self._carefully, work, staged))
        else:
            self._carefully(work, staged)

    def _copied(self, copy: BackgroundCopy, work: Callable[[_Staged], None], staged: _Staged) -> None:
        """On the copying thread: copy what was left, then go on as after a copy in ``save()``."""
        copy.run()
        staged.ticket.staged.set_result(None)
        if work == self._finish and self._finisher is not None:
            self._spawn(self._finisher, partial(self._carefully, work, staged))
        else:
            work(staged)

    def _spawn(self, worker: Worker, work: Callable[[], None]) -> None:
        job = worker.submit(work)
        self._finishing.add(job)
        job.add_done_callback(self._finishing.discard)

    def prepare(self, nbytes: int) -> None:
        """Have the slots ready for snapshots of this size, on a thread that gives way to others."""

        def work() -> None:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _PATIENT_NICE)
            self._pool.prepare(nbytes + _RESERVE_BYTES * (self._run.topology.dp - 1))

        threading.Thread(target=work, name="ckpt-prepare", daemon=True).start()

    def begin(self, hello: Hello) -> None:
        """Go on under another attempt; nothing may be pending."""
        if self._client is not None:
            self._client.begin(hello)

    def settle(self) -> bool:
        """Let the daemon finish what older attempts left with it; False if that took too long and was dropped."""
        return self._client is None or self._client.settle()

    def drain(self, timeout: float | None) -> None:
        """Wait until everything is committed or has failed; raises as :meth:`ServiceClient.wait_idle`."""
        began = time.monotonic()
        while jobs := set(self._finishing):  # one that copies is followed by one that finishes
            left = None if timeout is None else max(0.0, timeout - (time.monotonic() - began))
            if wait(jobs, left).not_done:
                raise TimeoutError(f"not handed over after {timeout} s")
            self._finishing -= jobs
        if self._client is not None:
            left = None if timeout is None else max(0.0, timeout - (time.monotonic() - began))
            self._client.wait_idle(left)

    def close(self) -> None:
        """End the threads and give the memory back."""
        for worker in (self._copier, self._finisher):
            if worker is not None:
                worker.shutdown()
        self._run.part()
        if self._client is not None:
            self._client.close()
        self._pool.close()

    def ticket(self, step: int, epoch: int) -> SaveTicket:
        """Return the ticket of a new save, whose failure is noted here."""
        # Not self: the thread that ends a ticket must not keep a trainer's tensors alive.
        return SaveTicket(step, epoch, partial(_note, self._failures))

    def new_failures(self) -> list[SaveFailed]:
        """Return what has failed since this was last asked."""
        return [self._failures.popleft() for _ in range(len(self._failures))]

    def lose(self, manifest: ShardManifest, ticket: SaveTicket, error: Exception) -> None:
        """Let a save fail that was admitted; the status tells of it too."""
        self._lose(manifest, ticket, _lost(ticket.step, error))

    def _lose(self, manifest: ShardManifest, ticket: SaveTicket, error: CkptError) -> None:
        ticket.fail(error)
        if self._client is not None:
            self._client.report_lost(manifest, error)

    # --- on the training thread ---------------------------------------------------------------------------------------

    def _slot(self, plan: Blueprint, manifest: ShardManifest, *, reserve: int) -> Slot:
        began = time.monotonic()
        slot = self._pool.take(plan.layout.nbytes + reserve, lambda: self._admission.may_wait(began))
        self._note_wait(time.monotonic() - began)
        if slot is None:
            raise SaveFailed(
                f"step {manifest.step} was not saved: all {self._pool.count} slots are taken and nothing has moved "
                f"for {self._run.config.stall_seconds} s",
                op="save",
                step=manifest.step,
                hint="look at the status file and the daemon's log",
            )
        return slot

    def _note_wait(self, seconds: float) -> None:
        """Have the status tell how long saves have waited for a slot."""
        if seconds > _NOTABLE_SECONDS and self._client is not None:
            self._client.report_blocked(seconds)

    def _carefully(self, work: Callable[[_Staged], None], staged: _Staged) -> None:
        """Do the rest of a save; whatever goes wrong before the slot has a new owner goes to the ticket."""
        name = staged.manifest.snapshot_id
        try:
            work(staged)
        except Exception as error:  # noqa: BLE001 - no descriptors, no threads: a failed save never ends a training
            self._pool.give_back(staged.slot)
            self.lose(staged.manifest, staged.ticket, error)
        except BaseException:  # Ctrl-C, which may come between any two steps; people go on after it
            if self._client is not None and self._client.has(name):
                self._client.hand_over_again(name)
            else:
                self._pool.give_back(staged.slot)
            raise

    # --- maybe on the finishing thread --------------------------------------------------------------------------------

    def _finish(self, staged: _Staged) -> None:
        """Add what other replicas contribute in time; those that are late are named in the manifest."""
        manifest = staged.manifest
        seconds = self._run.config.replica_seconds
        assert self._run.exchange is not None, "there are replicas"
        found = replicas.collect(self._run.exchange, manifest, seconds)
        whole = capture.blueprint(staged.plan.plan, found)
        if whole.layout.nbytes > staged.slot.nbytes:
            log.error("step %d: the replicas contribute too much, and it is left out", manifest.step)
            found, whole = {}, staged.plan
        absent = sorted(set(range(1, manifest.dp)) - found.keys())
        if absent:
            log.warning("step %d: nothing came from data-parallel ranks %s", manifest.step, absent)
            manifest = manifest.model_copy(update={"user": {"absent_replicas": " ".join(map(str, absent))}})
        self._deliver(replace(staged, plan=whole, manifest=manifest), found)

    def _deliver(self, staged: _Staged, contributed: dict[int, bytes] | None = None) -> None:
        target, slot = staged.target, staged.slot
        manifest = staged.manifest.model_copy(update={"bytes": staged.plan.layout.nbytes})
        offer = Offer(manifest=manifest, directory=target.directory, umask=_umask(), retention=target.retention)
        snapshot = capture.finish(staged.plan, manifest, slot, contributed)
        if self._client is None:
            self._write(snapshot, offer, staged.ticket)
            self._pool.give_back(slot)
            return
        snapshot.view.release()
        done = partial(_let_go, self._pool, slot)
        self._client.submit(Pending(offer, slot.fd, staged.ticket, staged.final, done))

    def _write(self, snapshot: Snapshot, offer: Offer, ticket: SaveTicket) -> None:
        """Do here and now what the daemon would do."""
        config, manifest = self._run.config, snapshot.manifest
        limit = RateLimit(config.rate_limit_bytes_per_second)
        try:
            with LocalDirectory.open(offer.directory) as directory:
                self._sweep_once(directory, manifest)
                writer.commit(
                    snapshot,
                    directory,
                    mode=0o666 & ~offer.umask,
                    host=self._run.host,
                    token=os.urandom(4).hex(),
                    options=WriteOptions(config.writer_threads, config.chunk_bytes, config.direct_io, limit),
                    watcher=Watcher(),
                )
                ticket.resolve(Path(directory.path, snapshot.final_name))
                self._retain(History(manifest, directory, offer.retention))
        except SaveFailed as error:
            ticket.fail(error)
        except OSError as error:
            ticket.fail(from_os_error(error, op=f"saving step {manifest.step}", kind=SaveFailed))
        finally:
            snapshot.view.release()

    def _sweep_once(self, directory: LocalDirectory, manifest: ShardManifest) -> None:
        """Delete what earlier starts have left half written of this shard, as a daemon does."""

        def is_dead(name: naming.PartialName) -> bool:
            shard = naming.parse_shard(name.final)
            if shard is None or name.attempt >= manifest.attempt:
                return False
            own = (manifest.kind, manifest.tp_rank)
            return (shard.kind, shard.tp_rank or 0) == own and shard.stage in (None, manifest.stage)

        if directory.path not in self._swept:
            self._swept.add(directory.path)
            with contextlib.suppress(OSError):  # litter costs space only
                writer.sweep(directory, is_dead)

    def _retain(self, history: History) -> None:
        """Delete what is too old. What cannot be deleted is tried again after the next save; the commit stands."""
        try:
            errors = prune.retain(self._run.root, self._run.postfix, [history])[0].errors
        except OSError as error:
            errors = (from_os_error(error, op="retention", kind=CkptError, path=history.directory.path),)
        for problem in errors:
            warnings.warn(str(problem), stacklevel=5)


def _lost(step: int, error: Exception) -> CkptError:
    """Return what a save comes to that ``error`` has ended in this process."""
    op = f"saving step {step}"
    if isinstance(error, OSError):
        return from_os_error(error, op=op, kind=SaveFailed, step=step)
    if isinstance(error, MemoryError):
        return from_os_error(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), op=op, kind=SaveFailed, step=step)
    kind = type(error) if isinstance(error, SaveFailed) else SaveFailed
    return kind(f"step {step} was not saved: {error}", op="save", step=step)


def _let_go(pool: SlotPool, slot: Slot, reusable: bool) -> None:
    pool.give_back(slot, reusable=reusable)


def _note(failures: deque[SaveFailed], error: Exception) -> None:
    if isinstance(error, SaveFailed):
        log.error("%s", error)
        failures.append(error)


def _umask() -> int:
    """Return the umask of this process from proc(5); the system call could only read it by setting it."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))
