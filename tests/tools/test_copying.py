"""Copies that are interrupted, raced, refused: what is there afterwards, and what is sent again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptfs
from ckptfs.commit.ownership.run import Run
from ckptfs.errors import CommitConflictError, IntegrityError, NotFoundError, RunBusyError
from ckptfs.replication.copier import CopyReport, Status, copy_to
from ckptfs.storage.registry import open_storage
from ckptfs.uri import Uri
from tests.cli.conftest import Place, a_run, no_accounts, place, radosgw, state_of
from tests.faults.proxy import FaultProxy
from tests.lab.server import Server
from tests.tools.copy_rig import a_big_run, answered_bytes, flags, same_data, sent_bytes
from tests.tools.copy_victims import Start, victims

__all__ = ["no_accounts", "place", "radosgw"]

RANKS, FILE_BYTES = 2, 32 << 20
SIZE_BYTES = RANKS * FILE_BYTES


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Commands in processes of their own."""
    with victims() as run:
        yield run


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two files of 32 MiB."""
    return a_big_run(tmp_path_factory.mktemp("big") / "run", RANKS, FILE_BYTES) / "step_1"


def statuses(report: CopyReport) -> dict[str, str]:
    """What became of each checkpoint."""
    return {one.name: one.status.value for one in report.checkpoints}


def names(run: object, options: dict[str, Any] | None = None) -> list[str]:
    """What is committed there."""
    return [c.uri.name for c in ckptfs.list_checkpoints(run, storage_options=options)]


# -- interrupted ------------------------------------------------------------------------------------


def test_a_copy_that_is_killed_three_times_goes_on_inside_its_files(
    tmp_path: Path, big: Path, start: Start, radosgw: Server
) -> None:
    """To S3 and back: bit-exact, nothing committed before the end. To S3 the files under way are sent again, and
    no others; of what comes back at most 30 % is.
    """
    there, back = radosgw.fresh(), tmp_path / "back"
    few = {"concurrency": 2, "part_size_bytes": 5 << 20}
    with FaultProxy(radosgw.endpoint) as proxy:
        options = {k: proxy.url if v == radosgw.endpoint else v for k, v in radosgw.options.items()}
        options |= few
        up = ["cp", big, f"{there}/step_1", *flags("-O", options), "--jobs", 1, "--json"]
        for write in (4, 6):
            killed = start(up, CKPTFS_TEST_FAULT=f"kill:write:*.distcp:{write}")()
            assert killed.status == -9, killed
            assert names(there, dict(radosgw.options)) == []
        done = start(up)()
        assert done.status == 0, done.err
        assert done.json["copied_bytes"] + done.json["skipped_bytes"] >= SIZE_BYTES
        assert sent_bytes(proxy.log) <= SIZE_BYTES + 2 * FILE_BYTES + (1 << 20)
        proxy.forget()
        down = ["cp", f"{there}/step_1", back / "step_1", *flags("-o", options), "--jobs", 1]
        killed = start([*down, "--json"], CKPTFS_TEST_FAULT="kill:write:*.distcp:3")()
        assert killed.status == -9, killed
        assert names(back) == []
        assert start([*down, "--json"])().status == 0
        assert answered_bytes(proxy.log) <= 1.3 * SIZE_BYTES
    assert same_data(big, back / "step_1")


def test_what_a_power_cut_left_is_compared_before_it_is_believed(
    tmp_path: Path, big: Path, start: Start
) -> None:
    """Bytes that are wrong in a partial file, and in a whole one, are copied again from there on."""
    target = tmp_path / "copy" / "step_1"
    words = ["cp", big, target, "--jobs", 1, "--json"]
    assert start(words, CKPTFS_TEST_FAULT="kill:write:*.distcp:7")().status == -9
    [whole] = target.parent.glob(".ckptfs/attempts/*/*/__*.distcp")
    [part] = target.parent.glob(".ckptfs/attempts/*/*/.partial-kept-*.distcp")
    for path in (whole, part):
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(b"\0" * 4096)
    done = start(words)()
    assert done.status == 0, done.err
    assert same_data(big, target)
    [one] = done.json["checkpoints"]
    assert 0 < one["resumed_bytes"] < FILE_BYTES  # the first half of the one that was under way


@pytest.mark.parametrize(
    "fault",
    [
        "fail=ENOSPC:write:.ckptfs/*",
        "fail=EDQUOT:close:*",
        "fail=TransientError:read_into:step_1/*",
    ],
)
def test_a_wrong_file_that_cannot_be_replaced_is_not_taken_for_the_right_one(
    tmp_path: Path, big: Path, start: Start, fault: str
) -> None:
    """Whichever side fails while it is brought again: an error, nothing committed; then it is right."""
    target = tmp_path / "copy" / "step_1"
    words = ["cp", big, target, "--jobs", 1, "--json"]
    assert start(words, CKPTFS_TEST_FAULT="kill:write:*.distcp:7")().status == -9
    [whole] = target.parent.glob(".ckptfs/attempts/*/*/__*.distcp")
    with whole.open("r+b") as file:
        file.write(b"\0" * 4096)
    failed = start(words, CKPTFS_TEST_FAULT=f"{fault}{whole.name}:*")()
    assert failed.status == 5, failed
    assert names(target.parent) == []
    done = start(words)()
    assert done.status == 0, done.err
    assert same_data(big, target)


@pytest.mark.parametrize("size_bytes", [1000, 17 << 20])
def test_what_lies_under_a_plain_name_of_a_bucket_is_compared_before_it_is_believed(
    tmp_path: Path, radosgw: Server, size_bytes: int
) -> None:
    """A file of the same size that somebody put there is replaced; what is right is not sent again."""
    with ckptfs.checkpoint_dir(tmp_path / "source" / "export_1") as path:
        Path(path, "model.bin").write_bytes(b"A" * size_bytes)
        Path(path, "config.json").write_bytes(b"{}")
    uri, options = radosgw.fresh(), dict(radosgw.options)
    there = open_storage(Uri.parse(uri), options)
    there.replace("export_1/model.bin", b"Z" * size_bytes)
    there.replace("export_1/config.json", b"{}")
    report = copy_to(tmp_path / "source" / "export_1", f"{uri}/export_1", target_options=options)
    assert there.read("export_1/model.bin") == b"A" * size_bytes
    [one] = report.checkpoints
    assert (one.copied_bytes, one.resumed_bytes) == (size_bytes, 2)


@pytest.mark.parametrize(
    ("fault", "code", "error"), [("ENOSPC", 5, "NoSpaceError"), ("EACCES", 4, "AccessError")]
)
def test_a_target_that_is_full_or_refuses_is_an_error_and_what_is_there_is_kept(
    tmp_path: Path, big: Path, start: Start, fault: str, code: int, error: str
) -> None:
    """The code says which; the next try continues with what is there."""
    words = ["cp", big, tmp_path / "copy" / "step_1", "--jobs", 1, "--json"]
    full = start(words, CKPTFS_TEST_FAULT=f"fail={fault}:write:*.distcp:6")()
    assert full.status == code, full
    assert full.json["error"]["type"] == error
    done = start(words)()
    assert done.status == 0, done.err
    assert done.json["checkpoints"][0]["resumed_bytes"] >= 16 << 20


def test_an_owner_that_takes_the_target_between_two_tries_makes_the_second_begin_anew(
    tmp_path: Path, big: Path, start: Start
) -> None:
    """Its recovery aborts the attempt and so spends its id."""
    run = tmp_path / "copy"
    words = ["cp", big, run / "step_1", "--json"]
    assert start(words, CKPTFS_TEST_FAULT="kill:write:*.distcp:6")().status == -9
    ckptfs.prepare_run(run).release()
    assert not list(run.glob(".ckptfs/attempts/*"))
    done = start(words)()
    assert done.status == 0, done.err
    assert done.json["checkpoints"][0]["resumed_bytes"] == 0
    assert same_data(big, run / "step_1")


def test_a_damaged_source_is_never_committed_and_names_file_and_bytes(
    place: Place, tmp_path: Path
) -> None:
    """Repaired, the same copy is made."""
    source = tmp_path / "source"
    ckptfs.save({"w": torch.arange(600_000.0)}, source / "step_1")
    [data] = source.glob("step_1/*/__0_0.distcp")
    good = data.read_bytes()
    data.write_bytes(good[:1_500_000] + b"\xff" + good[1_500_001:])
    for _ in range(2):
        with pytest.raises(IntegrityError, match=r"__0_0.distcp is damaged.* bytes \d+ to \d+"):
            copy_to(source / "step_1", f"{place.uri}/step_1", target_options=place.options)
        assert names(place.uri, place.options) == []
    data.write_bytes(good)
    copy_to(source / "step_1", f"{place.uri}/step_1", target_options=place.options)
    assert names(place.uri, place.options) == ["step_1"]


def test_half_files_of_killed_copies_are_no_part_of_the_checkpoint(
    tmp_path: Path, start: Start
) -> None:
    """Of a sidecar and of a manifest; nothing is left for anybody to clean."""
    ckptfs.save(state_of(1), tmp_path / "source" / "step_1")
    target = tmp_path / "copy" / "step_1"
    words = ["cp", tmp_path / "source" / "step_1", target, "--json"]
    for fault in ("kill:close:*.xxh3:1", "kill:close:*/ckptfs.json:1"):
        assert start(words, CKPTFS_TEST_FAULT=fault)().status == -9
        assert len(list(target.parent.rglob(".partial-*"))) == 1
    assert start(words)().status == 0
    assert not list(target.parent.rglob(".partial-*"))


# -- two at once ------------------------------------------------------------------------------------


def _overtake(start: Start, words: list[Any], gate: Path, where: str) -> None:
    """Hold a copy at ``where``, let a second one commit, and see the first find it there."""
    first = start(words, CKPTFS_TEST_FAULT=f"hold={gate}:{where}")
    wait_for(Path(f"{gate}.reached"))
    second = start(words)()
    gate.touch()
    ended = first()
    assert (second.status, ended.status) == (0, 0), (second, ended)
    found = [e.json["checkpoints"][0]["status"] for e in (second, ended)]
    assert found == ["copied", "already there"]


@pytest.mark.parametrize("where", ["create:*/ckptfs.json:1", "create:*/log/*:1"])
def test_of_two_copies_of_the_same_one_commits_and_the_other_finds_it_there(
    place: Place, tmp_path: Path, start: Start, where: str
) -> None:
    """The first stalls before its manifest, or before its seal; the second overtakes it. What is
    committed is whole, and its manifest is the one that was sealed.
    """
    source, gate = tmp_path / "source", tmp_path / "gate"
    ckptfs.save(state_of(1), source / "step_1")
    words = ["cp", source / "step_1", f"{place.uri}/step_1", *place_flags(place), "--json"]
    _overtake(start, words, gate, where)
    ckptfs.prepare_run(place.uri, storage_options=place.options).release()
    state = state_of(9)
    ckptfs.load(state, f"{place.uri}/step_1", storage_options=place.options)
    assert torch.equal(state["optimizer"]["exp_avg"], state_of(1)["optimizer"]["exp_avg"])
    assert state["step"] == 1


def test_a_file_that_another_copy_is_writing_is_left_to_it(
    tmp_path: Path, big: Path, start: Start
) -> None:
    """On a filesystem: exit 6, and the first is not disturbed."""
    gate = tmp_path / "gate"
    words = ["cp", big, tmp_path / "copy" / "step_1", "--json"]
    first = start(words, CKPTFS_TEST_FAULT=f"hold={gate}:write:*.distcp:5")
    wait_for(Path(f"{gate}.reached"))
    second = start(words)()
    gate.touch()
    assert second.status == 6, second
    assert "another process is writing" in second.err
    assert first().status == 0
    assert same_data(big, tmp_path / "copy" / "step_1")


@pytest.mark.parametrize(
    "where",
    ["close_read:exp/a.bin:1", "make_dir:.ckptfs/attempts/*/*:1"],
)
def test_a_copy_that_stalls_leaves_nothing_behind_once_another_has_committed_the_same(
    tmp_path: Path, start: Start, where: str
) -> None:
    """Between two files, or before its attempt: no attempt is there for the next owner."""
    with ckptfs.checkpoint_dir(tmp_path / "source" / "exp") as path:
        (Path(path) / "sub").mkdir()
        for size, name in enumerate(("sub/c.bin", "sub/.partial-mine", "b.bin", "a.bin"), 1000):
            (Path(path) / name).write_bytes(b"x" * size)
    run, gate = tmp_path / "copy", tmp_path / "gate"
    words = ["cp", tmp_path / "source" / "exp", run / "exp", "--jobs", 1, "--json"]
    _overtake(start, words, gate, where)
    assert not list(run.glob(".ckptfs/attempts/*"))
    assert (run / "exp/sub/.partial-mine").stat().st_size == 1001


def test_an_upload_that_another_copy_completed_is_taken_for_brought(
    big: Path, start: Start, radosgw: Server, tmp_path: Path
) -> None:
    """The other dies before it commits; what it brought is not sent again."""
    gate = tmp_path / "gate"
    words = [
        "cp",
        big,
        f"{radosgw.fresh()}/step_1",
        *flags("-O", radosgw.options),
        "--jobs",
        1,
        "--json",
    ]
    plan = f"hold={gate}:write:*__0_0.distcp:1;fail=NotFoundError:close:*__0_0.distcp:1"
    first = start(words, CKPTFS_TEST_FAULT=plan)
    wait_for(Path(f"{gate}.reached"))
    second = start(words, CKPTFS_TEST_FAULT="kill:create:*/ckptfs.json:1")()
    gate.touch()
    ended = first()
    assert (second.status, ended.status) == (-9, 0), (second, ended)
    assert ended.json["checkpoints"][0]["resumed_bytes"] >= FILE_BYTES


def place_flags(where: Place) -> list[str]:
    """Options of a target."""
    return flags("-O", where.options)


def wait_for(path: Path) -> None:
    """Until another process has made it."""
    import time

    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.01)


# -- names that are taken ---------------------------------------------------------------------------


def test_another_save_of_the_name_is_replaced_only_when_asked(place: Place, tmp_path: Path) -> None:
    """CommitConflictError and nothing changed; then the new one, by a claim of the run."""
    ckptfs.save(state_of(1), tmp_path / "a" / "step_1")
    ckptfs.save(state_of(2), f"{place.uri}/step_1", storage_options=place.options)
    target = f"{place.uri}/step_1"
    with pytest.raises(CommitConflictError, match="is another save"):
        copy_to(tmp_path / "a" / "step_1", target, target_options=place.options)
    report = copy_to(
        tmp_path / "a" / "step_1", target, overwrite=True, target_options=place.options
    )
    assert statuses(report) == {"step_1": "copied"}
    state = state_of(9)
    ckptfs.load(state, target, storage_options=place.options)
    assert state["step"] == 1
    again = copy_to(tmp_path / "a" / "step_1", target, overwrite=True, target_options=place.options)
    assert statuses(again) == {"step_1": "already there"}


def test_a_living_owner_is_not_in_the_way_of_a_fresh_name(tmp_path: Path) -> None:
    """To replace a name of its run is refused."""
    ckptfs.save(state_of(1), tmp_path / "a" / "step_1")
    run: Run = ckptfs.prepare_run(tmp_path / "b")
    with run:
        ckptfs.save(state_of(2), tmp_path / "b" / "step_1", run=run)
        copy_to(tmp_path / "a" / "step_1", tmp_path / "b" / "step_2")
        assert names(tmp_path / "b") == ["step_1", "step_2"]
        ckptfs.save(state_of(3), tmp_path / "b" / "step_3", run=run)
        with pytest.raises(RunBusyError):
            copy_to(tmp_path / "a" / "step_1", tmp_path / "b" / "step_1", overwrite=True)


# -- runs -------------------------------------------------------------------------------------------


def test_of_a_run_what_is_missing_is_copied_oldest_first_and_once(
    place: Place, tmp_path: Path
) -> None:
    """Checkpoints, weights and directories; what was deleted there is not brought back by default."""
    source = a_run(Place("file", str(tmp_path / "source")))
    first = copy_to(source.uri, place.uri, target_options=place.options, latest=True)
    assert statuses(first) == {"step_20": "copied"}
    report = copy_to(source.uri, place.uri, target_options=place.options)
    order = ["step_10", "step_20", "weights_20", "export_1"]
    assert [one.name for one in report.checkpoints] == order
    assert set(statuses(report).values()) == {"copied", "already there"}
    assert "the latest there will be step_10" in report.warnings[0]
    again = copy_to(source.uri, place.uri, target_options=place.options)
    assert set(statuses(again).values()) == {"already there"}
    assert again.copied_bytes == 0
    assert again.skipped_bytes > 0
    with ckptfs.checkpoint_dir(
        f"{place.uri}/export_1", mode="read", storage_options=place.options
    ) as path:
        assert Path(path, "config.json").read_text() == '{"layers": 2}\n'
    for name in ("step_10", "step_20"):
        state = state_of(0)
        ckptfs.load(state, f"{place.uri}/{name}", storage_options=place.options)
        assert state["step"] == int(name[5:])


def test_what_the_target_deleted_comes_back_by_its_step_alone(tmp_path: Path) -> None:
    """A copy that is made every night does not undo the target's retention."""
    source = a_run(Place("file", str(tmp_path / "source")))
    copy_to(source.uri, tmp_path / "copy")
    with ckptfs.CheckpointManager(tmp_path / "copy") as manager:
        manager.delete(10)
    assert statuses(copy_to(source.uri, tmp_path / "copy"))["step_10"] == "deleted there"
    assert statuses(copy_to(source.uri, tmp_path / "copy", step=10)) == {"step_10": "copied"}
    assert "step_10" in names(tmp_path / "copy")
    with pytest.raises(NotFoundError, match="no checkpoint of step 11"):
        copy_to(source.uri, tmp_path / "copy", step=11)


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    """It gives names, sizes and what is due."""
    source = a_run(Place("file", str(tmp_path / "source")))
    report = copy_to(source.uri, tmp_path / "copy", dry_run=True)
    assert {one.status for one in report.checkpoints} == {Status.TO_COPY}
    assert all(one.size_bytes for one in report.checkpoints)
    assert not (tmp_path / "copy").exists()


def test_a_checkpoint_of_parts_is_copied_with_all_its_parts(place: Place, tmp_path: Path) -> None:
    """Into one run, each part under its name; once."""
    with ckptfs.CheckpointManager(tmp_path / "source") as manager:
        ticket = manager.begin(5, ["actor", "critic"])
        ticket.commit(
            [
                ckptfs.save({"w": torch.full((9,), n)}, ticket.part(part))
                for n, part in enumerate(["actor", "critic"])
            ]
        )
    for status in ("copied", "already there"):
        report = copy_to(tmp_path / "source", place.uri, target_options=place.options)
        assert statuses(report) == {"step_5": status}
    state = {"w": torch.zeros(9, dtype=torch.int64)}
    ckptfs.load(state, f"{place.uri}/step_5/critic", storage_options=place.options)
    assert torch.equal(state["w"], torch.full((9,), 1))


def test_checkpoints_without_a_log_are_committed_at_the_target(
    place: Place, tmp_path: Path
) -> None:
    """One by stock torch, one that was copied by hand; stock torch reads what came of it."""
    loose = tmp_path / "loose"
    dcp.save({"w": torch.arange(5.0)}, checkpoint_id=loose / "step_1", no_dist=True)
    ckptfs.save({"w": torch.arange(5.0) + 1}, tmp_path / "source" / "step_2")
    (tmp_path / "source" / "step_2").rename(loose / "step_2")
    for status in ("copied", "already there"):
        report = copy_to(loose, place.uri, target_options=place.options)
        assert statuses(report) == {"step_1": status, "step_2": status}
    for step in (1, 2):
        state = {"w": torch.zeros(5)}
        ckptfs.load(state, f"{place.uri}/step_{step}", storage_options=place.options)
        assert torch.equal(state["w"], torch.arange(5.0) + step - 1)
    copy_to(f"{place.uri}/step_1", tmp_path / "back/step_1", source_options=place.options)
    state = {"w": torch.zeros(5)}
    dcp.load(state, checkpoint_id=tmp_path / "back/step_1", no_dist=True)
    assert torch.equal(state["w"], torch.arange(5.0))
