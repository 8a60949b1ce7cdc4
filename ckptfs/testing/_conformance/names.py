"""Tests of names: directories, renames, links, removals, keys; and of pickles."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptfs.errors import (
    AlreadyExistsError,
    NotFoundError,
    UnsupportedError,
    UriError,
)
from ckptfs.storage.base import Entry, Shape, Storage
from ckptfs.testing._conformance.base import (
    BAD_KEYS,
    Conformance,
    together,
)

__all__ = ["Names"]


class Names(Conformance):
    """Tests of make_dir, rename, link, removals, sync, refresh, space; and of all methods' keys."""

    def test_make_dir_makes_ancestors_and_may_be_repeated(self, fresh: Storage) -> None:
        """Missing ancestors, the root too, are made; repeating it is success; a no-op on stores."""
        fresh.make_dir("a/b/c")
        fresh.make_dir("a/b/c")
        fresh.make_dir("")
        real = fresh.capabilities.shape is Shape.FILESYSTEM
        assert self.raw_list() == []
        if real:
            assert self.raw_exists("a/b/c")
            assert fresh.list("a/b") == [Entry("c", is_dir=True)]

    def test_make_dir_race(self, fresh: Storage) -> None:
        """Sixteen threads that make overlapping paths all succeed."""
        for round_ in range(5):
            calls = [
                lambda path=f"r{round_}/a/{index % 3}/{index}": fresh.make_dir(path)
                for index in range(16)
            ]
            assert together(*calls) == [None] * 16

    def test_object_stores_refuse_rename(self, store: Storage) -> None:
        """rename is UnsupportedError on object stores, and the file stays."""
        if store.capabilities.shape is Shape.FILESYSTEM:
            pytest.skip("rename works here")
        self.raw_write("d/f", b"x")
        with pytest.raises(UnsupportedError):
            store.rename("d/f", "d/g")
        assert self.raw_list() == ["d/f"]

    def test_rename_moves_files_and_directories(self, tree: Storage) -> None:
        """A file is renamed over an existing one, and a whole directory, also over an empty one."""
        self.raw_write("d/f", b"x")
        self.raw_write("d/g", b"y")
        tree.rename("d/f", "d/g")
        assert (self.raw_read("d/g"), self.raw_list()) == (b"x", ["d/g"])
        self.raw_write("d/sub/z", b"z")
        tree.rename("d", "e")
        assert self.raw_list() == ["e/g", "e/sub/z"]
        assert not self.raw_exists("d")
        tree.make_dir("empty")
        tree.rename("e", "empty")
        assert self.raw_list() == ["empty/g", "empty/sub/z"]

    def test_rename_refuses_what_is_in_the_way(self, tree: Storage) -> None:
        """A target that is not empty or of the other kind is AlreadyExistsError; both stay."""
        self.raw_write("d/f", b"x")
        self.raw_write("e/g", b"y")
        for source, target in (("d", "e"), ("d/f", "e"), ("d", "e/g")):
            with pytest.raises(AlreadyExistsError):
                tree.rename(source, target)
            assert self.raw_list() == ["d/f", "e/g"]

    def test_rename_needs_source_and_parent(self, tree: Storage) -> None:
        """A missing source, or missing parent of the target, is NotFoundError; nothing moves."""
        self.raw_write("d/f", b"x")
        with pytest.raises(NotFoundError):
            tree.rename("d/absent", "d/g")
        with pytest.raises(NotFoundError):
            tree.rename("d/f", "absent/g")
        assert self.raw_list() == ["d/f"]

    def test_rename_race_has_one_winner(self, tree: Storage) -> None:
        """If several threads move one directory away, one succeeds and the others find nothing."""
        for round_ in range(5):
            self.raw_write(f"attempt{round_}/f", b"x")
            calls = [
                lambda target=f"d/{round_}-{index}", source=f"attempt{round_}": tree.rename(
                    source, target
                )
                for index in range(4)
            ]
            outcomes = together(*calls)
            assert sum(outcome is None for outcome in outcomes) == 1
            assert all(isinstance(o, NotFoundError) for o in outcomes if o is not None)

    def test_link_gives_a_file_a_second_name(self, tree: Storage) -> None:
        """Both names have the same bytes; removing or replacing one leaves the other."""
        self.raw_write("d/f", b"x")
        tree.make_dir("e")
        self._link_or_skip(tree, "d/f", "e/g")
        assert (tree.read("e/g"), self.raw_list()) == (b"x", ["d/f", "e/g"])
        tree.replace("e/g", b"other")
        assert self.raw_read("d/f") == b"x"
        tree.link("d/f", "e/h")
        tree.rename("d", "moved")
        tree.remove_tree("moved")
        assert tree.read("e/h") == b"x"

    def test_link_refuses(self, tree: Storage) -> None:
        """No source or parent is NotFoundError, a taken target AlreadyExistsError; all stays."""
        self.raw_write("d/f", b"x")
        self.raw_write("d/g", b"y")
        self._link_or_skip(tree, "d/f", "d/h")
        for source, target in (("d/absent", "d/i"), ("absent/f", "d/i"), ("d/f", "absent/i")):
            with pytest.raises(NotFoundError):
                tree.link(source, target)
        with pytest.raises(AlreadyExistsError):
            tree.link("d/f", "d/g")
        assert (self.raw_read("d/g"), self.raw_list()) == (b"y", ["d/f", "d/g", "d/h"])

    def _link_or_skip(self, tree: Storage, source: str, target: str) -> None:
        try:
            tree.link(source, target)
        except UnsupportedError:
            pytest.skip("no hard links here")

    def test_object_stores_refuse_links(self, store: Storage) -> None:
        """link is UnsupportedError on object stores, and nothing appears."""
        if store.capabilities.shape is Shape.FILESYSTEM:
            pytest.skip("links may work here")
        self.raw_write("d/f", b"x")
        with pytest.raises(UnsupportedError):
            store.link("d/f", "d/g")
        assert self.raw_list() == ["d/f"]

    def test_remove(self, store: Storage) -> None:
        """remove removes one file, not its neighbours; an absent file or directory is success."""
        self.raw_write("d/f", b"x")
        self.raw_write("d/g", b"y")
        store.remove("d/f")
        store.remove("d/f")
        store.remove("absent/f")
        assert self.raw_list() == ["d/g"]

    def test_remove_dir(self, store: Storage) -> None:
        """remove_dir removes only an empty directory; absent is success; a no-op on stores."""
        store.remove_dir("absent")
        self.raw_write("d/f", b"x")
        if store.capabilities.shape is Shape.FILESYSTEM:
            with pytest.raises(AlreadyExistsError):
                store.remove_dir("d")
            store.remove_dir("tmp")
            assert not self.raw_exists("tmp")
        else:
            store.remove_dir("d")
        assert self.raw_list() == ["d/f"]

    def test_remove_tree(self, store: Storage) -> None:
        """remove_tree removes a name and all below it, not similar names; absent is success."""
        for key in ("d/a/f", "d/a/b/g", "d/ab", "d/a.txt"):
            self.raw_write(key, b"x")
        store.remove_tree("d/a")
        assert self.raw_list() == ["d/a.txt", "d/ab"]
        assert not self.raw_exists("d/a")
        store.remove_tree("d/a")
        store.remove_tree("absent/deep")
        store.remove_tree("d/ab")
        assert self.raw_list() == ["d/a.txt"]

    def test_remove_tree_race(self, store: Storage) -> None:
        """Several removers of one tree all succeed, and nothing is left."""
        for index in range(40):
            self.raw_write(f"d/t/{index % 5}/{index}", b"x")
        assert together(*[lambda: store.remove_tree("d/t")] * 4) == [None] * 4
        assert self.raw_list() == []

    def test_the_root_is_never_removed(self, store: Storage) -> None:
        """remove_tree of "" is refused, because no caller owns the root."""
        self.raw_write("d/f", b"x")
        with pytest.raises(UnsupportedError):
            store.remove_tree("")
        assert self.raw_list() == ["d/f"]

    # -- certainty, and everything -------------------------------------------------------

    def test_sync_refresh_touch(self, store: Storage) -> None:
        """sync, refresh and touch succeed on what exists, refresh also on what does not."""
        self.raw_write("d/f", b"x")
        for key in ("", "d"):
            store.sync(key)
            store.refresh(key)
            store.touch(key)
        store.refresh("absent/deeper")
        if store.capabilities.shape is Shape.FILESYSTEM:
            with pytest.raises(NotFoundError):
                store.sync("absent")

    def test_space(self, fresh: Storage) -> None:
        """space gives free bytes and inodes even before the root exists, or None."""
        space = fresh.space()
        if space is not None:
            assert space.free_bytes is None or space.free_bytes >= 0
            assert space.free_inodes is None or space.free_inodes >= 0

    def test_local_path_is_where_it_is(self, store: Storage) -> None:
        """local_path is a path that plain open can use, or None."""
        self.raw_write("d/f", b"x")
        path = store.local_path("d/f")
        if path is not None:
            assert Path(path).read_bytes() == b"x"

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_keys_do_not_escape(self, store: Storage, key: str) -> None:
        """A key that is not a plain relative path is UriError in every method."""
        calls: list[Callable[[], object]] = [
            lambda: store.uri(key),
            lambda: store.read(key),
            lambda: store.replace(key, b""),
            lambda: store.stat(key),
            lambda: store.list(key),
            lambda: store.open_write(key),
            lambda: store.open_read(key),
            lambda: store.make_dir(key),
            lambda: store.remove(key),
            lambda: store.remove_dir(key),
            lambda: store.remove_tree(key),
            lambda: store.sync(key),
            lambda: store.refresh(key),
        ]
        if store.capabilities.exclusive_create:
            calls.append(lambda: store.create(key, b"", staging="tmp/w"))
        if store.capabilities.shape is Shape.FILESYSTEM:
            calls += [lambda: store.rename(key, "d/x"), lambda: store.rename("d", key)]
        calls += [lambda: store.link("d/f", key), lambda: store.link(key, "d/x")]
        for call in calls:
            with pytest.raises(UriError):
                call()
        assert self.raw_list() == []

    def test_pickled_storages_see_the_same_bytes(self, store: Storage) -> None:
        """A storage can be pickled; the copy has its own client."""
        store.replace("d/f", b"x")
        again = pickle.loads(pickle.dumps(store))  # noqa: S301 - our own bytes
        assert str(again.root) == str(store.root)
        assert again.read("d/f") == b"x"
        again.close()
        again.close()

    def test_errors_pickle(self, store: Storage) -> None:
        """A storage error crosses a process boundary with its URI and errno."""
        with pytest.raises(NotFoundError) as caught:
            store.read("d/absent")
        again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own bytes
        assert (str(again), again.uri, again.errno) == (
            str(caught.value),
            caught.value.uri,
            caught.value.errno,
        )
