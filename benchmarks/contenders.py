"""Ours and the others behind one face: save a state, say when it is there, and what it took.

Each is used as its documentation says, with the options that make it fastest on a CPU. A library is imported only where
it is used.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from benchmarks.training import Training


@dataclass(frozen=True)
class Pending:
    """A save under way: ``wait`` returns when the library calls it done; ``path`` is its file or directory."""

    wait: Callable[[], object]
    path: str


class Contender:
    """One way to save.

    Attributes:
        syncs: what it calls done is durable; else the benchmark adds an fsync of all its files and directories.
        removes: it deletes older checkpoints itself; else the benchmark does.
    """

    syncs: ClassVar[bool] = False
    removes: ClassVar[bool] = False

    def __init__(self, directory: str, training: Training) -> None:
        self.directory = directory
        self.training = training

    def save(self, step: int) -> Pending:
        raise NotImplementedError

    def guard(self) -> AbstractContextManager[Any]:
        """Return the context in which the optimizer may change what is saved."""
        return nullcontext()

    def processes(self) -> list[int]:
        """Return the pids of helpers that are no children of this process."""
        return []

    def mode(self) -> str:
        """Return how it really wrote: "direct" or "buffered"."""
        return "buffered"

    def close(self) -> None:
        """End what was started."""

    def path(self, step: int) -> str:
        return os.path.join(self.directory, f"step_{step}")


class Ours(Contender):
    syncs = True
    removes = True

    def __init__(self, directory: str, training: Training) -> None:
        super().__init__(directory, training)
        from trainer_hooks import Checkpointer

        self._checkpointer = Checkpointer(directory, keep_last=1)
        self._checkpointer.track(model=training.model, optimizer=training.optimizer)

    def save(self, step: int) -> Pending:
        ticket = self._checkpointer.save(step)
        return Pending(ticket.committed.result, self.directory)

    def processes(self) -> list[int]:
        return [self._status().daemon.pid]

    def mode(self) -> str:
        """Return what the log of the daemon says of the last commit."""
        with open(self._own(f"daemon.{self._host()}.log")) as file:
            said = [line.rstrip().rpartition("(")[2].rstrip(")") for line in file if "committed " in line]
        return said[-1]

    def close(self) -> None:
        self._checkpointer.close()

    def _status(self) -> Any:
        from ckpt_service.records import ServiceStatus

        with open(self._own(f"status.{self._host()}.json"), "rb") as file:
            return ServiceStatus.model_validate_json(file.read())

    def _own(self, name: str) -> str:
        return os.path.join(self.directory, ".ckpt_service", name)

    def _host(self) -> str:
        from ckpt_service.ownership import host_name

        return host_name(os.environ)


class TorchSave(Contender):
    """The blocking save that everybody starts with, made durable and atomic as it should be."""

    syncs = True

    def save(self, step: int) -> Pending:
        import torch

        path = self.path(step)
        with open(f"{path}.tmp", "wb") as file:
            torch.save(self.training.state(), file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(f"{path}.tmp", path)
        sync(self.directory)
        return Pending(lambda: None, path)


class _Dcp(Contender):
    """Shared by both modes. The next save waits for the one before, since DCP has no queue."""

    def __init__(self, directory: str, training: Training) -> None:
        super().__init__(directory, training)
        import torch.distributed as dist

        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
        dist.init_process_group("gloo")
        self._last: Any = None

    def _options(self) -> dict[str, Any]:
        raise NotImplementedError

    def save(self, step: int) -> Pending:
        import torch.distributed.checkpoint as dcp

        if self._last is not None:
            self._last.result()
        self._last = dcp.async_save(self.training.state(), checkpoint_id=self.path(step), **self._options())
        return Pending(self._last.result, self.path(step))

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


class DcpThread(_Dcp):
    def _options(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        return {"async_checkpointer_type": AsyncCheckpointerType.THREAD}


class DcpProcess(_Dcp):
    def __init__(self, directory: str, training: Training) -> None:
        super().__init__(directory, training)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        # What is left out needs CUDA.
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
        self._stager = DefaultStager(options)

    def _options(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        return {"async_checkpointer_type": AsyncCheckpointerType.PROCESS, "async_stager": self._stager}

    def close(self) -> None:
        self._stager.close()
        super().close()


class TorchCheckpointing(Contender):
    def __init__(self, directory: str, training: Training) -> None:
        super().__init__(directory, training)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))

    def save(self, step: int) -> Pending:
        future = self._manager.save(self.path(step), self.training.state())
        return Pending(future.result, self.path(step))

    def guard(self) -> AbstractContextManager[Any]:
        guard: AbstractContextManager[Any] = self._manager.lock()
        return guard

    def close(self) -> None:
        self._manager.close()


class Lightning(Contender):
    def __init__(self, directory: str, training: Training) -> None:
        super().__init__(directory, training)
        from lightning.fabric.plugins import TorchCheckpointIO
        from lightning.pytorch.plugins.io import AsyncCheckpointIO

        self._done: dict[str, threading.Event] = {}
        done = self._done

        class Telling(TorchCheckpointIO):
            """What it wraps, and it says when a file is there."""

            def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
                super().save_checkpoint(checkpoint, path, storage_options)
                done[str(path)].set()

        self._io = AsyncCheckpointIO(Telling())

    def save(self, step: int) -> Pending:
        event = self._done[self.path(step)] = threading.Event()
        self._io.save_checkpoint(self.training.state(), self.path(step))
        return Pending(event.wait, self.path(step))

    def close(self) -> None:
        self._io.teardown()


@dataclass(frozen=True)
class Entry:
    """A contender by its name: what people read, how it is made, and the packages that it needs."""

    title: str
    make: type[Contender]
    needs: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """Return the packages that are not installed; none is imported."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


CONTENDERS = {
    "ours": Entry("ours", Ours),
    "torch_save": Entry("torch.save + fsync", TorchSave),
    "dcp_thread": Entry("DCP async_save, thread", DcpThread),
    "dcp_process": Entry("DCP async_save, process", DcpProcess),
    "torch_checkpointing": Entry("torch_checkpointing", TorchCheckpointing, ("torch_checkpointing",)),
    "lightning": Entry("Lightning AsyncCheckpointIO", Lightning, ("lightning",)),
}


def sync(path: str) -> None:
    """fsync a file or directory."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
