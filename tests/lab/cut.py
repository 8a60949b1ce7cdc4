"""Cut the power of a disk that somebody holds (``make lab-powercut``), for a person.

    python -m tests.lab.cut RUN_DIR [nothing|something|everything]

What is left is mounted next to it, and says where, until the disk is ended. Run as its user: root.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.lab.cutdisk import Request
from tests.lab.powercut import Armed, Lose, mount_copy


def main(arguments: list[str]) -> int:
    """Cut it, mount the copy, say where."""
    run_dir, lose = Path(arguments[0]), Lose((*arguments[1:], "something")[0])
    place = Path(tempfile.mkdtemp(prefix="after-", dir=run_dir))
    seed = int.from_bytes(os.urandom(4))
    cut = Armed(run_dir, Request(f"{place}.image", 1, lose.value, seed)).now()
    with open("/proc/self/mounts") as table:
        fs = next(line.split()[2] for line in table if line.split()[1] == str(run_dir / "live"))
    mount_copy(fs, cut.image, place)
    print(f"{cut.cached} writes were not flushed, {cut.lost} are lost; found: {place}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
