"""The doctor finds what is planted: each property broken by one double, the others left as they are."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ckptfs.control.control import Control, SoloControl
from ckptfs.errors import AccessError, CollectiveError, CredentialsError, UnsupportedError
from ckptfs.storage.base import Stat, Storage
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.local.posix import Posix
from ckptfs.storage.registry import open_storage
from ckptfs.testing.faults import Fail, Fault, FaultyStorage, Plan
from ckptfs.testing.memory_object_store import (
    STORES,
    Manner,
    Manners,
    MemoryObjectClient,
    MemoryObjects,
)
from ckptfs.testing.readonly import ReadOnlyStorage
from ckptfs.testing.world import simulate
from ckptfs.tools.doctor import Clock, Expect, Report, Settings, Theme, Verdict, examine_with
from ckptfs.tools.doctor.session import ABOUT, PREFIX
from ckptfs.uri import Uri
from tests.faults.late import LateNews, LateStorage, SharedClock
from tests.faults.mounts import CopyingMount

OK, WARN, FAIL, UNKNOWN = Verdict.OK, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN
QUICK = Settings(size_bytes=1 << 20, rounds=3, replaces=6, replace_s=0.0)
Opener = Callable[[Uri, Mapping[str, Any]], Storage]


def alone(uri: object, settings: Settings = QUICK, opener: Opener = open_storage) -> Report:
    """A visit of one process."""
    return examine_with(SoloControl(), uri, None, settings, opener=opener)


def together(
    nodes: Sequence[str], uri: object, settings: Settings, opener: Callable[[str], Opener]
) -> Report:
    """A visit of one simulated rank per node; every rank has the same report."""

    def body(control: Control) -> Report:
        node = control.world.node
        return examine_with(control, uri, None, settings, opener=opener(node))

    reports = [end.get() for end in simulate(len(nodes), body, nodes=nodes)]
    assert all(report == reports[0] for report in reports)
    return reports[0]


def on(posix: Posix) -> Opener:
    """Local storage on these system calls."""
    return lambda uri, _: LocalStorage(uri, posix=posix)


def faulty(*faults: Fault) -> Opener:
    """Storage that fails as planned, in the corner and out of it."""
    plan = Plan(list(faults))
    return lambda uri, options: FaultyStorage(open_storage(uri, options), plan)


def not_ok(report: Report) -> dict[str, Verdict]:
    """What the doctor found wanting, but for speed: this machine may be busy."""
    judged = [f for f in report.findings if f.theme is not Theme.SPEED]
    return {f.name: f.verdict for f in judged if f.verdict is not OK}


# -- nothing is planted ------------------------------------------------------------------


def test_a_good_disk_passes_and_nothing_stays(tmp_path: Path) -> None:
    """Every property of a local disk is ok; the run's directory, made for the visit, is gone again."""
    report = alone(tmp_path / "deep/er/run")
    assert not_ok(report) == {}
    assert report.passed(strict=False)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_exists_is_left_as_it_was(tmp_path: Path) -> None:
    """No name and no byte of a run changes, its log included, and its files are not even opened."""
    run = tmp_path / "run"
    (run / ".ckptfs/log").mkdir(parents=True)
    (run / "step_1").mkdir()
    (run / ".ckptfs/log/00000000").write_bytes(b"entry")
    before = {p: p.stat() for p in run.rglob("*")}
    assert not_ok(alone(run)) == {}
    assert {p: p.stat() for p in run.rglob("*")} == before


def test_an_object_store_passes_and_nothing_stays() -> None:
    """The memory object store: conditions, uploads in parts, nothing left, no upload either."""
    report = alone("objects+memory://doctor-good/run")
    assert not_ok(report) == {
        **dict.fromkeys(("clock-storage", "free-space"), UNKNOWN),
        **dict.fromkeys(("versioning", "object-lock", "lifecycle"), UNKNOWN),
    }
    assert report.finding("conditional-create").verdict is OK
    assert report.finding("multipart").verdict is OK
    store = STORES.bucket("doctor-good")
    assert store.objects == {}
    assert store.uploads == {}


def test_ranks_of_two_nodes_on_one_disk_share_it(tmp_path: Path) -> None:
    """Two nodes, one directory: one domain, and --expect node is refused with both hosts."""
    settings = Settings(size_bytes=1 << 20, rounds=3, replaces=6, expect=Expect.NODE)
    report = together(["a", "a", "b"], tmp_path / "run", settings, lambda _: open_storage)
    assert not_ok(report) == {"domains": FAIL}
    assert "host-a, host-b see the same bytes" in report.finding("domains").seen
    assert "12 writers" in report.finding("exclusive-create").seen
    assert list(tmp_path.iterdir()) == []


def test_the_manual_knows_every_property(tmp_path: Path) -> None:
    """Each finding, of a disk and of a bucket, has its line in docs/howto/doctor.md."""
    page = (Path(__file__).parents[2] / "docs/howto/doctor.md").read_text()
    reports = [
        together(["a", "b"], tmp_path / "run", QUICK, lambda _: open_storage),
        alone("objects+memory://doctor-manual/run"),
    ]
    names = {f.name for report in reports for f in report.findings}
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
    assert len(names) > 20


# -- planted: what commits rest on -------------------------------------------------------


def test_a_mount_that_copies_directories_is_named(tmp_path: Path) -> None:
    """No rename atomicity: the directory's file has another inode after its rename."""
    report = alone(tmp_path / "run", opener=on(CopyingMount()))
    found = report.finding("rename-directory")
    assert found.verdict is WARN
    assert "copied file by file" in found.seen
    assert "s3://" in found.advice
    assert not_ok(report) == {"rename-directory": WARN}


def test_a_mount_without_hard_links_has_no_exclusive_create(tmp_path: Path) -> None:
    """No links: fences are advice, and the doctor says so twice."""
    report = alone(tmp_path / "run", opener=on(CopyingMount(links=False)))
    assert not_ok(report) == {"exclusive-create": WARN, "rename-directory": WARN}
    assert "two jobs on one run" in report.finding("exclusive-create").meaning


def test_links_that_two_win_are_no_exclusive_create(tmp_path: Path) -> None:
    """link(2) that overwrites, in the race alone: the probe is honest, the race shows it."""

    class Careless(Posix):
        def link(self, source: str, target: str) -> None:
            super().link(source, second := f"{source}.second")
            if "/race/" in target:
                os.replace(second, target)
            else:
                os.unlink(second)
                super().link(source, target)

    found = alone(tmp_path / "run", opener=on(Careless())).finding("exclusive-create")
    assert found.verdict is FAIL
    assert "winners" in found.seen
    assert "both believe" in found.meaning


def test_a_replace_with_a_gap_is_seen_by_the_reader(tmp_path: Path) -> None:
    """A rename that first removes the target: for a moment there is nothing, and somebody looks."""

    class Gap(Posix):
        looked = threading.Event()

        def open(self, path: str, *rest: Any, **more: Any) -> int:
            try:
                return super().open(path, *rest, **more)
            except FileNotFoundError:
                self.looked.set()
                raise

        def rename(self, source: str, target: str) -> None:
            if "/replace/" in target and os.path.lexists(target):
                os.unlink(target)
                self.looked.clear()
                assert self.looked.wait(60), "nobody looked"
            super().rename(source, target)

    found = alone(tmp_path / "run", opener=on(Gap())).finding("atomic-replace")
    assert found.verdict is FAIL
    assert "missing" in found.seen


def test_a_replace_that_is_torn_now_and_then_is_raced_for(tmp_path: Path) -> None:
    """Every fiftieth replace is seen half done: a handful of replaces would not meet it."""

    class Torn(Posix):
        looked, times = threading.Event(), 0

        def open(self, path: str, *rest: Any, **more: Any) -> int:
            found = super().open(path, *rest, **more)
            if path.endswith("replace/rank-0"):
                self.looked.set()
            return found

        def rename(self, source: str, target: str) -> None:
            if target.endswith("replace/rank-0"):
                self.times += 1
                if self.times % 50 == 0:
                    os.truncate(target, 100)
                    self.looked.clear()
                    assert self.looked.wait(60), "nobody looked"
            super().rename(source, target)

    class Ticking(Clock):
        at_s = 0.0

        def now_s(self) -> float:
            self.at_s += 0.01
            return self.at_s

    settings = Settings(0, rounds=1, replaces=6, replace_s=1.0, patience_s=60.0, clock=Ticking())
    found = alone(tmp_path / "run", settings, on(Torn())).finding("atomic-replace")
    assert found.verdict is FAIL
    assert "torn" in found.seen


@pytest.mark.parametrize(
    ("op", "key", "name"),
    [("read", "replace/*", "atomic-replace"), ("open_read", "large/*", "read-bandwidth")],
)
def test_what_cannot_be_read_is_a_load_that_fails(
    tmp_path: Path, op: str, key: str, name: str
) -> None:
    """Saves go through there: the finding says which of the two would fail."""
    refused = faulty(Fault(op, key, None, Fail(UnsupportedError("no ranges here"))))
    found = alone(tmp_path / "run", opener=refused).finding(name)
    assert (found.verdict, found.meaning) == (FAIL, "a load would fail here the same way")


def test_a_place_that_folds_case_is_named(tmp_path: Path) -> None:
    """Names that differ in case only are one name there."""

    class Folding(LocalStorage):
        def stat(self, key: str) -> Stat:
            return super().stat(key.replace("/case", "/Case"))

    found = alone(tmp_path / "run", opener=lambda uri, _: Folding(uri)).finding("names")
    assert (found.verdict, found.data["not_kept"]) == (WARN, ["names that differ in case only"])


def test_an_upload_that_no_list_has_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that is answered, and empty, while an upload is under way, lists none."""
    monkeypatch.setattr(MemoryObjectClient, "list_uploads", lambda *_: iter(()))
    found = alone("objects+memory://doctor-unlisted/run").finding("multipart-list")
    assert found.verdict is WARN
    assert "not in the list" in found.seen


@pytest.mark.parametrize("lacks", [(), ("no batches of deletes: keys go one by one",)])
def test_what_a_server_lacks_is_told(
    lacks: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the client learnt of ranges and batches becomes a finding of its own."""
    monkeypatch.setattr(MemoryObjectClient, "lacks", lacks)
    found = alone("objects+memory://doctor-lacks/run").finding("requests")
    assert found.verdict is (WARN if lacks else OK)
    assert all(text in found.seen for text in lacks)


def test_directories_that_cannot_be_synced_are_a_warning(tmp_path: Path) -> None:
    """fsync of a directory is EINVAL: what was acknowledged may go with the power."""

    class Unsynced(Posix):
        def fsync(self, fd: int) -> None:
            if os.path.isdir(f"/proc/self/fd/{fd}"):
                raise OSError(22, "Invalid argument")
            super().fsync(fd)

    report = alone(tmp_path / "run", opener=on(Unsynced()))
    assert not_ok(report) == {"fsync": WARN}


@pytest.mark.parametrize("manner", [Manner.IGNORES, Manner.REFUSES])
def test_a_store_without_conditional_create_is_a_warning(manner: Manner) -> None:
    """A server that ignores If-None-Match, and one that answers 501."""
    STORES.put("doctor-ill", MemoryObjects(manners=Manners(if_absent=manner, if_match=manner)))
    report = alone("objects+memory://doctor-ill/run")
    assert report.finding("conditional-create").verdict is WARN
    assert report.finding("conditional-replace").verdict is WARN
    assert "If-None-Match" in report.finding("conditional-create").advice


def test_a_store_that_knows_etags_badly_is_told_apart() -> None:
    """If-Match ignored alone: creates are exclusive, replacing by etag is not."""
    STORES.put("doctor-etag", MemoryObjects(manners=Manners(if_match=Manner.IGNORES)))
    report = alone("objects+memory://doctor-etag/run")
    assert report.finding("conditional-create").verdict is OK
    assert report.finding("conditional-replace").verdict is WARN


@pytest.mark.parametrize(
    ("op", "name", "verdict"),
    [
        ("put_part", "multipart", FAIL),
        ("complete", "multipart", FAIL),
        ("abort", "multipart-abort", WARN),
        ("list_uploads", "multipart-list", WARN),
    ],
)
def test_uploads_in_parts_are_tried_request_by_request(
    op: str, name: str, verdict: Verdict
) -> None:
    """Each request of an upload refused by itself is a finding of its own."""
    fault = Fault(op, "*/uploads/*", None, Fail(UnsupportedError(f"{op} is not for you")))
    STORES.put(f"doctor-{op}", MemoryObjects(Plan([fault])))
    found = alone(f"objects+memory://doctor-{op}/run").finding(name)
    assert (found.verdict, f"{op} is not for you" in found.seen) == (verdict, True)


# -- planted: permissions ----------------------------------------------------------------


def test_read_only_says_restore_yes_save_no(tmp_path: Path) -> None:
    """Read-only: listing is permitted, making is not, the rest is not tested; not a pass."""
    (tmp_path / "run").mkdir()
    report = alone(tmp_path / "run", opener=lambda u, o: ReadOnlyStorage(open_storage(u, o)))
    found = report.finding("make-directories")
    assert found.verdict is FAIL
    assert "can restore from here and cannot save" in found.meaning
    assert report.finding("list").verdict is OK
    assert report.finding("latency").verdict is UNKNOWN
    assert not report.passed(strict=False)


@pytest.mark.parametrize(
    ("op", "key", "name"),
    [
        ("list", "", "list"),
        ("replace", "access/*", "write"),
        ("read", "access/*", "read"),
        ("remove", "access/*", "delete"),
    ],
)
def test_each_permission_is_reported_by_itself(
    tmp_path: Path, op: str, key: str, name: str
) -> None:
    """One kind of operation refused: that one fails, the others are permitted."""
    refused = faulty(Fault(op, key, None, Fail(AccessError("refused by the test"))))
    report = alone(tmp_path / "run", opener=refused)
    names = ("list", "make-directories", "write", "read", "delete")
    bad = [f.name for f in report.findings if f.name in names and f.verdict is FAIL]
    assert bad == [name]
    assert "refused by the test" in report.finding(name).seen


def test_wrong_credentials_are_an_error_of_their_type(tmp_path: Path) -> None:
    """No access is granted: no report, but the typed error, alike on one rank and on all."""
    refused = faulty(Fault("list", "*", None, Fail(CredentialsError("wrong secret"))))
    with pytest.raises(CredentialsError, match="wrong secret"):
        alone(tmp_path / "run", opener=refused)
    with pytest.raises(CredentialsError, match="wrong secret"):
        together(["a", "b"], tmp_path / "run", QUICK, lambda _: refused)


def test_a_node_without_credentials_is_named(tmp_path: Path) -> None:
    """One of two nodes is refused: an error on both that names it."""
    refused = faulty(Fault("list", "*", None, Fail(CredentialsError("wrong secret"))))
    with pytest.raises(CollectiveError, match=r"rank 1 on host-b.*wrong secret"):
        together(
            ["a", "b"], tmp_path / "run", QUICK, lambda n: refused if n == "b" else open_storage
        )
    assert list(tmp_path.iterdir()) == []


# -- planted: between nodes --------------------------------------------------------------


def late(tmp_path: Path, delay_s: float, keys: str = "") -> Report:
    """Two nodes that see each other's names ``delay_s`` late; keys: only those that contain it."""
    clock = SharedClock()
    news = LateNews(delay_s, clock, only=keys)
    settings = Settings(0, rounds=2, replaces=3, replace_s=0.0, clock=clock)

    def opener(node: str) -> Opener:
        return lambda uri, options: LateStorage(open_storage(uri, options), news, node)

    return together(["a", "b"], tmp_path / "run", settings, opener)


def test_a_visibility_delay_of_three_seconds_is_measured(tmp_path: Path) -> None:
    """3 s until another node's file is there: a warning with the number, and what gives up after 1 s."""
    report = late(tmp_path, 3.0, keys="/seen/")
    found = report.finding("visibility-delay")
    assert found.verdict is WARN
    assert 3.0 <= found.data["max_s"] < 4.0
    assert "give up after 1 s" in found.meaning
    assert found.data["stale_plain_looks"] >= 1  # absence was cached for longer than 2 s
    assert not_ok(report) == {"visibility-delay": WARN}


def test_a_delay_of_everything_also_breaks_the_domains(tmp_path: Path) -> None:
    """Where ckptfs's own probe meets the delay too, it fails here as a run would, and 3 s are reported."""
    report = late(tmp_path, 3.0)
    assert report.finding("domains").verdict is FAIL
    assert report.finding("visibility-delay").data["max_s"] >= 3.0
    assert report.finding("exclusive-create").verdict is UNKNOWN
    assert list((tmp_path).iterdir()) == []


def test_a_delay_beyond_the_lease_fails(tmp_path: Path) -> None:
    """16 s: a living owner's lease would stand still for the next job."""
    report = late(tmp_path, 16.0, keys="/seen/")
    assert report.finding("visibility-delay").verdict is FAIL
    assert "looks dead" in report.finding("visibility-delay").meaning


def test_what_is_never_seen_is_told_as_such(tmp_path: Path) -> None:
    """Beyond patience: who did not see which rank's write."""
    found = late(tmp_path, 1000.0, keys="/seen/fresh").finding("visibility-delay")
    assert found.verdict is FAIL
    assert "did not see rank" in found.seen
    assert found.data["never"] == 2


@pytest.mark.parametrize("expect", [Expect.SHARED, None])
def test_nodes_that_do_not_share_are_named(tmp_path: Path, expect: Expect | None) -> None:
    """A path said to be shared, two disks: fail with both hosts; unsaid, it is reported and is no fault."""

    def opener(node: str) -> Opener:
        def open_here(uri: Uri, _: Mapping[str, Any]) -> Storage:
            below = uri.path.removeprefix(str(tmp_path))
            return LocalStorage(uri, directory=f"{tmp_path}/{node}{below}")

        return open_here

    settings = Settings(0, rounds=2, replaces=3, expect=expect)
    report = together(["a", "b", "b"], tmp_path / "run", settings, opener)
    found = report.finding("domains")
    assert found.verdict is (FAIL if expect else OK)
    assert "host-a (1 rank)" in found.seen
    assert "host-b (2 ranks)" in found.seen
    assert report.finding("visibility-delay").verdict is OK  # within each
    assert list(tmp_path.iterdir()) == []


def test_clocks_of_ranks_and_place_are_compared(tmp_path: Path) -> None:
    """A node with a clock 100 s ahead is named, against rank 0 and against the place."""

    def body(control: Control) -> Report:
        clock = SharedClock(100.0) if control.rank else Clock()
        settings = Settings(0, rounds=2, replaces=3, replace_s=0.0, clock=clock)
        return examine_with(control, tmp_path / "run", None, settings)

    report = simulate(2, body, nodes=["a", "b"])[0].get()
    ranks, place = report.finding("clock-ranks"), report.finding("clock-storage")
    assert (ranks.verdict, place.verdict) == (WARN, WARN)
    assert "rank 1 on host-b against rank 0: 100" in ranks.seen
    assert "ahead" in ranks.seen
    assert "host-b" in place.seen
    assert "behind" in place.seen


# -- the corner --------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["create", "rename", "open_write", "read"])
def test_ctrl_c_leaves_nothing(tmp_path: Path, op: str) -> None:
    """Ctrl-C in the middle of any check: it is raised, and the corner and the run's directory go."""
    interrupted = faulty(Fault(op, "*", 1, Fail(KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        alone(tmp_path / "run", opener=interrupted)
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_killed_doctors_go_after_a_day(tmp_path: Path) -> None:
    """An old corner with its note goes; a young one, and a stranger's of that name, stay."""
    old, young = (f"{PREFIX}{day}T000000-0123456789ab" for day in ("20200101", "29990101"))
    strange = f"{PREFIX}20200101T000000-ba9876543210"
    for name, text in ((old, ABOUT), (young, ABOUT), (strange, b"my thesis")):
        (tmp_path / "run" / name / "deep").mkdir(parents=True)
        (tmp_path / "run" / name / "about.txt").write_bytes(text)
    found = alone(tmp_path / "run").finding("leftovers")
    assert found.verdict is WARN
    assert found.data == {"stay": [strange]}
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == sorted([young, strange])


def test_an_old_corner_on_an_object_store_goes_too() -> None:
    """The same by keys; nothing else below the run is touched."""
    store = MemoryObjects()
    STORES.put("doctor-old", store)
    old = f"run/{PREFIX}20200101T000000-0123456789ab"
    store.put_behind(f"{old}/about.txt", ABOUT)
    store.put_behind(f"{old}/race/0", b"x")
    store.put_behind("run/step_1/.metadata", b"kept")
    found = alone("objects+memory://doctor-old/run").finding("leftovers")
    assert found.verdict is OK
    assert set(store.objects) == {"run/step_1/.metadata"}
