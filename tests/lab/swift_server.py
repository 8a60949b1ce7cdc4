"""OpenStack Swift in one process: account, container, object and proxy server. Run by Debian's Python.

    /usr/bin/python3 swift_server.py DIRECTORY TIDY PROXY ACCOUNT CONTAINER OBJECT        "" or "yes", four ports

Debian starts them as four daemons; Swift's own functional tests start them like this. One replica on
one device, below DIRECTORY. Imports nothing of this repository: Debian's Python does not know it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import eventlet

eventlet.patcher.monkey_patch(thread=False)

# After the patch: they keep what they import.
from eventlet import wsgi  # noqa: E402
from swift.common import utils  # noqa: E402
from swift.common.ring import RingBuilder  # noqa: E402
from swift.common.wsgi import SwiftHttpProtocol, loadapp  # noqa: E402

HOST = "127.0.0.1"
_SWIFT = """\
[swift-hash]
swift_hash_path_suffix = lab
[storage-policy:0]
name = one
default = yes
"""
_STORAGE = """\
[DEFAULT]
swift_dir = {home}
devices = {home}/devices
mount_check = false
disable_fallocate = true
fallocate_reserve = 0
recon_cache_path = {home}/cache
[pipeline:main]
pipeline = {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
"""
_PROXY = """\
[DEFAULT]
swift_dir = {home}
[pipeline:main]
pipeline = catch_errors gatekeeper cache listing_formats bulk s3api tempauth slo dlo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:gatekeeper]
use = egg:swift#gatekeeper
[filter:cache]
# No server listens there: what is not cached is asked.
use = egg:swift#memcache
memcache_servers = 127.0.0.1:1
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:bulk]
use = egg:swift#bulk
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
"""


def main(home: Path, proxy: int, *ports: int, tidy: bool) -> None:
    """Serve until killed. tidy: a HEAD without a length is answered without a body."""
    (home / "devices/d1").mkdir(parents=True)
    (home / "cache").mkdir()
    (home / "swift.conf").write_text(_SWIFT)
    utils.set_swift_dir(str(home))
    kinds = dict(zip(("account", "container", "object"), ports, strict=True))
    for kind, port in kinds.items():
        _write_ring(home / f"{kind}.ring.gz", port)
        (home / f"{kind}.conf").write_text(_STORAGE.format(home=home, kind=kind))
    (home / "proxy.conf").write_text(_PROXY.format(home=home))
    serving = [
        eventlet.spawn(_serve, home / f"{kind}.conf", port, tidy=tidy)
        for kind, port in {**kinds, "proxy": proxy}.items()
    ]
    for one in serving:
        one.wait()


def _write_ring(path: Path, port: int) -> None:
    builder = RingBuilder(4, 1, 0)
    where = {"ip": HOST, "port": port, "replication_ip": HOST, "replication_port": port}
    named = {"id": 0, "region": 1, "zone": 1, "weight": 1.0, "device": "d1", "meta": ""}
    builder.add_dev({**named, **where})
    builder.rebalance()
    builder.get_ring().save(str(path))


def _serve(conf: Path, port: int, *, tidy: bool) -> None:
    app = loadapp(str(conf), global_conf={"log_name": conf.stem, "log_level": "WARNING"})
    listening = eventlet.listen((HOST, port), backlog=1024, reuse_port=False)
    # The capitals of "ETag" are those that clients of S3 look for.
    wsgi.server(
        listening,
        _tidied(app) if tidy else app,
        utils.NullLogger(),
        protocol=SwiftHttpProtocol,
        capitalize_response_headers=False,
        log_output=False,
    )


def _tidied(app: Any) -> Callable[..., Any]:
    """Debian's eventlet ends a HEAD of unknown length with an empty chunk, which HEAD must not have."""

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        def started(status: str, headers: list[tuple[str, str]], *error: Any) -> Any:
            if environ["REQUEST_METHOD"] == "HEAD" and not any(
                name.lower() == "content-length" for name, _ in headers
            ):
                headers = [*headers, ("Content-Length", "0")]
            return start(status, headers, *error)

        return app(environ, started)

    return answer


if __name__ == "__main__":
    os.environ["TZ"] = "UTC+0"
    main(Path(sys.argv[1]), *map(int, sys.argv[3:]), tidy=bool(sys.argv[2]))
