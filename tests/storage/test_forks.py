"""Clients after a fork: no lock that another thread of the parent held."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from ckptfs.storage.clients.s3 import S3ObstoreClient
from ckptfs.storage.clients.s3_options import parse_s3_options
from ckptfs.storage.options import Times
from ckptfs.storage.threads import ProcessLock
from ckptfs.uri import Uri

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def child_ends(lock: AbstractContextManager[Any], use: Callable[[], object]) -> bool:
    """Whether ``use`` returns in a child that is forked while another thread holds ``lock``."""
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            release.wait(60)

    holding = threading.Thread(target=hold)
    holding.start()
    assert held.wait(120)
    child = multiprocessing.get_context("fork").Process(target=use)
    child.start()
    child.join(120)
    if child.exitcode is None:
        child.kill()
    release.set()
    holding.join(120)
    child.join(120)
    return child.exitcode == 0


def test_a_lock_of_one_process() -> None:
    """It excludes threads, is free after an error, and is the child's own after a fork."""
    lock = ProcessLock()
    inside: list[int] = []

    def work() -> None:
        for _ in range(500):
            with lock:
                inside.append(1)
                assert len(inside) == 1
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not inside
    with pytest.raises(KeyError), lock:
        raise KeyError
    with lock:
        pass

    def use() -> None:
        with lock:
            pass

    assert child_ends(lock, use)


S3 = {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:1"}


def test_obstore_in_a_child() -> None:
    """No request is possible there, but what was inherited can be closed."""
    pytest.importorskip("obstore")
    uri = Uri.parse("s3://bucket/run")
    client = S3ObstoreClient(uri, parse_s3_options(uri, S3), Times())
    assert child_ends(client._lock, client.close)
