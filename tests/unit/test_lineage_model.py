"""Any order of starts, resumes, saves, failures, crashes and losses, against a plain account of what counts.

The machine drives the real catalog, retention plan and resume choice over an imagined directory, and keeps its own
account: a list of the saves that count, cut at a roll-back, replaced at a fresh start. It knows nothing of how the
catalog derives the same from manifests and attempt records.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.checkpoints import attempt as attempt_record
from support.checkpoints import ranks, shard, topologies

from ckpt_service import retention
from ckpt_service.catalog import Catalog, Checkpoint, Evidence, Rank, Shard, State, build
from ckpt_service.records import Attempt, ShardManifest
from ckpt_service.retention import RetentionPolicy
from trainer_hooks import choice

Save = tuple[int, int]
"""(attempt, sequence)"""


@dataclass
class Account:
    """Which saves count, kept by hand.

    ``live``: the saves that count, oldest first. ``tail``: those that go once the running attempt has something
    complete, because its resume fell back behind them. ``head``: the newest attempt that has resumed or has a file.
    """

    live: list[Save] = field(default_factory=list)
    tail: set[Save] = field(default_factory=set)
    foreign: set[Save] = field(default_factory=set)
    abandoned: set[Save] = field(default_factory=set)
    unseen: list[Save] = field(default_factory=list)  # of fresh starts that have no file yet
    head: int = 0

    def saved(self, save: Save) -> None:
        (self.live if save[0] == self.head else self.unseen).append(save)

    def committed(self, save: Save) -> bool:
        """Note a file; return whether a fresh start has just become the run that counts."""
        if save[0] <= self.head:
            return False
        self.foreign |= {*self.live, *self.abandoned, *(s for s in self.unseen if s[0] < save[0])}
        self.live = [s for s in self.unseen if s[0] == save[0]]
        self.unseen = [s for s in self.unseen if s[0] > save[0]]
        self.tail, self.abandoned, self.head = set(), set(), save[0]
        return True

    def resumed(self, number: int, origin: Save, *, explicit: bool) -> None:
        behind = {save for save in self.live if save > origin}
        self.tail = set() if explicit else behind
        if explicit:
            self._abandon(behind)
        self.foreign |= set(self.unseen)
        self.unseen, self.head = [], number

    def completed(self, save: Save) -> None:
        if save[0] == self.head:
            self._abandon(self.tail)
            self.tail = set()

    def _abandon(self, saves: set[Save]) -> None:
        self.abandoned |= saves
        self.live = [save for save in self.live if save not in saves]


def save_of(found: Shard | ShardManifest) -> Save:
    manifest = found.manifest if isinstance(found, Shard) else found
    assert manifest is not None
    return (manifest.attempt, manifest.sequence)


def rank_of(found: Shard) -> Rank:
    return (found.stage, found.tp_rank)


class Run(RuleBasedStateMachine):
    """One run directory and the trainer on it.

    ``sees_all``: retention lists the files of all ranks. ``blind``: records are gone, so that nobody can tell any more
    what was left behind; the rest must hold all the same.
    """

    sees_all = True

    @initialize(
        layout=st.sampled_from([(1, 1), (1, 2), (2, 2)]),
        keep_last=st.integers(1, 3),
        keep_every=st.sampled_from([None, None, 3]),
        slots=st.integers(1, 2),
        losses=st.sampled_from(["nothing", "nothing", "files", "records"]),
    )
    def begin(self, layout: tuple[int, int], keep_last: int, keep_every: int | None, slots: int, losses: str) -> None:
        self.pp, self.tp = layout
        self.losses = losses
        self.ranks = ranks(*layout)
        self.policy = RetentionPolicy(keep_last, keep_every)
        self.slots = slots
        self.files: dict[str, Shard] = {}
        self.records: dict[int, Attempt] = {}
        self.pins: set[Save] = set()
        self.pending: dict[Rank, list[Shard]] = {rank: [] for rank in self.ranks}
        self.reported: dict[Rank, frozenset[Save]] = {rank: frozenset() for rank in self.ranks}
        self.account = Account()
        self.number = self.sequence = 0
        self.repeats: Counter[tuple[int, int]] = Counter()
        self.running = False
        self.fresh: set[int] = set()
        self.had_complete = False
        self.blind = self.files_lost = False
        self.derived: tuple[object, Catalog] | None = None

    # --- what happens -------------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.running)
    @rule()
    def start_afresh(self) -> None:
        self._start()

    @precondition(lambda self: not self.running)
    @rule(written=st.booleans())
    def start_and_resume(self, written: bool) -> None:
        self._settle(written)
        found = self._choice()
        self._start()
        if found is not None:
            self._resumed(found, explicit=False)

    @precondition(lambda self: not self.running and self._complete())
    @rule(written=st.booleans(), data=st.data())
    def start_and_roll_back(self, written: bool, data: st.DataObject) -> None:
        self._settle(written)
        if not self._complete() or not self._offered():
            return  # what was written last belongs to a fresh start, and nothing else counts any more
        offered = [(c.id.step, c.id.epoch) for c in self._offered()]
        named = data.draw(st.sampled_from(sorted(offered if self.blind else self._complete().values())))
        found = self._choice(*named)
        assert self.blind or found == max(save for save, name in self._complete().items() if name == named)
        self._start()
        self._resumed(found, explicit=True)

    @precondition(lambda self: not self.running and self._complete())
    @rule(data=st.data())
    def start_and_fall_back(self, data: st.DataObject) -> None:
        """The newest ones cannot be read for a moment: the resume takes an older one that nobody asked for."""
        self._settle(written=False)
        found = data.draw(st.sampled_from(sorted(self._complete())))
        self._start()
        self._resumed(found, explicit=False)

    @precondition(lambda self: self.running)
    @rule(step=st.integers(1, 6), epoch=st.integers(0, 1))
    def save(self, step: int, epoch: int) -> None:
        self.sequence += 1
        repeat = self.repeats[step, epoch]
        self.repeats[step, epoch] += 1
        self.account.saved((self.number, self.sequence))
        self._report()
        if any(len(jobs) >= self.slots for jobs in self.pending.values()):
            return  # where one rank has no slot free, all skip the save
        for stage, tp_rank in self.ranks:
            place = {"stage": stage, "tp_rank": tp_rank, "pp": self.pp, "tp": self.tp}
            self.pending[stage, tp_rank].append(shard(self.number, self.sequence, step, epoch, repeat=repeat, **place))

    @precondition(lambda self: any(self.pending.values()))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self._commit(data.draw(st.sampled_from([rank for rank in self.ranks if self.pending[rank]])))

    @precondition(lambda self: self.running)
    @rule(steps=st.lists(st.integers(7, 12), min_size=1, max_size=3))
    def save_for_good(self, steps: list[int]) -> None:
        for step in steps:
            self.save(step, 0)
            self.commit_everything()

    @precondition(lambda self: self.running and len(self.ranks) > 1)
    @rule(stuck=st.integers(0, 3), saves=st.integers(1, 6))
    def save_while_one_cannot_write(self, stuck: int, saves: int) -> None:
        fails = self.ranks[stuck % len(self.ranks)]
        for step in range(100 * self.sequence + 100, 100 * self.sequence + 100 + saves):
            if len(self.pending[fails]) >= self.slots:
                self.pending[fails].pop(0)
            self.save(step, 0)
            for rank in self.ranks:
                while self.pending[rank] and rank != fails:
                    self._commit(rank)

    @rule()
    def commit_everything(self) -> None:
        for rank in self.ranks:
            while self.pending[rank]:
                self._commit(rank)

    @precondition(lambda self: any(self.pending.values()))
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.pending[data.draw(st.sampled_from([rank for rank in self.ranks if self.pending[rank]]))].pop(0)

    @precondition(lambda self: self.running)
    @rule(daemon_too=st.booleans())
    def crash(self, daemon_too: bool) -> None:
        self.running = False
        if daemon_too:
            self._settle(written=False)

    @precondition(lambda self: self.files)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        self.pins.add(save_of(data.draw(st.sampled_from(list(self.files.values())))))

    @precondition(lambda self: self.files and self.losses == "files")
    @rule(data=st.data(), damaged=st.booleans())
    def lose_file(self, data: st.DataObject, damaged: bool) -> None:
        path = data.draw(st.sampled_from(sorted(self.files)))
        number = save_of(self.files[path])[0]
        if number in self.fresh and sum(save_of(file)[0] == number for file in self.files.values()) == 1:
            return  # without its only file nothing would tell of that start
        found = self.files.pop(path)
        if damaged:
            self.files[path] = replace(found, problem="it has 9 bytes instead of 10000")
        self.files_lost = True
        self.had_complete = bool(self._complete())
        if self.account.abandoned and not any(save[0] == self.account.head for save in self._complete()):
            self.blind = True  # what an unasked fallback gave up for the lost one may count again

    @precondition(lambda self: self.records and self.losses == "records")
    @rule(data=st.data(), all_of_them=st.booleans())
    def lose_records(self, data: st.DataObject, all_of_them: bool) -> None:
        lost = list(self.records) if all_of_them else [data.draw(st.sampled_from(sorted(self.records)))]
        for number in lost:
            del self.records[number]
        self.blind = True

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def all_ranks_choose_the_same_complete_unmixed_one(self) -> None:
        for found in self._offered():
            assert set(self.ranks) == found.ranks
            assert all(file.problem is None and file.path in self.files for file in found.shards)
            assert len({(m.run_id, m.attempt, m.step, m.epoch, m.repeat) for m in map(manifest_of, found.shards)}) == 1

    @invariant()
    def exactly_what_counts_is_offered(self) -> None:
        """The newest first, and never what a roll-back or a fresh start has left behind."""
        if not self.blind:
            assert [save_in(c) for c in self._offered()] == sorted(self._complete(), reverse=True)

    @invariant()
    def once_complete_always_complete(self) -> None:
        if self._reports_are_old():
            return
        there = bool(self._complete()) if not self.blind else self._choice() is not None
        assert there or not self.had_complete
        self.had_complete = there

    # --- how ----------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Take the next number, which is above all that were ever used here."""
        used = [*self.records, *(save_of(file)[0] for file in self.files.values())]
        self.number = max([self.number if not self.blind else 0, *used, *self._queued()], default=0) + 1
        self.records[self.number] = attempt_record(self.number, slots=self.slots)
        self.sequence, self.repeats, self.running = 0, Counter(), True
        self.fresh.add(self.number)

    def _queued(self) -> list[int]:
        return [save_of(file)[0] for jobs in self.pending.values() for file in jobs]

    def _resumed(self, origin: Save, *, explicit: bool) -> None:
        self.records[self.number] = attempt_record(self.number, origin, explicit=explicit, slots=self.slots)
        self.account.resumed(self.number, origin, explicit=explicit)
        self.fresh.discard(self.number)
        self._report()

    def _settle(self, written: bool) -> None:
        """Let the daemon write what older attempts left with it, or drop it."""
        for rank in self.ranks:
            while self.pending[rank]:
                if written:
                    self._commit(rank)
                else:
                    self.pending[rank].pop(0)

    def _report(self) -> None:
        """Let every rank know what the others hold, as it is told with each save and each resume."""
        for rank in self.ranks:
            self.reported[rank] = frozenset(save_of(f) for f in self.files.values() if rank_of(f) == rank)

    def _commit(self, rank: Rank) -> None:
        file = self.pending[rank].pop(0)
        older = self.files.get(file.path)
        if older is not None and save_of(older) > save_of(file):
            return  # a late writer gives way
        if older is not None and not self._is_abandoned(older):
            m = manifest_of(older)
            aside = shard(*save_of(older), m.step, m.epoch, stage=m.stage, tp_rank=m.tp_rank, tp=m.tp, set_aside=True)
            self.files[aside.path] = replace(older, path=aside.path)
        self.files[file.path] = file
        if self.account.committed(save_of(file)) or (self.blind and save_of(file)[0] in self.fresh):
            self.had_complete = False  # it begins a history of its own
        if self._is_whole(save_of(file)):
            self.account.completed(save_of(file))
        if save_of(file)[0] == max([*self.records, save_of(file)[0]]):
            self._retain(rank)

    def _retain(self, rank: Rank) -> None:
        plan = retention.plan(self.policy, self._view(rank), kind="train", stage=rank[0], tp_rank=rank[1])
        newest = max(self._complete(), default=None)
        for file in plan.delete:
            assert rank_of(file) == rank
            assert save_of(file) not in self.pins
            if not self.blind:
                assert save_of(file) not in self.account.foreign
                assert save_of(file) != newest or file.problem or self._reports_are_old()
            del self.files[file.path]
        if not self.blind and not self._reports_are_old():
            held = [file for file in self.files.values() if rank_of(file) == rank and self._counts_for_bound(file)]
            assert len(held) <= self.policy.keep_last + self.slots + 2, [save_of(file) for file in held]

    def _reports_are_old(self) -> bool:
        """A file that someone removes behind a rank's back is believed to be there until its next report."""
        return self.files_lost and not self.sees_all

    def _counts_for_bound(self, file: Shard) -> bool:
        every = self.policy.keep_every
        if every is not None and manifest_of(file).step % every == 0:
            return False
        return save_of(file) not in self.account.foreign | self.pins

    def _view(self, rank: Rank) -> Catalog:
        """What the retention of one rank goes by."""
        if self.sees_all:
            return self._catalog()
        own = [file for file in self.files.values() if rank_of(file) == rank]
        told = {("train", *peer): saves for peer, saves in self.reported.items() if peer != rank}
        return build(Evidence(own, list(self.records.values()), frozenset(self.pins), told, self.slots))

    def _catalog(self) -> Catalog:
        files, records, pins = list(self.files.values()), list(self.records.values()), frozenset(self.pins)
        if self.derived is None or self.derived[0] != (files, records, pins):
            self.derived = ((files, records, pins), build(Evidence(files, records, pins, slots=self.slots)))
        return self.derived[1]

    def _offered(self, step: int | None = None, epoch: int | None = None) -> list[Checkpoint]:
        """Return what all ranks would try, best first; they must agree on it."""
        found = self._catalog()
        choices = [choice.candidates(found, place, step, epoch) for place in topologies(self.pp, self.tp)]
        assert len({tuple(save_in(c) for c in offer.candidates) for offer in choices}) == 1
        return list(choices[0].candidates)

    def _choice(self, step: int | None = None, epoch: int | None = None) -> Save | None:
        offered = self._offered(step, epoch)
        return save_in(offered[0]) if offered else None

    def _is_abandoned(self, file: Shard) -> bool:
        return any(c.state is State.ABANDONED and save_in(c) == save_of(file) for c in self._catalog().checkpoints)

    def _is_whole(self, wanted: Save) -> bool:
        whole = {rank_of(f) for f in self.files.values() if save_of(f) == wanted and f.problem is None}
        return whole == set(self.ranks)

    def _complete(self) -> dict[Save, tuple[int, int]]:
        """Return (step, epoch) of what counts and is whole, by the machine's own account."""
        whole: dict[Save, set[Rank]] = defaultdict(set)
        names: dict[Save, tuple[int, int]] = {}
        for file in self.files.values():
            if file.problem is None:
                whole[save_of(file)].add(rank_of(file))
                names[save_of(file)] = (manifest_of(file).step, manifest_of(file).epoch)
        live = set(self.account.live)
        return {save: names[save] for save, there in whole.items() if save in live and there == set(self.ranks)}


def save_in(checkpoint: Checkpoint) -> Save:
    return (checkpoint.id.attempt, checkpoint.id.sequence)


def manifest_of(file: Shard) -> ShardManifest:
    assert file.manifest is not None
    return file.manifest


class RunOfSeparateDirectories(Run):
    """Every rank's retention sees its own files and what the others reported with the last save."""

    sees_all = False


@pytest.mark.parametrize("machine", [Run, RunOfSeparateDirectories])
def test_no_order_of_events_loses_or_mixes_checkpoints(machine: type[Run]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=100,
            stateful_step_count=40,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
