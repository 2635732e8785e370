"""Every name on disk: how it is spelled and how it is read back. Pure; no other module spells one.

A name counts only if it matches whole: ASCII digits, no leading zeros, ``_tp1`` is not ``_tp10``. Formatting and
parsing are inverses of each other, so whatever does not come back from :func:`parse_shard` unchanged is a stranger's
file and is never counted, loaded or deleted.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["train", "lora", "hf"]
KINDS: tuple[Kind, ...] = ("train", "lora", "hf")

_NUMBER = r"(0|[1-9][0-9]*)"
_TRAIN = re.compile(rf"ckpt_step_{_NUMBER}_epoch_{_NUMBER}(?:_tp{_NUMBER})?\.pt", re.ASCII)
_LORA = re.compile(rf"lora_step_{_NUMBER}_epoch_{_NUMBER}(?:_tp{_NUMBER})?\.pt", re.ASCII)
_HF = re.compile(rf"stage{_NUMBER}_tp{_NUMBER}\.pt", re.ASCII)
_PARTIAL = re.compile(rf"\.(.+)\.{_NUMBER}-{_NUMBER}-([A-Za-z0-9._-]+)-([0-9a-f]+)\.partial", re.ASCII)
_KEPT = re.compile(rf"\.(.+)\.{_NUMBER}-{_NUMBER}\.kept", re.ASCII)
_ATTEMPT = re.compile(rf"{_NUMBER}\.json", re.ASCII)
_STAGE = re.compile(rf"checkpoint_(?:(.+)_)?{_NUMBER}", re.ASCII | re.DOTALL)
_LORA_STAGE = re.compile(rf"(.*)_stage_{_NUMBER}", re.ASCII | re.DOTALL)

SERVICE_PREFIX = ".ckpt_service"
NO_POSTFIX = "None"  # how the old Optimus Prime trainer spells it
ATTEMPTS = "attempts"
PINS = "pins"
LAUNCHES = "launches"


@dataclass(frozen=True)
class ShardName:
    """What the name of a shard file says. ``step`` and ``epoch`` are None for HF files, ``tp_rank`` without tp."""

    kind: Kind
    step: int | None
    epoch: int | None
    tp_rank: int | None
    stage: int | None = None  # only HF names carry it; elsewhere the directory does


@dataclass(frozen=True)
class PartialName:
    """What the name of a file being written says."""

    final: str
    attempt: int
    sequence: int
    host: str
    token: str

    def is_of(self, host: str) -> bool:
        """Whether a daemon or trainer of ``host`` made it; names spell characters that are unsafe in them as ``_``."""
        return self.host == _plain(host)


def shard(kind: Kind, *, stage: int, tp_rank: int, tp: int, step: int, epoch: int) -> str:
    """Return the final name of a shard file inside its directory."""
    if kind == "hf":
        return f"stage{stage}_tp{tp_rank}.pt"
    prefix = "ckpt" if kind == "train" else "lora"
    suffix = f"_tp{tp_rank}" if tp > 1 else ""
    return f"{prefix}_step_{step}_epoch_{epoch}{suffix}.pt"


def parse_shard(name: str) -> ShardName | None:
    """Return what ``name`` says, or None if it is not exactly one of ours."""
    if match := _TRAIN.fullmatch(name):
        return ShardName("train", int(match[1]), int(match[2]), _optional(match[3]))
    if match := _LORA.fullmatch(name):
        return ShardName("lora", int(match[1]), int(match[2]), _optional(match[3]))
    if match := _HF.fullmatch(name):
        return ShardName("hf", None, None, int(match[2]), stage=int(match[1]))
    return None


def partial(final: str, *, attempt: int, sequence: int, host: str, token: str) -> str:
    """Return the name under which ``final`` is written; ``token`` is lower-case hex and makes it unique."""
    return f".{final}.{attempt}-{sequence}-{_plain(host)}-{token}.partial"


def parse_partial(name: str) -> PartialName | None:
    """Return what the name of a file being written says, or None if it is not one of ours."""
    match = _PARTIAL.fullmatch(name)
    if match is None or parse_shard(match[1]) is None:
        return None
    return PartialName(match[1], int(match[2]), int(match[3]), match[4], match[5])


def kept(final: str, *, attempt: int, sequence: int) -> str:
    """Return the name to which a shard is linked before ``final`` is replaced; the numbers are the shard's own."""
    return f".{final}.{attempt}-{sequence}.kept"


def parse_kept(name: str) -> str | None:
    """Return the final name that a ``.kept`` file had, or None if it is not one of ours."""
    match = _KEPT.fullmatch(name)
    return match[1] if match and parse_shard(match[1]) else None


def stage_directory(stage: int, postfix: str | None) -> str:
    """Return the directory of a pipeline stage below the root."""
    return f"checkpoint_{postfix}_{stage}" if postfix else f"checkpoint_{stage}"


def parse_stage_directory(name: str, postfix: str | None) -> int | None:
    """Return the stage if ``name`` is a stage directory of the run with this ``postfix``, else None."""
    match = _STAGE.fullmatch(name)
    if match is None or (match[1] or None) != (postfix or None):
        return None
    return int(match[2])


def postfix_of(name: str) -> str | None:
    """Return the postfix of the run that an entry of a root belongs to; None for all else, also without a postfix."""
    if name.startswith(f"{SERVICE_PREFIX}_"):
        return name[len(SERVICE_PREFIX) + 1 :] or None
    found = read_stage_directory(name)
    return found[0] if found else None


def former_stage_directory(stage: int) -> str:
    """Return where the old Optimus Prime trainer wrote when no postfix was given; ours are never written there."""
    return stage_directory(stage, NO_POSTFIX)


def read_stage_directory(name: str) -> tuple[str | None, int] | None:
    """Return the postfix and the stage that a stage directory's name says; the old trainer spells no postfix "None"."""
    match = _STAGE.fullmatch(name)
    if match is None:
        return None
    return (None if match[1] in (None, NO_POSTFIX) else match[1]), int(match[2])


def lora_directory(stage: int, lora_dir: str | None) -> str:
    """Return the directory of LoRA shards of a stage, below the root unless ``lora_dir`` is absolute."""
    return f"{lora_dir or 'lora_checkpoint'}_stage_{stage}"


def parse_lora_directory(name: str) -> tuple[str, int] | None:
    """Return what all stages' directories of LoRA shards share in their names, and the stage; None for others."""
    match = _LORA_STAGE.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def service_directory(postfix: str | None) -> str:
    """Return the directory below the root that holds everything of ours but the checkpoints."""
    return f"{SERVICE_PREFIX}_{postfix}" if postfix else SERVICE_PREFIX


def attempt_file(number: int) -> str:
    """Return the name of the record of one start of the trainer."""
    return f"{number}.json"


def parse_attempt_file(name: str) -> int | None:
    """Return the attempt whose record has this name, or None."""
    match = _ATTEMPT.fullmatch(name)
    return int(match[1]) if match else None


def pin_file(attempt: int, sequence: int) -> str:
    """Return the name of the empty file that pins one checkpoint."""
    return f"{attempt}-{sequence}"


def parse_pin_file(name: str) -> tuple[int, int] | None:
    """Return (attempt, sequence) of the checkpoint that a pin file names, or None."""
    match = re.fullmatch(rf"{_NUMBER}-{_NUMBER}", name, re.ASCII)
    return (int(match[1]), int(match[2])) if match else None


def status_file(host: str) -> str:
    """Return the name of the status file of the daemon of ``host``."""
    return f"status.{_plain(host)}.json"


def parse_status_file(name: str) -> str | None:
    """Return the host whose status file this is, or None."""
    match = re.fullmatch(r"status\.([A-Za-z0-9._-]+)\.json", name, re.ASCII)
    return match[1] if match else None


def run_lock() -> str:
    """Return the name of the lock file of the live run."""
    return "run.lock"


def peers_file(host: str) -> str:
    """Return the name of the file in which the daemon of ``host`` notes what ranks of other hosts have committed."""
    return f"peers.{_plain(host)}.json"


def parse_peers_file(name: str) -> str | None:
    """Return the host whose peers file this is, or None."""
    match = re.fullmatch(r"peers\.([A-Za-z0-9._-]+)\.json", name, re.ASCII)
    return match[1] if match else None


def probe_files(token: str) -> tuple[str, str]:
    """Return the two names of a file by which a directory is tried out: as it is made, and as it is renamed."""
    return f".ckpt-doctor-{token}.made", f".ckpt-doctor-{token}.renamed"


def bench_directory(token: str) -> str:
    """Return the name of the directory that holds the scratch files of one ``ckpt-service bench``."""
    return f".ckpt-bench-{token}"


def launch_directory(launch: str) -> str:
    """Return the name of the directory where the ranks of a launch meet: a hash, since launch ids are free text."""
    return hashlib.sha256(launch.encode()).hexdigest()[:16]


def daemon_lock(host: str) -> str:
    """Return the name of the lock file of the daemon of ``host``."""
    return f"daemon.{_plain(host)}.lock"


def daemon_log(host: str) -> str:
    """Return the name of the log of the daemon of ``host``."""
    return f"daemon.{_plain(host)}.log"


def set_aside_log(host: str) -> str:
    """Return the name of the older part of that log, set aside when it was full."""
    return f"{daemon_log(host)}.1"


def parse_daemon_log(name: str) -> str | None:
    """Return the host whose daemon's log this is, or None."""
    match = re.fullmatch(r"daemon\.([A-Za-z0-9._-]+)\.log", name, re.ASCII)
    return match[1] if match else None


def socket_name(root: str, postfix: str | None, host: str) -> str:
    """Return the short name of the socket of a run directory: a hash, since socket paths end at 107 bytes."""
    digest = hashlib.sha256("\0".join((root, postfix or "", host)).encode(errors="surrogateescape"))
    return f"{digest.hexdigest()[:16]}.sock"


def check_postfix(postfix: str | None) -> str | None:
    """Return ``postfix`` with ``""`` as None; raise ``ValueError`` if it cannot be part of a file name."""
    if postfix is not None and not isinstance(postfix, str):
        raise ValueError(f"postfix={postfix!r}: it must be text")
    if not postfix:
        return None
    if any("\ud800" <= character <= "\udfff" for character in postfix):
        raise ValueError(f"postfix={postfix!r}: it is not valid UTF-8")
    if "/" in postfix or "\0" in postfix or re.fullmatch("[0-9]+", postfix):
        raise ValueError(f"postfix={postfix!r}: it becomes part of a directory name: no '/', no NUL, not only digits")
    return postfix


def _optional(digits: str | None) -> int | None:
    return None if digits is None else int(digits)


def _plain(host: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", host)
