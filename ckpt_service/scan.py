"""A run directory to names and manifests: one read of each file's head, nothing else. Shell.

Reading is all that happens here; a file that vanishes between the listing and the read was pruned and is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from pydantic import ValidationError

from ckpt_service import image, naming
from ckpt_service.catalog import Catalog, Evidence, Shard, build
from ckpt_service.errors import DamagedCheckpoint, NewerFormat
from ckpt_service.naming import Kind, ShardName
from ckpt_service.records import (
    FORMAT_VERSION,
    SCHEMA_VERSION,
    Attempt,
    PeersFile,
    RankHolds,
    ServiceStatus,
    ShardManifest,
)

_ZIP_MAGIC = b"PK\3\4"
_PICKLE_MAGIC = b"\x80"


def parse_manifest(head: bytes | memoryview) -> ShardManifest | None:
    """Return the manifest in the first ``image.MANIFEST_END`` bytes of a file, None if it has none.

    Raises:
        NewerFormat: there is one, of a format that this release cannot read.
        DamagedCheckpoint: there is one, and it cannot be read.
    """
    content = image.manifest_json(head)
    if content is None:
        return None
    try:
        values = json.loads(content)
        found = values.get("format_version")
        if isinstance(found, int) and found > FORMAT_VERSION:
            raise NewerFormat(
                f"its format version is {found}, and this release reads up to {FORMAT_VERSION}",
                hint="upgrade ckpt-service to read it",
            )
        return ShardManifest.model_validate(values)
    except (ValueError, AttributeError, ValidationError, RecursionError) as error:
        raise DamagedCheckpoint(f"its manifest cannot be read: {error}") from error


def newer_manifest(head: bytes | memoryview) -> ShardManifest | None:
    """Return what a file of a newer format says of itself, as far as the fields of this release go, or None.

    Good for its place among the others, so that nothing older is taken for the newest; never for loading it.
    """
    content = image.manifest_json(head)
    try:
        return None if content is None else ShardManifest.model_validate_json(content)
    except ValidationError:
        return None


def is_legacy(head: bytes) -> bool:
    """Return whether a file that starts with ``head`` is one that the old trainer wrote, with ``torch.save``."""
    try:
        without = parse_manifest(head) is None
    except DamagedCheckpoint:
        return False
    return without and head.startswith((_ZIP_MAGIC, _PICKLE_MAGIC)) and not _was_ours(head)


def _was_ours(head: bytes) -> bool:
    return b'"format_version"' in head and b'"run_id"' in head


def inspect(path: str, name: ShardName, stage: int) -> Shard | None:
    """Return what the file at ``path`` is, judged by its name, head and size; None if it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        return Shard(path, name, stage, 0, 0.0, problem=f"cannot be opened: {error.strerror}", unread=True)
    try:
        found = os.fstat(fd)
        head = os.pread(fd, image.MANIFEST_END, 0)
    except OSError as error:
        return Shard(path, name, stage, 0, 0.0, problem=f"cannot be read: {error.strerror}", unread=True)
    finally:
        os.close(fd)
    try:
        manifest = parse_manifest(head)
    except NewerFormat as error:
        said = newer_manifest(head)
        return Shard(path, name, stage, found.st_size, found.st_mtime, said, str(error), newer_format=True)
    except DamagedCheckpoint as error:
        return Shard(path, name, stage, found.st_size, found.st_mtime, problem=str(error))
    problem = _problem(head, manifest, name, stage, found.st_size)
    return Shard(path, name, stage, found.st_size, found.st_mtime, manifest, problem)


def _problem(head: bytes, manifest: ShardManifest | None, name: ShardName, stage: int, size: int) -> str | None:
    if manifest is None:
        if is_legacy(head):
            return None
        if _was_ours(head):
            return "its head is damaged: the manifest is not where it should be"
        return f"it is not a checkpoint ({size} bytes)"
    if size != manifest.bytes:
        return f"it has {size} bytes instead of {manifest.bytes}"
    said = (manifest.kind, manifest.stage, manifest.tp_rank)
    if said != (name.kind, stage, name.tp_rank or 0):
        return f"its manifest says kind, stage, tp rank {said}, and its place {(name.kind, stage, name.tp_rank or 0)}"
    if name.kind != "hf" and (manifest.step, manifest.epoch) != (name.step, name.epoch):
        return f"its manifest says step {manifest.step} epoch {manifest.epoch}, and its name otherwise"
    return None


class Memory:
    """Inspects like :func:`inspect`, and does not open a file again that has not changed since.

    For a daemon that looks through the whole run after every commit: what is new is read, the rest is only looked up.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[tuple[int, ...], Shard]] = {}

    def __call__(self, path: str, name: ShardName, stage: int) -> Shard | None:
        """Return what the file at ``path`` is; None if it is gone."""
        try:
            found = os.stat(path)
        except OSError:
            self._seen.pop(path, None)
            return inspect(path, name, stage)
        mark = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        known = self._seen.get(path)
        if known is not None and known[0] == mark:
            return known[1]
        shard = inspect(path, name, stage)
        if shard is not None and not shard.unread:
            self._seen[path] = (mark, shard)
        return shard

    def forget_the_gone(self, present: Iterable[Shard]) -> None:
        """Let go of files that are not there any more."""
        paths = {shard.path for shard in present}
        self._seen = {path: seen for path, seen in self._seen.items() if path in paths}


Look = Callable[[str, ShardName, int], Shard | None]
"""How a file is inspected: :func:`inspect`, or a :class:`Memory`."""


def scan_directory(
    path: str, stage: int, look: Look = inspect, kinds: Collection[Kind] = naming.KINDS
) -> Iterator[Shard]:
    """Yield the shards of these kinds in one directory, set-aside ones included."""
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in names:
        name = naming.parse_shard(naming.parse_kept(entry) or entry)
        if name is None or name.kind not in kinds:
            continue
        shard = look(os.path.join(path, entry), name, stage if name.stage is None else name.stage)
        if shard is not None:
            yield shard


def scan_stage(root: str, postfix: str | None, stage: int, look: Look = inspect) -> Iterator[Shard]:
    """Yield the training shards of one stage, with those that the old trainer wrote where "None" was the postfix."""
    yield from scan_directory(os.path.join(root, naming.stage_directory(stage, postfix)), stage, look)
    if postfix is None:
        former = scan_directory(os.path.join(root, naming.former_stage_directory(stage)), stage, look)
        yield from (shard for shard in former if shard.manifest is None)


def scan_all_stages(path: str, stage: int, look: Look = inspect) -> Iterator[Shard]:
    """Yield the shards in a directory outside the run's own, and in those beside it that hold the other stages.

    HF shards of all stages lie in one directory; the directories of LoRA shards differ in the stage at their end.
    """
    parent, name = os.path.split(path)
    found = naming.parse_lora_directory(name)
    if found is None or found[1] != stage:
        yield from scan_directory(path, stage, look)
        return
    for beside in _listed(parent):
        other = naming.parse_lora_directory(beside)
        if other is not None and other[0] == found[0]:
            yield from scan_directory(os.path.join(parent, beside), other[1], look)


def load_lora(root: str, postfix: str | None) -> dict[str, Catalog]:
    """Return the LoRA checkpoints below a root, by what the names of their directories begin with."""
    attempts = load_attempts(root, postfix)
    run_id, slots = (attempts[-1].run_id, attempts[-1].slots) if attempts else (None, 2)
    shards: dict[str, list[Shard]] = {}
    for directory in _listed(root):
        found = naming.parse_lora_directory(directory)
        if found is not None:
            there = scan_directory(os.path.join(root, directory), found[1])
            shards.setdefault(found[0], []).extend(shard for shard in there if shard.name.kind == "lora")
    return {name: build(evidence_beside(own, run_id, slots)) for name, own in sorted(shards.items()) if own}


def evidence_beside(shards: Sequence[Shard], run_id: str | None, slots: int) -> Evidence:
    """Return what there is to know of checkpoints of another kind than the training's.

    Without records of attempts and pins, which are about training checkpoints: adapters are loaded without a resume, so
    the attempts of a run follow each other.
    """
    return Evidence(shards, slots=slots, run_id=run_id)


def stage_directories(root: str, postfix: str | None) -> dict[int, str]:
    """Return the stage directories of a run, by stage."""
    try:
        names = os.listdir(root)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    stages = {naming.parse_stage_directory(name, postfix): os.path.join(root, name) for name in names}
    return {stage: path for stage, path in sorted(stages.items(), key=lambda item: item[1]) if stage is not None}


def scan_run(root: str, postfix: str | None, look: Look = inspect) -> list[Shard]:
    """Return all training shards of a run."""
    stages = {*stage_directories(root, postfix)}
    if postfix is None:
        stages |= {*stage_directories(root, naming.NO_POSTFIX)}
    return [shard for stage in sorted(stages) for shard in scan_stage(root, postfix, stage, look)]


def scan_other_kinds(root: str) -> list[list[Shard]]:
    """Return the LoRA and HF shards in directories of the root, those that form one history together.

    Stages of LoRA shards have directories of their own, which belong together; an HF directory holds all stages.
    """
    histories: dict[tuple[Kind, str], list[Shard]] = {}
    for entry in sorted(_listed(root)):
        path = os.path.join(root, entry)
        if not os.path.isdir(path):
            continue
        if (found := naming.parse_lora_directory(entry)) is not None:
            histories.setdefault(("lora", found[0]), []).extend(scan_directory(path, found[1], kinds=["lora"]))
        histories.setdefault(("hf", entry), []).extend(scan_directory(path, 0, kinds=["hf"]))
    return [shards for shards in histories.values() if shards]


def named_steps(root: str, postfix: str | None) -> list[int]:
    """Return the steps in the names of a run's training shards, in order; no file is opened."""
    directories = stage_directories(root, postfix).values()
    names = (naming.parse_shard(entry) for directory in directories for entry in _listed(directory))
    return sorted({name.step for name in names if name is not None and name.step is not None})


def postfixes(root: str) -> list[str]:
    """Return the postfixes of the runs that have something below a root."""
    return sorted({postfix for name in _listed(root) if (postfix := naming.postfix_of(name)) is not None})


def load_attempts(root: str, postfix: str | None) -> list[Attempt]:
    """Return the records of all starts, oldest first; unreadable ones are left out, their files still count."""
    return read_attempts(root, postfix)[0]


def read_attempts(root: str, postfix: str | None) -> tuple[list[Attempt], list[str]]:
    """Return the records of all starts, oldest first, and the paths of those that cannot be read."""
    directory = os.path.join(root, naming.service_directory(postfix), naming.ATTEMPTS)
    attempts, unread = [], []
    for path in (os.path.join(directory, name) for name in _listed(directory) if naming.parse_attempt_file(name)):
        try:
            with open(path, "rb") as file:
                attempts.append(Attempt.model_validate_json(file.read()))
        except FileNotFoundError:
            continue  # somebody clears the directory away
        except (OSError, ValidationError):
            unread.append(path)
    return sorted(attempts, key=lambda attempt: attempt.n), sorted(unread)


def load_pins(root: str, postfix: str | None) -> frozenset[tuple[int, int]]:
    """Return (attempt, sequence) of the pinned checkpoints."""
    names = _listed(os.path.join(root, naming.service_directory(postfix), naming.PINS))
    return frozenset(pin for name in names if (pin := naming.parse_pin_file(name)) is not None)


def load_peers(root: str, postfix: str | None) -> dict[tuple[Kind, int, int], set[tuple[int, int]]]:
    """Return what ranks hold whose files may not be visible here, by (kind, stage, tp rank)."""
    directory = os.path.join(root, naming.service_directory(postfix))
    found: dict[tuple[Kind, int, int], set[tuple[int, int]]] = {}
    for host in filter(None, map(naming.parse_peers_file, _listed(directory))):
        for rank in load_peers_file(root, postfix, host):
            found.setdefault(("train", rank.stage, rank.tp_rank), set()).update(rank.holds)
    return found


def load_peers_file(root: str, postfix: str | None, host: str) -> list[RankHolds]:
    """Return what the trainers of one host have written down of other ranks; nothing if it cannot be read."""
    path = os.path.join(root, naming.service_directory(postfix), naming.peers_file(host))
    try:
        with open(path, "rb") as file:
            return PeersFile.model_validate_json(file.read()).ranks
    except (OSError, ValidationError):
        return []


def load_catalog(root: str, postfix: str | None) -> Catalog:
    """Derive the catalog of a run from its files alone."""
    return build(load_evidence(root, postfix))


def load_catalogs(root: str, postfix: str | None) -> list[Catalog]:
    """Derive a catalog for each history: the training checkpoints first, then those of other kinds below the root.

    LoRA and HF directories carry no postfix: the starts of the run say which of their files are its own, so without
    them only training checkpoints are looked at.
    """
    evidence = load_evidence(root, postfix)
    if not evidence.attempts:
        return [build(evidence)]
    run_id = evidence.attempts[-1].run_id
    beside = (evidence_beside(shards, run_id, evidence.slots) for shards in scan_other_kinds(root))
    return [build(evidence), *map(build, beside)]


def load_evidence(root: str, postfix: str | None, look: Look = inspect) -> Evidence:
    """Return what this host can see of a run."""
    attempts, unread = read_attempts(root, postfix)
    slots = attempts[-1].slots if attempts else 2
    return Evidence(
        scan_run(root, postfix, look),
        attempts,
        load_pins(root, postfix),
        committed=load_peers(root, postfix),
        slots=slots,
        unread=tuple(unread),
    )


def load_statuses(root: str, postfix: str | None) -> list[ServiceStatus]:
    """Return the status documents of all hosts; one that cannot be read is left out."""
    return [found for found in _statuses(root, postfix) if isinstance(found, ServiceStatus)]


def unreadable_statuses(root: str, postfix: str | None) -> list[str]:
    """Say of each status document that cannot be read, which one it is and why not."""
    return [found for found in _statuses(root, postfix) if isinstance(found, str)]


def _statuses(root: str, postfix: str | None) -> Iterator[ServiceStatus | str]:
    directory = os.path.join(root, naming.service_directory(postfix))
    for name in sorted(_listed(directory)):
        if naming.parse_status_file(name) is None:
            continue
        path = os.path.join(directory, name)
        try:
            with open(path, "rb") as file:
                content = file.read()
        except OSError as error:
            yield f"{path} cannot be read: {error.strerror}"
            continue
        try:
            yield ServiceStatus.model_validate_json(content)
        except ValidationError as error:
            yield f"{path} cannot be understood: {_why_not(content, error)}"


def _why_not(content: bytes, error: ValidationError) -> str:
    """Tell a newer release's document from a broken one."""
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        found = json.loads(content).get("schema_version")
        if isinstance(found, int) and found > SCHEMA_VERSION:
            return f"its schema version is {found}, and this release reads up to {SCHEMA_VERSION}; upgrade ckpt-service"
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
