"""One process in which ckptfs itself uses the checkpoint package of another torch.

``python -m tests.compat.ours OVERLAY DIRECTORY``: saves and loads the golden state with the API, and
with torch's own entry points through ``StorageWriter`` and ``StorageReader``, as the steps
``api`` and ``dcp`` of the run DIRECTORY. Exits with an error that names the keys which differ.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings

from tests.formats.state import blank, differences, lay_over, state


def _main(overlay: str, run: str) -> None:
    lay_over(overlay)
    import torch.distributed.checkpoint as dcp

    import ckptfs

    warnings.simplefilter("ignore")  # old torch warns about newer Python; not what is asked here
    wanted = state(sharded=False)
    ckptfs.save(wanted, f"{run}/api")
    dcp.save(wanted, storage_writer=ckptfs.StorageWriter(f"{run}/dcp"))
    for name in ("api", "dcp"):
        by_api = blank(copy.deepcopy(wanted))
        ckptfs.load(by_api, f"{run}/{name}")
        by_dcp = blank(copy.deepcopy(wanted))
        dcp.load(by_dcp, storage_reader=ckptfs.StorageReader(f"{run}/{name}"))
        wrong = [*differences(by_api, wanted), *differences(by_dcp, wanted)]
        if wrong:
            raise SystemExit(f"{name} holds other values under {wrong}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _main(*sys.argv[1:])
