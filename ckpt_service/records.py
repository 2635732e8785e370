"""The models of what stands in files. Pure.

Everything read from outside passes through one of these, so the inside may trust its types and ranges. Unknown fields
of files are ignored (a newer version may add some); messages are strict, since both sides agreed on a version.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PlainSerializer, model_validator

from ckpt_service.naming import Kind

FORMAT_VERSION = 1
SCHEMA_VERSION = 1

Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]


def _rfc3339(moment: datetime) -> str:
    text = moment.astimezone(timezone.utc).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z").replace(".000Z", "Z")


Moment = Annotated[AwareDatetime, PlainSerializer(_rfc3339, return_type=str)]
"""A UTC time; ISO 8601 with a Z when written. One without a zone is refused: nobody could say when it was."""


class Record(BaseModel):
    """What all files of ours have in common: they do not change, and fields of a newer release are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


# --- files ------------------------------------------------------------------------------------------------------------


class ShardManifest(Record):
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


class MeshRecord(Record):
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


class TensorSharding(Record):
    """How one tensor of a state is split; the file holds the rank's own part as a plain tensor.

    ``path`` are the keys (or indices) that lead to it from the top of the state, ``mesh`` the index of its mesh, and
    ``shape`` that of the whole tensor. ``placements`` has one entry for each dimension of the mesh: which dimension of
    the tensor is split along it, or None where each rank has the same.
    """

    path: list[str | int]
    mesh: Count
    placements: list[Count | None]
    shape: list[Count]


class ShardingRecord(Record):
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


class Origin(Record):
    """The checkpoint that an attempt resumed from. ``explicit``: the user named it (a roll-back)."""

    attempt: Count
    sequence: Count
    explicit: bool


class TopologyRecord(Record):
    """The sizes of the mesh: pipeline stages, data-parallel replicas, tensor-parallel ranks."""

    pp: Size
    dp: Size
    tp: Size


class Attempt(Record):
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


class RankHolds(Record):
    """The (attempt, sequence) of the training shards that one rank has committed and still holds."""

    stage: Count
    tp_rank: Count
    holds: list[tuple[int, int]]


class PeersFile(Record):
    """What ranks whose files this host may not see have told its trainers."""

    format_version: Size = FORMAT_VERSION
    ranks: list[RankHolds]


# --- the status file --------------------------------------------------------------------------------------------------

DaemonState = Literal["starting", "recovering", "idle", "writing", "degraded", "draining", "stopped"]


class CheckpointRef(Record):
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


class DaemonStatus(Record):
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


class QueueStatus(Record):
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


class WritingStatus(Record):
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


class PendingStatus(Record):
    """A snapshot that waits for its turn."""

    snapshot_id: str
    kind: Kind
    step: Count
    epoch: Count
    stage: Count
    tp_rank: Count
    bytes_total: Count
    submitted_at: Moment


class HeldBack(Record):
    """A peer that keeps us from deleting: it is ``behind`` saves behind."""

    stage: Count
    tp_rank: Count
    behind: Count


class ShardStatus(Record):
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


class Totals(Record):
    """Counts since the daemon started."""

    submitted: Count = 0
    committed: Count = 0
    failed: Count = 0
    retried: Count = 0
    skipped: Count = 0
    superseded: Count = 0
    pruned: Count = 0
    bytes_written: Count = 0


class StorageStatus(Record):
    """The filesystem under the root."""

    free_bytes: Count
    total_bytes: Count
    checkpoints_left: Count | None


class ErrorEntry(Record):
    """One failure, as a person should read it."""

    at: Moment
    code: str | None
    message: str
    hint: str | None
    step: Count | None
    stage: Count | None
    tp_rank: Count | None


class ServiceStatus(Record):
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
