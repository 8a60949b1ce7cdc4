"""``ckptfs doctor`` as a person and a launch script use it, on disks, mounts and real servers."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptfs.cli.main import main
from tests.cli.conftest import Cli, Golden, Place, a_run
from tests.faults.proxy import FaultProxy
from tests.lab import raw
from tests.lab.radosgw import make_user
from tests.lab.server import Server
from tests.multiprocess.harness import Rank, launch, mount_privately, torchrun
from tests.servers.conftest import moto

__all__ = ["moto"]

QUICK = ("--size", "1MiB")
_NUMBERS = (
    (r"\d[\d.]* [kMGT]?B/s", "<n> MB/s"),
    (r"\d[\d.e-]* (ms|s|GB|TB|MB|kB)\b", r"<n> \1"),
    (r"\d+ looks?", "<n> looks"),
    (r"\d+ free\b", "<n> free"),
    (r"(?m)^(\S+  quota  ).*$", r"\1<quota>"),
    (r"(?m)^(\S+  mount  ).*$", r"\1<mount>"),
    # A busy machine is slow, and that is no news of the command.
    (r"(?m)^\S+(?=  (latency|write-bandwidth|read-bandwidth)  )", "<sign>"),
    (r"(?m)^warn (latency|write-bandwidth|read-bandwidth): .*\n  .*\n\n", ""),
    (r"\d+ ok, \d+ warn", "<n> ok, <n> warn"),
    (r"replaced \d+ times", "replaced <n> times"),
)


def masked(text: str) -> str:
    """Numbers, and what depends on the disk that the tests run on."""
    text = re.sub(r"(?m)(?<=\S)[ \t]{2,}", "  ", text)
    for pattern, instead in _NUMBERS:
        text = re.sub(pattern, instead, text)
    return text


def verdicts(document: dict[str, Any]) -> dict[str, str]:
    """What was not ok."""
    return {f["name"]: f["verdict"] for f in document["findings"] if f["verdict"] != "ok"}


def finding(document: dict[str, Any], name: str) -> dict[str, Any]:
    """One finding of a --json document."""
    [found] = [f for f in document["findings"] if f["name"] == name]
    return dict(found)


# -- a place as it should be -------------------------------------------------------------


def test_a_run_in_use_passes_unchanged(cli: Cli, place: Place, golden: Golden) -> None:
    """On a disk and on S3: the report that a person reads; no key of the run changes."""
    a_run(place)
    with place.storage() as storage:
        before = listing(storage)
        ran = cli("doctor", place.uri, *QUICK, *place.flags)
        assert listing(storage) == before
    assert (ran.exit, ran.err) == (0, "")
    golden(f"doctor-{place.kind}", masked(ran.out), place)


def listing(storage: Any, key: str = "") -> dict[str, Any]:
    """Every key below, with what it holds."""
    found: dict[str, Any] = {}
    for entry in storage.list(key):
        below = f"{key}/{entry.name}" if key else entry.name
        found |= listing(storage, below) if entry.is_dir else {below: storage.read(below)}
    return found


def test_json_tells_every_property_and_the_needs(cli: Cli, local: Place) -> None:
    """--needs of more than there is fails, the numbers stand in the document, exit 1."""
    ran = cli("doctor", local.uri, "--json", "--size", "0", "--needs", "900TB")
    assert ran.exit == 1
    space = finding(ran.json, "free-space")
    assert (space["verdict"], space["data"]["needs_bytes"]) == ("fail", 900 * 10**12)
    assert ran.json["verdict"] == "fail"
    assert not ran.json["passed"]
    assert not Path(local.uri).exists()


@pytest.mark.parametrize(("flags", "code"), [((), 0), (("--strict",), 1)])
def test_strict_makes_a_warning_fail(
    cli: Cli, moto: Server, flags: tuple[str, ...], code: int
) -> None:
    """A server that ignores If-None-Match and If-Match: a warning, by --strict a failure."""
    with FaultProxy(moto.endpoint, "strip=if-none-match:*:*:*; strip=if-match:*:*:*") as proxy:
        options = moto.storage_options(endpoint_url=proxy.url)
        where = Place("s3", moto.fresh(), options)
        ran = cli("doctor", where.uri, "--json", *flags, *QUICK, *where.flags)
    assert ran.exit == code
    found = verdicts(ran.json)
    assert found["conditional-create"] == "warn"
    assert found["conditional-replace"] == "warn"
    assert "If-None-Match" in finding(ran.json, "conditional-create")["advice"]


# -- places that cannot be reached -------------------------------------------------------


def test_wrong_credentials_end_with_4(cli: Cli, radosgw: Server) -> None:
    """radosgw with a wrong secret: the error says what to check, and no report."""
    options = radosgw.storage_options(secret="wrong")  # noqa: S106 - that is the point
    where = Place("s3", radosgw.fresh(), options)
    ran = cli("doctor", where.uri, *QUICK, *where.flags)
    assert (ran.exit, ran.out) == (4, "")
    assert "check key and secret" in ran.err


def test_a_bucket_that_is_missing_ends_with_3(cli: Cli, radosgw: Server) -> None:
    """No such bucket: not found, and nothing is made."""
    where = Place("s3", "s3://no-such-bucket/run", radosgw.storage_options())
    ran = cli("doctor", where.uri, *QUICK, *where.flags)
    assert (ran.exit, ran.out) == (3, "")


def test_a_server_that_does_not_answer_ends_with_5(cli: Cli, radosgw: Server) -> None:
    """No server listens there."""
    options = radosgw.storage_options(endpoint_url="http://127.0.0.1:9", retry_s=0)
    where = Place("s3", radosgw.fresh(), options)
    ran = cli("doctor", where.uri, *QUICK, *where.flags)
    assert (ran.exit, ran.out) == (5, "")


# -- permissions and rules of a bucket ---------------------------------------------------


@pytest.fixture
def bucket(radosgw: Server) -> Iterator[tuple[Server, Any]]:
    """A bucket of this test's own, and a client of its owner."""
    import dataclasses

    name = f"doctor-{os.urandom(4).hex()}"
    with contextlib.closing(raw.s3(radosgw)) as client:
        client.create_bucket(Bucket=name)
        yield dataclasses.replace(radosgw, bucket=name), client


def a_user(server: Server, name: str) -> dict[str, Any]:
    """A user who may nothing yet; the options of its credentials."""
    name = f"{name}{os.urandom(4).hex()}"
    make_user(server.run_dir, name, f"AK{name}", f"SK{name}")
    return server.storage_options(key=f"AK{name}", secret=f"SK{name}") | {"uid": name}


def test_a_user_without_rights_ends_with_4(cli: Cli, bucket: tuple[Server, Any]) -> None:
    """Right credentials that may neither read nor write: not permitted, at all."""
    server, _ = bucket
    options = a_user(server, "stranger")
    del options["uid"]
    where = Place("s3", server.fresh(), options)
    ran = cli("doctor", where.uri, *QUICK, *where.flags)
    assert (ran.exit, ran.out) == (4, "")
    assert "neither reading nor writing is permitted" in ran.err


def test_a_user_who_may_only_read_fails_with_the_reason(
    cli: Cli, bucket: tuple[Server, Any], golden: Golden
) -> None:
    """Read-only by a bucket's policy: what cannot be done, what still can, and which right is missing."""
    server, client = bucket
    options = a_user(server, "reader")
    policy = {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Principal": {"AWS": [f"arn:aws:iam:::user/{options.pop('uid')}"]},
                "Action": ["s3:ListBucket", "s3:GetObject"],
                "Resource": [f"arn:aws:s3:::{server.bucket}", f"arn:aws:s3:::{server.bucket}/*"],
            }
        ],
    }
    client.put_bucket_policy(Bucket=server.bucket, Policy=json.dumps(policy))
    where = Place("s3", server.fresh(), options)
    ran = cli("doctor", where.uri, *QUICK, *where.flags)
    assert ran.exit == 1
    assert "can restore from here and cannot save" in ran.out
    assert "s3:PutObject" in ran.out
    golden("doctor-read-only-s3", masked(ran.out), where)


def test_rules_of_a_bucket_that_would_take_checkpoints(
    cli: Cli, bucket: tuple[Server, Any]
) -> None:
    """Expiry below the run, versions that are not expired, uploads aborted: each by its name."""
    server, client = bucket
    client.put_bucket_versioning(
        Bucket=server.bucket, VersioningConfiguration={"Status": "Enabled"}
    )
    rules = [
        {"ID": "scratch", "Status": "Enabled", "Prefix": "runs/", "Expiration": {"Days": 3}},
        {"ID": "other", "Status": "Enabled", "Prefix": "logs/", "Expiration": {"Days": 1}},
        {"ID": "off", "Status": "Disabled", "Prefix": "", "Expiration": {"Days": 1}},
        {
            "ID": "parts",
            "Status": "Enabled",
            "Prefix": "",
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 2},
        },
    ]
    client.put_bucket_lifecycle_configuration(
        Bucket=server.bucket, LifecycleConfiguration={"Rules": rules}
    )
    where = Place("s3", server.uri("runs/mine"), server.storage_options())
    ran = cli("doctor", where.uri, "--json", *QUICK, *where.flags)
    assert ran.exit == 1
    assert finding(ran.json, "lifecycle")["seen"] == "rule 'scratch' deletes objects after 3 days"
    assert finding(ran.json, "lifecycle-uploads")["seen"].endswith("after 2 days")
    assert verdicts(ran.json)["versioning"] == "warn"
    where = Place("s3", server.uri("elsewhere"), server.storage_options())
    ran = cli("doctor", where.uri, "--json", *QUICK, *where.flags)
    assert finding(ran.json, "lifecycle")["verdict"] == "ok"
    assert "Contents" not in client.list_objects_v2(Bucket=server.bucket)


# -- mounts ------------------------------------------------------------------------------


def doctor_after_mounts(rank: Rank) -> list[Any]:
    """Mount what the script says, for this process alone; the exit code of the command, and its document."""
    mount_privately()
    subprocess.run(["sh", "-c", rank.args["script"]], check=True, capture_output=True)
    return doctor(rank)


def doctor(rank: Rank) -> list[Any]:
    """The exit code of ``ckptfs doctor --json`` in this process, and its document: None where it is silent."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        main(["doctor", *rank.args["words"], "--json"])
    return [ended.value.code or 0, json.loads(out.getvalue() or "null")]


def mounted(script: str, *words: str) -> tuple[int, Any]:
    """What ``ckptfs doctor`` says in a mount namespace of its own, after ``script``."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    args = {"script": script, "words": words}
    with launch(doctor_after_mounts, 1, args=args, store="none") as ranks:
        (ended,) = ranks.results()
    if ended.error_type in {"OSError", "PermissionError", "CalledProcessError"}:
        pytest.skip(f"this kernel or container allows no mount: {ended.error}")
    assert ended.value, ended.log
    code, document = ended.value
    return code, document


def test_a_read_only_mount_fails_with_the_reason(tmp_path: Path) -> None:
    """A real read-only bind mount: EROFS is reported as what it means for training."""
    (tmp_path / "run").mkdir()
    code, document = mounted(
        f"mount --bind {tmp_path}/run {tmp_path}/run && mount -o remount,bind,ro {tmp_path}/run",
        f"{tmp_path}/run",
    )
    assert code == 1
    found = finding(document, "make-directories")
    assert found["data"]["why"] == "read-only"
    assert "cannot save" in found["meaning"]


@pytest.mark.parametrize("left", ["nothing", "half a MiB"])
def test_a_full_disk_fails_and_a_small_one_warns(tmp_path: Path, left: str) -> None:
    """A real tmpfs of 1 MiB: full, nothing can be written; with a little left, that is reported."""
    (tmp_path / "disk").mkdir()
    fill = "" if left == "half a MiB" else " bs=4k count=10000"
    fill = fill or " bs=4k count=128"
    code, document = mounted(
        f"mount -t tmpfs -o size=1m tmpfs {tmp_path}/disk && "
        f"(dd if=/dev/zero of={tmp_path}/disk/filler{fill} 2>/dev/null || true)",
        f"{tmp_path}/disk/run",
    )
    space, mount = finding(document, "free-space"), finding(document, "mount")
    if left == "nothing":
        assert code == 1
        assert space["verdict"] == "fail"
        assert "no space" in space["seen"].lower()
    else:
        assert code == 0
        assert space["verdict"] == "warn"
        assert verdicts(document)["write-bandwidth"] == "unknown"
    assert mount["verdict"] == "warn"  # memory
    assert mount["data"]["kind"] == "tmpfs"


# -- under a launcher --------------------------------------------------------------------


def test_two_ranks_of_torchrun_agree_and_one_speaks(tmp_path: Path) -> None:
    """Two processes, no process group: both exit with 0, rank 0 alone prints, nothing stays."""
    words = [f"{tmp_path}/disk/run", *QUICK]
    first, other = torchrun(doctor, 2, args={"words": words}, warm=True)
    assert first.value, first.log
    code, document = first.value
    assert (code, other.value) == (0, [0, None])
    assert document["ranks"] == 2
    assert not (tmp_path / "disk").exists()


def test_four_ranks_on_two_disks_said_to_be_shared(tmp_path: Path) -> None:
    """Two nodes with a disk each at one path, and --expect shared: all exit with 1, nodes named."""
    words = [f"nodes+file://{tmp_path}/@node/run", "--expect", "shared", "--size", "0"]
    first, *others = torchrun(doctor, 2, nnodes=2, args={"words": words}, warm=True)
    assert first.value, first.log
    code, document = first.value
    assert (code, [other.value for other in others]) == (1, [[1, None]] * 3)
    assert_two_disks(document, 2)
    assert not list(tmp_path.glob("node*"))


def assert_two_disks(document: Any, ranks: int) -> None:
    """That is what the document finds, with so many ranks at each."""
    domains = finding(document, "domains")
    assert domains["verdict"] == "fail"
    assert "node0/" in domains["seen"]
    assert "node1/" in domains["seen"]
    assert [len(d["ranks"]) for d in domains["data"]["domains"]] == [ranks] * 2


def test_what_rank_0_says_is_whole_although_the_launcher_ends_all(tmp_path: Path) -> None:
    """torchrun sends SIGTERM to all ranks when the first of them has failed, and rank 0 still speaks."""
    os.mkfifo(tmp_path / "out.0")
    pipe = os.open(tmp_path / "out.0", os.O_RDWR | os.O_NONBLOCK)
    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)  # so that rank 0 speaks until somebody listens
    uri, log = f"nodes+file://{tmp_path}/@node/run", tmp_path / "torchrun.log"
    script = (
        # The shell outlives torchrun's SIGTERM.
        'trap : TERM; export CKPTFS_NODE=node$RANK; "$0" -m ckptfs doctor "$@" '
        f"> {tmp_path}/out.$RANK; code=$?; echo $code > {tmp_path}/code.$RANK; exit $code"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr"]
    command += ["127.0.0.1", "--nproc-per-node", "2", "--no-python", "sh", "-c", script]
    command += [sys.executable, uri, "--json", "--expect", "shared", "--size", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    out = b""
    with (
        open(log, "wb") as file,
        subprocess.Popen(command, stdout=file, stderr=file, env=environment) as process,
    ):
        while b"closing signal" not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            nap(process)
        while process.poll() is None:
            out += heard(pipe)
            nap(process)
    out += heard(pipe)
    os.close(pipe)
    assert [int((tmp_path / f"code.{rank}").read_text()) for rank in range(2)] == [1, 1]
    assert (tmp_path / "out.1").read_text() == ""
    assert_two_disks(json.loads(out), 1)
    assert not list(tmp_path.glob("node*"))


def heard(pipe: int) -> bytes:
    """What is in the pipe."""
    try:
        return os.read(pipe, 1 << 16)
    except BlockingIOError:
        return b""


def nap(process: subprocess.Popen[bytes]) -> None:
    """Until it ends, at most a moment."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_killed_in_the_middle_it_cleans_up(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C, and the SIGTERM of a launcher, while it races: exit 130, and nothing stays."""
    hold = tmp_path / "hold"
    fault = f"hold={hold}:replace:*replace/rank-0:1"
    with subprocess.Popen(
        [sys.executable, "-m", "ckptfs", "doctor", f"faults+file://{tmp_path}/disk/run"],
        env={**os.environ, "CKPTFS_TEST_FAULT": fault},
        stderr=subprocess.PIPE,
    ) as process:
        wait_for(Path(f"{hold}.reached"), process)
        assert list((tmp_path / "disk/run").glob(".ckptfs-doctor-*"))
        process.send_signal(number)
        assert process.wait(60) == 130
    assert not (tmp_path / "disk").exists()


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    """Until the path is there; the process would end first if it never came."""
    while not path.exists():
        nap(process)
        assert process.poll() is None, process.stderr and process.stderr.read()


def test_a_plain_file_is_refused_by_name(cli: Cli, tmp_path: Path) -> None:
    """A file, where no run can be, is no storage to test: one sentence, and exit code 2."""
    (tmp_path / "model.pt").write_bytes(b"weights")
    ran = cli("doctor", tmp_path / "model.pt", "--size", "0")
    assert ran.exit == 2
    assert "a plain file" in ran.err
    assert (tmp_path / "model.pt").read_bytes() == b"weights"
