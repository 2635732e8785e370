"""The published schema of the status file is that of the model."""

from __future__ import annotations

import json
from pathlib import Path

from ckpt_service.records import ServiceStatus

SCHEMA = Path(__file__).parents[2] / "docs" / "status.schema.json"


def test_the_schema_in_the_docs_is_that_of_the_model() -> None:
    """To renew it: write what the left side gives, with indent=1 and sorted keys."""
    model = ServiceStatus.model_json_schema(mode="serialization")
    assert json.loads(json.dumps(model, sort_keys=True)) == json.loads(SCHEMA.read_text())
