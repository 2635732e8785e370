"""``python -m benchmarks``: measure ours and the others in turn, store the result, make a table and a chart of it."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import chart, machine, report
from benchmarks.contenders import CONTENDERS
from benchmarks.options import Options
from ckpt_service.bench import disk

ROOT = machine.ROOT
RESULTS = ROOT / "benchmarks" / "results"
_COPIES = 4  # of the state on the disk at once, at most: the last, the next, and what a library keeps beside them
_CHILD_SECONDS = 900
# Threads of a training that spin while they wait make a busy machine many times slower, and the noise hides all else.
_QUIET_THREADS = {"OMP_WAIT_POLICY": "passive"}


class Failed(Exception):
    """A contender could not be measured; the message says why."""


def main() -> int:
    given = _parser().parse_args()
    try:
        if given.render is not None:
            return _render(Path(given.render))
        options = Options(given.gigabytes, given.saves, given.interval, given.batch, given.quiet)
        names = _chosen(given.only)
        if given.rounds < 1:
            raise ValueError(f"--rounds {given.rounds}: it must be at least 1")
    except ValueError as error:
        _say(f"benchmarks: {error}")
        return 2
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with _scratch(given.directory) as place:
        needed, free = _COPIES * options.nbytes, shutil.disk_usage(place).free
        if free < needed:
            _say(f"benchmarks: {needed / 1e9:.1f} GB are needed in {given.directory}, and {free / 1e9:.1f} GB are free")
            _say("choose another disk with --directory, or less with --gigabytes")
            return 8
        document = measure(names, options, given.rounds, place)
    _store(document, Path(given.results), given.label)
    failed = [name for name in names if name in document["not_measured"] and not CONTENDERS[name].missing()]
    return 1 if failed or not document["loads"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    defaults = Options()
    parser.add_argument("--gigabytes", type=float, default=defaults.gigabytes, help="size of the state")
    parser.add_argument("--rounds", type=int, default=3, help="processes for each contender")
    parser.add_argument("--saves", type=int, default=defaults.saves, help="pairs of loops in each process")
    parser.add_argument("--interval", type=int, default=defaults.interval, help="steps of a loop, at least")
    parser.add_argument("--batch", type=int, default=defaults.batch, help="rows of a batch: more make steps longer")
    parser.add_argument("--quiet", type=int, default=defaults.quiet, help="saves with no training beside them")
    parser.add_argument("--only", default="", help=f"some of {','.join(CONTENDERS)}")
    parser.add_argument("--directory", default=str(ROOT / "build"), help="where to write: the disk that is measured")
    parser.add_argument("--results", default=str(RESULTS), help="where to store the result")
    parser.add_argument("--label", default="", help="a word at the end of the result's name")
    parser.add_argument(
        "--render", metavar="FILE.json", help="make table and chart of a stored result, measure nothing"
    )
    return parser


def _chosen(only: str) -> list[str]:
    names = only.split(",") if only else list(CONTENDERS)
    for name in names:
        if name not in CONTENDERS:
            raise ValueError(f"--only {only}: there is no {name!r}; there are {', '.join(CONTENDERS)}")
    return names


def measure(names: Sequence[str], options: Options, rounds: int, place: str) -> dict[str, Any]:
    """Measure the named contenders, all rounds of them in turn; those that cannot be are named with the reason."""
    facts = machine.facts(place)
    not_measured = {name: _why_not(name, names) for name in CONTENDERS}
    not_measured = {name: reason for name, reason in not_measured.items() if reason}
    samples, ceilings = [], []
    for number in range(rounds):
        _say(f"round {number + 1} of {rounds}: the disk alone")
        ceilings.append(_ceiling(place, options.nbytes))
        for name in names:
            if name in not_measured:
                continue
            _say(f"round {number + 1} of {rounds}: {CONTENDERS[name].title}")
            try:
                samples.append(_in_a_process(place, "child", name, options, str(number)))
            except Failed as error:
                not_measured[name] = str(error)
                _say(f"{CONTENDERS[name].title}: {error}")
    _say("loads")
    try:
        loads = _in_a_process(place, "loading", None, options, str(rounds))
    except Failed as error:
        loads = []
        _say(f"loads: {error}")
    return {
        "schema_version": 1,
        "facts": facts,
        "options": asdict(options),
        "rounds": rounds,
        "samples": [sample for sample in samples if sample["contender"] not in not_measured],
        "not_measured": not_measured,
        "ceiling": ceilings,
        "loads": loads,
    }


def _why_not(name: str, names: Sequence[str]) -> str:
    if name not in names:
        return "left out by --only"
    missing = CONTENDERS[name].missing()
    return f"{', '.join(missing)} not installed" if missing else ""


def _ceiling(place: str, nbytes: int) -> dict[str, dict[str, float] | None]:
    path = os.path.join(place, "ceiling")
    direct = disk.write_direct(path, nbytes)
    return {
        "direct": None if direct is None else asdict(direct),
        "buffered": asdict(disk.write_buffered(path, nbytes)),
    }


def _in_a_process(place: str, module: str, name: str | None, options: Options, number: str) -> Any:
    """Run a module in a directory of its own; return what the last line of its output says."""
    directory = tempfile.mkdtemp(dir=place)
    log = os.path.join(place, "errors")
    arguments = [*([name] if name else []), directory, number, options.to_json()]
    try:
        with open(log, "w+") as errors:
            done = subprocess.run(
                [sys.executable, "-m", f"benchmarks.{module}", *arguments],
                cwd=ROOT,
                env={**os.environ, **_QUIET_THREADS},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                timeout=_CHILD_SECONDS,
                check=False,
            )
            errors.seek(0)
            said = errors.read().strip().splitlines()
    except subprocess.TimeoutExpired as error:
        raise Failed(f"it took more than {_CHILD_SECONDS} s") from error
    finally:
        shutil.rmtree(directory)
    if done.returncode != 0 or not done.stdout.strip():
        raise Failed(f"it ended with {done.returncode}: {said[-1] if said else 'no message'}".replace(directory, "DIR"))
    return json.loads(done.stdout.strip().splitlines()[-1])


def _store(document: dict[str, Any], results: Path, label: str) -> None:
    facts = document["facts"]
    name = "-".join(filter(None, (facts["measured_at"][:10], machine.kind(facts), label)))
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    _render(path)


def _render(path: Path) -> int:
    """Make the table and, where matplotlib is installed, the chart of a stored result."""
    try:
        document = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"--render {path}: {error}") from error
    text = report.render(document)
    path.with_suffix(".md").write_text(text)
    print(text)
    try:
        chart.draw(document, str(path.with_suffix(".png")))
    except ImportError:
        _say("no chart: matplotlib is not installed (pip install -e '.[bench]')")
    return 0


@contextmanager
def _scratch(directory: str) -> Iterator[str]:
    os.makedirs(directory, exist_ok=True)
    place = tempfile.mkdtemp(prefix="benchmark-", dir=directory)
    try:
        yield place
    finally:
        shutil.rmtree(place)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
