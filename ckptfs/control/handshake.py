"""The handshake: all ranks agree on a new name for their keys, whatever an older run left behind.

A store outlives the processes that use it (torchrun's agent keeps it across restarts), so keys under
fixed names prove nothing. Only a nonce that this process has just drawn proves that the peer is alive.

    rank r    hello/<r> = nonce_r, version, World                                (a fixed name)
    rank 0    reads all hellos, draws the control's nonce C
              welcome/<nonce_r>/<i> = C  for each r, the i-th offer;   then <C>/table = all Worlds
    rank r    finds the key that holds its own nonce, answers  ack/<C>/<r>, waits for go/<C>
    rank 0    all acked, no hello has changed since            go/<C> = "go"
              a hello has changed: its process was dead         go/<C> = "again", next offer

No rank passes alone: "go" needs an answer for every nonce in the offer, and only the living process that drew
the nonce can answer. All other keys of the control are under C and never existed before. All versions have the
same format of hello: by it different versions find out that they differ.

The table of all ranks is one value that each rank reads. With thousands of ranks it is read thousands of times, so
it is compressed, which works well because its rows differ in few places, and it does not contain what only the
coordinator needs (a nonce, a version). All ranks run the same version when they read it.
"""

from __future__ import annotations

import json
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ckptfs._version import __version__
from ckptfs.control.messages import StepVerdict, decode_verdict, encode_verdict
from ckptfs.control.tcpstore_client import StoreClient, drop, offer, put, take
from ckptfs.control.world import Life, World
from ckptfs.errors import CkptfsError, CollectiveError, DeadlineError, Failure, StateError
from ckptfs.schema import parse

__all__ = [
    "HandshakeResult",
    "decode_table",
    "encode_table",
    "meet",
]

_ROW_BYTES = 16 << 10  # of one rank: a few names of a host, at most 4 KiB of them


def encode_table(hellos: Sequence[Mapping[str, Any]]) -> bytes:
    """Encode the table of all ranks.

    hellos: The hello of every rank in order, each with its ``world`` and its ``life`` (or None).
    """
    names = [*hellos[0]["world"]]
    rows = [[*(hello["world"][name] for name in names), hello["life"]] for hello in hellos]
    return zlib.compress(json.dumps({"names": names, "rows": rows}).encode())


def decode_table(data: bytes, ranks: int) -> list[dict[str, Any]]:
    """Decode ``world`` and ``life`` of this number of ranks. StateError if it is no such table."""
    inflating = zlib.decompressobj()
    try:
        text = inflating.decompress(data, ranks * _ROW_BYTES)
        if inflating.unconsumed_tail or not inflating.eof:
            raise ValueError(f"larger than {ranks * _ROW_BYTES} bytes, or cut short")
        table = parse(text)
    except (zlib.error, ValueError) as error:
        raise StateError(f"the table of the ranks in torch's store is damaged: {error}") from error
    return [
        {"world": dict(zip(table["names"], row[:-1], strict=True)), "life": row[-1]}
        for row in table["rows"]
    ]


_POLL_S = (0.001, 0.05)  # from, to
# How often rank 0 checks whether the hello of a rank that does not answer was a dead process's, and
# a rank without a welcome checks whether its own hello is still there.
_DOUBT_S = 0.25
_GRACE_S = 2.0  # how much longer the others wait than rank 0, which has the better error


@dataclass(frozen=True, slots=True)
class HandshakeResult:
    """The result of the handshake. nonce: The prefix of all further keys."""

    nonce: str
    worlds: tuple[World, ...]
    lives: tuple[Life | None, ...]


@dataclass(frozen=True, slots=True)
class _HandshakeContext:
    """How this rank meets the others, and for how long."""

    client: StoreClient
    base: str
    rank: int
    size: int
    timeout_s: float
    deadline: float

    def call(self, op: Callable[[Any], Any]) -> Any:
        return self.client.call(op, self.timeout_s)

    def hello(self, rank: int) -> str:
        return f"{self.base}/hello/{rank}"


def meet(
    client: StoreClient,
    base: str,
    world: World,
    prepare: Callable[[Any, str], None],
    *,
    timeout_s: float,
    version: str = __version__,
) -> HandshakeResult:
    """Agree with the other ranks of ``base``. ``prepare(store, nonce)`` runs before any "go".

    Raises:
        DeadlineError: Some ranks did not come within timeout_s.
        CollectiveError: The versions of ckptfs differ.
    """
    grace_s = _GRACE_S if world.rank else 0.0
    place = _HandshakeContext(
        client, base, world.rank, world.size, timeout_s, time.monotonic() + timeout_s + grace_s
    )
    hello = {
        "nonce": uuid.uuid4().hex,
        "version": version,
        "world": asdict(world),
        "life": _asdict(Life.of_this_process()),
    }
    if world.rank == 0:
        return _lead(place, hello, prepare)
    return _follow(place, hello, prepare)


# -- rank 0 ------------------------------------------------------------------------------------


def _lead(
    place: _HandshakeContext, own: Mapping[str, Any], prepare: Callable[[Any, str], None]
) -> HandshakeResult:
    offers: Counter[str] = Counter()
    others = range(1, place.size)
    while True:
        hellos = _await_hellos(place, offers)
        nonce = uuid.uuid4().hex
        table = [own, *(hellos[rank] for rank in others)]
        problem = _version_error(table)
        if problem is not None:
            _refuse(place, hellos, offers, problem)
        place.call(lambda store: prepare(store, nonce))  # noqa: B023 - called at once
        data = encode_verdict(StepVerdict(value=nonce))
        for rank in others:
            _welcome(place, hellos[rank], offers, data)
        # Last: a rank that finds no table blames rank 0, and not ranks that rank 0 did not welcome
        # before it died.
        place.call(lambda store: put(store, _table(place, nonce), encode_table(table)))  # noqa: B023
        if _await_acks(place, nonce, hellos, offers):
            break
    place.call(lambda store: _finish(store, place, nonce))
    return _meeting(nonce, table)


def _await_hellos(place: _HandshakeContext, offers: Counter[str]) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}

    def look(store: Any) -> bool:
        for rank in _present(store, {r: place.hello(r) for r in range(1, place.size)}, found):
            found[rank] = json.loads(store.get(place.hello(rank)))
        return len(found) == place.size - 1

    if not _poll(place, look):
        missing = tuple(rank for rank in range(1, place.size) if rank not in found)
        _refuse(place, found, offers, _late(place, missing))
    return found


def _await_acks(
    place: _HandshakeContext,
    nonce: str,
    hellos: Mapping[int, Mapping[str, Any]],
    offers: Counter[str],
) -> bool:
    """Wait until every rank has answered this offer.

    Returns False if a hello was stale, so that another offer is needed.
    """
    keys = {rank: _ack(place, nonce, rank) for rank in hellos}
    acked: set[int] = set()
    stale: set[int] = set()
    next_doubt = time.monotonic() + _DOUBT_S

    def look(store: Any) -> bool:
        nonlocal next_doubt
        acked.update(_present(store, keys, acked))
        complete = len(acked) == len(hellos)
        if complete or time.monotonic() > next_doubt:
            next_doubt = time.monotonic() + _DOUBT_S
            suspects = hellos if complete else set(hellos) - acked
            stale.update(r for r in suspects if _changed(store, place.hello(r), hellos[r]))
        return complete or bool(stale)

    if not _poll(place, look):
        error = _late(place, tuple(sorted(set(hellos) - acked)))
        _say_go(place, nonce, StepVerdict(error=error))
        raise error
    if stale:
        # The ranks that answered wait for the next offer. The key of a stale nonce has no reader.
        _say_go(place, nonce, StepVerdict(value="again"))
        for rank in stale:
            key = _welcome_key(place, hellos[rank], offers, -1)
            place.call(lambda store: drop(store, key))  # noqa: B023 - called at once
        place.call(lambda store: drop(store, _table(place, nonce)))  # read after "go" only
    return not stale


def _present(store: Any, keys: Mapping[int, str], known: Collection[int]) -> list[int]:
    """Return the ranks that have an existing key and are not known yet.

    It takes one request if all keys exist.
    """
    missing = {rank: key for rank, key in keys.items() if rank not in known}
    if not missing or store.check(list(missing.values())):
        return list(missing)
    return [rank for rank, key in missing.items() if store.check([key])]


def _changed(store: Any, key: str, hello: Mapping[str, Any]) -> bool:
    return not store.check([key]) or bool(json.loads(store.get(key))["nonce"] != hello["nonce"])


def _finish(store: Any, place: _HandshakeContext, nonce: str) -> None:
    """Delete the hellos, then write "go".

    After "go" a rank may open the next control on this base.
    """
    for rank in range(1, place.size):
        store.delete_key(place.hello(rank))
    offer(store, _go(place, nonce), encode_verdict(StepVerdict(value="go")))
    # Only after "go": while the answers exist, the ranks that wrote them are not blamed if this one dies.
    for rank in range(1, place.size):
        store.delete_key(_ack(place, nonce, rank))


def _refuse(
    place: _HandshakeContext,
    hellos: Mapping[int, Mapping[str, Any]],
    offers: Counter[str],
    error: CkptfsError,
) -> None:
    """Send the error to every rank that said hello, and raise it."""
    data = encode_verdict(StepVerdict(error=error))
    for rank, hello in hellos.items():
        place.call(lambda s: s.delete_key(place.hello(rank)))  # noqa: B023 - called at once
        _welcome(place, hello, offers, data)
    place.client.flush(place.timeout_s)
    raise error


def _welcome(
    place: _HandshakeContext, hello: Mapping[str, Any], offers: Counter[str], data: bytes
) -> None:
    key = _welcome_key(place, hello, offers, 0)
    place.call(lambda store: put(store, key, data))
    offers[hello["nonce"]] += 1


def _say_go(place: _HandshakeContext, nonce: str, verdict: StepVerdict[Any]) -> None:
    place.call(lambda store: offer(store, _go(place, nonce), encode_verdict(verdict)))


def _version_error(table: list[Mapping[str, Any]]) -> CkptfsError | None:
    """Return an error if not all ranks run one version: their steps would not mean the same."""
    versions = [str(hello["version"]) for hello in table]
    if len(set(versions)) == 1:
        return None
    failures = {
        rank: Failure(
            rank,
            hello["world"]["node"],
            "ckptfs.errors.StateError",
            f"runs ckptfs {hello['version']}, the coordinator {versions[0]}",
        )
        for rank, hello in enumerate(table)
        if hello["version"] != versions[0]
    }
    return CollectiveError(
        "ranks run different versions of ckptfs: "
        + ", ".join(
            f"{version} on ranks {[r for r, v in enumerate(versions) if v == version]}"
            for version in dict.fromkeys(versions)
        ),
        failures=failures,
        hint="install one version on every node and in every image",
    )


# -- the other ranks ---------------------------------------------------------------------------


def _follow(
    place: _HandshakeContext, hello: Mapping[str, Any], prepare: Callable[[Any, str], None]
) -> HandshakeResult:
    offers: Counter[str] = Counter()
    place.call(lambda s: s.set(place.hello(place.rank), json.dumps(hello)))
    try:
        while True:
            key = _welcome_key(place, hello, offers, 0)
            offers[str(hello["nonce"])] += 1
            nonce = str(_await_value(place, key, silent=lambda: (0,), hello=hello))
            place.call(lambda s: drop(s, key))  # noqa: B023 - called at once

            def acknowledge(store: Any, nonce: str = nonce) -> None:
                prepare(store, nonce)
                store.set(_ack(place, nonce, place.rank), b"1")

            place.call(acknowledge)
            absent = lambda: _absent(place, nonce)  # noqa: B023, E731 - called in this turn only
            if _await_value(place, _go(place, nonce), silent=absent) == "go":
                table = place.call(lambda s: take(s, _table(place, nonce))[0])  # noqa: B023
                return _meeting(nonce, decode_table(table, place.size))
    except BaseException:
        # So that rank 0 does not offer again to a process that has given up.
        place.client.submit(lambda s: _withdraw(s, place, hello))
        raise


def _withdraw(store: Any, place: _HandshakeContext, hello: Mapping[str, Any]) -> None:
    key = place.hello(place.rank)
    if not _changed(store, key, hello):
        store.delete_key(key)


def _await_value(
    place: _HandshakeContext,
    key: str,
    silent: Callable[[], tuple[int, ...]],
    hello: Mapping[str, Any] | None = None,
) -> Any:
    """Return the value of the key, once it exists.

    hello: This rank's hello, written again if it is gone. An earlier try of this rank that gave up
    compares before it deletes, and may delete a hello that was written between the two.
    """
    next_doubt = time.monotonic() + _DOUBT_S

    def look(store: Any) -> bool:
        nonlocal next_doubt
        if store.check([key]):
            return True
        if hello is not None and time.monotonic() > next_doubt:
            next_doubt = time.monotonic() + _DOUBT_S
            if not store.check([place.hello(place.rank)]):
                store.set(place.hello(place.rank), json.dumps(hello))
        return False

    if not _poll(place, look):
        raise _late(place, silent())
    return decode_verdict(place.call(lambda s: take(s, key)[0])).unwrap()


def _absent(place: _HandshakeContext, nonce: str) -> tuple[int, ...]:
    def look(store: Any) -> tuple[int, ...]:
        if not store.check([_table(place, nonce)]):
            return (0,)  # it has not offered to all
        return tuple(r for r in range(1, place.size) if not store.check([_ack(place, nonce, r)]))

    return tuple(place.call(look)) or (0,)


# -- both --------------------------------------------------------------------------------------


def _late(place: _HandshakeContext, ranks: tuple[int, ...]) -> DeadlineError:
    return DeadlineError(
        f"ranks {list(ranks)} of {place.size} did not open their control plane "
        f"within {place.timeout_s:g} s",
        silent=ranks,
        rank=ranks[0] if len(ranks) == 1 else None,
        hint="make the same collective calls in the same order on every rank",
    )


def _poll(place: _HandshakeContext, look: Callable[[Any], bool]) -> bool:
    """Call ``look`` until it returns True; return False at the deadline.

    It does not use a wait of c10d: without reading its text, an expired wait cannot be
    distinguished from a lost connection.
    """
    pause_s = _POLL_S[0]
    while not place.call(look):
        if time.monotonic() > place.deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _POLL_S[1])
    return True


def _ack(place: _HandshakeContext, nonce: str, rank: int) -> str:
    return f"{place.base}/ack/{nonce}/{rank}"


def _go(place: _HandshakeContext, nonce: str) -> str:
    return f"{place.base}/{nonce}/go"


def _table(place: _HandshakeContext, nonce: str) -> str:
    return f"{place.base}/{nonce}/table"


def _welcome_key(
    place: _HandshakeContext, hello: Mapping[str, Any], offers: Counter[str], shift: int
) -> str:
    return f"{place.base}/welcome/{hello['nonce']}/{offers[str(hello['nonce'])] + shift}"


def _asdict(life: Life | None) -> dict[str, int] | None:
    return None if life is None else asdict(life)


def _meeting(nonce: str, table: Sequence[Mapping[str, Any]]) -> HandshakeResult:
    return HandshakeResult(
        nonce,
        tuple(World(**hello["world"]) for hello in table),
        tuple(Life(**hello["life"]) if hello["life"] else None for hello in table),
    )
