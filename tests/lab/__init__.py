"""Real servers on this machine, for tests and for people: object stores, an HDFS, many machines.

    radosgw       Ceph: the S3 of record. mon, osd and gateway in memory           Debian
    moto          what radosgw lacks (If-Match); moto_tls: the same over https     PyPI
    swift, rclone, s3rver, seaweedfs, localstack   S3 of others            Debian, PyPI, npm
    azurite       Azure Blob                                                       npm
    gcs           Google's JSON API with preconditions (tests/lab/gcs_server.py)   here
    gcs_emulator  Google's JSON API, plain I/O; ignores preconditions              PyPI
    sftp, ftp, webdav   directories, for fsspec's own clients                Debian, PyPI
    hdfs          a NameNode and a DataNode                                        PyPI, Debian
    sink          S3-shaped, forgets large bodies: what does a *client* cost?      here

A test asks for a fixture of that name (tests/servers/conftest.py); the first one to ask starts the
server (2 s; hdfs: 5 s), the session's end stops it. The value is a ``Server``::

    def test_round_trip(radosgw: Server) -> None:
        with contextlib.closing(open_storage(radosgw.fresh(), radosgw.storage_options())) as s: ...

    server.endpoint            "http://127.0.0.1:23811"         server.bucket   one per session
    server.uri("a/b")          "s3://ckptfs-lab/a/b"            server.fresh()  a prefix of its own
    server.storage_options(concurrency=2)     what fsspec's library for it takes, and yours on top
    server.environment         the same as variables, for a process that gets no options
    server.pids                its processes: memory to watch; never kill those of a shared server

Who wants a server of their own, to kill or with other settings, starts one::

    with lab.moto() as server: ...            lab.radosgw, lab.azurite, lab.gcs, lab.hdfs, lab.sink

Ports are free ones and every server has a directory of its own, so that sessions run side by side.
A server is up when it answers; one that dies or does not answer in time is a ``LabError`` with the
end of its log. ``UnavailableError``: the machine lacks a part; fixtures then skip, and fail where CI=true.
``UnsuitableError``: the machine could not run it with anything installed; its tests are skipped in CI too.
No server outlives the process that started it, however that ends (tests/lab/keeper.py).
``with lab.Nodes(2) as nodes`` is two machines that do not see each other's disks (tests/lab/nodes.py),
and ``tests.lab.job`` a real torchrun over such machines.
``with lab.PowerCut("ext4") as disk`` is a filesystem with power that can be cut (tests/lab/powercut.py).
``tests.lab.raw`` reads and writes behind ckptfs's back. ``make lab-install`` installs, ``make lab-s3``
and its sisters start one in the foreground. ``radosgw.make_user`` adds a user who may nothing yet.
"""

from __future__ import annotations

from tests.lab.azurite import azurite
from tests.lab.gcs import gcs, gcs_emulator
from tests.lab.hdfs import hdfs
from tests.lab.moto import moto
from tests.lab.nfs import NfsLab
from tests.lab.nodes import Nodes
from tests.lab.other_s3 import localstack, rclone, s3rver, seaweedfs, swift
from tests.lab.powercut import PowerCut
from tests.lab.process import LabError, UnavailableError, UnsuitableError
from tests.lab.radosgw import radosgw
from tests.lab.server import Server
from tests.lab.sink import sink
from tests.lab.trees import ftp, sftp, webdav

__all__ = [
    "LabError",
    "NfsLab",
    "Nodes",
    "PowerCut",
    "Server",
    "UnavailableError",
    "UnsuitableError",
    "azurite",
    "ftp",
    "gcs",
    "gcs_emulator",
    "hdfs",
    "localstack",
    "moto",
    "radosgw",
    "rclone",
    "s3rver",
    "seaweedfs",
    "sftp",
    "sink",
    "swift",
    "webdav",
]
