"""Start one server in the foreground, for a person: ``make lab-s3`` and its sisters.

    python -m tests.lab s3 | moto | moto-tls | azure | gcs | gcs-emulator | hdfs | sink

Prints its URI, its storage_options and the variables to export; Ctrl-C stops it.
"""

from __future__ import annotations

import functools
import json
import shlex
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Final

from tests import lab
from tests.lab.server import Server

SERVERS: Final[Mapping[str, Callable[[], AbstractContextManager[Server]]]] = {
    "s3": lab.radosgw,
    "moto": lab.moto,
    "moto-tls": functools.partial(lab.moto, tls=True),
    "azure": lab.azurite,
    "gcs": lab.gcs,
    "gcs-emulator": lab.gcs_emulator,
    "hdfs": lab.hdfs,
    "sink": lab.sink,
}
_STOP: Final = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def describe(server: Server) -> str:
    """What a person pastes into a shell and into Python."""
    exports = [f"export {name}={shlex.quote(at)}" for name, at in server.environment.items()]
    options = json.dumps(server.storage_options(), indent=4)
    lines = [f"# {server.name} at {server.endpoint}", *exports, f"uri = {server.uri()!r}"]
    return "\n".join([*lines, f"storage_options = {options}", "# Ctrl-C stops it"])


def main(arguments: list[str]) -> int:
    """Serve until a signal says stop; 1 with one line of reason where it cannot."""
    if len(arguments) != 1 or arguments[0] not in SERVERS:
        print(f"usage: python -m tests.lab {' | '.join(SERVERS)}", file=sys.stderr)
        return 2
    try:
        with SERVERS[arguments[0]]() as server:
            # First: who has read that it is up may interrupt it in the next moment.
            signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)
            print(describe(server), flush=True)
            signal.sigwait(_STOP)
    except KeyboardInterrupt:  # before it was up
        return 130
    except lab.LabError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
