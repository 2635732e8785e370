"""``bench``: what this disk and this host give, and how often saving is worth it."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from ckpt_service.bench.cost import SHARE, Cost, cost_of
from ckpt_service.bench.disk import Rate
from ckpt_service.bench.measure import Limits, Measured, NoSpace, measure
from ckpt_service.cli.common import (
    Exit,
    Json,
    Postfix,
    checked_postfix,
    complain,
    end_on_signals,
    print_json,
    size,
)
from ckpt_service.cli.progress import ProgressLine
from ckpt_service.config import load_config
from ckpt_service.records import SCHEMA_VERSION
from ckpt_service.scan import load_catalog
from ckpt_service.writer import RateLimit, WriteOptions

_GB = 10**9
_DEFAULT_GIGABYTES = 10.0
_LEAST_SCRATCH_BYTES = 1 << 20


def bench(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A directory on the disk that saves will go to.")],
    gigabytes: Annotated[
        float | None,
        typer.Option(
            metavar="N", help="Size of a checkpoint; by default that of the newest complete one in DIR, else 10."
        ),
    ] = None,
    scratch_gigabytes: Annotated[
        float, typer.Option(metavar="N", help="Take no more disk than this at any moment.")
    ] = 1.0,
    seconds: Annotated[float, typer.Option(metavar="S", help="Take about this much time at most.")] = 20.0,
    postfix: Postfix = None,
    as_json: Json = False,
) -> None:
    """Measure a disk and this host: reads, writes, fsync, the writer; and say how often saving costs less than 3 %.

    Writes scratch files of its own into DIR and deletes them, also after Ctrl-C. Exit 8: not enough space for them.
    """
    end_on_signals()
    path, postfix = _existing(directory), checked_postfix(postfix)
    limits = Limits(
        max(_LEAST_SCRATCH_BYTES, int(_positive("--scratch-gigabytes", scratch_gigabytes) * _GB)),
        _positive("--seconds", seconds),
    )
    nbytes = _checkpoint_bytes(path, postfix, gigabytes)
    with ProgressLine() as line:
        try:
            measured = measure(path, limits, _options(), lambda what: line.show(f"measuring: {what} ..."))
        except NoSpace as error:
            complain(str(error))
            sys.exit(Exit.NO_SPACE)
    cost = cost_of(nbytes, measured.host())
    if as_json:
        print_json(_document(path, measured, cost))
    else:
        for text in _lines(measured, cost):
            typer.echo(text)


def _existing(directory: str) -> str:
    if not os.path.isdir(directory):
        raise ValueError(f"DIR={directory}: there is no such directory")
    return os.path.abspath(directory)


def _positive(option: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise ValueError(f"{option} {value}: it must be a number above 0")
    return value


def _checkpoint_bytes(path: str, postfix: str | None, gigabytes: float | None) -> int:
    if gigabytes is not None:
        return int(_positive("--gigabytes", gigabytes) * _GB)
    newest = load_catalog(path, postfix).newest_complete()
    return newest.bytes if newest is not None else int(_DEFAULT_GIGABYTES * _GB)


def _options() -> WriteOptions:
    """Return how the daemon would write here, without the rate limit: what could be had is asked."""
    config = load_config(os.environ)
    return WriteOptions(config.writer_threads, config.chunk_bytes, config.direct_io, RateLimit(0))


def _lines(measured: Measured, cost: Cost) -> list[str]:
    tried = measured.trial
    rows = [
        ("direct write", _rate(measured.direct_write)),
        ("buffered write", f"{_rate(measured.buffered_write)} (with fsync)"),
        ("fsync", f"{measured.sync_seconds * 1000:.1f} ms (a small file)"),
        ("direct read", _rate(measured.direct_read)),
        ("warm read", f"{_rate(measured.warm_read)} (from the page cache)"),
        ("memory copy", f"{_rate(tried.copied)} (into shared memory, one thread)"),
        ("our writer", f"{_rate(tried.written)} ({_mode(tried.direct)}, {_cpu_per_gb(measured):.2f} CPU s a GB)"),
    ]
    return [*(f"{name:<15} {text}" for name, text in rows), *_verdict(measured, cost)]


def _verdict(measured: Measured, cost: Cost) -> list[str]:
    return [
        f"A checkpoint of {size(cost.nbytes)} is durable after {cost.write_seconds:.2f} s.",
        f"It costs a training that keeps all {measured.cores} cores busy up to {cost.lost_seconds:.2f} s: "
        f"{cost.stall_seconds:.2f} s to copy it, {cost.contention_seconds:.2f} s for the CPU time of the daemon.",
        f"Saved every {cost.shortest_interval_seconds():.0f} s or less often, that is less than {SHARE:.0%}.",
    ]


def _rate(rate: Rate | None) -> str:
    return "not to be had on this filesystem" if rate is None else f"{size(rate.bytes_per_second)}/s"


def _mode(direct: bool) -> str:
    return "direct" if direct else "buffered"


def _cpu_per_gb(measured: Measured) -> float:
    return measured.host().cpu_seconds_per_byte * _GB


def _document(path: str, measured: Measured, cost: Cost) -> dict[str, Any]:
    tried = measured.trial
    return {
        "schema_version": SCHEMA_VERSION,
        "directory": path,
        "cores": measured.cores,
        "direct_write": _rate_row(measured.direct_write),
        "buffered_write": _rate_row(measured.buffered_write),
        "fsync_seconds": measured.sync_seconds,
        "direct_read": _rate_row(measured.direct_read),
        "warm_read": _rate_row(measured.warm_read),
        "memory_copy": _rate_row(tried.copied),
        "writer": {
            **(_rate_row(tried.written) or {}),
            "mode": _mode(tried.direct),
            "cpu_seconds_per_gigabyte": _cpu_per_gb(measured),
        },
        "checkpoint": {
            "bytes": cost.nbytes,
            "write_seconds": cost.write_seconds,
            "stall_seconds": cost.stall_seconds,
            "contention_seconds": cost.contention_seconds,
            "lost_seconds": cost.lost_seconds,
            "share": SHARE,
            "shortest_interval_seconds": cost.shortest_interval_seconds(),
        },
    }


def _rate_row(rate: Rate | None) -> dict[str, float] | None:
    if rate is None:
        return None
    return {"bytes": rate.nbytes, "seconds": rate.seconds, "bytes_per_second": rate.bytes_per_second}
