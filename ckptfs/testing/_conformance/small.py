"""Tests of small files: exclusive create, atomic replace, reads and lists."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ckptfs.errors import (
    AlreadyExistsError,
    NotFoundError,
    UnsupportedError,
)
from ckptfs.storage.base import Entry, Shape, Storage
from ckptfs.testing._conformance.base import (
    SIZES,
    Conformance,
    pattern,
    together,
)

__all__ = ["SmallFiles"]


class SmallFiles(Conformance):
    """Tests of create, replace, read, stat and list."""

    def test_create_stores_the_bytes_and_nothing_else(self, exclusive: Storage) -> None:
        """A created file is under its key, and the staging file is gone."""
        exclusive.create("d/0", b"entry", staging="tmp/w")
        assert self.raw_read("d/0") == b"entry"
        assert self.raw_list() == ["d/0"]

    def test_create_refuses_a_taken_key(self, exclusive: Storage) -> None:
        """An existing key is AlreadyExistsError; the old bytes stay, and nothing is left over."""
        self.raw_write("d/0", b"older")
        with pytest.raises(AlreadyExistsError) as caught:
            exclusive.create("d/0", b"newer", staging="tmp/w")
        assert str(exclusive.uri("d/0")) in str(caught.value) or caught.value.uri
        assert self.raw_read("d/0") == b"older"
        assert self.raw_list() == ["d/0"]

    def test_create_may_be_repeated(self, exclusive: Storage) -> None:
        """A repeated create is AlreadyExistsError, and the bytes of the first call are there."""
        exclusive.create("d/0", b"mine", staging="tmp/w")
        with pytest.raises(AlreadyExistsError):
            exclusive.create("d/0", b"mine", staging="tmp/w")
        assert exclusive.read("d/0") == b"mine"

    def test_create_passes_over_an_old_staging_file(self, exclusive: Storage) -> None:
        """A staging file that a killed attempt left does not disturb the next attempt."""
        self.raw_write("tmp/w", b"of an attempt that was killed, and longer")
        exclusive.create("d/0", b"entry", staging="tmp/w")
        assert self.raw_read("d/0") == b"entry"

    def test_create_race_has_one_winner(self, exclusive: Storage) -> None:
        """If eight threads create one key, one succeeds, and its bytes are there."""
        for round_ in range(10):
            key = f"d/{round_}"

            def create(index: int, key: str = key) -> Callable[[], None]:
                return lambda: exclusive.create(key, b"%d" % index * 2000, staging=f"tmp/{index}")

            outcomes = together(*(create(index) for index in range(8)))
            winners = [index for index, outcome in enumerate(outcomes) if outcome is None]
            assert len(winners) == 1, outcomes
            assert all(isinstance(o, AlreadyExistsError) for o in outcomes if o is not None)
            assert self.raw_read(key) == b"%d" % winners[0] * 2000
        assert len(self.raw_list()) == 10

    def test_create_is_never_seen_half(self, exclusive: Storage) -> None:
        """A reader that polls a key sees nothing at first, then all of the file."""
        data = b"x" * 300_000

        def poll(key: str) -> None:
            while True:
                try:
                    found = exclusive.read(key)
                except NotFoundError:
                    continue
                assert found == data
                return

        for round_ in range(5):
            key = f"d/{round_}"
            outcomes = together(
                lambda key=key: poll(key),  # type: ignore[misc]
                lambda key=key: exclusive.create(key, data, staging="tmp/w"),  # type: ignore[misc]
            )
            assert outcomes == [None, None]

    def test_create_without_exclusion_is_refused(self, store: Storage) -> None:
        """Without the capability create is UnsupportedError and writes nothing."""
        if store.capabilities.exclusive_create:
            pytest.skip("create excludes here")
        with pytest.raises(UnsupportedError):
            store.create("d/0", b"entry", staging="tmp/w")
        assert self.raw_list() == []

    def test_create_needs_its_directory(self, tree: Storage) -> None:
        """A missing directory of the key is NotFoundError, and nothing is left over."""
        if not tree.capabilities.exclusive_create:
            pytest.skip("no exclusive create here")
        with pytest.raises(NotFoundError):
            tree.create("absent/0", b"entry", staging="tmp/w")
        assert self.raw_list() == []

    # -- replace -------------------------------------------------------------------------

    def test_replace_writes_over(self, store: Storage) -> None:
        """A new key appears, an existing one changes, and there is no other file."""
        store.replace("d/hint", b"one, and longer")
        assert self.raw_read("d/hint") == b"one, and longer"
        store.replace("d/hint", b"two")
        assert self.raw_read("d/hint") == b"two"
        assert self.raw_list() == ["d/hint"]

    def test_replace_shows_old_or_new(self, store: Storage) -> None:
        """A reader that polls while two values alternate always sees one of them, whole."""
        if not store.capabilities.atomic_replace:
            pytest.skip("no atomic replace here")
        values = (b"a" * 200_000, b"b" * 100_000)
        store.replace("d/hint", values[0])
        stop = threading.Event()
        wrong: list[bytes] = []

        def poll() -> None:
            while not stop.is_set():
                value = store.read("d/hint")
                if value not in values:
                    wrong.append(value)

        def alternate() -> None:
            try:
                for number in range(60):
                    store.replace("d/hint", values[number % 2])
            finally:
                stop.set()

        assert together(poll, alternate) == [None, None]
        assert wrong == []

    def test_replace_needs_its_directory(self, tree: Storage) -> None:
        """A missing directory is NotFoundError, and nothing is made."""
        with pytest.raises(NotFoundError):
            tree.replace("absent/hint", b"x")
        assert self.raw_list() == []
        assert not self.raw_exists("absent")

    def test_written_together(self, store: Storage) -> None:
        """All files of one call are there, over older ones; other files of the directory stay."""
        self.raw_write("d/b", b"older, and longer")
        self.raw_write("d/other", b"stays")
        files = {"a": b"", "b": b"newer", "c": pattern(3 << 20)}
        store.write_files("d", files)
        assert {name: self.raw_read(f"d/{name}") for name in files} == files
        assert self.raw_read("d/other") == b"stays"
        assert self.raw_list() == ["d/a", "d/b", "d/c", "d/other"]

    def test_writing_together_needs_its_directory(self, tree: Storage) -> None:
        """On a tree it does not make the directory."""
        with pytest.raises(NotFoundError):
            tree.write_files("absent", {"a": b"", "b": b""})
        assert self.raw_list() == []

    def test_conditional_replace(self, store: Storage) -> None:
        """With if_match it replaces only if the etag still matches; otherwise it is an error."""
        if not store.capabilities.conditional_replace:
            with pytest.raises(UnsupportedError):
                store.replace("d/k", b"x", if_match="")
            assert self.raw_list() == []
            return
        store.replace("d/k", b"one", if_match="")
        with pytest.raises(AlreadyExistsError):
            store.replace("d/k", b"two", if_match="")
        etag = store.stat("d/k").etag
        assert etag
        store.replace("d/k", b"two", if_match=etag)
        with pytest.raises(AlreadyExistsError):
            store.replace("d/k", b"three", if_match=etag)
        assert self.raw_read("d/k") == b"two"

    # -- read, stat, list ----------------------------------------------------------------

    def test_read_returns_what_is_there(self, store: Storage) -> None:
        """read returns all bytes of a file of any size."""
        for size_bytes in SIZES:
            data = pattern(size_bytes)[:size_bytes]
            self.raw_write("d/f", data)
            assert store.read("d/f") == data

    def test_absent_is_not_found(self, store: Storage) -> None:
        """read, stat and open_read of an absent key raise NotFoundError with the URI."""
        calls: list[Callable[[str], object]] = [store.read, store.stat, store.open_read]
        for call in calls:
            with pytest.raises(NotFoundError) as caught:
                call("d/absent")
            assert "d/absent" in str(caught.value.uri)
            assert isinstance(caught.value, FileNotFoundError)

    def test_stat_tells_size_and_kind(self, store: Storage) -> None:
        """stat gives the size of a file, and on filesystems whether it is a directory."""
        self.raw_write("d/f", b"12345")
        found = store.stat("d/f")
        assert (found.size_bytes, found.is_dir) == (5, False)
        if store.capabilities.shape is Shape.FILESYSTEM:
            assert store.stat("d").is_dir
            assert store.stat("").is_dir
        else:
            with pytest.raises(NotFoundError):
                store.stat("d")

    def test_stat_etag_follows_the_bytes(self, store: Storage) -> None:
        """If there is an etag, it changes with the bytes."""
        store.replace("d/f", b"one")
        before = store.stat("d/f").etag
        store.replace("d/f", b"two")
        if before is not None and store.capabilities.conditional_replace:
            assert store.stat("d/f").etag != before

    def test_list_is_one_level_and_sorted(self, store: Storage) -> None:
        """list gives the files and directories directly below, in order, and nothing deeper."""
        for key in ("d/b", "d/a", "d/sub/x", "d/sub/y", "e/z"):
            self.raw_write(key, b"x")
        assert store.list("d") == [
            Entry("a", is_dir=False),
            Entry("b", is_dir=False),
            Entry("sub", is_dir=True),
        ]
        assert [e.name for e in store.list("") if e.name != "tmp"] == ["d", "e"]

    def test_list_of_nothing(self, store: Storage) -> None:
        """An absent directory is NotFoundError; an absent prefix is empty."""
        if store.capabilities.shape is Shape.FILESYSTEM:
            assert store.list("d") == []
            with pytest.raises(NotFoundError):
                store.list("absent")
        else:
            assert store.list("absent") == []

    def test_reading_writes_nothing(self, fresh: Storage) -> None:
        """Capabilities, space, reads and refreshes leave no trace and do not make the root."""
        assert fresh.capabilities.shape in Shape
        fresh.space()
        fresh.refresh("d/e")
        for call in (fresh.read, fresh.stat, fresh.open_read):
            with pytest.raises(NotFoundError):
                call("d/f")
        assert self.raw_list() == []
        if fresh.capabilities.shape is Shape.FILESYSTEM:
            assert not self.raw_exists("")
