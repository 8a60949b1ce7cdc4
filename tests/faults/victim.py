"""Runs somebody's training script, and kills its process at a storage operation of our choice.

    CKPTFS_TEST_FAULT="kill:close:*__1_0.distcp:2@1" \
        torchrun --nproc-per-node 2 -m tests.faults.victim script.py s3://bucket/run sync

The script knows nothing of it. Every storage of ``ckptfs`` is made by one function of the registry;
here, and nowhere else, it is given another one, which puts ``FaultyStorage`` around what was made.
The URI stays the user's own: ``faults+s3://`` would need none of this, but an adapter would see
another protocol than its users have. One plan counts for all storages of a process, from 1.

    torchrun ranks    run this module, which runs the script as ``__main__``
    forked children   have it from their parent and count on from where that was
    Ray's workers     import ``install`` (``HOOK``): Ray reads the name of a function from the
                      environment, which workers have from the driver that started their cluster

A spawned child (DCP's asynchronous process) is not reached; kill what the trainer itself does.
torchrun, with ``--max-restarts 0``, ends the other ranks. Runs with older versions of ckptfs too (tests/versions).
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping
from typing import Any

from ckptfs.storage import registry
from ckptfs.storage.base import Storage
from ckptfs.testing.faults import FaultyStorage, Plan
from ckptfs.uri import Uri

# What makes Ray call ``install`` in each worker; for the environment of the driver.
HOOK = {"__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": "tests.faults.victim.install"}


def install() -> None:
    """Put the plan of the environment around every storage that this process opens from now on."""
    # Private, and the one place where each storage is made, whichever module imported open_storage by name.
    plan, choose = Plan.from_environment(), registry._factory

    def chosen(uri: Uri) -> registry.Factory:
        factory = choose(uri)

        def opened(place: Uri, options: Mapping[str, Any]) -> Storage:
            return FaultyStorage(factory(place, options), plan)

        return opened

    registry._factory = chosen


if __name__ == "__main__":
    install()
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))  # as if it had been started by name
    runpy.run_path(sys.argv[0], run_name="__main__")
