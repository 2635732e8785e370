"""Settings: file, then environment, then flags; whatever is wrong is said with the place where it stands."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ckpt_service.config import PREFIX, ServiceConfig, load_config, unknown_variables


def test_the_defaults_are_those_of_the_manual() -> None:
    config = load_config({})
    assert config == ServiceConfig()
    waits = {
        "start_seconds": 15,
        "stall_seconds": 60,
        "notice_seconds": 3,
        "heartbeat_seconds": 1,
        "stale_seconds": 5,
        "grace_seconds": 25,
        "resume_wait_seconds": 60,
        "linger_seconds": 60,
        "orphan_seconds": 600,
    }
    assert {key: getattr(config, key) for key in waits} == waits


def test_every_setting_says_what_it_is() -> None:
    assert all(field.description for field in ServiceConfig.model_fields.values())


@pytest.mark.parametrize("places", [(), ("file",), ("file", "environment"), ("file", "environment", "flag")])
def test_the_later_place_wins(places: tuple[str, ...]) -> None:
    file = b"stall_seconds = 10" if "file" in places else None
    environ = {"CKPT_SERVICE_STALL_SECONDS": "20"} if "environment" in places else {}
    flags = {"stall_seconds": 30} if "flag" in places else None
    assert load_config(environ, file, flags).stall_seconds == [60, 10, 20, 30][len(places)]


def test_each_place_gives_what_the_others_leave_out() -> None:
    config = load_config({"CKPT_SERVICE_MAX_TRIES": "9"}, b"writer_threads = 3", {"direct_io": False})
    changed = {"max_tries": 9, "writer_threads": 3, "direct_io": False}
    assert config == ServiceConfig(**changed)


@pytest.mark.parametrize("key", ServiceConfig.model_fields)
def test_every_setting_can_come_from_the_environment(key: str) -> None:
    value = "8192" if key == "chunk_bytes" else "1"
    assert getattr(load_config({PREFIX + key.upper(): value}), key) == type(getattr(ServiceConfig(), key))(value)


@pytest.mark.parametrize(
    ("word", "value"), [("0", False), ("false", False), ("off", False), ("1", True), ("yes", True)]
)
def test_a_switch_in_the_environment_is_a_word(word: str, value: bool) -> None:
    assert load_config({"CKPT_SERVICE_DIRECT_IO": word}).direct_io is value


def test_other_variables_of_ours_and_of_others_do_not_matter() -> None:
    environ = {"CKPT_SERVICE_HOST": "n12", "CKPT_SERVICE_LAUNCH": "x", "STALL_SECONDS": "1", "stall_seconds": "1"}
    assert load_config(environ) == ServiceConfig()


@pytest.mark.parametrize(
    ("environ", "file", "flags", "where"),
    [
        ({}, b"stall_second = 1", {}, "file stall_second: there is no such setting; did you mean stall_seconds\\?"),
        ({}, b"[waits]\nstall_seconds = 1", {}, "file waits: there is no such setting$"),
        ({}, None, {"verbose": True}, "flag verbose: there is no such setting$"),
        ({}, b"stall_seconds = 0", {}, "file stall_seconds=0: .*greater than 0"),
        ({}, b"stall_seconds = 'soon'", {}, "file stall_seconds='soon'"),
        ({"CKPT_SERVICE_STALL_SECONDS": "-1"}, b"stall_seconds = 1", {}, "CKPT_SERVICE_STALL_SECONDS='-1'"),
        ({"CKPT_SERVICE_STALL_SECONDS": ""}, None, {}, "CKPT_SERVICE_STALL_SECONDS=''"),
        ({"CKPT_SERVICE_STALL_SECONDS": "1"}, b"stall_seconds = 1", {"stall_seconds": 0}, "flag stall_seconds=0"),
        ({}, b"chunk_bytes = 5000", {}, "file chunk_bytes=5000: .*multiple of 4096"),
        ({}, b"chunk_bytes = 0", {}, "file chunk_bytes=0"),
        ({}, None, {"writer_threads": 65}, "flag writer_threads=65"),
        ({}, None, {"shards_at_once": 0}, "flag shards_at_once=0"),
        ({}, None, {"max_tries": 0}, "flag max_tries=0"),
        ({"CKPT_SERVICE_MAX_TRIES": "2.5"}, None, {}, "CKPT_SERVICE_MAX_TRIES='2.5'"),
        ({"CKPT_SERVICE_STALL_SECONDS": "inf"}, None, {}, "CKPT_SERVICE_STALL_SECONDS='inf'"),
        ({"CKPT_SERVICE_LINGER_SECONDS": "nan"}, None, {}, "CKPT_SERVICE_LINGER_SECONDS='nan'"),
        ({}, None, {"rate_limit_bytes_per_second": -1}, "flag rate_limit_bytes_per_second=-1"),
        ({}, b"stall_seconds = ", {}, "configuration file is not valid TOML"),
        ({}, b"\xff\xfe", {}, "configuration file is not valid TOML"),
    ],
)
def test_a_mistake_is_named_with_its_place(
    environ: dict[str, str], file: bytes | None, flags: dict[str, Any], where: str
) -> None:
    with pytest.raises(ValueError, match=f"^.*{where}") as caught:
        load_config(environ, file, flags)
    assert not isinstance(caught.value, ValidationError), "a plain sentence, not a list of findings"


@given(st.binary(max_size=60), st.dictionaries(st.sampled_from(["CKPT_SERVICE_DIRECT_IO"]), st.text(max_size=5)))
def test_whatever_is_given_the_answer_is_settings_or_a_value_error(file: bytes, environ: dict[str, str]) -> None:
    try:
        config = load_config(environ, file)
    except ValueError:
        return
    assert isinstance(config, ServiceConfig)


def test_a_variable_that_is_no_setting_is_named_with_the_one_that_was_meant() -> None:
    known = {"CKPT_SERVICE_HOST": "n12", "CKPT_SERVICE_STALL_SECONDS": "1", "CKPT_SERVICE_TEST_REQUIRE_ALL": "1"}
    assert unknown_variables(known) == []
    assert unknown_variables({**known, "CKPT_SERVICE_STAL_SECONDS": "1", "CKPT_SERVICE_ZZZ": "", "OTHER": ""}) == [
        "CKPT_SERVICE_STAL_SECONDS is not a setting; did you mean CKPT_SERVICE_STALL_SECONDS?",
        "CKPT_SERVICE_ZZZ is not a setting",
    ]


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        ServiceConfig().max_tries = 7
