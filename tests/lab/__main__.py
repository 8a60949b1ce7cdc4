"""Start a part of the laboratory in the foreground, for a person: ``make lab-s3`` and its sisters.

    python -m tests.lab s3 | moto | moto-tls | swift | rclone | s3rver | seaweedfs | localstack
    | azure | gcs | gcs-emulator | hdfs | sink | nodes | nfs | nfs3 | powercut | powercut-xfs | powercut-btrfs

Prints how to use it (a server: its URI, its storage_options and the variables to export); Ctrl-C
stops it. A part is a context manager; its value has ``describe()``; one line in ``PARTS`` adds it.
"""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Final, Protocol

from tests import lab


class Described(Protocol):
    """What runs and can say how it is used."""

    def describe(self) -> str:
        """What a person pastes into a shell and into Python."""


PARTS: Final[Mapping[str, Callable[[], AbstractContextManager[Described]]]] = {
    "s3": lab.radosgw,
    "moto": lab.moto,
    "moto-tls": functools.partial(lab.moto, tls=True),
    "swift": lab.swift,
    "rclone": lab.rclone,
    "s3rver": lab.s3rver,
    "seaweedfs": lab.seaweedfs,
    "localstack": lab.localstack,
    "azure": lab.azurite,
    "gcs": lab.gcs,
    "gcs-emulator": lab.gcs_emulator,
    "hdfs": lab.hdfs,
    "sink": lab.sink,
    "nodes": functools.partial(lab.Nodes, 2),
    "nfs": lab.NfsLab,
    "nfs3": functools.partial(lab.NfsLab, "3"),
    "powercut": functools.partial(lab.PowerCut, "ext4"),
    "powercut-xfs": functools.partial(lab.PowerCut, "xfs"),
    "powercut-btrfs": functools.partial(lab.PowerCut, "btrfs"),
}
_STOP: Final = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def main(arguments: list[str]) -> int:
    """Run until a signal says stop; 1 with one line of reason where it cannot."""
    if len(arguments) != 1 or arguments[0] not in PARTS:
        print(f"usage: python -m tests.lab {' | '.join(PARTS)}", file=sys.stderr)
        return 2
    try:
        with PARTS[arguments[0]]() as part:
            # First: who has read that it is up may interrupt it in the next moment.
            signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)
            print(part.describe(), flush=True)
            signal.sigwait(_STOP)
    except KeyboardInterrupt:  # before it was up
        return 130
    except lab.LabError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
