"""What is measured: handed to every process as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Options:
    """One measurement.

    Attributes:
        gigabytes: size of the state of model and optimizer, in 10**9 bytes.
        saves: pairs of a loop with a save and one without, in each process.
        interval: training steps of a loop, at least; more where a save takes longer.
        batch: rows of a batch; more make a step longer.
        quiet: saves without training beside them, for CPU time and the rate of writing.
    """

    gigabytes: float = 1.0
    saves: int = 2
    interval: int = 20
    batch: int = 128
    quiet: int = 2

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"--{name} {value}: it must be above 0")

    @property
    def nbytes(self) -> int:
        return int(self.gigabytes * 1e9)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Options:
        return cls(**json.loads(text))
