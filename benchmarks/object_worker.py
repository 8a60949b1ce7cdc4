"""The client side of one measurement: every peer in one process, in turn, against one server.

    round 0   warm up: imports, connections, page tables; counts for nobody
    round n   every peer saves and loads once, each round another one first

Inside the clock: the call. Outside: making the state, comparing what was loaded, deleting. CPU seconds
are those of this process with all its threads; the server is another process.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.object_peers import Peer, Raw, State, make_peers

KIB, MIB = 1 << 10, 1 << 20
# One layer of a model of a billion parameters: attention, three large matrices, two norms.
LAYER = (*(16 * MIB,) * 4, *(44 * MIB,) * 3, 8 * KIB, 8 * KIB)


def large_state(size_bytes: int, make: Callable[[int], torch.Tensor]) -> State:
    """Layers until ``size_bytes`` are reached; float32."""
    state: State = {}
    left = size_bytes
    while left > 0:
        for wanted in LAYER:
            taken = min(wanted, left) // 4
            if taken:
                state[f"layers.{len(state)}"] = make(taken)
            left -= 4 * taken
            if left < 4:
                return state
    return state


def small_state(size_bytes: int, make: Callable[[int], torch.Tensor]) -> State:
    """Tensors of 4 to 64 KiB, 20 KiB on average."""
    state: State = {}
    left, sizes = size_bytes, (4 * KIB, 6 * KIB, 8 * KIB, 18 * KIB, 64 * KIB)
    while left > 0:
        size = sizes[len(state) % len(sizes)]
        state[f"small.{len(state)}"] = make(size // 4)
        left -= size
    return state


STATES = {"large": large_state, "small": small_state}


class Bench:
    """All peers over one bucket with one state."""

    def __init__(self, asked: dict[str, Any]) -> None:
        torch.manual_seed(0)
        make = STATES[asked["state"]]
        self.state = make(asked["size_bytes"], torch.rand)
        self.target = make(asked["size_bytes"], torch.zeros)
        self.bucket: str = asked["bucket"]
        self.options: dict[str, Any] = asked["options"]
        self.peers = make_peers(asked["peers"], self.options, self.bucket)

    def run(self, rounds: int) -> dict[str, Any]:
        """Every measurement: {peer: {"save": [...], "load": [...]}}, rounds in order."""
        found: dict[str, Any] = {p.name: {"save": [], "load": []} for p in self.peers}
        for number in range(rounds + 1):
            turn = number % len(self.peers)
            for peer in (*self.peers[turn:], *self.peers[:turn]):
                saved, loaded = self._one(peer)
                if number:
                    found[peer.name]["save"].append(saved)
                    found[peer.name]["load"].append(loaded)
        return {
            "bytes": sum(tensor.nbytes for tensor in self.state.values()),
            "tensors": len(self.state),
            "peers": found,
        }

    def _one(self, peer: Peer) -> tuple[dict[str, float], dict[str, float]]:
        prefix = f"bench-{uuid.uuid4().hex[:12]}"
        at = f"s3://{self.bucket}/{prefix}"
        try:
            saved = _timed(lambda: peer.save(self.state, at))
            loaded = _timed(lambda: peer.load(self.target, at))
            if not isinstance(peer, Raw):
                self._check(peer)
        finally:
            self._delete(prefix)
        return saved, loaded

    def _check(self, peer: Peer) -> None:
        for key, tensor in self.state.items():
            if not torch.equal(self.target[key], tensor):
                raise AssertionError(f"{peer.name} did not load {key} as it was saved")
            self.target[key].zero_()

    def _delete(self, prefix: str) -> None:
        """The bytes of this turn: the servers keep them in memory."""
        import botocore.session

        session = botocore.session.get_session()
        client = session.create_client(
            "s3",
            aws_access_key_id=self.options["key"],
            aws_secret_access_key=self.options["secret"],
            endpoint_url=self.options["endpoint_url"],
            region_name=self.options["client_kwargs"]["region_name"],
        )
        with contextlib.closing(client):
            for page in client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=f"{prefix}/"
            ):
                for line in page.get("Contents", ()):
                    client.delete_object(Bucket=self.bucket, Key=line["Key"])


def _timed(call: Callable[[], None]) -> dict[str, float]:
    gc.collect()
    cpu, started = time.process_time(), time.perf_counter()
    call()
    wall = time.perf_counter() - started
    return {"s": wall, "cpu_s": time.process_time() - cpu}


def main() -> None:
    """Measure what the JSON on the command line asks for; write the result as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("asked", type=json.loads)
    parser.add_argument("result", type=Path)
    options = parser.parse_args()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    options.result.write_text(json.dumps(Bench(options.asked).run(options.asked["rounds"])))


if __name__ == "__main__":
    main()
