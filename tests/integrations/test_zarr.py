"""zarr 3 on ``ckptfs+X://``: its FsspecStore calls the filesystem's coroutines in an event loop of its own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations.running import Store
from tests.integrations.test_fsspec import ours

pytest.importorskip("zarr", reason="zarr is not installed: make test-integrations")

import zarr
from zarr.storage import FsspecStore

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(180)]


def test_arrays_and_groups(store: Store) -> None:
    """Written, read by ranges in chunks, listed and deleted by URL and options alone."""
    np: Any = pytest.importorskip("numpy")
    options = dict(store.storage_options)
    data = np.arange(10_000, dtype="f4").reshape(100, 100)
    array = zarr.open_array(
        FsspecStore.from_url(ours(store, "a.zarr"), storage_options=options),
        mode="w",
        shape=data.shape,
        chunks=(10, 10),
        dtype="f4",
    )
    array[:] = data
    again = zarr.open_array(
        FsspecStore.from_url(ours(store, "a.zarr"), storage_options=options), mode="r"
    )
    assert np.array_equal(again[35:72, 8:91], data[35:72, 8:91])
    group = zarr.open_group(
        FsspecStore.from_url(ours(store, "g.zarr"), storage_options=options), mode="a"
    )
    group.create_array("x", shape=(4,), dtype="i4")[:] = 3
    group.create_array("y", shape=(4,), dtype="i4")
    assert sorted(group.keys()) == ["x", "y"]
    del group["y"]
    assert sorted(group.keys()) == ["x"]
    assert np.array_equal(group["x"][:], [3, 3, 3, 3])
