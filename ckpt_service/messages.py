"""What trainer and daemon say to each other: one pydantic model for each message. Pure.

Frames (:mod:`ckpt_service.wire`) carry these as JSON. A protocol has the same messages on both sides; what two releases
of different protocols still understand of each other are :class:`Announcement` and :class:`Refused`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from ckpt_service.records import Count, OnFull, RankHolds, Record, ShardManifest, Size

PROTOCOL = 1


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


# --- messages: trainer to daemon --------------------------------------------------------------------------------------


class Hello(_Message):
    """The first message of a client. ``role`` "tool" only asks; "trainer" keeps the daemon alive."""

    type: Literal["hello"] = "hello"
    protocol: int = PROTOCOL
    version: str
    role: Literal["trainer", "tool"]
    pid: Count
    root: str
    postfix: str | None
    run_id: str | None = None
    attempt: Count = 0
    stage: Count = 0
    tp_rank: Count = 0
    slots: Size = 1
    on_full: OnFull = "block"


class Announcement(Record):
    """What a hello of any protocol says, also one that this release cannot read as a whole."""

    type: Literal["hello"] = "hello"
    protocol: int
    version: str = "an unknown release"


class Retention(_Message):
    """The retention policy of a trainer, as it travels with every offer."""

    keep_last: Size = 2
    keep_every: Size | None = None


class Offer(_Message):
    """A snapshot, with two descriptors: the sealed memory of its image, and its final directory.

    ``directory`` is the absolute path for people to read; the daemon works relative to the descriptor. ``umask`` is the
    trainer's, so that the file gets the mode that the trainer would have given it.
    """

    type: Literal["offer"] = "offer"
    manifest: ShardManifest
    directory: str
    umask: Count
    retention: Retention


class Settle(_Message):
    """Ask to be told when nothing of older attempts of this shard is pending. ``cancel``: do not wait, drop it."""

    type: Literal["settle"] = "settle"
    attempt: Count
    stage: Count
    tp_rank: Count
    cancel: bool = False


class Park(_Message):
    """Ask that the write of a snapshot of this client does not begin; answered by :class:`Parked`."""

    type: Literal["park"] = "park"
    snapshot_id: str


class Unpark(_Message):
    """Decide about a parked snapshot: ``drop`` it for a newer one, or let it be written after all."""

    type: Literal["unpark"] = "unpark"
    snapshot_id: str
    drop: bool


class Peers(_Message):
    """What other ranks hold, for a host that does not see their files; replaces what was said of them before."""

    type: Literal["peers"] = "peers"
    ranks: list[RankHolds]


class Lost(_Message):
    """A save of this client failed, or was skipped, before its snapshot could be handed over; for the status."""

    type: Literal["lost"] = "lost"
    manifest: ShardManifest
    skipped: bool
    message: str
    code: str | None = None
    hint: str | None = None


class Blocked(_Message):
    """A save of this client has waited so long for a free slot; for the status."""

    type: Literal["blocked"] = "blocked"
    seconds: float = Field(ge=0)


class Leave(_Message):
    """Ask the daemon to write what it holds and then to leave; answered by :class:`Left`, from any client.

    ``patient``: however long that takes, and whoever is connected; else within its grace time, as after SIGTERM.
    """

    type: Literal["leave"] = "leave"
    patient: bool


class Goodbye(_Message):
    """A clean close: this client needs the daemon no longer, once all is written."""

    type: Literal["goodbye"] = "goodbye"


# --- messages: daemon to trainer --------------------------------------------------------------------------------------


class Welcome(_Message):
    """The answer to a hello."""

    type: Literal["welcome"] = "welcome"
    protocol: int = PROTOCOL
    version: str
    pid: Count
    host: str


class Refused(Record):
    """The hello or the offer (``snapshot_id``) is not taken. ``retryable``: offering it again may succeed.

    The one message that crosses between releases, so unknown fields are ignored and none may ever be taken away.
    ``protocol`` is the daemon's.
    """

    type: Literal["refused"] = "refused"
    protocol: int = PROTOCOL
    snapshot_id: str | None = None
    message: str
    retryable: bool = False
    code: str | None = None
    hint: str | None = None


class Accepted(_Message):
    """The daemon holds the snapshot: it survives the trainer."""

    type: Literal["accepted"] = "accepted"
    snapshot_id: str


class Progress(_Message):
    """Some bytes of a snapshot went to the disk. Sent to all who wait, also for their own turn."""

    type: Literal["progress"] = "progress"
    snapshot_id: str
    bytes_done: Count


class Committed(_Message):
    """The snapshot is durable under its final name."""

    type: Literal["committed"] = "committed"
    snapshot_id: str
    path: str
    seconds: float


FailureReason = Literal["error", "superseded", "cancelled"]


class Failed(_Message):
    """The snapshot did not become a checkpoint and will not be tried again."""

    type: Literal["failed"] = "failed"
    snapshot_id: str
    reason: FailureReason
    message: str
    code: str | None = None
    hint: str | None = None


class Parked(_Message):
    """The answer to a park; ``ok`` is False when the write has begun or the snapshot is not here."""

    type: Literal["parked"] = "parked"
    snapshot_id: str
    ok: bool


class Settled(_Message):
    """The answer to a settle, repeated while ``pending`` snapshots remain; ``bytes_done`` moves as they are written."""

    type: Literal["settled"] = "settled"
    pending: Count
    bytes_done: Count


class Left(_Message):
    """The answer to a leave, when the daemon leaves; ``lost`` says of each snapshot not written why it was not."""

    type: Literal["left"] = "left"
    lost: list[str]


ClientMessage = Hello | Offer | Settle | Park | Unpark | Peers | Lost | Blocked | Leave | Goodbye
DaemonMessage = Welcome | Refused | Accepted | Progress | Committed | Failed | Parked | Settled | Left

client_messages: TypeAdapter[ClientMessage] = TypeAdapter(Annotated[ClientMessage, Field(discriminator="type")])
daemon_messages: TypeAdapter[DaemonMessage] = TypeAdapter(Annotated[DaemonMessage, Field(discriminator="type")])
