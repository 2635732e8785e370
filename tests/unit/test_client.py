"""The trainer's side of the socket, with a channel that the test holds."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter

from ckpt_service.config import load_config
from ckpt_service.messages import ClientMessage, Hello, client_messages
from ckpt_service.wire import Decoder
from trainer_hooks import client as module
from trainer_hooks.client import Pending, ServiceClient

CLIENT_MESSAGES: TypeAdapter[ClientMessage] = client_messages


def hello(attempt: int) -> Hello:
    return Hello(
        version="0", role="trainer", pid=1, root="/runs", postfix=None, run_id="run", attempt=attempt, on_full="replace"
    )


class Line:
    """A channel to a daemon that never answers."""

    def __init__(self) -> None:
        self.here, self.there = socket.socketpair()
        self.sent: list[ClientMessage] = []

    def fileno(self) -> int:
        return self.here.fileno()

    def send(self, frame: bytes, _: list[int]) -> None:
        self.sent += [CLIENT_MESSAGES.validate_json(found.body) for found in Decoder().feed(frame)]

    def receive(self) -> list[Any]:
        if not self.here.recv(10):
            raise ConnectionResetError("the daemon is gone")
        return []

    def close(self) -> None:
        self.here.close()
        self.there.close()


def test_an_attempt_that_begins_while_it_reconnects_is_introduced(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[Line] = []
    greeted: list[int] = []
    reconnects, go, told = threading.Event(), threading.Event(), threading.Event()

    class Second(Line):
        def send(self, frame: bytes, descriptors: list[int]) -> None:
            super().send(frame, descriptors)
            told.set()

    def connect(_: object, greeting: Hello, __: object) -> Line:
        greeted.append(greeting.attempt)
        if lines:
            reconnects.set()
            assert go.wait(30)
        lines.append(Second() if lines else Line())
        return lines[-1]

    monkeypatch.setattr(module, "connect", connect)
    client = ServiceClient(SimpleNamespace(), hello(1), load_config({}))  # type: ignore[arg-type]
    client.start()
    lines[0].there.close()  # the daemon dies, and another one is being started
    assert reconnects.wait(30)
    client.begin(hello(2))  # a resume after own saves
    go.set()
    assert told.wait(30)
    assert greeted == [1, 1]
    assert lines[1].sent[0] == hello(2), "else every offer of the new attempt would be refused"
    client.close()


def test_kinds_are_told_apart() -> None:
    """Each kind counts its saves by itself: what gives way is the first LoRA save, not the final training save."""

    def pending(kind: str, *, final: bool) -> Pending:
        manifest = SimpleNamespace(sequence=1, kind=kind, snapshot_id=f"{kind}-1")
        return Pending(SimpleNamespace(manifest=manifest, directory=Path()), -1, SimpleNamespace(), final, bool)  # type: ignore[arg-type]

    client = ServiceClient(SimpleNamespace(), hello(1), load_config({}))  # type: ignore[arg-type]
    for each in (pending("train", final=True), pending("lora", final=False)):
        client.submit(each)
    assert client.replaceable() == [(1, "lora")]
