"""What other ranks hold, cut into messages that a frame of the protocol holds."""

from __future__ import annotations

from ckpt_service import wire
from ckpt_service.records import RankHolds
from trainer_hooks.peers import batches


def test_many_ranks_with_long_histories_fit_into_frames() -> None:
    ranks = [
        RankHolds(stage=stage, tp_rank=tp, holds=[(900_000 + n, 900_000 + n) for n in range(900)])
        for stage in range(16)
        for tp in range(8)
    ]
    messages = batches(ranks)
    assert [rank for message in messages for rank in message.ranks] == ranks
    for message in messages:
        wire.encode(message)  # raises if it is too long
    assert len(messages) == 6, "as few as will do"


def test_no_news_are_no_message() -> None:
    assert batches([]) == []


def test_a_rank_with_a_very_long_history_has_a_message_of_its_own() -> None:
    few = RankHolds(stage=0, tp_rank=0, holds=[(1, 1)])
    many = RankHolds(stage=0, tp_rank=1, holds=[(1, n) for n in range(25_000)])
    assert [len(message.ranks) for message in batches([few, many, few])] == [1, 1, 1]
