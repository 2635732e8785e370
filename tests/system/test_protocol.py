"""Hostile and broken clients at the socket of a real daemon: each is refused, and everybody else goes on.

All of them meet one daemon with one honest trainer, which must be able to commit after each.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.processes import RunDirectory, wait_for
from support.shards import LOADABLE, SEALS, image_of, manifest, memory, snapshot

from ckpt_service import image, wire
from ckpt_service.messages import (
    Accepted,
    Committed,
    DaemonMessage,
    Hello,
    Offer,
    Refused,
    Retention,
    Settle,
    Welcome,
    daemon_messages,
)
from ckpt_service.records import ShardManifest
from trainer_hooks import Checkpointer

LAYOUT = snapshot(LOADABLE).layout


class Client:
    """A client that says whatever the test wants."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.socket.connect(str(path))
        except OSError:
            self.socket.close()
            raise
        self.socket.settimeout(20)
        self._decoder = wire.Decoder()
        self._received: list[DaemonMessage] = []

    def send(self, data: bytes, descriptors: list[int] | None = None) -> None:
        sent = socket.send_fds(self.socket, [data], descriptors or [])
        if rest := data[sent:]:
            self.socket.sendall(rest)

    def next(self) -> DaemonMessage | None:
        """Return the next message, None at the end of the connection."""
        while not self._received:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._received += [daemon_messages.validate_json(frame.body) for frame in self._decoder.feed(data)]
        return self._received.pop(0)

    def refusal(self) -> str:
        """Return why the daemon refuses; whatever else it says first is skipped."""
        while (message := self.next()) is not None:
            if isinstance(message, Refused):
                return message.message
        raise AssertionError("the daemon closed the connection without a word")

    def greet(self, directory: RunDirectory, **changes: object) -> Client:
        plain = {"version": "0", "role": "trainer", "pid": os.getpid(), "root": str(directory.root), "postfix": None}
        hello = Hello.model_validate({**plain, "run_id": "cafe0001", "attempt": 77, "slots": 2, **changes})
        self.send(wire.encode(hello))
        return self

    def welcomed(self, directory: RunDirectory) -> Client:
        self.greet(directory)
        assert isinstance(self.next(), Welcome)
        return self


class Service:
    """A daemon, an honest trainer in this process, and a place for the files of the hostile ones."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.socket = directory.root.parent / "s"
        self.bad = directory.root / "checkpoint_99"
        self.bad.mkdir(parents=True)
        self.process = directory.interpreter(
            *("-m", "ckpt_service", "run", str(directory.root), "--socket", str(self.socket))
        ).process
        wait_for(self.socket.exists, "the daemon listens")
        self.checkpointer = Checkpointer(directory.root, service=self.socket)
        self.steps = 0

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        client = Client(self.socket)
        with client.socket:
            yield client

    def descriptors(self) -> list[str]:
        found = []
        for entry in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(entry))
        # While a status is published, its file and directory are open for a moment.
        publishing = (str(self.directory.root / ".ckpt_service"), str(self.socket.parent) + "/.")
        passing = [t for t in found if t.startswith(publishing) and not t.endswith(".lock")]
        return sorted(t.split(":")[0] for t in found if t not in passing and t != str(self.socket.parent))

    def rests(self) -> bool:
        """Whether all that was ever accepted is committed and let go of."""
        status = self.directory.status()
        return status is not None and status.totals.committed > self.steps and not status.writing

    def commits(self) -> None:
        """The honest trainer saves, and no other daemon than the first one has answered."""
        self.steps += 1
        self.checkpointer.save(self.steps, state={"value": torch.full((1000,), 1.0)}).wait_committed(30)
        assert self.process.poll() is None, "the daemon is dead"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = RunDirectory(tmp_path_factory.mktemp("protocol") / "run")
    service = Service(directory)
    service.commits()
    offers_honestly(service)
    yield service
    service.checkpointer.close()
    os.kill(service.process.pid, signal.SIGTERM)
    assert service.process.wait(30) == 0
    directory.clean_up()


@pytest.fixture(autouse=True)
def unharmed(service: Service) -> Iterator[None]:
    """After every test the daemon holds what it held before, and serves the others."""
    wait_for(service.rests, "nothing is held any more")
    before = service.descriptors()
    yield
    service.commits()
    wait_for(lambda: service.descriptors() == before, f"the daemon has closed what it was given: {before}", 10)
    assert not [path for path in service.bad.iterdir() if path.suffix != ".pt"], "no litter"


def offer(service: Service, stated: ShardManifest) -> bytes:
    message = Offer(manifest=stated, directory=str(service.bad), umask=0o022, retention=Retention())
    return wire.encode(message, 2)


def stated(**changes: object) -> ShardManifest:
    plain = {"run_id": "cafe0001", "attempt": 77, "stage": 99, "pp": 100, "step": 1, "bytes": LAYOUT.nbytes}
    return manifest(**{**plain, **changes})


def offered(service: Service, frame: bytes, fd: int, directory: int | None = None) -> str:
    """Offer as a trainer that was welcomed; return the refusal."""
    with service.client() as client:
        client.welcomed(service.directory)
        opened = os.open(service.bad, os.O_RDONLY | os.O_DIRECTORY) if directory is None else directory
        try:
            client.send(frame, [fd, opened])
        finally:
            os.close(fd)
            os.close(opened)
        return client.refusal()


def offers_honestly(service: Service) -> None:
    """What every test here leaves one detail of wrong; were this refused, they would show nothing."""
    with service.client() as client:
        client.welcomed(service.directory)
        good = stated(step=4)
        fd, opened = memory(image_of(good)), os.open(service.bad, os.O_RDONLY | os.O_DIRECTORY)
        try:
            client.send(offer(service, good), [fd, opened])
        finally:
            os.close(fd)
            os.close(opened)
        assert isinstance(client.next(), Accepted)
        while not isinstance(message := client.next(), Committed):
            assert message is not None
    assert (service.bad / "ckpt_step_4_epoch_0.pt").stat().st_size == LAYOUT.nbytes


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "is not ours"),
        (struct.pack(">II", 0xFFFFFFFF, 0), "a frame of 4294967295 bytes"),
        (struct.pack(">II", 2, 3) + b"{}", "3 descriptors"),
        (struct.pack(">II", 0, 0), "not a message"),
        (struct.pack(">II", 4, 0) + b"\xff\xfe\x00\x01", "not a message"),
        (struct.pack(">II", 2, 2) + b"{}", "descriptors of a message got lost"),
        (struct.pack(">II", 40000, 0) + b"[" * 40000, "not a message"),
        (struct.pack(">II", 15, 0) + b'{"type":"evil"}', "not a message"),
    ],
    ids=["garbage", "huge", "too many descriptors", "empty", "not text", "no descriptors", "deep", "unknown message"],
)
def test_what_is_not_a_message_is_refused(service: Service, data: bytes, reason: str) -> None:
    with service.client() as client:
        client.send(data)
        assert reason in client.refusal()
        assert client.next() is None, "the connection is closed"


@pytest.mark.parametrize("first", ["offer", "settle"])
def test_who_does_not_say_hello_first_is_refused(service: Service, first: str) -> None:
    with service.client() as client, open(service.bad / "x.pt", "wb") as file:
        if first == "offer":
            client.send(offer(service, stated()), [file.fileno(), file.fileno()])
        else:
            client.send(wire.encode(Settle(attempt=1, stage=0, tp_rank=0)))
        assert "hello first" in client.refusal()
        assert client.next() is None


def test_a_tool_may_not_offer(service: Service) -> None:
    with service.client() as client, open(service.bad / "x.pt", "wb") as file:
        client.greet(service.directory, role="tool")
        client.send(offer(service, stated()), [file.fileno(), file.fileno()])
        client.refusal()


def test_another_protocol_version_is_refused_naming_both(service: Service) -> None:
    with service.client() as client:
        client.greet(service.directory, protocol=2, version="9.9.9")
        reason = client.refusal()
    assert "speaks protocol 1" in reason
    assert "9.9.9 speaks 2" in reason


def test_the_hello_of_another_protocol_is_understood_although_it_says_more(service: Service) -> None:
    body = b'{"type":"hello","protocol":2,"version":"9.9.9","role":"observer","later":{"more":1}}'
    with service.client() as client:
        client.send(struct.pack(">II", len(body), 0) + body)
        assert "9.9.9 speaks 2" in client.refusal()


@pytest.mark.parametrize("change", [{"root": "/somewhere/else"}, {"postfix": "other"}])
def test_another_run_directory_is_refused_naming_both(service: Service, change: dict[str, str]) -> None:
    with service.client() as client:
        client.greet(service.directory, **change)
        reason = client.refusal()
    assert str(service.directory.root) in reason
    assert next(iter(change.values())) in reason


@pytest.mark.parametrize("change", [{"attempt": 78}, {"run_id": "cafe0002"}])
def test_an_offer_of_another_attempt_or_run_is_refused(service: Service, change: dict[str, object]) -> None:
    other = ShardManifest.model_validate({**stated().model_dump(), **change})
    assert "another run or attempt" in offered(service, offer(service, other), memory(image_of(other)))


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW])
def test_memory_that_may_still_change_its_size_is_refused(service: Service, seals: int) -> None:
    assert "sealed" in offered(service, offer(service, stated()), memory(image_of(stated()), seals=seals))


def test_memory_that_is_shorter_than_stated_is_refused(service: Service) -> None:
    short = memory(image_of(stated())[:-4096])
    assert f"and the manifest says {LAYOUT.nbytes}" in offered(service, offer(service, stated()), short)


@pytest.mark.parametrize("size", [0, LAYOUT.nbytes])
def test_an_image_of_no_bytes_is_refused(service: Service, size: int) -> None:
    nothing = stated(bytes=0)
    assert "the manifest says 0" in offered(service, offer(service, nothing), memory(bytes(size)))


def test_a_size_that_is_no_whole_number_of_blocks_is_refused(service: Service) -> None:
    odd = stated(bytes=LAYOUT.nbytes - 1)
    offered(service, offer(service, odd), memory(image_of(odd)))


def test_a_pipe_instead_of_memory_is_refused(service: Service) -> None:
    reader, writer = os.pipe()
    os.close(writer)
    offered(service, offer(service, stated()), reader)


def test_an_ordinary_file_instead_of_memory_is_refused(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(image_of(stated()))
    offered(service, offer(service, stated()), os.open(path, os.O_RDWR))


def test_memory_that_cannot_be_written_to_is_refused(service: Service) -> None:
    # The daemon could not put the checksums in.
    offered(service, offer(service, stated()), memory(image_of(stated()), seals=SEALS | fcntl.F_SEAL_WRITE))


def test_a_file_instead_of_a_directory_is_refused(service: Service, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file = os.open(tmp_path / "file", os.O_RDONLY)
    assert "not a directory" in offered(service, offer(service, stated()), memory(image_of(stated())), file)


def test_a_manifest_that_is_not_the_offered_one_is_refused(service: Service) -> None:
    reason = offered(service, offer(service, stated()), memory(image_of(stated(step=2))))
    assert "another one" in reason


def damaged(position: int, content: bytes) -> bytes:
    data = image_of(stated())
    data[position : position + len(content)] = content
    return bytes(data)


def record_header(name: str) -> int:
    record = LAYOUT.find(name)
    assert record is not None
    return record.header


DEEP = b'{"format_version": 1, "user": ' + b"[" * 7000


@pytest.mark.parametrize(
    "content",
    [
        os.urandom(LAYOUT.nbytes),
        bytes(LAYOUT.nbytes),
        damaged(LAYOUT.nbytes - 98, os.urandom(98)),
        damaged(LAYOUT.directory, b"\xff" * 64),
        damaged(record_header(image.PICKLE), b"\xff" * 30),
        damaged(record_header("data/0") + 26, b"\xff\xff\xff\xff"),
        damaged(100, b"\xff" * 64),
        damaged(100, DEEP),
        damaged(LAYOUT.directory + 28, b"\x01\x00"),
    ],
    ids=["random", "zeros", "tail", "directory", "header", "lengths", "manifest", "deep manifest", "name"],
)
def test_an_image_that_makes_no_sense_is_refused(service: Service, content: bytes) -> None:
    offered(service, offer(service, stated()), memory(content))


def test_the_wrong_number_of_descriptors_is_refused(service: Service) -> None:
    with service.client() as client:
        client.welcomed(service.directory)
        message = Offer(manifest=stated(), directory=str(service.bad), umask=0o022, retention=Retention())
        fd = memory(image_of(stated()))
        client.send(wire.encode(message, 1), [fd])
        os.close(fd)
        assert "2 descriptors" in client.refusal()


def test_an_offer_that_is_repeated_is_one_snapshot(service: Service) -> None:
    with service.client() as client:
        client.welcomed(service.directory)
        message = Offer(manifest=stated(), directory=str(service.bad), umask=0o022, retention=Retention())
        directory, fd = os.open(service.bad, os.O_RDONLY), memory(image_of(stated()))
        for _ in range(20):
            client.send(wire.encode(message, 2), [fd, directory])
        os.close(directory)
        os.close(fd)
        answers = [client.next() for _ in range(21)]
        while sum(isinstance(answer, Accepted) for answer in answers) < 20:
            answers.append(client.next())
        assert not any(answer is None or isinstance(answer, Refused) for answer in answers)
    service.commits()
    wait_for(lambda: not list(service.bad.glob(".*.partial")), "all are written")
    assert (service.bad / "ckpt_step_1_epoch_0.pt").read_bytes()[:4] == b"PK\3\4"


def test_descriptors_that_nobody_asked_for_are_closed(service: Service) -> None:
    with service.client() as client, open(os.devnull) as null:
        client.welcomed(service.directory)
        client.send(struct.pack(">II", 500, 0))
        with contextlib.suppress(OSError):  # it may be cut off before the end
            for _ in range(40):
                client.send(b" ", [null.fileno()] * 4)
            client.socket.shutdown(socket.SHUT_WR)
        while client.next() is not None:
            pass


@pytest.mark.parametrize("part", [b"", b"\0\0\0", struct.pack(">II", 500, 0) + b'{"type":'])
def test_half_a_frame_and_then_silence_holds_up_nobody(service: Service, part: bytes) -> None:
    with service.client() as client:
        client.send(part) if part else None
        service.commits()


def test_coming_and_going_is_harmless(service: Service) -> None:
    for number in range(200):
        with service.client() as client:
            if number % 2:
                client.greet(service.directory, role="tool")


def test_a_trainer_that_never_reads_is_cut_off(service: Service) -> None:
    frame = wire.encode(Settle(attempt=1, stage=0, tp_rank=0))
    with service.client() as client:
        client.welcomed(service.directory)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(200):
                client.send(frame * 50)
        service.commits()
        while client.next() is not None:  # what was on its way; then the end, not a wait for more
            pass


def test_another_user_is_refused(service: Service) -> None:
    if os.getuid() != 0:
        pytest.skip("becoming another user takes root")
    # The socket is closed to others; open it, and the directories above, to see that the daemon looks for itself.
    script = f"""
import os, socket, sys
os.setgid(65534); os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
try:
    sock.connect({str(service.socket)!r})
    sys.exit(10 if not sock.recv(1) else 11)
except PermissionError:
    sys.exit(12)
except ConnectionResetError:
    sys.exit(10)
"""

    def result() -> int:
        code = os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-S", "-c", script])
        assert isinstance(code, int)
        return code

    assert result() == 12
    above = [parent for parent in service.socket.parents if parent.stat().st_mode & 0o005 != 0o005]
    modes = {path: path.stat().st_mode & 0o7777 for path in (*above, service.socket)}
    try:
        for path, mode in modes.items():
            path.chmod(mode | 0o007)
        assert result() == 10
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
