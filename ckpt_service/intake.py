"""Two descriptors and an offer to a snapshot that the daemon owns. Shell.

The memory comes from another process, so nothing in it is trusted before it is checked: the size may not change any
more (seals), the layout lies inside it, and its manifest is the one that was offered. Bytes of tensors are never
looked at.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import threading
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone

from ckpt_service import image, scan
from ckpt_service.errors import CkptError, ProtocolError, from_os_error
from ckpt_service.jobs import JobKey
from ckpt_service.messages import Offer
from ckpt_service.storage import LocalDirectory
from ckpt_service.writer import Snapshot

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@dataclass
class Held:
    """An accepted snapshot with everything that it needs; released once, when its job has ended.

    ``stop`` ends its write; ``submitted_at`` is a monotonic time in seconds, ``accepted_at`` the same moment for
    people; ``bytes_done`` moves while it is written.
    """

    offer: Offer
    snapshot: Snapshot
    directory: LocalDirectory
    mapping: mmap.mmap
    submitted_at: float
    accepted_at: datetime
    stop: threading.Event = field(default_factory=threading.Event)
    bytes_done: int = 0
    write_began_at: float | None = None

    @property
    def key(self) -> JobKey:
        """The identity of its job."""
        return job_key(self.offer)

    @property
    def path(self) -> str:
        """Where it will be, for people to read."""
        return os.path.join(self.offer.directory, self.snapshot.final_name)

    def release(self) -> None:
        """Unmap the memory and close the directory."""
        self.snapshot.view.release()
        _unmap(self.mapping)
        self.directory.close()


def job_key(offer: Offer) -> JobKey:
    """Return the identity of the snapshot that is offered."""
    m = offer.manifest
    return JobKey(m.attempt, m.sequence, m.kind, m.stage, m.tp_rank)


def take(offer: Offer, descriptors: list[int]) -> Held:
    """Check an offer against its descriptors and take both over; they stay the caller's when this raises.

    Raises:
        ProtocolError: the descriptors or the image are not what the offer says; or (``retryable``) this process lacks
            memory or descriptors, and may have them later.
    """
    step = offer.manifest.step
    if len(descriptors) != 2:
        raise ProtocolError(f"an offer needs 2 descriptors, and {len(descriptors)} came", op="offer")
    memory, directory = descriptors
    try:
        mapping = _map_sealed(memory, offer)
        try:
            snapshot = _checked(offer, mapping)
            _require_directory(directory)
        except BaseException:
            _unmap(mapping)
            raise
    except OSError as error:
        raise from_os_error(error, op=f"taking the snapshot of step {step}", kind=ProtocolError, step=step) from error
    except CkptError as error:
        raise ProtocolError(f"step {step} is not what was offered: {error}", op="offer") from error
    os.close(memory)  # its mapping has a descriptor of its own
    return Held(
        offer,
        snapshot,
        LocalDirectory(directory, offer.directory),
        mapping,
        submitted_at=time.monotonic(),
        accepted_at=datetime.now(timezone.utc),
    )


def _refusal(offer: Offer, error: OSError | CkptError) -> CkptError:
    """Tell what is wrong with the offer from what this process lacks to take it."""
    step = offer.manifest.step
    if isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EMFILE, errno.ENFILE):
        return from_os_error(error, op=f"taking step {step}", kind=ProtocolError)
    return ProtocolError(f"step {step} is not what was offered: {error}", op="offer")


def close_all(descriptors: list[int]) -> None:
    """Close descriptors that nobody takes over."""
    for descriptor in descriptors:
        os.close(descriptor)


def _unmap(mapping: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # the traceback of an error still looks at it; it goes with that
        mapping.close()


def _map_sealed(memory: int, offer: Offer) -> mmap.mmap:
    seals = fcntl.fcntl(memory, fcntl.F_GET_SEALS)
    if seals & _SEALS != _SEALS:
        raise ProtocolError("its memory is not sealed against shrinking and growing")
    size = os.fstat(memory).st_size
    if not 0 < offer.manifest.bytes <= size or offer.manifest.bytes % image.ALIGNMENT:
        raise ProtocolError(f"its memory has {size} bytes, and the manifest says {offer.manifest.bytes}")
    return mmap.mmap(memory, offer.manifest.bytes, flags=mmap.MAP_SHARED)


def _checked(offer: Offer, mapping: mmap.mmap) -> Snapshot:
    view = memoryview(mapping)
    try:
        if scan.parse_manifest(view[: image.MANIFEST_END]) != offer.manifest:
            raise ProtocolError("the manifest in the image is another one")
        return Snapshot(offer.manifest, image.parse(view), view)
    except BaseException:
        view.release()
        raise


def _require_directory(descriptor: int) -> None:
    if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
        raise ProtocolError("its second descriptor is not a directory")
