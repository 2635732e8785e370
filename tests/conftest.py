"""Rules for all tests: with ``CKPT_SERVICE_TEST_REQUIRE_ALL=1`` a skip is a failure, except where CUDA is missing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import RunDirectory


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    required = os.environ.get("CKPT_SERVICE_TEST_REQUIRE_ALL") == "1"
    if report.skipped and required and item.get_closest_marker("cuda") is None:
        report.outcome = "failed"
        report.longrepr = f"skipped although everything is required: {report.longrepr}"
    return report


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    """A run directory for real processes; whatever they leave running is ended."""
    directory = RunDirectory(tmp_path / "run")
    yield directory
    directory.clean_up()
