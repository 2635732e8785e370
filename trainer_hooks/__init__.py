"""What a training process uses: snapshots of its state, handed to the daemon, and the way back."""

from ckpt_service.catalog import CheckpointId
from ckpt_service.retention import RetentionPolicy
from trainer_hooks.checkpointer import Checkpointer
from trainer_hooks.preemption import Preemption
from trainer_hooks.resume import ResumePoint
from trainer_hooks.tickets import SaveTicket
from trainer_hooks.topology import Topology

__all__ = ["CheckpointId", "Checkpointer", "Preemption", "ResumePoint", "RetentionPolicy", "SaveTicket", "Topology"]
