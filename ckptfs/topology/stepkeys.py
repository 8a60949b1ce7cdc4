"""The keys of one collective step in the store, and what is done with them.

    <prefix>/<k>/in/<r>     what rank r says                              arrive, gather
                 arrived    how many have; the last sets "all"
                 all        wakes the coordinator
                 claim      "decide" (coordinator) or "alarm" (anybody), once
                 for/<r>    rank r's own piece of it, if it has pieces    offer_verdict, take_piece, drop_piece
                 verdict    the answer, once                              offer_verdict, end
                 acks       how many have read it; the last sets "acked"  acknowledge

Every method is an operation on a store, run on a StoreClient's thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ckptfs.topology.client import drop, offer, put, take, take_many, wait_for

__all__ = ["StepKeys"]


@dataclass(frozen=True, slots=True)
class StepKeys:
    """Step ``number`` of the control (or clone) under ``prefix``, with ``size`` ranks."""

    prefix: str
    number: int
    size: int

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{self.number}/{name}"

    def arrive(self, store: Any, rank: int, data: bytes | None) -> None:
        """Say ``data`` (None: nothing needs to travel) and be counted."""
        if data is not None:
            put(store, self._key(f"in/{rank}"), data)
        if store.add(self._key("arrived"), 1) == self.size:
            store.set(self._key("all"), b"1")

    def gather(self, store: Any) -> list[tuple[bytes, list[str]]]:
        """Coordinator: wait for all, claim the step, read ranks 1, 2, ...: bytes and their keys.

        Empty: an alarm came first; its verdict is there, or on its way.
        """
        self.arrive(store, 0, None)
        wait_for(store, self._key("all"))
        if not self.claim(store, "decide"):
            return []
        return take_many(store, [self._key(f"in/{rank}") for rank in range(1, self.size)])

    def claim(self, store: Any, what: str) -> bool:
        """Take the step for "decide" or "alarm"; the first has it, and later ones of the same."""
        return bool(store.compare_set(self._key("claim"), "", what) == what.encode())

    def offer_verdict(self, store: Any, data: bytes, pieces: Iterable[bytes] = ()) -> bool:
        """Set the verdict if nobody has; True when ours is the one that all obey.

        pieces: of each rank, there before the verdict that speaks of them; asked for one by one, and
        what that raises is raised here.
        """
        names: list[str] = []
        ours = False
        try:
            for rank, piece in enumerate(pieces):
                if rank:  # the coordinator has its own
                    names.append(self._key(f"for/{rank}"))
                    put(store, names[-1], piece)
            ours = offer(store, self._key("verdict"), data)
            return ours
        finally:
            if not ours:  # an alarm came first, or one cannot be made: nobody will read them
                for name in names:
                    drop(store, name)

    def take_piece(self, store: Any, rank: int) -> bytes:
        """Read this rank's own piece of the verdict, which said that there is one."""
        data, names = take(store, self._key(f"for/{rank}"))
        for name in names:
            store.delete_key(name)
        return data

    def drop_piece(self, store: Any, rank: int) -> None:
        """Delete that rank's piece, which it will never take; absent is fine."""
        drop(store, self._key(f"for/{rank}"))

    def end(self, store: Any, data: bytes) -> bool:
        """Offer a verdict out of turn, and wake the coordinator, who waits for values. True when ours
        is the one that all obey.
        """
        ours = self.offer_verdict(store, data)
        store.set(self._key("all"), b"1")
        return ours

    def read_verdict(self, store: Any) -> bytes:
        """Wait for the verdict and read it, whoever wrote it."""
        wait_for(store, self._key("verdict"))
        return take(store, self._key("verdict"))[0]

    def acknowledge(self, store: Any) -> None:
        """This rank has read the verdict, or never will."""
        if store.add(self._key("acks"), 1) == self.size:
            store.set(self._key("acked"), b"1")

    def is_acknowledged(self, store: Any) -> bool:
        """True when every rank has read the verdict."""
        return bool(store.check([self._key("acked")]))

    def sweep(self, store: Any, read: list[str]) -> None:
        """All have arrived: nobody will read these keys, or the step before this one, again."""
        for name in read:
            store.delete_key(name)
        if self.number:
            StepKeys(self.prefix, self.number - 1, self.size).drop(store)

    def drop(self, store: Any) -> None:
        """Delete the step's own keys; absent is fine."""
        drop(store, self._key("verdict"))
        for name in ("claim", "arrived", "all", "acks", "acked"):
            store.delete_key(self._key(name))

    def drop_values(self, store: Any) -> None:
        """Delete what ranks said and nobody gathered."""
        for rank in range(1, self.size):
            drop(store, self._key(f"in/{rank}"))
