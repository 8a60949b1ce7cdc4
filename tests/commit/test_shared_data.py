"""Files that several saves use: how they are named, found and removed. No tensor, no rank."""

from __future__ import annotations

import pytest

from ckptfs.commit.catalog.catalog import missing_files
from ckptfs.commit.delete.shared_data import (
    file_exists,
    file_key,
    link_file,
    not_needed,
    stock_path,
)
from ckptfs.commit.log.entries import (
    GENESIS,
    Delete,
    Entry,
    Gone,
    Kind,
    Seal,
    Snapshot,
    decode_entry,
    encode_entry,
)
from ckptfs.commit.log.fold import LogState, fold_entry, snapshot_of, state_from_snapshot
from ckptfs.commit.manifest import (
    DomainRecord,
    FileRecord,
    Manifest,
    decode_manifest,
    encode_manifest,
    needed_reader,
)
from ckptfs.commit.operations import drive
from ckptfs.commit.paths import METADATA
from ckptfs.errors import ManifestError, NotFoundError, UnsupportedError
from ckptfs.storage.base import Shape
from ckptfs.storage.memory import MemoryStorage, MemoryStoreRegistry
from ckptfs.testing.faults import Fail, Fault, FaultyStorage, Plan, When
from ckptfs.uri import Uri


def store(shape: Shape) -> MemoryStorage:
    """An empty one."""
    return MemoryStorage(
        Uri.parse("memory://shared/run"), shape=shape, stores=MemoryStoreRegistry()
    )


def shared(*paths: str) -> tuple[FileRecord, ...]:
    """Records of shared files by their paths: the writer's id and a name."""
    return tuple(FileRecord(p, 4, origin=p.split("/")[0]) for p in paths)


def manifest(save_id: str, files: tuple[FileRecord, ...]) -> Manifest:
    """The manifest of step_<save_id>."""
    own = FileRecord(f"{save_id}/{METADATA}", 1)
    return Manifest(
        save_id=save_id,
        name=f"step_{save_id}",
        step=None,
        files=(*files, own),
        domains=(DomainRecord("d", (0,)),),
        min_reader_version=needed_reader(files),
    )


class Log:
    """Saves with shared files, as a store and a log hold them."""

    def __init__(self) -> None:
        self.storage = store(Shape.OBJECT)
        self.state = LogState()
        self.seals: dict[str, Seal] = {}

    def save(self, save_id: str, *paths: str) -> None:
        """A committed save that lists these files; its own are written."""
        files = shared(*paths)
        for file in files:
            if file.origin == save_id:
                self.storage.replace(file_key(file, ""), b"data")
        data = encode_manifest(manifest(save_id, files))
        self.storage.replace(f"step_{save_id}/{save_id}/ckptfs.json", data)
        origins = tuple(sorted({f.origin or "" for f in files} - {save_id}))
        seal = Seal(
            save_id=save_id,
            base=GENESIS,
            seq=len(self.seals) + 1,
            fenced=True,
            name=f"step_{save_id}",
            step=None,
            artifact=Kind.CHECKPOINT,
            domains=("d",),
            digest="",
            origins=origins,
        )
        self.seals[save_id] = seal
        self.state = fold_entry(self.state, seal)

    def not_needed(self, save_id: str) -> tuple[str, ...] | None:
        """What goes with a save that is deleted now."""
        self.state = fold_entry(self.state, Delete(save_id, GENESIS))
        raw = self.storage.read(f"step_{save_id}/{save_id}/ckptfs.json")
        files = decode_manifest(raw, "here").files
        seal = self.seals[save_id]
        return drive(not_needed(seal, files, self.state, Shape.OBJECT), self.storage)

    def gone(self, save_id: str) -> None:
        """Its bytes were removed, its manifest last."""
        self.storage.remove(f"step_{save_id}/{save_id}/ckptfs.json")
        self.state = fold_entry(self.state, Gone(save_id, GENESIS))


@pytest.fixture
def log() -> Log:
    """``a`` wrote a frozen and a trained file; ``b`` and ``c`` use the frozen one."""
    found = Log()
    found.save("a", "a/frozen", "a/trained")
    found.save("b", "a/frozen", "b/trained")
    found.save("c", "a/frozen", "c/trained")
    return found


def test_a_file_goes_with_the_last_save_that_lists_it(log: Log) -> None:
    """The writer goes first: only what no other save lists. The last user takes the rest."""
    assert log.not_needed("a") == ("_data/a/trained",)
    log.gone("a")
    assert log.not_needed("c") == ("_data/c/trained",)
    log.gone("c")
    assert log.not_needed("b") == ("_data/a/frozen", "_data/b/trained")


def test_saves_that_are_deleted_count_until_their_bytes_are_gone(log: Log) -> None:
    """Of two deletes under way at once the first leaves the file to the second."""
    log.state = fold_entry(log.state, Delete("a", GENESIS))
    log.state = fold_entry(log.state, Delete("c", GENESIS))
    assert log.not_needed("b") == ("_data/b/trained",)
    log.gone("b")
    log.gone("a")
    assert log.not_needed("c") == ("_data/a/frozen", "_data/c/trained")


def test_nothing_goes_while_a_manifest_that_counts_cannot_be_read(log: Log) -> None:
    """Damaged or missing: None, and the delete is tried again; that of a deleted save may be missing."""
    log.storage.replace("step_c/c/ckptfs.json", b"{}")
    assert log.not_needed("a") is None
    log.storage.remove("step_c/c/ckptfs.json")
    assert log.not_needed("a") is None
    log.state = fold_entry(log.state, Delete("c", GENESIS))
    assert log.not_needed("a") == ("_data/a/trained",)


def test_only_the_manifests_that_may_count_are_read(log: Log) -> None:
    """Of a hundred saves one is read to keep the frozen file, and of its own files none is asked."""
    for number in range(100):
        log.save(f"n{number}", "a/frozen", f"n{number}/trained")
    for number in range(100):
        log.save(f"x{number}", f"x{number}/alone")
    plan = Plan()
    log.storage, plain = FaultyStorage(log.storage, plan), log.storage  # type: ignore[assignment]
    assert log.not_needed("b") == ("_data/b/trained",)
    log.storage = plain
    reads = [o for o in plan.trace if o.op == "read"]
    assert len(reads) == 1 + 1, "its own manifest, and one that needs the frozen file"


def test_a_link_follows_a_save_that_moves() -> None:
    """The attempt is projected between two looks: the second place is tried, then nothing is claimed."""
    storage = store(Shape.FILESYSTEM)
    for key in ("attempts/a", "step/a", "new"):
        storage.make_dir(key)
    storage.replace("step/a/f", b"data")
    assert drive(link_file(("attempts", "step"), "a/f", "new/f"), storage)
    assert storage.read("new/f") == b"data"
    assert drive(link_file(("attempts", "step"), "a/f", "new/f"), storage), "it is ours already"
    assert not drive(link_file(("attempts", "step"), "a/gone", "new/g"), storage)
    faulty = FaultyStorage(
        storage, Plan([Fault("link", "*", None, Fail(UnsupportedError("none"), When.BEFORE))])
    )
    with pytest.raises(UnsupportedError):
        drive(link_file(("attempts", "step"), "a/f", "new/h"), faulty)


def test_a_shared_file_is_there_with_its_size_or_not_at_all() -> None:
    """What was removed or cut short by hand is not listed by another save."""
    storage = store(Shape.OBJECT)
    (record,) = shared("a/f")
    assert not drive(file_exists(record), storage)
    storage.replace("_data/a/f", b"four")
    assert drive(file_exists(record), storage)
    storage.replace("_data/a/f", b"three")
    assert not drive(file_exists(record), storage)


@pytest.mark.parametrize(
    ("root", "path"),
    [
        ("s3://bucket/a/run", "/bucket/a/run/_data/x/f"),
        ("gs://bucket/run", "/bucket/run/_data/x/f"),
        ("abfs://container/run", "/container/run/_data/x/f"),
        ("abfs://container@account.dfs.core.windows.net/run", "/container/run/_data/x/f"),
        ("hdfs://namenode:8020/a/run", "/a/run/_data/x/f"),
        ("/mnt/bucket/run", "/mnt/bucket/run/_data/x/f"),
    ],
)
def test_stock_readers_get_a_rooted_path(root: str, path: str) -> None:
    """As fsspec's filesystem of that protocol reads a path that begins at its root."""
    (record,) = shared("x/f")
    assert stock_path(record, Uri.parse(root)) == path
    assert stock_path(FileRecord("y/f", 1, origin="x"), Uri.parse(root)) == "y/f"


def test_old_readers_refuse_and_others_see_what_they_always_saw() -> None:
    """A manifest with shared files asks for reader 2; one with links, or none, has no new demands."""
    files = shared("a/f")
    assert decode_manifest(encode_manifest(manifest("b", files)), "x").files[0] == files[0]
    assert manifest("b", files).min_reader_version == 2
    linked = FileRecord("b/f", 1, origin="a")
    assert not linked.is_shared
    assert manifest("b", (linked,)).min_reader_version == 1
    assert b"origin" not in encode_manifest(manifest("b", (FileRecord("b/f", 1),)))
    bad = encode_manifest(manifest("b", files)).replace(b'"origin": "a"', b'"origin": ".."')
    with pytest.raises(ManifestError):
        decode_manifest(bad, "x")


def test_what_a_copy_lacks_of_the_shared_files_is_missing() -> None:
    """Shared files are looked for outside the step, not in it."""
    storage = store(Shape.OBJECT)
    storage.replace(f"step/b/{METADATA}", b"x")
    storage.replace("step/a/f", b"data")
    found = manifest("b", shared("a/f"))
    assert drive(missing_files(found, "step"), storage) == ("a/f",)
    storage.replace("_data/a/f", b"data")
    assert drive(missing_files(found, "step"), storage) == ()


def test_an_unlisted_home_is_the_root() -> None:
    """A key of a plain file is below its home."""
    assert file_key(FileRecord("a/f", 1), "step") == "step/a/f"
    assert file_key(FileRecord("a/f", 1), "") == "a/f"
    with pytest.raises(NotFoundError):
        store(Shape.OBJECT).read(file_key(shared("a/f")[0], "step"))


def test_origins_survive_the_log_and_its_snapshots(log: Log) -> None:
    """Who wrote the bytes is known after a snapshot too; a seal without origins is what it was."""
    entry = Entry("w", log.seals["b"])
    assert decode_entry(encode_entry(entry), "here") == entry
    assert b"origins" not in encode_entry(Entry("w", log.seals["a"]))
    written = encode_entry(Entry("s", snapshot_of(log.state)))
    body = decode_entry(written, "here").body
    assert isinstance(body, Snapshot)
    log.state = state_from_snapshot(log.state.next, body)
    assert log.not_needed("a") == ("_data/a/trained",)
