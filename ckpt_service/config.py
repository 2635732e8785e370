"""The settings of trainer and daemon: a TOML file, overridden by ``CKPT_SERVICE_*``, overridden by flags."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "CKPT_SERVICE_"
_OTHERS = {f"{PREFIX}HOST", f"{PREFIX}LAUNCH"}  # not settings: what differs between hosts, and between starts


class ServiceConfig(BaseModel):
    """Every wait and every knob; times in seconds, sizes in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    start_seconds: float = Field(15, gt=0, description="how long a daemon may take to answer its first hello")
    stall_seconds: float = Field(60, gt=0, description="how long a save may wait without a byte of progress")
    notice_seconds: float = Field(3, gt=0, description="how soon a dead daemon is known")
    heartbeat_seconds: float = Field(1, gt=0, description="how often the status is rewritten when nothing changes")
    stale_seconds: float = Field(5, gt=0, description="age of a heartbeat after which readers call the status stale")
    grace_seconds: float = Field(25, gt=0, description="how long the daemon drains after SIGTERM")
    resume_wait_seconds: float = Field(60, gt=0, description="how long resume waits for older writes without progress")
    replica_seconds: float = Field(5, gt=0, description="how long a save waits for what other replicas contribute")
    linger_seconds: float = Field(
        60, ge=0, description="how long the daemon stays after an unclean loss of its clients"
    )
    orphan_seconds: float = Field(600, ge=0, description="how long the job of a dead trainer is still retried")
    writer_threads: int = Field(2, ge=1, le=64, description="threads that write one shard")
    shards_at_once: int = Field(4, ge=1, le=64, description="shards written side by side")
    chunk_bytes: int = Field(16 << 20, ge=4096, multiple_of=4096, description="bytes of one write")
    direct_io: bool = Field(True, description="write past the page cache where the filesystem can")
    rate_limit_bytes_per_second: int = Field(0, ge=0, description="limit of all writes together; 0 is none")
    max_tries: int = Field(4, ge=1, description="how often a write is tried that fails in a way that may pass")


def load_config(
    environ: Mapping[str, str], file: bytes | None = None, flags: Mapping[str, Any] | None = None
) -> ServiceConfig:
    """Return the settings from the content of a TOML file, the environment and flags; the later win.

    Raises:
        ValueError: an unknown key or a value out of range, naming where it stands.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for source, given in (("file", _parse(file)), ("environment", _from_environ(environ)), ("flag", flags or {})):
        for key, value in given.items():
            values[key] = value
            origin[key] = f"{PREFIX}{key.upper()}" if source == "environment" else f"{source} {key}"
    try:
        return ServiceConfig(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else ""
        if first["type"] == "extra_forbidden":
            raise ValueError(f"{origin[key]}: there is no such setting{_meant(key)}") from error
        raise ValueError(f"{origin.get(key, key)}={values.get(key)!r}: {first['msg']}") from error


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable that looks like a setting and is none; else a typo goes unnoticed."""
    known = {f"{PREFIX}{key.upper()}" for key in ServiceConfig.model_fields} | _OTHERS
    unknown = (name for name in sorted(environ) if name.startswith(PREFIX) and name not in known)
    return [
        f"{name} is not a setting" + _meant(name.removeprefix(PREFIX).lower(), lambda key: f"{PREFIX}{key.upper()}")
        for name in unknown
        if not name.startswith(f"{PREFIX}TEST_")
    ]


def _meant(key: str, spelled: Callable[[str], str] = str) -> str:
    """Return the end of a sentence that names the setting that was probably meant; nothing if none is near."""
    return "".join(
        f"; did you mean {spelled(close)}?" for close in get_close_matches(key, ServiceConfig.model_fields, 1)
    )


def _parse(file: bytes | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        return tomllib.loads(file.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the configuration file is not valid TOML: {error}") from error


def _from_environ(environ: Mapping[str, str]) -> dict[str, str]:
    known = {f"{PREFIX}{key.upper()}": key for key in ServiceConfig.model_fields}
    return {key: environ[name] for name, key in known.items() if name in environ}
