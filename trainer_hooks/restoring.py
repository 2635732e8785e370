"""A whole resume: wait for what is on its way, agree, check, write down, and only then change anything. Shell."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence

from ckpt_service import naming, writer
from ckpt_service.catalog import State, build
from ckpt_service.errors import CkptError, SaveFailed, StateMismatch
from ckpt_service.records import Origin
from ckpt_service.storage import LocalDirectory
from trainer_hooks import replicas, resume
from trainer_hooks.choice import candidates
from trainer_hooks.load import LoadedShard
from trainer_hooks.resume import ResumePoint
from trainer_hooks.saves import Saves
from trainer_hooks.saving import Saver
from trainer_hooks.start import Run
from trainer_hooks.tracking import Tracked
from trainer_hooks.values import Allowed

log = logging.getLogger(__name__)


class Restorer:
    """Carries a resume out on this rank; every method is collective on all ranks."""

    def __init__(self, run: Run, saver: Saver, saves: Saves, tracked: Tracked, allowed: Allowed) -> None:
        self._run = run
        self._saver = saver
        self._saves = saves
        self._tracked = tracked
        self._allowed = allowed

    def resume(self, step: int | None, epoch: int | None, *, strict: bool) -> ResumePoint | None:
        """Resume as ``Checkpointer.resume``, which describes it."""
        run = self._run
        run.open()
        run.agree(self._settled, b"", kind=SaveFailed)
        evidence = resume.evidence(run)
        if step is None:
            _require_read(evidence.unread)
        found = build(evidence)
        choice = candidates(found, run.topology, step, epoch)
        taken = resume.load_agreed(run, choice, self._allowed, explicit=step is not None)
        if taken is None:
            lacking = (State.PARTIAL, State.DEAD, State.LEGACY)  # legacy ones with a file for every rank are taken
            partial = [c.id.step for c in found.of_kind("train") if c.state in lacking]
            if partial:
                warnings.warn(f"nothing to resume from: only partial checkpoints, of steps {partial}", stacklevel=3)
            return None
        point, loaded = taken
        self._saves.has_resumed = True  # in strict mode it may still be refused; the user has looked at what is there
        mine = loaded.own()
        run.agree(lambda: self._checked(mine, strict=strict), b"", kind=StateMismatch)
        if point.attempt:
            self._go_on_from(Origin(attempt=point.attempt, sequence=point.sequence, explicit=step is not None))
        run.agree(lambda: self._restored(mine), b"", kind=StateMismatch)
        self._seed_if_absent(loaded, point)
        return point

    def _settled(self) -> bytes:
        """Let everything that is on its way be written, then clear away what older attempts left half written."""
        attempt, place = self._run.attempt, self._run.topology
        if attempt is None or not place.is_writer:
            return b""
        self._saver.drain(None)
        if not self._saver.settle():
            seconds = self._run.config.resume_wait_seconds
            warnings.warn(f"older snapshots were not written within {seconds} s and are dropped", stacklevel=5)
        try:
            with LocalDirectory.open(self._run.stage_directory) as directory:
                writer.sweep(directory, lambda name: name.attempt < attempt.n and _tp_rank(name.final) == place.tp_rank)
        except OSError as error:
            log.warning("temporary files could not be cleared away: %s", error)
        return b""

    def _go_on_from(self, origin: Origin) -> None:
        """Write down what was resumed; after own saves another attempt begins with it, see :meth:`Run.note_origin`."""
        self._run.note_origin(origin, used=self._saves.has_saved)
        self._saves.begin_attempt()
        if self._run.attempt is not None:
            self._saver.begin(self._run.hello())

    def _checked(self, loaded: LoadedShard, *, strict: bool) -> bytes:
        if self._tracked:
            self._tracked.check(loaded.state, loaded.shardings, strict=strict)
        return b""

    def _restored(self, loaded: LoadedShard) -> bytes:
        self._tracked.restore(loaded.state, loaded.shardings)
        return b""

    def _seed_if_absent(self, loaded: LoadedShard, point: ResumePoint) -> None:
        """Give a replica that the checkpoint does not know random numbers of its own."""
        attempt, place = self._run.attempt, self._run.topology
        if loaded.replica is not None or place.dp_rank == 0 or not self._tracked:
            return
        run_id = attempt.run_id if attempt else self._run.root
        replicas.seed_all(replicas.derived_seed(run_id, point.sequence, place))
        warnings.warn(
            f"step {point.step} holds no random numbers of data-parallel rank {place.dp_rank}: it starts "
            "from a seed derived from the run and the rank",
            stacklevel=4,
        )


def _require_read(unread: Sequence[str]) -> None:
    for path in unread:
        raise CkptError(
            f"{path} cannot be read: it may say that the run was rolled back",
            op="resume",
            path=path,
            hint="restore it, delete it if it is lost for good, or name the step to resume from",
        )


def _tp_rank(final: str) -> int | None:
    parsed = naming.parse_shard(final)
    return (parsed.tp_rank or 0) if parsed is not None else None
