"""Two hundred processes that append to one log directory at the same moment.

python -m tests.commit.racers DIRECTORY PROCESSES APPENDS
"""

from __future__ import annotations

import os
import sys

from ckptfs.commit.log.append import Appended, RefusedAppend, append, make_log
from ckptfs.commit.log.entries import Pin
from ckptfs.commit.operations import drive
from ckptfs.storage.local import LocalStorage
from ckptfs.uri import Uri


def _race(directory: str, who: int, appends: int) -> None:
    storage = LocalStorage(Uri.parse(directory))
    state = None
    for turn in range(appends):
        write_id = f"{who}-{turn}"
        done: Appended | RefusedAppend[str] = drive(
            append(lambda _, w=write_id: Pin(w), write_id=write_id, state=state),  # type: ignore[misc]
            storage,
        )
        assert isinstance(done, Appended)
        state = done.state


def main() -> int:
    """Fork, hold everybody at a pipe, release them, wait; the exit status says whether all succeeded."""
    directory, processes, appends = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    drive(make_log(), LocalStorage(Uri.parse(directory)))
    gate, open_gate = os.pipe()
    children = []
    for who in range(processes):
        pid = os.fork()
        if pid == 0:
            os.close(open_gate)
            os.read(gate, 1)  # ends when the parent closes its end
            status = 1
            try:
                _race(directory, who, appends)
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    os.close(open_gate)
    failed = [pid for pid in children if os.waitpid(pid, 0)[1] != 0]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
