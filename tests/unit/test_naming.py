"""Names on disk: what is formatted comes back, and what is not exactly ours never parses."""

from __future__ import annotations

import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt_service import naming
from ckpt_service.naming import Kind, PartialName, ShardName

NUMBERS = st.integers(0, 10**20)
KINDS = st.sampled_from(naming.KINDS)
HOSTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
TOKENS = st.text("0123456789abcdef", min_size=1, max_size=16)
POSTFIXES = st.none() | st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), max_size=20).filter(
    lambda text: not (text.isascii() and text.isdigit())
)


@st.composite
def final_names(draw: st.DrawFn) -> str:
    tp = draw(st.integers(1, 64))
    return naming.shard(
        draw(KINDS),
        stage=draw(NUMBERS),
        tp_rank=draw(st.integers(0, tp - 1)),
        tp=tp,
        step=draw(NUMBERS),
        epoch=draw(NUMBERS),
    )


@pytest.mark.parametrize(
    ("kind", "tp", "name"),
    [
        ("train", 1, "ckpt_step_1100_epoch_3.pt"),
        ("train", 2, "ckpt_step_1100_epoch_3_tp1.pt"),
        ("lora", 1, "lora_step_1100_epoch_3.pt"),
        ("lora", 2, "lora_step_1100_epoch_3_tp1.pt"),
        ("hf", 1, "stage4_tp1.pt"),
        ("hf", 2, "stage4_tp1.pt"),
    ],
)
def test_the_names_are_those_of_the_specification(kind: Kind, tp: int, name: str) -> None:
    assert naming.shard(kind, stage=4, tp_rank=1, tp=tp, step=1100, epoch=3) == name


@given(KINDS, NUMBERS, st.integers(1, 64), NUMBERS, NUMBERS, st.data())
def test_a_shard_comes_back(kind: Kind, stage: int, tp: int, step: int, epoch: int, data: st.DataObject) -> None:
    tp_rank = data.draw(st.integers(0, tp - 1))
    name = naming.shard(kind, stage=stage, tp_rank=tp_rank, tp=tp, step=step, epoch=epoch)
    if kind == "hf":
        expected = ShardName("hf", None, None, tp_rank, stage=stage)
    else:
        expected = ShardName(kind, step, epoch, tp_rank if tp > 1 else None)
    assert naming.parse_shard(name) == expected


@given(st.from_regex(r"(ckpt|lora)_step_\d{1,3}_epoch_\d{1,3}(_tp\d{1,3})?\.pt\n?|stage\d{1,3}_tp\d{1,3}\.pt\n?"))
def test_whatever_parses_is_spelled_just_like_that(name: str) -> None:
    parsed = naming.parse_shard(name)
    if parsed is not None:
        tp = 1 if parsed.tp_rank is None else parsed.tp_rank + 2
        again = naming.shard(
            parsed.kind,
            stage=parsed.stage or 0,
            tp_rank=parsed.tp_rank or 0,
            tp=tp,
            step=parsed.step or 0,
            epoch=parsed.epoch or 0,
        )
        assert again == name


STRANGERS = [
    "",
    "ckpt_step_1_epoch_2_tp01.pt",
    "ckpt_step_01_epoch_2.pt",
    "ckpt_step_1_epoch_02.pt",
    "ckpt_step_00_epoch_0.pt",
    "ckpt_step_-1_epoch_2.pt",
    "ckpt_step_+1_epoch_2.pt",
    "ckpt_step_1_0_epoch_2.pt",
    "ckpt_step_\u0661_epoch_2.pt",  # an Arabic digit, which int() would take
    "ckpt_step_1_epoch_\uff12.pt",  # a full-width one
    "ckpt_step_1_epoch_2_tp\u00b2.pt",
    "ckpt_step_1_epoch_2.pt\n",
    "ckpt_step_1_epoch_2.pt ",
    " ckpt_step_1_epoch_2.pt",
    "\nckpt_step_1_epoch_2.pt",
    "ckpt_step_1_epoch_2.ptx",
    "ckpt_step_1_epoch_2xpt",
    "ckpt_step_1_epoch_2.PT",
    "CKPT_step_1_epoch_2.pt",
    "xckpt_step_1_epoch_2.pt",
    "ckpt_step_1_epoch_2_tp.pt",
    "ckpt_step_1_epoch_2_tp1_tp1.pt",
    "ckpt_step_1_epoch_2_dp0.pt",
    "ckpt_step_1_epoch_2_tp1_dp0.pt",
    "ckpt_step_1_epoch_2.pt.bak",
    "ckpt_step__epoch_2.pt",
    "./ckpt_step_1_epoch_2.pt",
    "a/ckpt_step_1_epoch_2.pt",
    "lora_step_1_epoch_2.pt\n",
    "lora_step_1_epoch_2.ptx",
    "lora_step_1_epoch_2_tp01.pt",
    "stage0.pt",
    "stage0_tp01.pt",
    "stage00_tp1.pt",
    "stage0_tp1.pt\n",
    "stage_0_tp1.pt",
]


@pytest.mark.parametrize("name", STRANGERS)
def test_a_strangers_file_is_not_a_shard(name: str) -> None:
    assert naming.parse_shard(name) is None


@pytest.mark.parametrize("final", STRANGERS)
def test_a_file_being_written_for_a_strangers_name_is_a_strangers(final: str) -> None:
    assert naming.parse_partial(f".{final}.1-2-host-ab.partial") is None
    assert naming.parse_kept(f".{final}.1-2.kept") is None


def test_tp1_is_not_tp10() -> None:
    one, ten = (naming.parse_shard(f"ckpt_step_5_epoch_0_tp{rank}.pt") for rank in (1, 10))
    assert one is not None
    assert ten is not None
    assert (one.tp_rank, ten.tp_rank) == (1, 10)
    assert naming.parse_stage_directory("checkpoint_1", None) == 1
    assert naming.parse_stage_directory("checkpoint_10", None) == 10


@given(final_names(), NUMBERS, NUMBERS, HOSTS, TOKENS)
def test_a_file_being_written_comes_back(final: str, attempt: int, sequence: int, host: str, token: str) -> None:
    name = naming.partial(final, attempt=attempt, sequence=sequence, host=host, token=token)
    parsed = naming.parse_partial(name)
    assert parsed is not None
    assert parsed == PartialName(final, attempt, sequence, parsed.host, token)
    assert parsed.is_of(host), "the host that wrote it may sweep it"
    assert name.startswith("."), "nobody who lists *.pt sees it"
    assert "/" not in name
    assert naming.parse_shard(name) is None
    assert naming.parse_kept(name) is None


@pytest.mark.parametrize("host", ["n12", "gpu-node-03", "trainer-0.trainers.ml.svc", "a--b", "-", "host-12-ab"])
def test_a_usual_host_name_is_kept_as_it_is(host: str) -> None:
    parsed = naming.parse_partial(
        naming.partial("ckpt_step_1_epoch_2.pt", attempt=3, sequence=4, host=host, token="0a1b")
    )
    assert parsed == PartialName("ckpt_step_1_epoch_2.pt", 3, 4, host, "0a1b")
    assert naming.status_file(host) == f"status.{host}.json"
    assert naming.parse_status_file(naming.status_file(host)) == host
    assert naming.daemon_lock(host) == f"daemon.{host}.lock"
    assert naming.daemon_log(host) == f"daemon.{host}.log"


@given(HOSTS)
def test_an_odd_host_name_becomes_one_plain_part_of_a_name(host: str) -> None:
    allowed = set(string.ascii_letters + string.digits + "._-")
    for name in (naming.status_file(host), naming.daemon_lock(host), naming.daemon_log(host)):
        assert set(name) <= allowed
    spelled = naming.parse_status_file(naming.status_file(host))
    assert spelled is not None
    assert naming.status_file(spelled) == naming.status_file(host)


def test_another_hosts_file_is_not_ours() -> None:
    parsed = naming.parse_partial(".stage0_tp0.pt.1-1-node-1-ff.partial")
    assert parsed is not None
    assert parsed.is_of("node-1")
    assert not parsed.is_of("node-10")
    assert not parsed.is_of("node")


@pytest.mark.parametrize(
    "name",
    [
        ".ckpt_step_1_epoch_2.pt.partial",
        ".ckpt_step_1_epoch_2.pt.1-2-host-ab.partial\n",
        ".ckpt_step_1_epoch_2.pt.01-2-host-ab.partial",
        ".ckpt_step_1_epoch_2.pt.1-02-host-ab.partial",
        ".ckpt_step_1_epoch_2.pt.1-2-host-AB.partial",
        ".ckpt_step_1_epoch_2.pt.1-2-host-xy.partial",
        ".ckpt_step_1_epoch_2.pt.1-2--ab.partial",
        ".ckpt_step_1_epoch_2.pt.1-2-ho/st-ab.partial",
        ".ckpt_step_1_epoch_2.pt.1-2-host-.partial",
        "ckpt_step_1_epoch_2.pt.1-2-host-ab.partial",
        "..ckpt_step_1_epoch_2.pt.1-2-host-ab.partial",
        ".ckpt_step_1_epoch_2.pt.1-2.kept",
        ".model.safetensors.1-2-host-ab.partial",
        "download.partial",
    ],
)
def test_a_strangers_temporary_file_is_left_alone(name: str) -> None:
    assert naming.parse_partial(name) is None


@given(final_names(), NUMBERS, NUMBERS)
def test_a_kept_link_comes_back(final: str, attempt: int, sequence: int) -> None:
    name = naming.kept(final, attempt=attempt, sequence=sequence)
    assert naming.parse_kept(name) == final
    assert naming.parse_shard(name) is None
    assert naming.parse_partial(name) is None


@pytest.mark.parametrize(
    "name",
    [
        ".ckpt_step_1_epoch_2.pt.kept",
        ".ckpt_step_1_epoch_2.pt.1-2.kept\n",
        ".ckpt_step_1_epoch_2.pt.1-2-3.kept",
        ".ckpt_step_1_epoch_2.pt.01-2.kept",
        "ckpt_step_1_epoch_2.pt.1-2.kept",
        ".photos.pt.1-2.kept",
    ],
)
def test_a_strangers_kept_file_is_left_alone(name: str) -> None:
    assert naming.parse_kept(name) is None


@given(NUMBERS, POSTFIXES)
@example(0, "two\nlines")
@example(1, "a_0_")
def test_a_stage_directory_comes_back(stage: int, postfix: str | None) -> None:
    assert naming.check_postfix(postfix) == (postfix or None)
    assert naming.parse_stage_directory(naming.stage_directory(stage, postfix), postfix) == stage


@given(NUMBERS, POSTFIXES, POSTFIXES)
def test_the_names_of_two_postfixes_never_cross(stage: int, one: str | None, other: str | None) -> None:
    same = (one or None) == (other or None)
    found = naming.parse_stage_directory(naming.stage_directory(stage, one), other)
    assert found == (stage if same else None)
    assert (naming.service_directory(one) == naming.service_directory(other)) is same
    assert (naming.socket_name("/runs", one, "h") == naming.socket_name("/runs", other, "h")) is same


@pytest.mark.parametrize(("one", "other"), [("a", "a_0"), ("a", None), ("0_a", "a"), ("a_1", "a_11"), ("stage", "")])
def test_look_alike_postfixes_never_cross(one: str, other: str | None) -> None:
    for stage in (0, 1, 11):
        assert naming.parse_stage_directory(naming.stage_directory(stage, one), other) is None
        assert naming.parse_stage_directory(naming.stage_directory(stage, other), one) is None


def test_no_postfix_and_an_empty_one_are_the_same() -> None:
    assert naming.stage_directory(3, None) == naming.stage_directory(3, "") == "checkpoint_3"
    assert naming.stage_directory(3, "sft") == "checkpoint_sft_3"
    assert naming.service_directory(None) == naming.service_directory("") == ".ckpt_service"
    assert naming.service_directory("sft") == ".ckpt_service_sft"
    assert naming.socket_name("/r", None, "h") == naming.socket_name("/r", "", "h")
    assert naming.check_postfix("") is None
    assert naming.check_postfix(None) is None


@pytest.mark.parametrize(
    "name", ["checkpoint_", "checkpoint_01", "checkpoint_\u0661", "checkpoint_1\n", "xcheckpoint_1"]
)
@pytest.mark.parametrize("postfix", [None, "sft"])
def test_a_strangers_directory_is_no_stage(name: str, postfix: str | None) -> None:
    assert naming.parse_stage_directory(name, postfix) is None


@pytest.mark.parametrize("postfix", ["a/b", "/", "a\0", "7", "007", "0", "a\ud800", "\udcff"])
def test_a_postfix_that_cannot_be_in_a_name_is_refused_by_name(postfix: str) -> None:
    with pytest.raises(ValueError, match="postfix="):
        naming.check_postfix(postfix)


@given(NUMBERS, POSTFIXES)
def test_a_stage_directory_says_its_postfix_and_stage(stage: int, postfix: str | None) -> None:
    assert naming.read_stage_directory(naming.stage_directory(stage, postfix)) == (
        None if postfix == "None" else postfix or None,
        stage,
    )


@pytest.mark.parametrize("name", ["checkpoint_", "checkpoint_a", "checkpoint_01", "x_checkpoint_1", "checkpoint_1_"])
def test_a_strangers_directory_says_nothing(name: str) -> None:
    assert naming.read_stage_directory(name) is None


def test_where_the_old_trainer_wrote_without_a_postfix() -> None:
    assert naming.former_stage_directory(3) == "checkpoint_None_3"
    assert naming.read_stage_directory("checkpoint_None_3") == (None, 3)


def test_lora_directories_of_all_stages_have_one_beginning() -> None:
    assert naming.parse_lora_directory(naming.lora_directory(12, None)) == ("lora_checkpoint", 12)
    assert naming.parse_lora_directory("a_stage_1_stage_2") == ("a_stage_1", 2)
    assert naming.parse_lora_directory("_stage_0") == ("", 0), "of lora_dir='adapters/'"
    for name in ("a_stage_01", "a_stage_", "a_stage_1x", "lora_checkpoint"):
        assert naming.parse_lora_directory(name) is None


def test_lora_directories() -> None:
    assert naming.lora_directory(2, None) == naming.lora_directory(2, "") == "lora_checkpoint_stage_2"
    assert naming.lora_directory(2, "/data/adapters") == "/data/adapters_stage_2"


@given(NUMBERS, NUMBERS)
def test_attempts_and_pins_come_back(attempt: int, sequence: int) -> None:
    assert naming.parse_attempt_file(naming.attempt_file(attempt)) == attempt
    assert naming.parse_pin_file(naming.pin_file(attempt, sequence)) == (attempt, sequence)


@pytest.mark.parametrize("name", ["", "1", "01.json", "1.json\n", ".1.json", "1.json.tmp", "-1.json", "\u0661.json"])
def test_a_strangers_file_is_no_attempt(name: str) -> None:
    assert naming.parse_attempt_file(name) is None


@pytest.mark.parametrize("name", ["", "1", "1-", "01-2", "1-02", "1-2\n", "1-2-3", "\u0661-2", "1-2.json"])
def test_a_strangers_file_is_no_pin(name: str) -> None:
    assert naming.parse_pin_file(name) is None


@pytest.mark.parametrize(
    "name", ["status..json", "status.json", "status.a b.json", "status.a.json\n", "xstatus.a.json"]
)
def test_a_strangers_file_is_no_status(name: str) -> None:
    assert naming.parse_status_file(name) is None


def test_a_socket_has_a_short_name_of_its_own_for_each_run_directory_and_host() -> None:
    root = "/a/very/deep" * 40
    names = {naming.socket_name(root, postfix, host) for postfix in (None, "x", "y") for host in ("n1", "n2")} | {
        naming.socket_name("/other", None, "n1"),
        naming.socket_name("/undecodable\udcff", None, "n1"),
    }
    assert len(names) == 8
    assert all(len(name) == 21 and name.endswith(".sock") for name in names)


@pytest.mark.parametrize("host", ["node", "gpu-node-03", "a.b_c-1"])
def test_the_files_of_any_host_are_found_again(host: str) -> None:
    assert naming.parse_status_file(naming.status_file(host)) == host
    assert naming.parse_peers_file(naming.peers_file(host)) == host


@pytest.mark.parametrize(
    ("name", "postfix"),
    [
        (".ckpt_service", None),
        (".ckpt_service_", None),
        (".ckpt_service_a b", "a b"),
        ("checkpoint_0", None),
        ("checkpoint_x_0", "x"),
        ("checkpoint_x_y_12", "x_y"),
        ("checkpoint_x_", None),
        ("lora_checkpoint_stage_0", None),
    ],
)
def test_an_entry_of_a_root_names_its_postfix(name: str, postfix: str | None) -> None:
    assert naming.postfix_of(name) == postfix


def test_lora_directories_come_back() -> None:
    assert naming.parse_lora_directory(naming.lora_directory(3, None)) == ("lora_checkpoint", 3)
    assert naming.parse_lora_directory(naming.lora_directory(0, "a_stage_1")) == ("a_stage_1", 0)
    for name in ("lora_checkpoint_stage_", "lora_checkpoint_stage_01", "_stage", "checkpoint_0"):
        assert naming.parse_lora_directory(name) is None


def test_logs_come_back() -> None:
    assert naming.parse_daemon_log(naming.daemon_log("n12")) == "n12"
    assert naming.parse_daemon_log(naming.set_aside_log("n12")) is None
