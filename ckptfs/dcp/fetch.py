"""Data files read into tensors: verified in the same pass, straight into their memory.

    saved item --+-- payload known, host memory contiguous --> read into it, digest it there
                 +-- payload known, anything else -----------> scratch, copied into place
                 +-- payload unknown (objects) --------------> the whole item, then torch's unpickler

    calling thread   targets, wants, requests ... commit, load_bytes       in reading order
    lanes            read, compare with digests, copy                      in any order

The reading order is that of the files' names and of the offsets in them. A payload is known by its
digests; without them (stock files) it lies where torch puts it, if the item's head is as torch writes
it: that is looked at, and what looks otherwise is left to torch.load. Local files are read by the calling
thread too, others only by the lanes, which open the next files as well. In memory beyond the tensors,
at most: per lane a window of scratch and one of the reader's, and whole items (64 MiB of them, or one
that is larger) until they are unpickled.
"""

from __future__ import annotations

import io
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from ckptfs.dcp.collector import gc_paused
from ckptfs.dcp.datafile import Source, Verify
from ckptfs.dcp.filling import Work
from ckptfs.dcp.lanes import Lanes
from ckptfs.dcp.planned import AsTorch, Taker, Told, reads_of, refuse_extensions
from ckptfs.dcp.readers import Readers, opened
from ckptfs.dcp.reads import Read
from ckptfs.errors import CkptfsError
from ckptfs.events import Counters
from ckptfs.progress import SILENT, Meter

__all__ = ["Source", "Verify", "fetch", "fetch_reads", "refuse_extensions"]


def fetch(
    source: Source,
    plan: LoadPlan,
    planner: LoadPlanner,
    metadata: Metadata,
    meter: Meter = SILENT,
) -> Counters:
    """Read every item of this rank's plan into the planner's tensors. Local. meter: counts the bytes
    that were asked for, and learns how many there are.

    The planner is asked by the calling thread only. Errors as of ``fetch_reads``.
    """
    return _fetch(source, reads_of(plan, metadata), AsTorch(planner), meter)


def fetch_reads(
    source: Source,
    reads: Sequence[Read],
    load_bytes: Callable[[Read, io.BytesIO], None],
    meter: Meter = SILENT,
) -> Counters:
    """Read everything into the Reads' tensors, and give the objects to ``load_bytes``, on the calling
    thread and in reading order. Local. meter: as for ``fetch``.

    IncompleteCheckpointError: a file is missing. IntegrityError: it is short or its bytes differ; both
    name file, key and rank. After an error nothing is read any more, and the tensors are undefined.
    """
    return _fetch(source, reads, Told(load_bytes), meter)


def _fetch(source: Source, reads: Iterable[Read], taker: Taker, meter: Meter) -> Counters:
    started = time.perf_counter()
    count = 0
    try:
        # At 20,000 tensors the collector would take as long as everything else together.
        with gc_paused():
            files: dict[str, list[Read]] = defaultdict(list)
            for read in reads:
                files[read.path].append(read)
                count += 1
            if not files:
                return Counters()
            if meter is not SILENT:
                meter.expect(sum(map(_asked_bytes, (r for f in files.values() for r in f))))
            lanes, work = _read_all(source, files, taker, meter)
    except CkptfsError as error:
        error.rank = source.rank if error.rank is None else error.rank
        raise
    spent = time.perf_counter() - started
    # Several threads verify side by side; the counters are of this one rank's time.
    verify_s = work.verify_s / lanes.used
    return Counters(
        size_bytes=work.read_bytes,
        payload_bytes=work.payload_bytes,
        files=len(files),
        items=count,
        read_s=max(0.0, spent - verify_s),
        verify_s=verify_s,
    )


def _read_all(
    source: Source, files: dict[str, list[Read]], taker: Taker, meter: Meter
) -> tuple[Lanes, Work]:
    paths = sorted(files)
    with Readers(source) as readers, Lanes.of(readers.open(paths[0])) as lanes:
        work = Work(lanes, readers, taker, meter)
        for file in opened(source, paths, readers, lanes):
            reads = sorted(files[file.path], key=attrgetter("offset"))
            file.check_size(max(read.offset + read.length for read in reads))
            work.read(file, reads)
        work.finish()
    return lanes, work


def _asked_bytes(read: Read) -> int:
    """What of a file it asks for; blocks that it shares with others come on top."""
    if read.dtype is None:
        return read.length
    return math.prod(read.box_lengths) * read.dtype.itemsize
