"""One contender, one round, in a process of its own: ``python -m benchmarks.child NAME DIRECTORY ROUND OPTIONS``.

1. Train until the optimizer holds its whole state. Save once: what the first save costs is told apart. Save again and
   count the steps until that is durable: so long the loops have to be, for all that a save costs to fall into its loop.
2. Pairs of loops of the same steps, one that begins with a save and one without; which comes first alternates. Their
   difference is what the save costs, wherever the time went.
3. Saves with no training beside them: CPU time of all processes, and how fast it writes; then one more with a thread
   that looks at memory and descriptors, which would disturb the others.

The last line on standard output is a :class:`Sample` as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import threading
import time
from dataclasses import asdict, dataclass

from benchmarks import processes
from benchmarks.contenders import CONTENDERS, Contender, Pending, sync
from benchmarks.options import Options
from benchmarks.training import Training

_MOST_STEPS = 100
_MARGIN = 1.3  # a save does not always take the same time


@dataclass(frozen=True)
class Sample:
    """What one process measured; times in seconds, sizes in bytes.

    Attributes:
        steps: of one loop.
        first_call: the call of the very first save.
        calls: the training thread inside each save.
        lost: for each pair, the loop with a save less the one without.
        step: the median step without a save.
        worst_step: the longest beside a save under way, without the call; of each loop.
        durable: from the call until files and directory are synced.
        done: until the library called it done, where that comes before the fsync that was added; else as ``durable``.
        quiet_durable: the same with no training beside it.
        cpu_per_gigabyte: of all processes, with no training beside it.
        memory, descriptors: the highest during a save, beyond those before the contender was made.
        unfinished: loops that ended before their save was durable, so what it cost is not whole.
    """

    contender: str
    mode: str
    state_bytes: int
    steps: int
    first_call: float
    calls: list[float]
    lost: list[float]
    step: float
    worst_step: list[float]
    durable: list[float]
    done: list[float]
    quiet_durable: list[float]
    cpu_per_gigabyte: float
    memory: int
    descriptors: int
    unfinished: int


@dataclass
class Watched:
    """A save that a thread follows until it is durable; the thread only waits."""

    contender: Contender
    pending: Pending
    began: float
    call: float
    done: float = 0.0
    durable: float = 0.0
    _thread: threading.Thread | None = None

    def follow(self, before: Watched | None) -> Watched:
        self._thread = threading.Thread(target=self._wait, args=[before])
        self._thread.start()
        return self

    def join(self) -> Watched:
        assert self._thread is not None
        self._thread.join()
        assert self.durable, "the save failed"
        return self

    def is_under_way(self) -> bool:
        return not self.durable

    def _wait(self, before: Watched | None) -> None:
        self.pending.wait()
        self.done = time.monotonic() - self.began
        if not self.contender.syncs:
            sync_tree(self.pending.path)
        self.durable = time.monotonic() - self.began
        if before is not None and not self.contender.removes:
            remove(before.pending.path)


@dataclass
class Loop:
    """What a loop took: the whole of it, its steps, and of those the ones beside a save under way."""

    wall: float
    steps: list[float]
    beside: list[float]
    save: Watched | None = None
    unfinished: bool = False


class Saving:
    """Numbers the saves of a contender and follows them."""

    def __init__(self, contender: Contender) -> None:
        self._contender = contender
        self._last: Watched | None = None
        self._step = 0

    def save(self) -> Watched:
        self._step += 1
        began = time.monotonic()
        pending = self._contender.save(self._step)
        call = time.monotonic() - began
        self._last = Watched(self._contender, pending, began, call).follow(self._last)
        return self._last


def run_loop(training: Training, steps: int, saving: Saving | None) -> Loop:
    """Train; with ``saving``, save first. Does not wait for the save."""
    began = time.monotonic()
    save = saving.save() if saving is not None else None
    seconds, beside = [], []
    for _ in range(steps):
        start, under_way = time.monotonic(), save is not None and save.is_under_way()
        training.step()
        seconds.append(time.monotonic() - start)
        if under_way:
            beside.append(seconds[-1])
    wall = time.monotonic() - began
    return Loop(wall, seconds, beside, save, save is not None and save.is_under_way())


def steps_until_durable(training: Training, saving: Saving) -> int:
    """Save, and return how many steps it takes until that is durable."""
    save = saving.save()
    steps = 0
    while save.is_under_way() and steps < _MOST_STEPS:
        training.step()
        steps += 1
    save.join()
    return steps


def run_pair(training: Training, steps: int, saving: Saving, *, save_first: bool) -> tuple[Loop, Loop]:
    """Return the loop without a save and the one with it; each begins when nothing is under way."""
    without = None if save_first else run_loop(training, steps, None)
    beside = run_loop(training, steps, saving)
    assert beside.save is not None
    beside.save.join()
    return without or run_loop(training, steps, None), beside


def measure(name: str, directory: str, number: int, options: Options) -> Sample:
    """Measure one contender in ``directory``, which must be empty."""
    training = Training(options.nbytes, options.batch)
    training.warm_up()
    own = [os.getpid()]
    memory_before, descriptors_before = processes.memory_bytes(own), processes.descriptors(own)
    contender = CONTENDERS[name].make(directory, training)
    training.guard = contender.guard
    saving = Saving(contender)
    first = saving.save().join()
    steps = max(options.interval, int(steps_until_durable(training, saving) * _MARGIN))
    pairs = [run_pair(training, steps, saving, save_first=(number + n) % 2 == 0) for n in range(options.saves)]
    saves = [beside.save for _, beside in pairs if beside.save is not None]

    def everybody() -> list[int]:
        return processes.family(os.getpid()) + contender.processes()

    gigabytes = training.nbytes() / 1e9
    cpu_before = processes.cpu_seconds(everybody())
    quiet = [saving.save().join() for _ in range(options.quiet)]
    cpu = processes.cpu_seconds(everybody()) - cpu_before
    with processes.Peaks(everybody) as peaks:
        saving.save().join()
    mode = contender.mode()
    contender.close()
    return Sample(
        contender=name,
        mode=mode,
        state_bytes=training.nbytes(),
        steps=steps,
        first_call=first.call,
        calls=[save.call for save in saves],
        lost=[beside.wall - without.wall for without, beside in pairs],
        step=statistics.median(step for without, _ in pairs for step in without.steps),
        worst_step=[max(beside.beside, default=max(beside.steps)) for _, beside in pairs],
        durable=[save.durable for save in saves],
        done=[save.done for save in saves],
        quiet_durable=[save.durable for save in quiet],
        cpu_per_gigabyte=cpu / gigabytes / options.quiet,
        memory=peaks.memory_bytes - memory_before,
        descriptors=peaks.descriptors - descriptors_before,
        unfinished=sum(beside.unfinished for _, beside in pairs),
    )


def sync_tree(path: str) -> None:
    """fsync a file, or all files and directories below a directory, and the directory that it lies in."""
    if os.path.isdir(path):
        for directory, _, names in os.walk(path):
            for name in names:
                sync(os.path.join(directory, name))
            sync(directory)
    else:
        sync(path)
    sync(os.path.dirname(path))


def remove(path: str) -> None:
    """Delete a file or a directory with all that is in it."""
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def main() -> None:
    name, directory, number, options = sys.argv[1:]
    sample = measure(name, directory, int(number), Options.from_json(options))
    print(json.dumps(asdict(sample)))


if __name__ == "__main__":  # the processes of others import this module again
    main()
