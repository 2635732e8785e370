"""What the other ranks have committed, where their files cannot be seen. Shell; used on the client's thread only.

On a directory that all hosts share, the files themselves say it. Elsewhere each writer leaves a list of what it holds
in the exchange after each commit, and hands the lists of the others to its daemon with each offer: retention there
knows which checkpoints are complete. A rank that is not heard of is unknown, and what it lacks may still come.
"""

from __future__ import annotations

import json
from contextlib import suppress

from ckpt_service import scan
from ckpt_service.records import Peers, RankHolds
from trainer_hooks.exchange import Exchange
from trainer_hooks.start import Run


class PeerNews:
    """Tells the others what this rank holds, and hears what they do."""

    def __init__(self, run: Run, exchange: Exchange) -> None:
        self._run = run
        self._exchange = exchange
        self._heard: dict[tuple[int, int], RankHolds] = {}

    def publish(self) -> None:
        """Leave the list of what this rank holds now."""
        place = self._run.topology
        shards = scan.scan_directory(self._run.stage_directory, place.stage)
        mine = [s.manifest for s in shards if s.tp_rank == place.tp_rank and s.manifest is not None and not s.problem]
        holds = sorted({(manifest.attempt, manifest.sequence) for manifest in mine})
        with suppress(RuntimeError, OSError):  # it is gone with its rank; the others hold back, up to their bound
            self._exchange.put(_key(place.stage, place.tp_rank), json.dumps(holds).encode())

    def news(self) -> Peers | None:
        """Return what the other ranks hold if any of it has changed since the last call, else None."""
        before = dict(self._heard)
        with suppress(RuntimeError, OSError):
            for rank in self._others():
                found = self._exchange.peek(_key(*rank))
                if found is not None:
                    self._heard[rank] = RankHolds(stage=rank[0], tp_rank=rank[1], holds=json.loads(found))
        return Peers(ranks=list(self._heard.values())) if self._heard != before else None

    def _others(self) -> list[tuple[int, int]]:
        place = self._run.topology
        ranks = [(stage, tp) for stage in range(place.pp) for tp in range(place.tp)]
        return [rank for rank in ranks if rank != (place.stage, place.tp_rank)]


def _key(stage: int, tp_rank: int) -> str:
    return f"holds/{stage}/{tp_rank}"
