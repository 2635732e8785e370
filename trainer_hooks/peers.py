"""What the other ranks have committed, where their files cannot be seen. Shell; used on the client's thread only.

On a directory that all hosts share, the files themselves say it. Elsewhere each writer leaves a list of what it holds
in the exchange after each commit, and hands the lists of the others to its daemon with each offer: retention there
knows which checkpoints are complete. A rank that is not heard of is unknown, and what it lacks may still come.
"""

from __future__ import annotations

import json
from contextlib import suppress

from ckpt_service import scan
from ckpt_service.messages import Peers
from ckpt_service.records import RankHolds
from trainer_hooks.exchange import Exchange
from trainer_hooks.start import Run

_HOLDS_IN_A_MESSAGE = 20_000  # about 20 bytes each, and a frame of the protocol holds a MiB


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
        own = [s for s in shards if (s.name.kind, s.tp_rank) == ("train", place.tp_rank)]
        mine = [shard.manifest for shard in own if shard.manifest is not None and not shard.problem]
        holds = sorted({(manifest.attempt, manifest.sequence) for manifest in mine})
        with suppress(RuntimeError, OSError):  # it is gone with its rank; the others hold back, up to their bound
            self._exchange.put(_key(place.stage, place.tp_rank), json.dumps(holds).encode())

    def forget(self) -> None:
        """Have everything told again: the next daemon may not know it, and the last one may not have heard it."""
        self._heard.clear()

    def news(self) -> list[Peers]:
        """Return what the other ranks hold and has changed since the last call, in messages of bounded size."""
        before = dict(self._heard)
        with suppress(RuntimeError, OSError):
            for rank in self._others():
                found = self._exchange.peek(_key(*rank))
                if found is not None:
                    self._heard[rank] = RankHolds(stage=rank[0], tp_rank=rank[1], holds=json.loads(found))
        return batches([holds for rank, holds in self._heard.items() if before.get(rank) != holds])

    def _others(self) -> list[tuple[int, int]]:
        place = self._run.topology
        ranks = [(stage, tp) for stage in range(place.pp) for tp in range(place.tp)]
        return [rank for rank in ranks if rank != (place.stage, place.tp_rank)]


def batches(changed: list[RankHolds]) -> list[Peers]:
    """Put as many ranks into a message as its frame will surely hold; 128 ranks with long histories need several."""
    messages: list[list[RankHolds]] = []
    room = 0
    for rank in changed:
        if not messages or len(rank.holds) > room:
            messages.append([])
            room = _HOLDS_IN_A_MESSAGE
        messages[-1].append(rank)
        room -= len(rank.holds) + 1
    return [Peers(ranks=ranks) for ranks in messages]


def _key(stage: int, tp_rank: int) -> str:
    return f"holds/{stage}/{tp_rank}"
