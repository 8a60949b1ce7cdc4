"""Connections to a store are kept for the next client, and for nobody else."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from ckptfs.topology.client import StoreClient, connect
from ckptfs.topology.connection_pool import pool_of
from tests.topology.relay import HOST, Relay

pytestmark = pytest.mark.timeout(60)


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
    """One client: it opens, does one thing, and closes."""
    client = StoreClient(store, "test")
    client.call(lambda s: s.set("key", value), 10.0)
    client.close()


def test_a_closed_client_leaves_its_connection_to_the_next(relay: Relay) -> None:
    """However many clients follow each other, from whichever thread, there is one connection."""
    store = PrefixStore("a", client_of(relay))
    ask(store)
    made = relay.accepted
    for _ in range(20):
        ask(store)
        thread = threading.Thread(target=ask, args=(store,))
        thread.start()
        thread.join()
    assert relay.accepted == made


def test_clients_at_one_time_have_a_connection_each(relay: Relay) -> None:
    """A blocked wait blocks nobody but its own client; later both connections are used again."""
    store = client_of(relay)
    waiting, other = StoreClient(store, "waits"), StoreClient(store, "writes")
    woken = waiting.submit(lambda s: s.wait(["go"]))
    other.call(lambda s: s.set("go", "1"), 10.0)
    woken.result(10)
    made = relay.accepted
    waiting.close()
    other.close()
    pair = [StoreClient(store, "again"), StoreClient(store, "again too")]
    for client in pair:
        client.call(lambda s: s.get("go"), 10.0)
    assert relay.accepted == made


def test_a_client_in_a_lost_wait_gives_nothing_back(relay: Relay) -> None:
    """Its connection is nobody's: the next client gets one of its own."""
    store = client_of(relay)
    stuck = StoreClient(store, "stuck")
    stuck.call(lambda s: s.set("there", "1"), 10.0)
    lost = stuck.submit(lambda s: s.wait(["never"]))
    stuck.close()
    ask(store)
    assert not lost.done()
    StoreClient(store, "frees").call(lambda s: s.set("never", "1"), 10.0)
    lost.result(10)


def test_a_connection_that_was_cut_is_replaced(relay: Relay) -> None:
    """What a firewall closed while nobody used it costs the next client nothing but a connection."""
    store = client_of(relay)
    ask(store)
    made = relay.accepted
    relay.cut()
    ask(store, "z")
    assert relay.accepted == made + 1
    assert client_of(relay).get("key") == b"z"


def test_an_error_half_way_keeps_nothing(relay: Relay) -> None:
    """After an error of the store an answer may still be on its way: that connection is not kept."""
    store = client_of(relay)
    client = StoreClient(store, "test")

    def fail(store: Any) -> None:
        store.set("key", "1")
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        client.submit(fail).result(10)
    client.close()
    pool = pool_of(store)
    assert pool is not None
    assert pool.take() is None


def test_connections_go_with_their_store(relay: Relay) -> None:
    """A store that the process has no more keeps no connection open."""
    store = client_of(relay)
    ask(store)
    pool = pool_of(store)
    assert pool is not None
    kept = pool.take()
    assert kept is not None
    pool.give(kept)
    again = client_of(relay)
    assert pool_of(again) is not pool
    del store, kept, pool
    gc.collect()
    made = relay.accepted
    ask(again)
    assert relay.accepted == made + 1


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
    assert relay.accepted == made + 1
    ask(store, "parent")
    assert relay.accepted == made + 1


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
