"""Errors say what was tried, on what, and what to do next."""

from __future__ import annotations

import copy
import errno
import inspect
import os
import pickle

import pytest

from ckpt_service import errors
from ckpt_service.errors import CkptError, RunDirectoryBusy, SaveFailed, SnapshotSkipped, from_os_error

ALL = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, CkptError)]


def os_error(number: int, filename: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), filename) if filename else OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("number", "code", "hint"),
    [
        (errno.ENOSPC, "ENOSPC", "free space"),
        (errno.EDQUOT, "EDQUOT", "quota"),
        (errno.EFBIG, "EFBIG", "ulimit -f"),
        (errno.EROFS, "EROFS", "read-write"),
        (errno.EACCES, "EACCES", "permission"),
        (errno.EPERM, "EPERM", "permission"),
        (errno.EMFILE, "EMFILE", "ulimit -n"),
        (errno.EIO, "EIO", "kernel log"),
    ],
)
def test_a_known_failure_says_its_code_and_what_to_do(number: int, code: str, hint: str) -> None:
    error = from_os_error(os_error(number), op="write", path="/runs/a.pt", step=1200)
    assert (error.op, error.code, error.path, error.step) == ("write", code, "/runs/a.pt", 1200)
    assert error.hint is not None
    assert hint in error.hint
    assert str(error) == f"write failed: {os.strerror(number)}: /runs/a.pt; {error.hint}"


def test_a_failure_without_advice_still_says_where() -> None:
    error = from_os_error(os_error(errno.ENOTDIR, "/runs/file"), op="listing")
    assert (error.code, error.hint, error.path) == ("ENOTDIR", None, "/runs/file")
    assert str(error) == f"listing failed: {os.strerror(errno.ENOTDIR)}: /runs/file"


def test_a_path_that_is_given_wins_over_the_errors_own() -> None:
    error = from_os_error(os_error(errno.EIO, "a.pt"), op="write", path="/runs/checkpoint_0/a.pt")
    assert error.path == "/runs/checkpoint_0/a.pt"


def test_an_error_without_a_number_keeps_its_words() -> None:
    error = from_os_error(OSError("the pipe is odd"), op="write")
    assert str(error) == "write failed: the pipe is odd"
    assert (error.code, error.retryable, error.path) == (None, False, None)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_what_may_pass_is_retryable(number: int) -> None:
    assert from_os_error(os_error(number), op="write").retryable


@pytest.mark.parametrize("number", [errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.EINVAL])
def test_what_stays_as_it_is_is_not_retryable(number: int) -> None:
    assert not from_os_error(os_error(number), op="write").retryable


def test_the_kind_is_the_callers_choice() -> None:
    assert type(from_os_error(os_error(errno.EIO), op="write")) is SaveFailed
    assert type(from_os_error(os_error(errno.EIO), op="lock", kind=RunDirectoryBusy)) is RunDirectoryBusy


def test_a_hint_ends_the_message_and_nothing_else_changes_it() -> None:
    assert str(CkptError("no daemon answers")) == "no daemon answers"
    assert str(CkptError("no daemon answers", hint="start one")) == "no daemon answers; start one"
    plain = CkptError("x")
    assert (plain.op, plain.step, plain.path, plain.code, plain.hint, plain.retryable) == (None,) * 5 + (False,)


@pytest.mark.parametrize("kind", ALL)
def test_every_error_survives_a_copy_to_another_process(kind: type[CkptError]) -> None:
    error = kind("it broke", op="load", step=3, path="/p", code="EIO", retryable=True, hint="look")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert str(again) == "it broke; look"
        assert vars(again) == vars(error)


def test_a_refused_state_is_the_users_mistake_too() -> None:
    assert issubclass(errors.StateRefused, ValueError)
    others = set(ALL) - {errors.StateRefused}
    assert not any(issubclass(kind, ValueError) for kind in others)


def test_a_snapshot_that_was_dropped_on_purpose_is_a_failed_save() -> None:
    assert issubclass(SnapshotSkipped, SaveFailed)
    assert issubclass(errors.SnapshotSuperseded, SaveFailed)
