"""A wrong option of the constructor is named before anything is made."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from trainer_hooks import Checkpointer


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("topology", "rank 0", "topology='rank 0': it must be a Topology"),
        ("retention", 2, "retention=2: it must be a RetentionPolicy"),
        ("keep_last", 0, "keep_last=0: it must be a whole number of at least 1"),
        ("slots", True, "slots=True: it must be a whole number of at least 1"),
        ("slots", 0, "slots=0: it must be a whole number of at least 1"),
        ("on_full", "drop", "on_full='drop': it must be one of 'block', 'skip', 'replace'"),
        ("staging", None, "staging=None: it must be one of 'overlap', 'blocking'"),
        ("async_ckpt", "no", "async_ckpt='no': it must be True or False"),
        ("on_committed", "upload", "on_committed='upload': it must be a function that takes a ticket"),
        ("postfix", "a/b", "postfix='a/b': it becomes part of a directory name"),
        ("postfix", 7, "postfix=7: it must be text"),
        ("trust", ["Mine"], "trust='Mine': it must hold classes"),
        ("trust", [lambda: 0], "it must hold classes that can be imported by their name"),
        ("trust", int, "trust=<class 'int'>: it must be a list of classes"),
        ("trust", 5, "trust=5: it must be a list of classes"),
        ("service", "", 'service="": it must be "auto" or the path of a socket'),
        ("root", 5, "root=5: it must be a path"),
    ],
)
def test_a_wrong_option_is_named(tmp_path: Path, option: str, value: Any, said: str) -> None:
    options: dict[str, Any] = {"root": tmp_path / "run", "async_ckpt": False, option: value}
    with pytest.raises(ValueError, match=re.escape(said)):
        Checkpointer(**options)
    assert list(tmp_path.iterdir()) == []


def test_a_variable_that_is_no_setting_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_SERVICE_SLOTS", "3")
    with pytest.warns(UserWarning, match="CKPT_SERVICE_SLOTS is not a setting"):
        Checkpointer(tmp_path, async_ckpt=False).close()
