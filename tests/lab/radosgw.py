"""Ceph's S3 gateway over one monitor and one OSD that keeps everything in memory. Up in 2 s.

    ceph-mon <- ceph-osd (memstore) <- radosgw <- the tests          all on 127.0.0.1, cephx on

cephx stays on: without it radosgw 16.2 hangs at its first request. tcp_nodelay: small requests are
ten times slower without it. The monitor proposes at once: its default of a second for every change
of a map makes the start ten times longer. No ceph-mgr: it reports, and no test asks it here.
Deleted objects are collected after seconds, not hours: memory is the disk.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.lab import raw
from tests.lab.process import HOST, Crew, need, run, status_of
from tests.lab.s3 import s3_server
from tests.lab.server import Server

ACCESS_KEY = "AKLAB"
SECRET_KEY = "SKLAB"  # noqa: S105 - of a server on 127.0.0.1 that lives for a minute
_OSD_PORTS = 8  # an OSD listens on four addresses, each in the old and the new protocol
_CONF = """\
[global]
fsid = {fsid}
mon initial members = a
mon host = [v2:{host}:{mon_v2},v1:{host}:{mon_v1}]
public addr = {host}
cluster addr = {host}
ms bind ipv6 = false
ms bind port min = {osd_first}
ms bind port max = {osd_last}
run dir = {run}
admin socket = {run}/$name.$pid.asok
pid file = {run}/$name.pid
log file = {run}/$name.log
keyring = {run}/keyring
debug rgw = 0/0
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
paxos propose interval = 0.05
paxos min wait = 0.02
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon warn on pool no redundancy = false
mon pg warn min per osd = 0
mon data avail warn = 3
mon data avail crit = 1
mon data = {run}/mon
osd data = {run}/osd
osd objectstore = {store}
memstore device bytes = {capacity}
bluestore block size = {capacity}
osd max object name len = 256
osd max object namespace len = 64
[client.rgw]
rgw frontends = beast endpoint={host}:{rgw} tcp_nodelay=1
rgw dns name = localhost
rgw gc obj min wait = 20
rgw gc processor period = 10
rgw gc processor max time = 10
"""
_CAPABILITIES = {
    "mon.": {"mon": "allow *"},
    "client.admin": {"mon": "allow *", "osd": "allow *"},
    "osd.0": {"mon": "allow profile osd", "osd": "allow *"},
    "client.rgw": {"mon": "allow rw", "osd": "allow rwx"},
}


@contextlib.contextmanager
def radosgw(*, store: str = "memstore", capacity_bytes: int = 8 << 30) -> Iterator[Server]:
    """An S3 endpoint with one bucket. store: Ceph's object store; "bluestore" keeps data in a file."""
    need("ceph-mon", "ceph-osd", "ceph-authtool", "monmaptool", "ceph", "radosgw", "radosgw-admin")
    with Crew("radosgw", in_memory=store == "memstore") as crew:
        endpoint = _start(crew, store, capacity_bytes)
        make_user(crew.run_dir, "lab", ACCESS_KEY, SECRET_KEY)
        server = s3_server(
            "radosgw",
            endpoint,
            ACCESS_KEY,
            SECRET_KEY,
            run_dir=str(crew.run_dir),
            pids=crew.pids(),
        )
        with contextlib.closing(raw.s3(server)) as client:
            client.create_bucket(Bucket=server.bucket)
        yield server


def make_user(run_dir: str | Path, uid: str, access_key: str, secret_key: str) -> None:
    """A further user (``server.run_dir``), for tests of permissions: it owns nothing, may nothing."""
    [admin] = need("radosgw-admin")
    run(
        [
            *(admin, "-c", f"{run_dir}/ceph.conf", "-n", "client.rgw", "user", "create"),
            *(f"--uid={uid}", f"--display-name={uid}"),
            *(f"--access-key={access_key}", f"--secret-key={secret_key}"),
        ]
    )


def _start(crew: Crew, store: str, capacity_bytes: int) -> str:
    """Write the configuration, then start monitor, OSD and gateway; the gateway's endpoint."""
    [mon, osd, monmaptool, ceph, rgw] = need(
        "ceph-mon", "ceph-osd", "monmaptool", "ceph", "radosgw"
    )
    here = crew.run_dir
    fsid, osd_id = str(uuid.uuid4()), str(uuid.uuid4())
    ports = {name: crew.port() for name in ("mon_v2", "mon_v1", "rgw")}
    osd_first = crew.ports_in_a_row(_OSD_PORTS)
    conf = here / "ceph.conf"
    conf.write_text(
        _CONF.format(
            fsid=fsid,
            host=HOST,
            run=here,
            store=store,
            capacity=capacity_bytes,
            osd_first=osd_first,
            osd_last=osd_first + _OSD_PORTS - 1,
            **ports,
        )
    )
    for directory in ("mon", "osd"):
        (here / directory).mkdir()
    _make_keys(here / "keyring")
    monitor = f"[v2:{HOST}:{ports['mon_v2']},v1:{HOST}:{ports['mon_v1']}]"
    monmap = here / "monmap"
    run([monmaptool, "--create", "--fsid", fsid, "--addv", "a", monitor, monmap])
    run([mon, "-c", conf, "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", here / "keyring"])
    crew.start("mon", [mon, "-f", "-c", conf, "-i", "a"], grace_s=0)
    # Waits for the monitor by itself, as long as --connect-timeout says.
    run([ceph, "-c", conf, "--connect-timeout", "30", "osd", "new", osd_id])
    run([osd, "-c", conf, "-i", "0", "--mkfs", "--osd-uuid", osd_id])
    crew.start("osd", [osd, "-f", "-c", conf, "-i", "0"], grace_s=0)
    crew.start("rgw", [rgw, "-f", "-c", conf, "-n", "client.rgw"], grace_s=0)
    endpoint = f"http://{HOST}:{ports['rgw']}"
    crew.wait_for(lambda: status_of(endpoint) is not None, f"{endpoint} answers")
    return endpoint


def _make_keys(keyring: Path) -> None:
    """A key for each daemon, with what it may."""
    [authtool] = need("ceph-authtool")
    run([authtool, "--create-keyring", keyring])
    for entity, capabilities in _CAPABILITIES.items():
        allowed = [word for cap in capabilities.items() for word in ("--cap", *cap)]
        run([authtool, keyring, "--gen-key", "-n", entity, *allowed])
