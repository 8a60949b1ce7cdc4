"""What the doctor makes of what was seen: pure functions, every verdict of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from ckptfs.errors import AccessError, CkptfsError, NotFoundError, StorageError
from ckptfs.storage.clients.bucket_rules import Lock, Rule, Versioning, of_gcs, of_s3
from ckptfs.testing.world import thread_worlds
from ckptfs.text import size_text
from ckptfs.tools import doctor
from ckptfs.tools.doctor import (
    CHECKS,
    Report,
    Theme,
    Verdict,
    access,
    bucket,
    commit,
    mount,
    session,
    sharing,
    speed,
)
from ckptfs.tools.doctor.bucket import BucketAnswers, judge_rules
from ckptfs.tools.doctor.mount import (
    FreeSpace,
    Mount,
    judge_inodes,
    judge_mount,
    judge_names,
    judge_quota,
    judge_space,
    mounts_of,
)
from ckptfs.tools.doctor.report import on_ranks, seconds
from ckptfs.tools.doctor.session import (
    PREFIX,
    DoctorCheck,
    FailedOperation,
    Why,
    begun_s,
    failure,
    new_id,
)
from ckptfs.tools.doctor.sharing import Clocks, judge_clocks
from ckptfs.tools.doctor.speed import Transfer, judge_bandwidth, judge_latency

OK, WARN, FAIL, UNKNOWN = Verdict.OK, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN
WORLDS = tuple(control.world for control in thread_worlds(2, nodes=["a", "b"]))
GB = 10**9
DISK = Mount("ext4", "/dev/sda1", ("rw", "relatime"), "/data")
NFS = Mount("nfs4", "server:/x", ("rw", "vers=4.2", "hard", "actimeo=30"), "/data")
NO = FailedOperation(Why.ACCESS, "AccessDenied", "allow it")
UNTOLD = FailedOperation(Why.UNSUPPORTED, "NotImplemented")


@pytest.mark.parametrize(
    ("rooms", "needs", "verdict", "seen"),
    [
        ([FreeSpace(500 * GB, None)] * 2, None, OK, "500 GB free"),
        ([FreeSpace(500 * GB, None)] * 2, 500 * GB, OK, "500 GB free"),
        (
            [FreeSpace(500 * GB, None), FreeSpace(5 * GB, None)],
            6 * GB,
            FAIL,
            "rank 1 on host-b: 5.00 GB free",
        ),
        ([FreeSpace(GB // 2, None)] * 2, None, WARN, "500 MB free"),
        ([FreeSpace(None, None)] * 2, None, UNKNOWN, "does not report it"),
        ([FreeSpace(None, None)] * 2, 2 * GB, UNKNOWN, "whether 2.00 GB fit"),
        (
            [
                FreeSpace(5 * GB, None),
                FreeSpace(0, None, FailedOperation(Why.NO_SPACE, "no space left")),
            ],
            None,
            FAIL,
            "rank 1 on host-b: no space left",
        ),
    ],
)
def test_space_against_needs(
    rooms: list[FreeSpace], needs: int | None, verdict: Verdict, seen: str
) -> None:
    """The place with the least room decides, and is named where the others have more."""
    found = judge_space(WORLDS, rooms, needs)
    assert (found.name, found.verdict) == ("free-space", verdict)
    assert seen in found.seen


@pytest.mark.parametrize(("free", "verdict"), [(99, FAIL), (9_999, WARN), (10_000, OK)])
def test_inodes_run_out_by_themselves(free: int, verdict: Verdict) -> None:
    """Few names left: a warning, then a failure, whatever space there is."""
    [found] = judge_inodes(WORLDS, [FreeSpace(GB, free), FreeSpace(GB, 10**6)])
    assert (found.name, found.verdict) == ("inodes", verdict)


@pytest.mark.parametrize(
    ("mount", "verdict", "advice"),
    [
        (DISK, OK, ""),
        (replace(DISK, options=("rw", "prjquota")), UNKNOWN, "quota -s"),
        (replace(DISK, kind="lustre"), UNKNOWN, "lfs quota"),
        (NFS, UNKNOWN, "quota -s"),
    ],
)
def test_quota_is_known_to_be_off_or_not_known(mount: Mount, verdict: Verdict, advice: str) -> None:
    """A mount without quota options has none; else the report says what to ask."""
    [found] = judge_quota([mount, mount])
    assert (found.name, found.verdict) == ("quota", verdict)
    assert advice in found.advice


@pytest.mark.parametrize(
    ("mount", "verdict", "words"),
    [
        (DISK, OK, ""),
        (NFS, OK, ""),
        (replace(NFS, options=("rw", "soft")), WARN, "a write may be lost"),
        (replace(NFS, options=("rw", "nocto")), WARN, "older version"),
        (replace(NFS, options=("rw", "actimeo=600")), WARN, "actimeo=600"),
        (replace(DISK, kind="tmpfs"), WARN, "memory"),
        (replace(DISK, kind="overlay"), WARN, "container"),
        (replace(DISK, kind="fuse.s3fs", source="s3fs"), OK, "FUSE"),
    ],
)
def test_mounts_worth_a_note(mount: Mount, verdict: Verdict, words: str) -> None:
    """Options that change what a job may rely on; a FUSE mount is named and decides nothing."""
    [found] = judge_mount(WORLDS, [DISK, mount])
    assert found.verdict is verdict
    assert (words in found.meaning) if verdict is WARN else True
    [alone] = judge_mount(WORLDS[:1], [mount])
    assert words in alone.meaning
    assert mount.kind in alone.seen


def test_the_mount_of_a_path_is_the_last_and_deepest_that_holds_it() -> None:
    """Prefixes of names are no mounts, later mounts hide earlier ones, spaces are escaped."""
    table = (
        "21 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
        "30 21 0:5 / /data rw - nfs4 server:/x rw,vers=4.2\n"
        "31 21 0:6 / /data\\040two rw shared:1 - tmpfs tmpfs rw,size=1k\n"
        "32 21 0:7 / /data rw,noatime - fuse.s3fs s3fs rw\n"
        "nonsense\n"
    )
    kinds = {p: m.kind for p in ("/", "/data/run", "/database", "/data two/x")
             if (m := mounts_of(table, p))}  # fmt: skip
    assert kinds == {
        "/": "ext4",
        "/data/run": "fuse.s3fs",
        "/database": "ext4",
        "/data two/x": "tmpfs",
    }
    assert mounts_of("", "/") is None


def test_names_that_do_not_come_back() -> None:
    """Case folded, or a kind of name refused: a warning that says which."""
    good = {"spaces": None, "long": None}
    assert judge_names(WORLDS, [good, good])[0].verdict is OK
    refused = judge_names(WORLDS, [good, {**good, "spaces": NO}])[0]
    assert (refused.verdict, refused.data["not_kept"]) == (WARN, ["spaces"])
    assert judge_names(WORLDS, [None, None]) == ()


# -- rules of a bucket -------------------------------------------------------------------

PLAIN = BucketAnswers("runs/mine/", Versioning.OFF, None, ())
EXPIRES = Rule("r", "runs/", expires_days=3)


@pytest.mark.parametrize(
    ("rules", "name", "verdict", "words"),
    [
        (PLAIN, "versioning", OK, "off"),
        (replace(PLAIN, versioning=Versioning.SUSPENDED), "versioning", OK, "suspended"),
        (replace(PLAIN, versioning=Versioning.ON), "versioning", WARN, "no rule expires"),
        (
            replace(PLAIN, versioning=Versioning.ON, lifecycle=(Rule("v", "", versions_days=9),)),
            "versioning",
            OK,
            "after 9 days",
        ),
        (
            replace(PLAIN, versioning=NO),
            "versioning",
            UNKNOWN,
            "reading the settings is not permitted",
        ),
        (
            replace(PLAIN, versioning=UNTOLD),
            "versioning",
            UNKNOWN,
            "the server does not report them",
        ),
        (PLAIN, "object-lock", OK, "none"),
        (replace(PLAIN, lock=Lock()), "object-lock", OK, "no default"),
        (replace(PLAIN, lock=Lock(30)), "object-lock", WARN, "30 days"),
        (replace(PLAIN, lock=NO), "object-lock", UNKNOWN, "not permitted"),
        (PLAIN, "lifecycle", OK, "no rule"),
        (replace(PLAIN, lifecycle=(EXPIRES,)), "lifecycle", FAIL, "after 3 days"),
        (
            replace(PLAIN, lifecycle=(replace(EXPIRES, expires_days=30),)),
            "lifecycle",
            WARN,
            "after 30 days",
        ),
        (
            replace(PLAIN, lifecycle=(replace(EXPIRES, is_narrow=True),)),
            "lifecycle",
            WARN,
            "further conditions",
        ),
        (replace(PLAIN, lifecycle=(replace(EXPIRES, prefix="logs/"),)), "lifecycle", OK, ""),
        (
            replace(PLAIN, lifecycle=(replace(EXPIRES, prefix="runs/mine/step_"),)),
            "lifecycle",
            FAIL,
            "",
        ),
        (
            replace(PLAIN, lifecycle=(Rule("m", "", moves_to="GLACIER"),)),
            "lifecycle",
            WARN,
            "moves",
        ),
        (replace(PLAIN, lifecycle=(Rule("m", "", moves_to="STANDARD_IA"),)), "lifecycle", OK, ""),
        (replace(PLAIN, lifecycle=NO), "lifecycle", UNKNOWN, "not permitted"),
        (
            replace(PLAIN, lifecycle=(Rule("u", "", aborts_days=7),)),
            "lifecycle-uploads",
            OK,
            "after 7 days",
        ),
        (
            replace(PLAIN, lifecycle=(Rule("u", "", aborts_days=0),)),
            "lifecycle-uploads",
            WARN,
            "after 0 days",
        ),
        (None, "lifecycle", UNKNOWN, "cannot ask"),
    ],
)
def test_rules_that_take_checkpoints(
    rules: BucketAnswers | None, name: str, verdict: Verdict, words: str
) -> None:
    """Only rules with a prefix that meets the run's count; not permitted to look is an answer."""
    found = {f.name: f for f in judge_rules(rules, "ask the owner")}[name]
    assert found.verdict is verdict
    assert words in found.seen


def test_what_s3_answers_is_read() -> None:
    """Filters in both spellings, tags, dates, years; nothing configured is no error; refusals stay."""
    rules: list[dict[str, Any]] = [
        {"ID": "a", "Status": "Enabled", "Filter": {"Prefix": "x/"}, "Expiration": {"Days": 4}},
        {"ID": "b", "Status": "Disabled", "Prefix": "", "Expiration": {"Days": 1}},
        {
            "ID": "c",
            "Status": "Enabled",
            "Filter": {"And": {"Prefix": "y/", "Tags": [{"Key": "k", "Value": "v"}]}},
            "Expiration": {"Date": "2030-01-01"},
            "Transitions": [{"Days": 1, "StorageClass": "GLACIER"}],
        },
        {
            "Status": "Enabled",
            "Prefix": "",
            "NoncurrentVersionExpiration": {"NoncurrentDays": 5},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 6},
        },
    ]
    answers: dict[str, Mapping[str, Any]] = {
        "GetBucketVersioning": {"Status": "Enabled"},
        "GetObjectLockConfiguration": {
            "ObjectLockConfiguration": {
                "ObjectLockEnabled": "Enabled",
                "Rule": {"DefaultRetention": {"Mode": "COMPLIANCE", "Years": 1}},
            }
        },
        "GetBucketLifecycleConfiguration": {"Rules": rules},
    }
    found = of_s3(answers.__getitem__)
    assert found.versioning is Versioning.ON
    assert found.lock == Lock(365)
    assert found.lifecycle == (
        Rule("a", "x/", expires_days=4),
        Rule("c", "y/", is_narrow=True, expires_days=0, moves_to="GLACIER"),
        Rule("", "", aborts_days=6, versions_days=5),
    )
    assert of_s3(raising(NotFoundError("none"))).lifecycle == ()
    assert isinstance(of_s3(raising(AccessError("no"))).lock, AccessError)


def raising(error: CkptfsError) -> Any:
    """Asks in vain."""

    def ask(*_: object) -> Mapping[str, Any]:
        raise error

    return ask


def test_what_gcs_answers_is_read() -> None:
    """Age, prefixes, versions, retention in seconds; one refusal counts for all three."""
    bucket = {
        "versioning": {"enabled": True},
        "retentionPolicy": {"retentionPeriod": "172800"},
        "lifecycle": {
            "rule": [
                {
                    "action": {"type": "Delete"},
                    "condition": {"age": 3, "matchesPrefix": ["runs/"]},
                },
                {"action": {"type": "Delete"}, "condition": {"age": 9, "isLive": False}},
                {
                    "action": {"type": "AbortIncompleteMultipartUpload"},
                    "condition": {"age": 7},
                },
                {
                    "action": {"type": "SetStorageClass", "storageClass": "ARCHIVE"},
                    "condition": {"age": 1, "matchesStorageClass": ["STANDARD"]},
                },
            ]
        },
    }
    found = of_gcs(lambda: bucket)
    assert (found.versioning, found.lock) == (Versioning.ON, Lock(2))
    assert found.lifecycle == (
        Rule("rule 0", "runs/", expires_days=3),
        Rule("rule 1", "", versions_days=9),
        Rule("rule 2", "", aborts_days=7),
        Rule("rule 3", "", is_narrow=True, moves_to="ARCHIVE"),
    )
    assert isinstance(of_gcs(raising(AccessError("no"))).versioning, AccessError)


# -- clocks and speed --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "verdict"),
    [
        ((-0.5, 0.5), OK),
        ((4.0, 4.9), OK),
        ((5.5, 6.5), WARN),
        ((-900.0, -601.0), FAIL),
        (None, UNKNOWN),
    ],
)
def test_clock_of_the_place(place: tuple[float, float] | None, verdict: Verdict) -> None:
    """Only what is sure counts: the bound that is nearest to none."""
    seen = [Clocks(place, (-0.1, 0.1), "Date of the server")] * 2
    found = {f.name: f for f in judge_clocks(WORLDS, seen)}
    assert found["clock-storage"].verdict is verdict
    assert found["clock-ranks"].verdict is OK


def test_speed_is_judged_only_where_it_is_hopeless() -> None:
    """Slow commits and slow transfers warn; a short transfer shows nothing; --needs becomes a time."""
    quick, slow = {"write": (0.01, 0.02)}, {"write": (2.0, 3.0)}
    assert judge_latency(WORLDS, [quick, quick])[0].verdict is OK
    assert judge_latency(WORLDS, [slow, slow])[0].verdict is WARN
    mib = 1 << 20
    write, read = judge_bandwidth([Transfer(100 * mib, 1.0, 50.0, "memory")] * 2, 21 * GB)
    assert (write.verdict, read.verdict) == (OK, WARN)
    assert write.seen.startswith("210 MB/s")
    assert "21.0 GB at this rate: 100.1 s" in write.seen
    assert "from memory perhaps" in read.seen
    assert judge_bandwidth([Transfer(mib, 0.5, 0.5)] * 2, None)[0].verdict is OK


# -- words and reports -------------------------------------------------------------------


def test_what_failed_names_its_ranks_and_whether_loads_or_saves_would_fail() -> None:
    """A load only where every failed rank read; the first rank's hint is the advice."""
    read = replace(NO, is_read=True)
    told = failure("latency", Theme.SPEED, WORLDS, {1: NO})
    assert (told.verdict, told.seen, told.advice) == (
        FAIL,
        "rank 1 on host-b: AccessDenied",
        "allow it",
    )
    for refused, fails in (
        ({1: NO}, "save"),
        ({0: read, 1: read}, "load"),
        ({0: read, 1: NO}, "save"),
    ):
        found = failure("latency", Theme.SPEED, WORLDS, refused)
        assert found.meaning == f"a {fails} would fail here the same way"
    assert failure("latency", Theme.SPEED, WORLDS, {1: NO}, "nothing").meaning == "nothing"


def test_every_check_is_in_the_list_once() -> None:
    """A check that is defined and not listed would never be made."""
    modules = (access, bucket, commit, mount, sharing, speed, session, doctor)
    defined = {id(x) for m in modules for x in vars(m).values() if isinstance(x, DoctorCheck)}
    assert sorted(map(id, CHECKS)) == sorted(defined)


def test_who_how_long_how_much() -> None:
    """Ranks are named where only some are meant; times and sizes have two or three digits."""
    assert on_ranks(WORLDS, [0, 1]) == ""
    assert on_ranks(WORLDS, [1]) == "rank 1 on host-b: "
    assert [seconds(s) for s in (0.00021, 0.012, 3.14, 240, 9000)] == [
        "0.21 ms",
        "12 ms",
        "3.1 s",
        "4 min",
        "2.5 h",
    ]
    assert [size_text(b) for b in (5e5, 64 << 20, 1.5e12)] == ["500 kB", "67.1 MB", "1.50 TB"]


def test_the_worst_finding_is_the_verdict() -> None:
    """fail before warn before ok; unknown counts for nothing; --strict takes warnings for failures."""
    [ok] = judge_mount(WORLDS[:1], [DISK])
    [warn] = judge_mount(WORLDS[:1], [replace(DISK, kind="tmpfs")])
    fail = judge_space(WORLDS, [FreeSpace(0, None, NO)] * 2, None)
    unknown = judge_rules(None, "")[0]

    def report(*findings: Any) -> Report:
        return Report("s3://b/r", "id", "object", 1, ("host",), findings)

    assert report(ok, unknown).passed(strict=True)
    assert report(ok, warn).passed(strict=False)
    assert not report(ok, warn).passed(strict=True)
    assert not report(fail, warn).passed(strict=False)
    assert report(warn, fail).verdict is FAIL


def test_a_corner_says_when_it_was_begun() -> None:
    """Only names of our own making are taken for corners, and their time is UTC."""
    assert begun_s(f"{PREFIX}{new_id(86400.0 * 365)}") == 86400.0 * 365
    for name in ("step_1", f"{PREFIX}x", f"{PREFIX}20269999T000000-0123456789ab"):
        assert begun_s(name) is None


def test_what_an_error_becomes() -> None:
    """Read-only and not permitted are distinguished; credentials never travel."""
    told = FailedOperation.of(StorageError("at s3://key:secret@host/x", errno=30, hint="see it"))
    assert (told.why, told.hint) == (Why.READ_ONLY, "see it")
    assert "secret" not in told.text
    assert FailedOperation.of(AccessError("no")).why is Why.ACCESS
