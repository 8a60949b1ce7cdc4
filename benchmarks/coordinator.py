"""One turn of ``planner``: a process that plays all ranks of a save and times its coordinator.

    python -m benchmarks.coordinator ckptfs|dcp RANKS TENSORS      prints JSON

Rank 0 runs through. At each step the other ranks are played, one after the other, up to what they say
there; then the clock runs while rank 0 decodes that, decides, and encodes an answer for each. A rank
lives only while it is played, so that thousands fit into one machine's memory. It plans once; what it
wrote follows from the answer to its plan, without making that plan again.
"""

from __future__ import annotations

import gc
import json
import pickle
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.save.spec import WrittenPart
from ckptfs.control.messages import (
    StepVerdict,
    attempt,
    decode_message,
    decode_verdict,
    encode_verdict,
    joined,
    message_by,
    settle,
    split,
)
from ckptfs.control.world import World
from ckptfs.dcp.write.pipeline import encode_placed, finish_save
from ckptfs.dcp.write.rank_files import Placed, sidecar_name
from ckptfs.testing.world import worlds_of
from tests.dcp.planned import plan_save
from tests.scale.simulation import Shard, Sizes

CHUNK_BYTES = 9000  # of one item in its file; nothing is written
SAVE_ID = "0123456789abcdef"


class Watch:
    """Seconds, CPU seconds and names of what is timed."""

    def __init__(self) -> None:
        self.parts_s: dict[str, float] = {}
        self.cpu_s = 0.0

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """What is inside counts as ``part``."""
        gc.collect()  # what playing the ranks left belongs to no side
        began, cpu = time.perf_counter(), time.process_time()
        yield
        self.cpu_s += time.process_time() - cpu
        self.parts_s[part] = self.parts_s.get(part, 0.0) + time.perf_counter() - began


class _Said(Exception):  # noqa: N818 - nothing went wrong: a rank is played no further
    """What a rank says in a step that is not decided yet."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = data


class _Played:
    """The Control of a rank that is played: up to the first step."""

    def __init__(self, worlds: tuple[World, ...], rank: int) -> None:
        self.worlds, self.world = worlds, worlds[rank]
        self.rank, self.size = rank, len(worlds)

    def step(self, label: str, local: Callable[[], Any], decide: Any = None) -> Any:
        """Raises what the rank says there."""
        del decide
        raise _Said(message_by(self.world, attempt(label, local, self.world)[0]))


class _Coordinating:
    """The Control of rank 0, which plays the others."""

    def __init__(self, sizes: Sizes, watch: Watch) -> None:
        self.worlds = worlds_of(sizes.ranks)
        self.world, self.rank, self.size = self.worlds[0], 0, sizes.ranks
        self._sizes, self._watch = sizes, watch
        self._answer: tuple[bytes, list[bytes]] | None = None

    def step(self, label: str, local: Callable[[], Any], decide: Any = None) -> Any:
        """As ``Control.step``; from what was said to the answers is on the watch."""
        said, problem = attempt(label, local, self.world)
        arrived = [message_by(self.world, said), *self._others(label)]
        with self._watch.timing(label):
            verdict, raised = settle([decode_message(one) for one in arrived], decide, self.worlds)
            common, pieces = split(verdict)
            answer = encode_verdict(common), list(pieces)
        self._answer = answer
        return _read(answer, 0).unwrap(problem or raised)

    def _others(self, label: str) -> Iterator[bytes]:
        return (self._played(label, rank) for rank in range(1, self.size))

    def _played(self, label: str, rank: int) -> bytes:
        if self._answer is not None:
            return self._wrote(label, rank, self._answer)
        try:
            plan_save(Shard(self._sizes), _Played(self.worlds, rank))  # type: ignore[arg-type]
        except _Said as said:
            return said.data
        raise RuntimeError(f"rank {rank} took no step")

    def _wrote(self, label: str, rank: int, answer: tuple[bytes, list[bytes]]) -> bytes:
        """What a rank says that wrote the items that its bitmap names."""
        decided, bitmap = _read(answer, rank).unwrap()
        assert decided, "in a first save all plans are whole"
        count = int.from_bytes(bitmap).bit_count()
        said, _ = attempt(label, lambda: _part(rank, count), self.worlds[rank])
        return message_by(self.worlds[rank], said)


def _read(answer: tuple[bytes, list[bytes]], rank: int) -> StepVerdict[Any]:
    verdict = decode_verdict(answer[0])
    return joined(verdict, answer[1][rank]) if verdict.apart else verdict


def _save(control: _Coordinating, sizes: Sizes) -> bytes:
    """What ``ckptfs.save`` does on rank 0 but for the bytes and the log; the .metadata."""
    planned = plan_save(Shard(sizes), control)  # type: ignore[arg-type] # all of a Control that it asks for
    made: list[bytes] = []

    def finish(parts: Sequence[WrittenPart]) -> None:
        (metadata,) = finish_save(
            planned, parts, save_id=SAVE_ID, checkpoint_id="file:///run/step_1"
        ).values()
        assert isinstance(metadata, bytes), "there is one domain"
        made.append(metadata)

    control.step("write", lambda: _part(control.rank, len(planned.items)), finish)
    return made[0]


def _part(rank: int, count: int) -> WrittenPart:
    """What a rank reports that wrote so many items."""
    name = f"{SAVE_ID}/__{rank}_0.distcp"
    sidecar = sidecar_name(name)
    files = (
        FileRecord(name, count * CHUNK_BYTES, digests=sidecar),
        FileRecord(sidecar, 1, digest="0" * 32),
    )
    placed = [[Placed(n, n * CHUNK_BYTES, CHUNK_BYTES) for n in range(count)]]
    return WrittenPart(files, payload=encode_placed(placed))


def ours(sizes: Sizes, watch: Watch) -> bytes:
    """ckptfs; the .metadata."""
    return _save(_Coordinating(sizes, watch), sizes)


def stock(sizes: Sizes, watch: Watch) -> bytes:
    """torch's own planner and writer, as ``dcp.save`` calls them on rank 0; the .metadata."""
    with tempfile.TemporaryDirectory(dir=_memory()) as directory:
        share, writer = Shard(sizes), FileSystemWriter(directory)
        writer.set_up_storage_writer(True, rank=0, use_collectives=True)
        planner = DefaultSavePlanner()
        said = [pickle.dumps(_plain(share.plan(rank))) for rank in range(sizes.ranks)]
        with watch.timing("plan the save"):
            plans, metadata = planner.create_global_plan([pickle.loads(one) for one in said])  # noqa: S301
            chosen = writer.prepare_global_plan(plans)
            answers = [pickle.dumps(plan) for plan in chosen]
        del said, plans, chosen
        wrote = [pickle.dumps(_results(rank, one)) for rank, one in enumerate(answers)]
        del answers
        with watch.timing("write"):
            writer.finish(metadata, [pickle.loads(one) for one in wrote])  # noqa: S301
        return (Path(directory) / ".metadata").read_bytes()


def _plain(plan: SavePlan) -> SavePlan:
    """As stock's planner makes it: what it knows of paths instead of our facts."""
    facts: Any = plan.planner_data
    return SavePlan(plan.items, planner_data=dict(facts.mappings))


def _results(rank: int, answer: bytes) -> list[WriteResult]:
    plan: SavePlan = pickle.loads(answer)  # noqa: S301 - ours
    name = f"__{rank}_0.distcp"
    return [
        WriteResult(item.index, CHUNK_BYTES, _StorageInfo(name, n * CHUNK_BYTES, CHUNK_BYTES))
        for n, item in enumerate(plan.items)
    ]


def _memory() -> str | None:
    """A tmpfs where there is one: a disk has no part in this."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108


def main() -> None:
    """Measure one side, print what was found."""
    side, ranks, tensors = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    watch = Watch()
    sizes = Sizes(ranks, tensors=tensors)
    metadata = {"ckptfs": ours, "dcp": stock}[side](sizes, watch)
    found = {
        "wall_s": sum(watch.parts_s.values()),
        "cpu_s": watch.cpu_s,
        "parts_s": watch.parts_s,
        "metadata_bytes": len(metadata),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
