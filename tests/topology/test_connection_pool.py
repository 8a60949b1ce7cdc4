"""Connections to a store are kept for the next client, and for no other use."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from ckptfs.control.tcpstore_client import (
    CHUNK_BYTES,
    WAITING,
    StoreClient,
    connect,
    drop,
    pool_of,
    put,
)
from ckptfs.errors import ControlPlaneLostError, StateError
from tests.topology.relay import HOST, Relay


@pytest.fixture
def relay() -> Iterator[Relay]:
    """A relay in front of a store of its own."""
    server = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    with Relay(server.port) as relay:
        yield relay


def client_of(relay: Relay) -> Any:
    """A process's own client of that store."""
    return TCPStore(HOST, relay.port, is_master=False, wait_for_workers=False)


def ask(store: Any, value: str = "x") -> None:
    """One client: it opens, does one thing of each kind, and closes."""
    client = StoreClient(store, "test")
    client.call_short(lambda s: s.set("key", value), 10.0)
    client.call(lambda s: s.get("key"), 10.0)
    client.close()


def wait_on_threads(store: Any, count: int) -> list[StoreClient]:
    """So many clients wait at the same time, until all do; then each has its answer."""
    clients = [StoreClient(store, f"waits-{number}") for number in range(count)]

    def waits(number: int) -> Callable[[Any], None]:
        def wait(s: Any) -> None:
            s.set(f"here/{number}", "1")
            s.wait(["go"])

        return wait

    waiting = [client.submit(waits(number)) for number, client in enumerate(clients)]
    other = StoreClient(store, "writes")
    other.call(lambda s: s.wait([f"here/{number}" for number in range(count)]), 10.0)
    other.call_short(lambda s: s.set("go", "1"), 10.0)
    for one in waiting:
        one.result(120)
    other.call_short(lambda s: s.delete_key("go"), 10.0)
    other.call_short(lambda s: [s.delete_key(f"here/{n}") for n in range(count)], 10.0)
    other.close()
    return clients


def test_one_client_after_the_other_connects_once(relay: Relay) -> None:
    """However many clients follow each other, from whichever thread, the first has connected for all."""
    store = PrefixStore("a", client_of(relay))
    ask(store)
    made = relay.accepted
    for _ in range(20):
        ask(store)
        thread = threading.Thread(target=ask, args=(store,))
        thread.start()
        thread.join()
    assert relay.accepted == made


def test_the_first_operation_connects_for_all_that_wait_later(relay: Relay) -> None:
    """As many threads as a process has wait at the same time, each over a connection alone, which was
    there before; one more gets one, and that is kept too.
    """
    store = client_of(relay)
    ask(store)
    made = relay.accepted
    assert made == 2 + WAITING  # the test's own, the shared one
    clients = wait_on_threads(store, WAITING - 1)  # in addition to the one that waits for them
    assert relay.accepted == made
    clients += wait_on_threads(store, WAITING)
    assert relay.accepted == made + 1
    clients += wait_on_threads(store, WAITING)
    assert relay.accepted == made + 1
    assert len(clients) == 3 * WAITING - 1  # all of them are open: an idle client holds none


def test_two_threads_at_once_make_one_set(relay: Relay) -> None:
    """The first operations of a process on several threads make the connections once."""
    store = client_of(relay)
    clients = [StoreClient(store, f"first-{number}") for number in range(8)]
    for future in [client.submit_short(lambda s: s.set("a", "1")) for client in clients]:
        future.result(120)
    assert relay.accepted == 2 + WAITING


def test_a_short_operation_passes_by_all_that_wait(relay: Relay) -> None:
    """Heartbeats continue while every other connection of the process waits for a key."""
    store = client_of(relay)
    stuck = [StoreClient(store, f"stuck-{number}") for number in range(WAITING + 2)]
    lost = [client.submit(lambda s: s.wait(["never"])) for client in stuck]
    heart = StoreClient(store, "heart")
    try:
        heart.call_short(lambda s: s.set("beat", "1"), 10.0)
        assert not any(one.done() for one in lost)
    finally:
        # By a connection of its own: a thread that still waits for a key when Python ends aborts it.
        client_of(relay).set("never", "1")
    for one in lost:
        one.result(120)


def test_nothing_that_is_dropped_is_waited_for(relay: Relay) -> None:
    """What somebody else deleted a moment ago is absent; a read of it would wait for it to come back."""
    store = client_of(relay)
    client = StoreClient(store, "test")
    client.call_short(lambda s: put(s, "large", b"x" * (CHUNK_BYTES + 1)), 10.0)
    keys = client.call_short(lambda s: s.num_keys(), 10.0)
    client.call_short(lambda s: drop(s, "absent"), 10.0)
    assert client.call_short(lambda s: s.num_keys(), 10.0) == keys
    client.call_short(lambda s: drop(s, "large"), 10.0)
    assert client.call_short(lambda s: s.num_keys(), 10.0) == keys - 2

    class Races:
        """Another client looks, and deletes a key whenever this one has seen it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def check(self, keys: list[str]) -> bool:
            there = bool(store.check(keys))
            for key in keys:
                store.delete_key(key)
            return there

        def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
            told: bytes = store.compare_set(key, expected, desired)
            assert key == "small" or not store.check([key]), "somebody may take it"
            return told

        def get(self, key: str) -> bytes:
            assert store.check([key]), "it would wait"
            return bytes(store.get(key))

    client.call_short(lambda s: put(s, "small", b"x"), 10.0)
    for key in ("small", "absent"):
        drop(Races(), key)
        assert not store.check([key])


def test_a_connection_that_was_cut_is_replaced(relay: Relay) -> None:
    """What a firewall closed while it was not in use costs the next client nothing but a connection."""
    store = client_of(relay)
    ask(store)
    made = relay.accepted
    relay.cut()
    pool = pool_of(store)
    assert pool is not None
    pool.idle_s = 0.0  # as after a night
    ask(store, "z")
    assert relay.accepted == made + 2  # the shared one, and one that waits
    assert client_of(relay).get("key") == b"z"


def test_an_error_half_way_keeps_nothing(relay: Relay) -> None:
    """After an error of the store an answer may still be on its way: that connection is not kept, even if
    another client shares it; an error of ckptfs's own came with the answer.
    """
    store = client_of(relay)
    ask(store)
    made = relay.accepted

    def failing(error: Exception) -> Callable[[Any], None]:
        def fail(store: Any) -> None:
            store.set("key", "1")
            raise error

        return fail

    for waits in (False, True):
        for error in (StateError("mine"), RuntimeError("in the middle")):
            client = StoreClient(store, "test")
            submit = client.submit if waits else client.submit_short
            with pytest.raises(type(error)):
                submit(failing(error)).result(120)
    assert relay.accepted == made
    wait_on_threads(store, WAITING - 1)
    assert relay.accepted == made + 2


def test_a_client_whose_connection_broke_does_not_make_another(relay: Relay) -> None:
    """Where the store is gone that takes a minute, and a rank that leaves would wait for it."""
    store = client_of(relay)
    client = StoreClient(store, "test")
    client.call(lambda s: s.set("key", "1"), 10.0)
    made = relay.accepted
    relay.cut()
    for call in (client.call_short, client.call, client.call_short):
        with pytest.raises(ControlPlaneLostError, match="is gone"):
            call(lambda s: s.check(["key"]), 10.0)
    assert relay.accepted == made


def test_after_an_odd_error_a_wait_holds_up_nobody(relay: Relay) -> None:
    """The operation failed and the connection did not: it is still what others share, so what waits
    next waits over another one.
    """
    store = client_of(relay)
    heart, client = StoreClient(store, "heart"), StoreClient(store, "test")
    heart.call_short(lambda s: s.set("beat", "1"), 10.0)
    with pytest.raises(ValueError, match="invalid literal"):
        client.call_short(lambda s: int(s.compare_set("odd", "", "no number")), 10.0)
    waiting = client.submit(lambda s: s.wait(["never"]))
    other = StoreClient(store, "other")
    other.call_short(lambda s: s.set("beat", "2"), 10.0)
    for _ in range(50):
        heart.call_short(lambda s: s.set("beat", "3"), 10.0)
    assert not waiting.done()
    other.call_short(lambda s: s.set("never", "1"), 10.0)
    waiting.result(120)


def test_a_client_that_slept_does_not_use_what_was_cut_meanwhile(relay: Relay) -> None:
    """A firewall closes the connection that all threads share while no thread speaks: neither a new client
    nor one that used it before fails for that.
    """
    store = client_of(relay)
    client = StoreClient(store, "test")
    client.call_short(lambda s: s.set("key", "1"), 10.0)
    relay.cut()
    pool = pool_of(store)
    assert pool is not None
    pool.idle_s = 0.0  # as after a night
    client.call_short(lambda s: s.set("key", "2"), 10.0)
    # A set gets no answer: over a second connection the server may meet what was sent later first.
    assert client.call_short(lambda s: s.get("key"), 10.0) == b"2"
    assert client_of(relay).get("key") == b"2"


def test_connections_go_with_their_store(relay: Relay) -> None:
    """A store that the process has no more keeps no connection open."""
    store = client_of(relay)
    ask(store)
    again = client_of(relay)
    assert pool_of(again) is not pool_of(store)
    del store
    gc.collect()
    made = relay.accepted
    ask(again)
    assert relay.accepted == made + 1 + WAITING


def test_the_child_of_a_fork_connects_for_itself(relay: Relay) -> None:
    """Parent and child never talk over one connection."""
    store = client_of(relay)
    ask(store)
    made = relay.accepted
    child = os.fork()
    if child == 0:
        status = 1
        try:
            ask(store, "child")
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert relay.accepted == made + 1 + WAITING
    ask(store, "parent")
    assert relay.accepted == made + 1 + WAITING


def test_a_store_that_somebody_else_hosts_is_reached_once(relay: Relay) -> None:
    """Without a group each call asks for torchrun's store again: it is the one of the first call, until
    that does not answer any more.
    """
    first = connect(HOST, relay.port, 10.0)
    ask(first)
    made = relay.accepted
    again = connect(HOST, relay.port, 10.0)
    assert again is first
    ask(again)
    assert relay.accepted == made


def test_a_store_without_connections_keeps_none() -> None:
    """Clients of a store in memory are the store itself."""
    store = HashStore()
    assert pool_of(store) is None
    assert pool_of(PrefixStore("a", store)) is None
    ask(store)
