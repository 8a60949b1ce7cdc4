"""One rank that ``running`` started: its orders on standard input, its findings on a pipe.

    in    {"rank", "ranks", "port", "line", "asked"}      port null: this one hosts the store
    out   {"port"}  {"kind", ...} of told  {"done"} or {"failed"}       rank 0 alone tells findings

Standard input stays open as long as whoever started this lives; when it ends, this ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from ckptfs.bench.ask import decode_asked
from ckptfs.bench.told import encode_told
from ckptfs.errors import CkptfsError
from ckptfs.uri import mask_credentials

__all__ = ["main"]


def main() -> None:
    """Measure as ordered; ends the process."""
    orders = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    line = os.fdopen(orders["line"], "w", buffering=1)

    def tell(text: str) -> None:
        line.write(text + "\n")
        line.flush()

    try:
        _measure(orders, tell)
    except CkptfsError as error:
        tell(json.dumps({"failed": failed_document(error)}))
        os._exit(1)  # threads of libraries may wait for ranks that are gone
    tell(json.dumps({"done": True}))
    line.close()
    os._exit(0)


def _measure(orders: dict[str, Any], tell: Any) -> None:
    # Imported here: an order to measure nothing should not cost the import of torch.
    from ckptfs.bench.ranks import hosted_store, joined_group
    from ckptfs.bench.rounds import measure_ranks

    store = hosted_store(orders["port"])
    if orders["port"] is None:
        tell(json.dumps({"port": store.port}))
    group = joined_group(orders["rank"], orders["ranks"], store)
    measure_ranks(decode_asked(orders["asked"]), group, lambda told: tell(encode_told(told)))
    group.barrier()


def failed_document(error: CkptfsError) -> dict[str, Any]:
    """The error as JSON values, without credentials."""
    return {
        "type": type(error).__name__,
        "message": mask_credentials(error.message),
        "uri": error.uri,
        "hint": error.hint and mask_credentials(error.hint),
        "rank": error.rank,
    }


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
