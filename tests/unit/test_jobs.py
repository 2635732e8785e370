"""The life of a snapshot: every step of the table, and whatever order events come in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ckpt_service.jobs import (
    ACTIVE,
    ENDED,
    TRANSITIONS,
    Abort,
    Accept,
    Broke,
    Cancelled,
    ClientGone,
    Dropped,
    Event,
    Forget,
    Instruction,
    JobBook,
    JobKey,
    Landed,
    Offered,
    Parked,
    Pause,
    Phase,
    Prune,
    Pruned,
    Renaming,
    Report,
    RetryDue,
    Start,
    Synced,
    Unparked,
    retry_pause,
)
from ckpt_service.naming import Kind

ORPHAN_SECONDS = 600.0
CLIENT, OTHER = 7, 8


def key_of(sequence: int = 1, *, attempt: int = 1, stage: int = 0, tp_rank: int = 0) -> JobKey:
    return JobKey(attempt, sequence, "train", stage, tp_rank)


KEY = key_of()
BLOCKER = key_of(0, stage=9)


def new_book(shards_at_once: int = 1, max_tries: int = 4) -> JobBook:
    return JobBook(shards_at_once, max_tries, ORPHAN_SECONDS)


def fire(book: JobBook, *events: Event) -> list[Instruction]:
    """Handle the events, check the book after each, and return what the last one asks for."""
    instructions: list[Instruction] = []
    for event in events:
        instructions = book.handle(event)
        book.check()
    return instructions


def offered(key: JobKey, client: int = CLIENT) -> Offered:
    return Offered(key, 4096, client)


def broke(key: JobKey = KEY, *, retryable: bool = True, at: float = 0.0) -> Broke:
    return Broke(key, retryable, at)


WAY: dict[Phase, list[Event]] = {
    Phase.QUEUED: [],
    Phase.WRITING: [],
    Phase.SYNCING: [Synced(KEY)],
    Phase.RENAMING: [Synced(KEY), Renaming(KEY)],
    Phase.PRUNING: [Synced(KEY), Renaming(KEY), Landed(KEY)],
    Phase.WAITING: [broke()],
    Phase.PARKED: [Parked(KEY)],
}
"""How a job that was offered gets into each phase in which it can be met."""

EVENTS: dict[type, Event] = {
    Synced: Synced(KEY),
    Renaming: Renaming(KEY),
    Landed: Landed(KEY),
    Pruned: Pruned(KEY),
    Broke: broke(),
    RetryDue: RetryDue(KEY),
    Cancelled: Cancelled(KEY),
    Parked: Parked(KEY),
    Unparked: Unparked(KEY),
    Dropped: Dropped(KEY),
}


def book_in(phase: Phase, *, max_tries: int = 4) -> JobBook:
    """Return a book whose job ``KEY`` is in this phase; a job of another shard keeps a queued one from starting."""
    book = new_book(max_tries=max_tries)
    if phase in (Phase.QUEUED, Phase.PARKED):
        fire(book, offered(BLOCKER, OTHER))
    fire(book, offered(KEY), *WAY[phase])
    if phase is Phase.WAITING:
        fire(book, offered(BLOCKER, OTHER))
    assert book.jobs[KEY].phase is phase
    return book


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_table_is_about_phases_that_can_be_met() -> None:
    assert {phase for phase, _ in TRANSITIONS} == set(WAY) == set(Phase) - ENDED


@pytest.mark.parametrize(("phase", "event"), TRANSITIONS, ids=lambda part: getattr(part, "__name__", str(part)))
def test_every_transition_of_the_table(phase: Phase, event: type) -> None:
    book = book_in(phase)
    before = book.jobs[KEY]
    instructions = fire(book, EVENTS[event])
    after = TRANSITIONS[(phase, event)]
    about = [instruction for instruction in instructions if instruction.key == KEY]
    if after is Phase.COMMITTED:
        assert about == [Forget(KEY)], "it was reported when it landed"
        assert KEY not in book.jobs
    elif after in ENDED:
        assert about == [Report(KEY, CLIENT, after), Forget(KEY)]
        assert KEY not in book.jobs
    else:
        assert book.jobs[KEY].phase is after
        assert book.jobs[KEY].client == before.client
        assert about == {
            Phase.WAITING: [Pause(KEY, 0.5)],
            Phase.PRUNING: [Report(KEY, CLIENT, Phase.COMMITTED), Prune(KEY)],
        }.get(after, [])


ILLEGAL = [
    (phase, event)
    for phase in WAY
    for event in EVENTS
    if (phase, event) not in TRANSITIONS and not (event is Cancelled and phase in ACTIVE)
]


@pytest.mark.parametrize(("phase", "event"), ILLEGAL, ids=lambda part: getattr(part, "__name__", str(part)))
def test_any_other_event_is_our_own_bug(phase: Phase, event: type) -> None:
    book = book_in(phase)
    before = dict(book.jobs)
    with pytest.raises(AssertionError, match=f"{event.__name__} meets a job that is {phase.value}"):
        book.handle(EVENTS[event])
    assert book.jobs == before


def test_the_whole_way_of_one_snapshot() -> None:
    book = new_book()
    assert fire(book, offered(KEY)) == [Accept(KEY, CLIENT), Start(KEY)]
    assert fire(book, Synced(KEY)) == []
    assert fire(book, Renaming(KEY)) == []
    assert fire(book, Landed(KEY)) == [Report(KEY, CLIENT, Phase.COMMITTED), Prune(KEY)]
    assert fire(book, Pruned(KEY)) == [Forget(KEY)]
    assert book.jobs == {}


# --- order ------------------------------------------------------------------------------------------------------------


def land(key: JobKey) -> list[Event]:
    return [Synced(key), Renaming(key), Landed(key), Pruned(key)]


def test_the_oldest_set_is_written_first_whatever_the_order_of_the_offers() -> None:
    keys = [
        key_of(sequence, attempt=attempt, tp_rank=rank) for attempt in (1, 2) for sequence in (9, 10) for rank in (0, 1)
    ]
    book = new_book()
    fire(book, offered(BLOCKER))
    for key in reversed(keys):
        fire(book, offered(key))
    started = []
    running = BLOCKER
    while book.jobs:
        instructions = fire(book, *land(running))
        for instruction in instructions:
            if isinstance(instruction, Start):
                running = instruction.key
                started.append(running)
    assert started == keys


def test_several_shards_side_by_side_and_never_one_twice() -> None:
    book = new_book(shards_at_once=3)
    keys = [key_of(sequence, tp_rank=rank) for sequence in (1, 2) for rank in (0, 1)]
    starts = [instruction for key in keys for instruction in fire(book, offered(key)) if isinstance(instruction, Start)]
    assert starts == [Start(keys[0]), Start(keys[1])], "one place is left, and both shards are being written"
    assert fire(book, *land(keys[1])) == [Forget(keys[1]), Start(keys[3])]
    assert fire(book, *land(keys[0])) == [Forget(keys[0]), Start(keys[2])]


@pytest.mark.parametrize("phase", [phase for phase in WAY if phase is not Phase.QUEUED])
def test_the_next_of_a_shard_waits_until_the_former_has_left(phase: Phase) -> None:
    book = book_in(phase)
    book.shards_at_once = 4
    later = key_of(2)
    assert fire(book, offered(later)) == [Accept(later, CLIENT)]
    assert book.jobs[later].phase is Phase.QUEUED


def test_a_pause_of_one_shard_does_not_hold_up_the_others() -> None:
    book = new_book()
    other = key_of(2, tp_rank=1)
    fire(book, offered(KEY), offered(key_of(2)), offered(other))
    assert fire(book, broke()) == [Pause(KEY, 0.5), Start(other)]
    assert fire(book, RetryDue(KEY)) == []
    assert fire(book, *land(other)) == [Forget(other), Start(KEY)], "and then the older of the paused shard"


def test_lora_and_training_shards_of_a_rank_are_two_histories() -> None:
    book = new_book(shards_at_once=2)
    lora = JobKey(1, 1, "lora", 0, 0)
    assert fire(book, offered(KEY), offered(lora))[-1] == Start(lora)


# --- retries ----------------------------------------------------------------------------------------------------------


def test_pauses_double_up_to_half_a_minute() -> None:
    assert [retry_pause(tries) for tries in range(1, 10)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert retry_pause(1_000_000) == 30


def test_a_write_is_tried_so_many_times() -> None:
    book = new_book(max_tries=3)
    fire(book, offered(KEY))
    for seconds in (0.5, 1.0):
        assert fire(book, broke()) == [Pause(KEY, seconds)]
        assert fire(book, RetryDue(KEY)) == [Start(KEY)]
    assert fire(book, broke()) == [Report(KEY, CLIENT, Phase.FAILED), Forget(KEY)]


def test_what_cannot_pass_fails_at_once() -> None:
    book = book_in(Phase.SYNCING)
    assert fire(book, broke(retryable=False)) == [Report(KEY, CLIENT, Phase.FAILED), Forget(KEY)]
    assert book.jobs == {}


def test_a_failure_makes_room_for_the_next() -> None:
    book = new_book()
    fire(book, offered(KEY), offered(key_of(2)))
    assert fire(book, broke(retryable=False))[-1] == Start(key_of(2))


# --- cancelled --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.WRITING, Phase.SYNCING, Phase.RENAMING])
@pytest.mark.parametrize("retryable", [True, False])
def test_a_cancelled_write_is_stopped_and_not_tried_again(phase: Phase, retryable: bool) -> None:
    book = book_in(phase)
    assert fire(book, Cancelled(KEY)) == [Abort(KEY)]
    assert fire(book, Cancelled(KEY)) == [Abort(KEY)], "asked twice"
    assert fire(book, broke(retryable=retryable)) == [Report(KEY, CLIENT, Phase.CANCELLED), Forget(KEY)]
    assert book.jobs == {}


@pytest.mark.parametrize("phase", [Phase.WRITING, Phase.SYNCING, Phase.RENAMING])
def test_a_cancelled_write_that_lands_all_the_same_is_committed(phase: Phase) -> None:
    book = book_in(phase)
    fire(book, Cancelled(KEY))
    rest = WAY[Phase.PRUNING][len(WAY[phase]) :]
    assert fire(book, *rest) == [Report(KEY, CLIENT, Phase.COMMITTED), Prune(KEY)]
    assert fire(book, Pruned(KEY)) == [Forget(KEY)]


def test_what_has_landed_cannot_be_cancelled() -> None:
    book = book_in(Phase.PRUNING)
    assert fire(book, Cancelled(KEY)) == []
    assert fire(book, Pruned(KEY)) == [Forget(KEY)]


def test_an_offer_does_not_bring_a_doomed_write_back() -> None:
    book = book_in(Phase.WRITING)
    fire(book, Cancelled(KEY))
    assert fire(book, offered(KEY, OTHER)) == [Accept(KEY, OTHER)]
    assert fire(book, broke()) == [Report(KEY, OTHER, Phase.CANCELLED), Forget(KEY)]


def test_a_doomed_name_has_no_memory() -> None:
    book = book_in(Phase.WRITING)
    fire(book, Cancelled(KEY), broke(), offered(KEY))
    assert fire(book, broke()) == [Pause(KEY, 0.5)], "the same snapshot, handed over anew, is a new job"


# --- trainers that go away and come back ------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", WAY)
def test_a_snapshot_outlives_its_trainer(phase: Phase) -> None:
    book = book_in(phase)
    assert fire(book, ClientGone(CLIENT, at=5.0)) == []
    job = book.jobs[KEY]
    after = Phase.QUEUED if phase is Phase.PARKED else phase  # nobody is left to decide about it
    assert (job.phase, job.client, job.orphaned_at) == (after, None, 5.0)


def test_only_the_jobs_of_the_one_that_left_are_orphans() -> None:
    book = new_book()
    other = key_of(1, tp_rank=1)
    fire(book, offered(KEY), offered(other, OTHER), ClientGone(OTHER, at=5.0))
    assert [job.client for job in book.jobs.values()] == [CLIENT, None]


def test_a_trainer_that_came_back_is_not_mistaken_for_the_connection_that_ends_late() -> None:
    book = book_in(Phase.WRITING)
    fire(book, offered(KEY, OTHER), ClientGone(CLIENT, at=5.0))
    assert (book.jobs[KEY].client, book.jobs[KEY].orphaned_at) == (OTHER, None)


@pytest.mark.parametrize(("after", "tried"), [(0.0, True), (ORPHAN_SECONDS, True), (ORPHAN_SECONDS + 0.1, False)])
def test_an_orphan_is_retried_for_so_long(after: float, tried: bool) -> None:
    book = book_in(Phase.WRITING, max_tries=100)
    fire(book, ClientGone(CLIENT, at=1000.0))
    expected = [Pause(KEY, 0.5)] if tried else [Report(KEY, None, Phase.FAILED), Forget(KEY)]
    assert fire(book, broke(at=1000.0 + after)) == expected


def test_an_orphan_that_is_offered_again_is_none() -> None:
    book = book_in(Phase.WRITING, max_tries=100)
    fire(book, ClientGone(CLIENT, at=0.0), offered(KEY, OTHER))
    assert fire(book, broke(at=10 * ORPHAN_SECONDS)) == [Pause(KEY, 0.5)]


@pytest.mark.parametrize("phase", WAY)
def test_a_snapshot_offered_again_is_accepted_and_goes_on_where_it_was(phase: Phase) -> None:
    book = book_in(phase)
    fire(book, ClientGone(CLIENT, at=5.0))
    instructions = fire(book, offered(KEY, OTHER))
    told = [Report(KEY, OTHER, Phase.COMMITTED)] if phase is Phase.PRUNING else []
    assert instructions == [Accept(KEY, OTHER), *told]
    job = book.jobs[KEY]
    after = Phase.QUEUED if phase is Phase.PARKED else phase
    assert (job.phase, job.client, job.orphaned_at) == (after, OTHER, None)


def test_a_parked_snapshot_that_is_offered_again_is_queued() -> None:
    book = book_in(Phase.PARKED)
    fire(book, offered(KEY, OTHER))
    assert book.jobs[KEY].phase is Phase.QUEUED


@pytest.mark.parametrize("phase", WAY)
def test_only_what_has_not_begun_can_be_parked(phase: Phase) -> None:
    book = book_in(phase)
    assert book.can_park(KEY) is (phase is Phase.QUEUED)
    assert book.is_parked(KEY) is (phase is Phase.PARKED)
    assert not book.can_park(key_of(99))


def test_a_retry_keeps_its_count_when_the_snapshot_is_offered_again() -> None:
    book = book_in(Phase.WAITING, max_tries=2)
    fire(book, *land(BLOCKER), offered(KEY, OTHER), RetryDue(KEY))
    assert fire(book, broke()) == [Report(KEY, OTHER, Phase.FAILED), Forget(KEY)]


def test_what_older_attempts_left_for_a_rank() -> None:
    book = new_book()
    mine = [key_of(5, attempt=1, tp_rank=1), JobKey(2, 1, "lora", 0, 1)]
    for key in [*mine, key_of(1, attempt=3, tp_rank=1), key_of(5, attempt=1), key_of(5, attempt=1, stage=1, tp_rank=1)]:
        fire(book, offered(key))
    assert [job.key for job in book.left_by_older(0, 1, attempt=3)] == mine
    assert book.left_by_older(0, 1, attempt=1) == []


def test_check_sees_a_book_that_went_wrong() -> None:
    book = new_book()
    fire(book, offered(KEY), offered(key_of(2)), offered(key_of(3, tp_rank=1)))
    queued = [key_of(2), key_of(3, tp_rank=1)]
    wrong: list[tuple[str, int, Callable[[JobBook], None]]] = [
        ("side by side", 1, lambda copy: _put(copy, queued[1], Phase.WRITING)),
        ("one shard", 2, lambda copy: _put(copy, queued[0], Phase.WRITING)),
        ("ended", 1, lambda copy: _put(copy, queued[0], Phase.FAILED)),
        ("doomed", 1, lambda copy: copy._doomed.add(queued[0])),
    ]
    for problem, shards_at_once, spoil in wrong:
        copy = JobBook(shards_at_once, 4, ORPHAN_SECONDS, dict(book.jobs))
        copy.check()
        spoil(copy)
        with pytest.raises(AssertionError, match=problem):
            copy.check()


def _put(book: JobBook, key: JobKey, phase: Phase) -> None:
    job = book.jobs[key]
    book.jobs[key] = type(job)(job.key, job.nbytes, job.client, phase)


# --- any order of events ----------------------------------------------------------------------------------------------


@dataclass
class Life:
    """What was promised for one accepted snapshot. ``owed`` is the client that has not heard of its fate."""

    owed: int | None
    reports: int = 0
    fate: Phase | None = None
    writing: bool = False


SHARDS: list[tuple[Kind, int]] = [("train", 0), ("train", 1), ("lora", 0)]
KEYS = [
    JobKey(attempt, sequence, kind, 0, rank) for attempt, sequence in [(1, 1), (1, 2), (2, 1)] for kind, rank in SHARDS
]
NEXT: dict[Phase, Callable[[JobKey], Event]] = {
    Phase.WRITING: Synced,
    Phase.SYNCING: Renaming,
    Phase.RENAMING: Landed,
    Phase.PRUNING: Pruned,
}


class AnyOrder(RuleBasedStateMachine):
    """Fires legal events at random, and keeps account of what each client is owed."""

    def __init__(self) -> None:
        super().__init__()
        self.book = new_book(shards_at_once=2, max_tries=3)
        self.lives: dict[JobKey, Life] = {}
        self.pauses: dict[JobKey, float] = {}
        self.now = 0.0

    def _keys(self, *phases: Phase) -> list[JobKey]:
        return sorted(key for key, job in self.book.jobs.items() if job.phase in phases)

    def _pick(self, data: st.DataObject, *phases: Phase) -> JobKey:
        return data.draw(st.sampled_from(self._keys(*phases)))

    def _fire(self, event: Event) -> None:
        waiting = set(self._keys(Phase.QUEUED))
        if isinstance(event, Offered):
            waiting.add(event.key)
        instructions = self.book.handle(event)
        self.book.check()
        for instruction in instructions:
            self._carry_out(instruction)
        for start in (instruction.key for instruction in instructions if isinstance(instruction, Start)):
            passed_over = [key for key in self._keys(Phase.QUEUED) if key < start and key in waiting]
            busy = {key.shard for key in self._keys(*ACTIVE, Phase.WAITING, Phase.PARKED)}
            assert all(key.shard in busy for key in passed_over), "the oldest that can start does"

    def _carry_out(self, instruction: Instruction) -> None:
        key = instruction.key
        match instruction:
            case Accept(_, client):
                self.lives.setdefault(key, Life(client)).owed = client
            case Start():
                assert not self.lives[key].writing
                self.lives[key].writing = True
            case Abort():
                assert self.lives[key].writing
            case Pause(_, seconds):
                assert self.lives[key].writing
                self.lives[key].writing = False
                self.pauses[key] = seconds
            case Report(_, client, phase):
                self._reported(self.lives[key], client, phase)
            case Prune():
                assert self.lives[key].fate is Phase.COMMITTED
            case Forget():
                life = self.lives.pop(key)
                assert life.reports >= 1, "nobody was told"
                assert life.owed is None, "the one that asked last was not told"
                self.pauses.pop(key, None)

    def _reported(self, life: Life, client: int | None, phase: Phase) -> None:
        assert client == life.owed, "the report goes to the one that waits, or to nobody if it is gone"
        assert life.reports == 0 or (phase is Phase.COMMITTED and client is not None), (
            "a second report without a reason"
        )
        assert life.fate in (None, phase)
        life.fate, life.owed, life.reports = phase, None, life.reports + 1

    @rule(key=st.sampled_from(KEYS), client=st.integers(1, 3))
    def offer(self, key: JobKey, client: int) -> None:
        again = key in self.book.jobs
        tries = self.book.jobs[key].tries if again else 0
        self._fire(offered(key, client))
        assert self.book.jobs[key].client == client
        assert self.book.jobs[key].tries == tries

    @precondition(lambda self: self._keys(*ACTIVE))
    @rule(data=st.data())
    def goes_on(self, data: st.DataObject) -> None:
        key = self._pick(data, *ACTIVE)
        self._fire(NEXT[self.book.jobs[key].phase](key))

    @precondition(lambda self: self._keys(Phase.WRITING, Phase.SYNCING, Phase.RENAMING))
    @rule(data=st.data(), retryable=st.booleans())
    def breaks(self, data: st.DataObject, retryable: bool) -> None:
        key = self._pick(data, Phase.WRITING, Phase.SYNCING, Phase.RENAMING)
        tries = self.book.jobs[key].tries
        self._fire(Broke(key, retryable, self.now))
        if key in self.book.jobs:
            assert retryable
            assert self.book.jobs[key].tries == tries + 1
            assert self.pauses[key] == retry_pause(tries + 1)

    @precondition(lambda self: self._keys(Phase.WAITING))
    @rule(data=st.data())
    def pause_is_over(self, data: st.DataObject) -> None:
        self._fire(RetryDue(self._pick(data, Phase.WAITING)))

    @precondition(lambda self: self._keys(Phase.QUEUED))
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        self._fire(Parked(self._pick(data, Phase.QUEUED)))

    @precondition(lambda self: self._keys(Phase.PARKED))
    @rule(data=st.data(), drop=st.booleans())
    def unpark(self, data: st.DataObject, drop: bool) -> None:
        key = self._pick(data, Phase.PARKED)
        self._fire(Dropped(key) if drop else Unparked(key))
        assert (key in self.book.jobs) is not drop

    @precondition(lambda self: self.book.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.book.jobs)))
        before = self.book.jobs[key].phase
        self._fire(Cancelled(key))
        assert (key in self.book.jobs) is (before in ACTIVE)

    @rule(client=st.integers(1, 3))
    def client_goes(self, client: int) -> None:
        for life in self.lives.values():
            life.owed = None if life.owed == client else life.owed
        self._fire(ClientGone(client, self.now))

    @rule(seconds=st.sampled_from([1.0, ORPHAN_SECONDS, ORPHAN_SECONDS * 2]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def the_book_holds_what_was_promised(self) -> None:
        assert set(self.lives) == set(self.book.jobs)
        assert {key for key, life in self.lives.items() if life.writing} == set(self._keys(*ACTIVE))

    @invariant()
    def nothing_waits_without_a_reason(self) -> None:
        active = self._keys(*ACTIVE)
        busy = {key.shard for key in [*active, *self._keys(Phase.WAITING, Phase.PARKED)]}
        assert len(active) == 2 or all(key.shard in busy for key in self._keys(Phase.QUEUED))

    def teardown(self) -> None:
        """Let everything come to its end: nothing may be left over, and nobody may be left untold."""
        for _ in range(100):
            for key in self._keys(Phase.WAITING):
                self._fire(RetryDue(key))
            for key in self._keys(Phase.PARKED):
                self._fire(Unparked(key))
            for key in self._keys(*ACTIVE):
                self._fire(NEXT[self.book.jobs[key].phase](key))
        assert self.book.jobs == {}
        assert self.lives == {}


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
