"""The models at the edges: files forgive what they do not know, messages do not, and times are UTC."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from ckpt_service import messages
from ckpt_service.messages import Offer, client_messages, daemon_messages
from ckpt_service.records import Attempt, ServiceStatus, ShardManifest

MANIFEST: dict[str, Any] = {
    "format_version": 1,
    "kind": "train",
    "run_id": "51ab09cd",
    "attempt": 2,
    "sequence": 31,
    "repeat": 1,
    "step": 5200,
    "epoch": 6,
    "stage": 3,
    "tp_rank": 1,
    "dp_rank": 0,
    "pp": 4,
    "tp": 2,
    "dp": 8,
    "dp_shards": 1,
    "created_at": "2027-03-04T05:06:07.089Z",
    "producer": "ckpt-service 0.1.0, torch 2.9.0",
    "bytes": 40960,
    "tensors": 17,
    "user": {"loss": 2.5, "best": True, "note": "warm-up", "tokens": 123, "parent": None},
}

ATTEMPT: dict[str, Any] = {
    "format_version": 1,
    "run_id": "51ab09cd",
    "n": 2,
    "launch": "job-77.0",
    "host": "gpu-node-03",
    "pid": 311,
    "pid_start": 99123,
    "topology": {"pp": 4, "dp": 8, "tp": 2},
    "slots": 2,
    "started_at": "2027-03-04T05:00:00Z",
    "resumed_from": {"attempt": 1, "sequence": 12, "explicit": False},
}

STATUS: dict[str, Any] = {
    "schema_version": 1,
    "host": "gpu-node-03",
    "root": "/scratch/llm",
    "run_id": "51ab09cd",
    "attempt": 2,
    "daemon": {
        "pid": 401,
        "pid_start": 99200,
        "version": "0.1.0",
        "protocol": 1,
        "socket": "/run/user/1001/ckpt-service/0f3c.sock",
        "state": "writing",
        "started_at": "2027-03-04T05:00:01Z",
        "heartbeat_at": "2027-03-04T06:30:00.250Z",
    },
    "queue": {"depth": 3, "capacity": 4, "bytes": 9000000000, "on_full": "skip", "blocked_seconds": 1.25},
    "writing": [
        {
            "snapshot_id": "2-31-3-1",
            "kind": "train",
            "step": 5200,
            "epoch": 6,
            "stage": 3,
            "tp_rank": 1,
            "phase": "syncing",
            "bytes_done": 2900000000,
            "bytes_total": 3000000000,
            "bytes_per_second": 1500000000.0,
            "eta_seconds": 0.25,
        }
    ],
    "pending": [
        {
            "snapshot_id": "lora-2-7-3-0",
            "kind": "lora",
            "step": 5300,
            "epoch": 6,
            "stage": 3,
            "tp_rank": 0,
            "bytes_total": 50000000,
            "submitted_at": "2027-03-04T06:29:58.500Z",
        }
    ],
    "shards": [
        {
            "kind": "train",
            "stage": 3,
            "tp_rank": 0,
            "last_submitted": {"attempt": 2, "sequence": 31, "epoch": 6, "step": 5200},
            "last_committed": {
                "attempt": 2,
                "sequence": 30,
                "epoch": 6,
                "step": 5100,
                "path": "/scratch/llm/checkpoint_3/ckpt_step_5100_epoch_6_tp0.pt",
                "bytes": 3000000000,
                "committed_at": "2027-03-04T06:20:00Z",
                "seconds": 2.75,
            },
            "kept": [{"attempt": 2, "sequence": 29, "epoch": 6, "step": 5000}],
            "held_back_by": [{"stage": 2, "tp_rank": 1, "behind": 3}],
            "consecutive_failures": 1,
            "last_error": "write failed: Input/output error",
        }
    ],
    "last_complete": {
        "attempt": 2,
        "sequence": 29,
        "epoch": 6,
        "step": 5000,
        "ranks_committed": 8,
        "ranks_expected": 8,
        "committed_at": "2027-03-04T06:10:00Z",
    },
    "totals": {
        "submitted": 60,
        "committed": 55,
        "failed": 1,
        "retried": 2,
        "skipped": 1,
        "superseded": 1,
        "pruned": 49,
        "bytes_written": 165000000000,
    },
    "storage": {"free_bytes": 70000000000, "total_bytes": 100000000000, "checkpoints_left": 23},
    "errors": [
        {
            "at": "2027-03-04T06:00:00Z",
            "code": "EIO",
            "message": "writing step 4900 failed: Input/output error",
            "hint": "check the disk and the kernel log",
            "step": 4900,
            "stage": 3,
            "tp_rank": 0,
        }
    ],
}

BEFORE_THE_FIRST: dict[str, Any] = {
    **STATUS,
    "run_id": None,
    "attempt": None,
    "daemon": {**STATUS["daemon"], "state": "starting"},
    "writing": [],
    "pending": [],
    "shards": [{**STATUS["shards"][0], "last_submitted": None, "last_committed": None, "last_error": None}],
    "last_complete": None,
    "storage": None,
    "errors": [],
}

OFFER: dict[str, Any] = {
    "type": "offer",
    "manifest": MANIFEST,
    "directory": "/scratch/llm/checkpoint_3",
    "umask": 18,
    "retention": {"keep_last": 2, "keep_every": None},
}

FILES = [(ShardManifest, MANIFEST), (Attempt, ATTEMPT), (ServiceStatus, STATUS), (ServiceStatus, BEFORE_THE_FIRST)]
FROM_TRAINERS: list[dict[str, Any]] = [
    {
        "type": "hello",
        "protocol": 1,
        "version": "0.1.0",
        "role": "trainer",
        "pid": 311,
        "root": "/scratch/llm",
        "postfix": None,
        "run_id": "51ab09cd",
        "attempt": 2,
        "stage": 3,
        "tp_rank": 1,
        "slots": 2,
        "on_full": "skip",
    },
    OFFER,
    {"type": "settle", "attempt": 2, "stage": 3, "tp_rank": 1, "cancel": True},
    {"type": "park", "snapshot_id": "4-13-0-1"},
    {"type": "unpark", "snapshot_id": "4-13-0-1", "drop": True},
    {"type": "peers", "ranks": [{"stage": 0, "tp_rank": 1, "holds": [[4, 12], [4, 13]]}]},
    {"type": "lost", "manifest": MANIFEST, "skipped": False, "message": "no", "code": "EIO", "hint": None},
    {"type": "blocked", "seconds": 0.5},
    {"type": "leave", "patient": True},
    {"type": "goodbye"},
]
FROM_DAEMONS: list[dict[str, Any]] = [
    {"type": "welcome", "protocol": 1, "version": "0.1.0", "pid": 401, "host": "gpu-node-03"},
    {
        "type": "refused",
        "protocol": 1,
        "snapshot_id": "2-31-3-1",
        "message": "no",
        "retryable": False,
        "code": "ENOMEM",
        "hint": "free memory",
    },
    {"type": "accepted", "snapshot_id": "2-31-3-1"},
    {"type": "progress", "snapshot_id": "2-31-3-1", "bytes_done": 4096},
    {"type": "committed", "snapshot_id": "2-31-3-1", "path": "/p.pt", "seconds": 2.5},
    {
        "type": "failed",
        "snapshot_id": "2-31-3-1",
        "reason": "superseded",
        "message": "a newer one is there",
        "code": None,
        "hint": None,
    },
    {"type": "parked", "snapshot_id": "4-13-0-1", "ok": False},
    {"type": "settled", "pending": 1, "bytes_done": 4096},
    {"type": "left", "lost": ["step 3 was not written"]},
]
MESSAGES = [(client_messages, values) for values in FROM_TRAINERS] + [(daemon_messages, v) for v in FROM_DAEMONS]


def type_of(values: object) -> str | None:
    return values.get("type") if isinstance(values, dict) else None


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "values"), FILES)
def test_a_file_comes_back_as_it_was(model: type[BaseModel], values: dict[str, Any]) -> None:
    parsed = model.model_validate_json(json.dumps(values))
    again = parsed.model_dump_json()
    assert json.loads(again) == values
    assert list(json.loads(again)) == list(values), "the order of the document"
    assert model.model_validate_json(again) == parsed


@pytest.mark.parametrize(("model", "values"), FILES)
def test_what_a_newer_version_adds_to_a_file_is_ignored(model: type[BaseModel], values: dict[str, Any]) -> None:
    def with_more(value: Any) -> Any:
        if isinstance(value, dict):
            return {**{key: with_more(inner) if key != "user" else inner for key, inner in value.items()}, "later": [1]}
        return [with_more(inner) for inner in value] if isinstance(value, list) else value

    assert model.model_validate(with_more(values)) == model.model_validate(values)


@pytest.mark.parametrize(
    "name", ["kind", "run_id", "attempt", "sequence", "step", "epoch", "stage", "tp_rank", "bytes"]
)
def test_a_manifest_without_its_identity_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        ShardManifest.model_validate({key: value for key, value in MANIFEST.items() if key != name})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kind", "optimizer"),
        ("attempt", 0),
        ("sequence", 0),
        ("repeat", -1),
        ("step", -1),
        ("step", 1.5),
        ("step", "many"),
        ("pp", 0),
        ("tp", 0),
        ("dp", 0),
        ("bytes", -1),
        ("format_version", 0),
        ("user", {"weights": [1, 2]}),
        ("user", "none"),
        ("created_at", "yesterday"),
    ],
)
def test_a_manifest_out_of_range_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        ShardManifest.model_validate({**MANIFEST, name: value})


def test_the_users_values_keep_their_types() -> None:
    user = ShardManifest.model_validate_json(json.dumps(MANIFEST)).user
    assert {key: type(value) for key, value in user.items()} == {
        "loss": float,
        "best": bool,
        "note": str,
        "tokens": int,
        "parent": type(None),
    }


@pytest.mark.parametrize(("kind", "name"), [("train", "2-31-3-1"), ("lora", "lora-2-31-3-1"), ("hf", "hf-2-31-3-1")])
def test_the_name_of_a_snapshot(kind: str, name: str) -> None:
    assert ShardManifest.model_validate({**MANIFEST, "kind": kind}).snapshot_id == name


@given(st.lists(st.tuples(st.sampled_from(["train", "lora", "hf"]), *[st.integers(1, 12)] * 4), unique=True))
def test_no_two_snapshots_have_one_name(identities: list[tuple[str, int, int, int, int]]) -> None:
    fields = ("kind", "attempt", "sequence", "stage", "tp_rank")
    manifests = [
        ShardManifest.model_validate({**MANIFEST, **dict(zip(fields, identity, strict=True))})
        for identity in identities
    ]
    assert len({manifest.snapshot_id for manifest in manifests}) == len(identities)


def test_an_attempt_that_has_not_resumed_says_null() -> None:
    fresh = Attempt.model_validate({**ATTEMPT, "resumed_from": None})
    assert json.loads(fresh.model_dump_json())["resumed_from"] is None


@pytest.mark.parametrize(
    "state", ["starting", "recovering", "idle", "writing", "degraded", "draining", "stopped", "asleep", ""]
)
def test_the_states_of_a_daemon(state: str) -> None:
    values = {**STATUS, "daemon": {**STATUS["daemon"], "state": state}}
    if state in ("asleep", ""):
        with pytest.raises(ValidationError, match="state"):
            ServiceStatus.model_validate(values)
    else:
        assert ServiceStatus.model_validate(values).daemon.state == state


def test_records_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        ShardManifest.model_validate(MANIFEST).step = 1


# --- times ------------------------------------------------------------------------------------------------------------


def with_time(moment: object) -> ShardManifest:
    return ShardManifest.model_validate({**MANIFEST, "created_at": moment})


def time_of(manifest: ShardManifest) -> str:
    return str(json.loads(manifest.model_dump_json())["created_at"])


@pytest.mark.parametrize(
    ("given_as", "written"),
    [
        ("2027-03-04T05:06:07Z", "2027-03-04T05:06:07Z"),
        ("2027-03-04T05:06:07.120Z", "2027-03-04T05:06:07.120Z"),
        ("2027-03-04T05:06:07.000Z", "2027-03-04T05:06:07Z"),
        ("2027-03-04T07:06:07+02:00", "2027-03-04T05:06:07Z"),
        ("2027-03-03T23:36:07.5-05:30", "2027-03-04T05:06:07.500Z"),
        (datetime(2027, 3, 4, 5, 6, 7, 999_999, timezone.utc), "2027-03-04T05:06:07.999Z"),
    ],
)
def test_times_are_written_in_utc_with_a_z(given_as: object, written: str) -> None:
    assert time_of(with_time(given_as)) == written


@given(
    st.datetimes(
        min_value=datetime(1990, 1, 1),
        max_value=datetime(2200, 1, 1),
        timezones=st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes))),
    )
)
def test_a_time_comes_back_to_the_millisecond(moment: datetime) -> None:
    manifest = with_time(moment)
    again = ShardManifest.model_validate_json(manifest.model_dump_json())
    assert timedelta(0) <= manifest.created_at - again.created_at < timedelta(milliseconds=1)
    assert again.created_at.utcoffset() == timedelta(0)
    assert time_of(again) == time_of(manifest), "read and written again it stays the same"


@pytest.mark.parametrize("moment", ["2027-03-04T05:06:07", datetime(2027, 3, 4)])
def test_a_time_without_a_zone_is_refused(moment: object) -> None:
    with pytest.raises(ValidationError, match="timezone"):
        with_time(moment)


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("adapter", "values"), MESSAGES, ids=type_of)
def test_a_message_comes_back_as_it_was(adapter: Any, values: dict[str, Any]) -> None:
    parsed = adapter.validate_json(json.dumps(values))
    assert json.loads(parsed.model_dump_json()) == values
    assert parsed.type == values["type"]


def test_every_message_is_tried_here() -> None:
    tried = {values["type"] for values in FROM_TRAINERS + FROM_DAEMONS}
    classes = [value for value in vars(messages).values() if isinstance(value, type) and issubclass(value, BaseModel)]
    assert tried == {value.model_fields["type"].default for value in classes if "type" in value.model_fields}


@pytest.mark.parametrize(("adapter", "values"), MESSAGES, ids=type_of)
def test_a_field_that_was_not_agreed_on_is_refused(adapter: Any, values: dict[str, Any]) -> None:
    if values["type"] == "refused":  # it has to be understood by the trainer of any release
        assert adapter.validate_python({**values, "later": 1}) == adapter.validate_python(values)
        return
    with pytest.raises(ValidationError, match="later"):
        adapter.validate_json(json.dumps({**values, "later": 1}))


def test_the_hello_of_any_protocol_says_who_asks() -> None:
    hello = {"type": "hello", "protocol": 7, "version": "9.0", "role": "observer", "later": {"more": [1]}}
    assert messages.Announcement.model_validate(hello) == messages.Announcement(protocol=7, version="9.0")


def test_a_retention_that_was_not_agreed_on_is_refused() -> None:
    with pytest.raises(ValidationError, match="keep_best"):
        client_messages.validate_python({**OFFER, "retention": {"keep_last": 2, "keep_best": 1}})


@pytest.mark.parametrize("name", ["keep_last", "keep_every"])
def test_a_retention_below_one_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        client_messages.validate_python({**OFFER, "retention": {name: 0}})


@pytest.mark.parametrize(("adapter", "values"), MESSAGES, ids=type_of)
def test_a_message_to_the_other_side_is_refused(adapter: Any, values: dict[str, Any]) -> None:
    other = daemon_messages if adapter is client_messages else client_messages
    with pytest.raises(ValidationError, match="type"):
        other.validate_json(json.dumps(values))


@pytest.mark.parametrize(
    "body", [b"", b"{", b"null", b"[]", b'"hello"', b"{}", b'{"type":null}', b'{"type":"offer"}', b"\xff\xfe", b"1e999"]
)
def test_a_body_that_is_no_message_is_a_validation_error(body: bytes) -> None:
    for adapter in (client_messages, daemon_messages):
        with pytest.raises(ValidationError):
            adapter.validate_json(body)


@settings(max_examples=50)
@given(st.binary(max_size=60) | st.recursive(st.none() | st.text(), st.lists).map(lambda v: json.dumps(v).encode()))
def test_noise_is_a_validation_error(body: bytes) -> None:
    for adapter in (client_messages, daemon_messages):
        with pytest.raises(ValidationError):
            adapter.validate_json(body)


def test_an_offer_carries_the_manifest_of_its_file() -> None:
    offer = client_messages.validate_python(OFFER)
    assert isinstance(offer, Offer)
    assert offer.manifest == ShardManifest.model_validate(MANIFEST)
