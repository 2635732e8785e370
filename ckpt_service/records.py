"""The models at the edges: what stands in files and what travels over the socket. Pure.

Everything read from outside passes through one of these, so the inside may trust its types and ranges. Unknown fields
of files are ignored (a newer version may add some); messages are strict, since both sides agreed on a version.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PlainSerializer, TypeAdapter, model_validator

from ckpt_service.naming import Kind

FORMAT_VERSION = 1
SCHEMA_VERSION = 1
PROTOCOL = 1

Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]


def _rfc3339(moment: datetime) -> str:
    text = moment.astimezone(timezone.utc).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z").replace(".000Z", "Z")


Moment = Annotated[AwareDatetime, PlainSerializer(_rfc3339, return_type=str)]
"""A UTC time; ISO 8601 with a Z when written. One without a zone is refused: nobody could say when it was."""


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


# --- files ------------------------------------------------------------------------------------------------------------


class ShardManifest(_File):
    """What a shard file says of itself; the first record of its image. ``bytes`` is the size of the whole file."""

    format_version: Size = FORMAT_VERSION
    kind: Kind
    run_id: str
    attempt: Size
    sequence: Size
    repeat: Count = 0
    step: Count
    epoch: Count
    stage: Count
    tp_rank: Count
    dp_rank: Count = 0
    pp: Size
    tp: Size
    dp: Size
    dp_shards: Size = 1
    created_at: Moment
    producer: str
    bytes: Count
    tensors: Count
    user: dict[str, str | int | float | bool | None] = Field(default_factory=dict)

    @property
    def snapshot_id(self) -> str:
        """The name of this snapshot in messages and in the status."""
        plain = f"{self.attempt}-{self.sequence}-{self.stage}-{self.tp_rank}"
        return plain if self.kind == "train" else f"{self.kind}-{plain}"


class MeshRecord(_File):
    """Ranks in a grid over which tensors are split, as the rank that saved sees it.

    One entry a dimension: its name (None where the trainer gave none), its size, and where the rank stands in it.
    """

    dim_names: list[str] | None
    shape: list[Size]
    coordinate: list[Count]

    @model_validator(mode="after")
    def _belongs_together(self) -> MeshRecord:
        names = self.shape if self.dim_names is None else self.dim_names
        if not len(names) == len(self.shape) == len(self.coordinate):
            raise ValueError("dim_names, shape and coordinate must have one entry for each dimension")
        if any(at >= size for at, size in zip(self.coordinate, self.shape, strict=True)):
            raise ValueError(f"coordinate {self.coordinate} lies outside a mesh of {self.shape}")
        return self


class TensorSharding(_File):
    """How one tensor of a state is split; the file holds the rank's own part as a plain tensor.

    ``path`` are the keys (or indices) that lead to it from the top of the state, ``mesh`` the index of its mesh, and
    ``shape`` that of the whole tensor. ``placements`` has one entry for each dimension of the mesh: which dimension of
    the tensor is split along it, or None where each rank has the same.
    """

    path: list[str | int]
    mesh: Count
    placements: list[Count | None]
    shape: list[Count]


class ShardingRecord(_File):
    """The split tensors (DTensors) in a shard file."""

    meshes: list[MeshRecord]
    tensors: list[TensorSharding]

    @model_validator(mode="after")
    def _belongs_together(self) -> ShardingRecord:
        for tensor in self.tensors:
            if tensor.mesh >= len(self.meshes):
                raise ValueError(f"{tensor.path}: there is no mesh {tensor.mesh}")
            if len(tensor.placements) != len(self.meshes[tensor.mesh].shape):
                raise ValueError(f"{tensor.path}: placements must have one entry for each dimension of the mesh")
            if any(dim is not None and dim >= len(tensor.shape) for dim in tensor.placements):
                raise ValueError(f"{tensor.path}: a dimension is split that the tensor does not have")
        return self


def save_of(snapshot_id: str) -> tuple[int, int]:
    """Return (attempt, sequence) of a snapshot by its name in messages and in the status."""
    attempt, sequence = snapshot_id.split("-")[-4:-2]
    return int(attempt), int(sequence)


class Origin(_File):
    """The checkpoint that an attempt resumed from. ``explicit``: the user named it (a roll-back)."""

    attempt: Count
    sequence: Count
    explicit: bool


class TopologyRecord(_File):
    """The sizes of the mesh: pipeline stages, data-parallel replicas, tensor-parallel ranks."""

    pp: Size
    dp: Size
    tp: Size


class Attempt(_File):
    """One start of the trainer on a run directory."""

    format_version: Size = FORMAT_VERSION
    run_id: str
    n: Size
    launch: str | None = None
    host: str
    pid: Count
    pid_start: Count
    topology: TopologyRecord
    slots: Size
    started_at: Moment
    resumed_from: Origin | None = None


class RankHolds(_File):
    """The (attempt, sequence) of the training shards that one rank has committed and still holds."""

    stage: Count
    tp_rank: Count
    holds: list[tuple[int, int]]


class PeersFile(_File):
    """What ranks whose files this host may not see have told its trainers."""

    format_version: Size = FORMAT_VERSION
    ranks: list[RankHolds]


# --- the status file --------------------------------------------------------------------------------------------------

DaemonState = Literal["starting", "recovering", "idle", "writing", "degraded", "draining", "stopped"]


class CheckpointRef(_File):
    """One checkpoint, named by its order and by the numbers that the user knows."""

    attempt: Count
    sequence: Count
    epoch: Count
    step: Count


class CommittedRef(CheckpointRef):
    """A shard that is durable. ``seconds`` from accepted to committed."""

    path: str
    bytes: Count
    committed_at: Moment
    seconds: float


class CompleteRef(CheckpointRef):
    """The newest checkpoint that all ranks have."""

    ranks_committed: Count
    ranks_expected: Count
    committed_at: Moment


class DaemonStatus(_File):
    """The daemon itself."""

    pid: Count
    pid_start: Count
    version: str
    protocol: Count
    socket: str
    state: DaemonState
    started_at: Moment
    heartbeat_at: Moment


OnFull = Literal["block", "skip", "replace"]
"""What ``save()`` does when all slots are taken."""


class QueueStatus(_File):
    """What waits, in the daemon and in the trainers.

    ``capacity`` is the slots of all connected trainers; ``blocked_seconds`` how long their saves have waited for one,
    added up since the daemon started.
    """

    depth: Count
    capacity: Count
    bytes: Count
    on_full: OnFull
    blocked_seconds: float


WritePhase = Literal["writing", "syncing", "renaming", "pruning"]


class WritingStatus(_File):
    """A snapshot that is being written."""

    snapshot_id: str
    kind: Kind
    step: Count
    epoch: Count
    stage: Count
    tp_rank: Count
    phase: WritePhase
    bytes_done: Count
    bytes_total: Count
    bytes_per_second: float | None
    eta_seconds: float | None


class PendingStatus(_File):
    """A snapshot that waits for its turn."""

    snapshot_id: str
    kind: Kind
    step: Count
    epoch: Count
    stage: Count
    tp_rank: Count
    bytes_total: Count
    submitted_at: Moment


class HeldBack(_File):
    """A peer that keeps us from deleting: it is ``behind`` saves behind."""

    stage: Count
    tp_rank: Count
    behind: Count


class ShardStatus(_File):
    """The history of one (kind, stage, tp rank)."""

    kind: Kind
    stage: Count
    tp_rank: Count
    last_submitted: CheckpointRef | None
    last_committed: CommittedRef | None
    kept: list[CheckpointRef]
    held_back_by: list[HeldBack]
    consecutive_failures: Count
    last_error: str | None


class Totals(_File):
    """Counts since the daemon started."""

    submitted: Count = 0
    committed: Count = 0
    failed: Count = 0
    retried: Count = 0
    skipped: Count = 0
    superseded: Count = 0
    pruned: Count = 0
    bytes_written: Count = 0


class StorageStatus(_File):
    """The filesystem under the root."""

    free_bytes: Count
    total_bytes: Count
    checkpoints_left: Count | None


class ErrorEntry(_File):
    """One failure, as a person should read it."""

    at: Moment
    code: str | None
    message: str
    hint: str | None
    step: Count | None
    stage: Count | None
    tp_rank: Count | None


class ServiceStatus(_File):
    """The status file of one host: what is queued, being written, safe, and failed."""

    schema_version: Size = SCHEMA_VERSION
    host: str
    root: str
    run_id: str | None
    attempt: Count | None
    daemon: DaemonStatus
    queue: QueueStatus
    writing: list[WritingStatus]
    pending: list[PendingStatus]
    shards: list[ShardStatus]
    last_complete: CompleteRef | None
    totals: Totals
    storage: StorageStatus | None
    errors: list[ErrorEntry]


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


class Announcement(_File):
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


class Refused(_File):
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
