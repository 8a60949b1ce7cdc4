"""Copying a data file: compared to its last byte before anybody finds it under its name."""

from __future__ import annotations

import pytest
import xxhash

from ckptfs.commit.digests import BlockDigester, FileDigests, ItemDigests, encode_digests
from ckptfs.commit.manifest import FileRecord, digest_of
from ckptfs.errors import IntegrityError
from ckptfs.replication.copied_files import CopyTask, Readable, Writable, copy_share
from ckptfs.storage.base import Storage
from tests.commit.logs import memory

DATA = bytes(range(256)) * 8192  # two blocks
SIDECAR = "one/f.xxh3"


def _sidecar(data: bytes) -> bytes:
    digester = BlockDigester()
    digester.cut()  # no head
    digester.update(memoryview(data))
    digester.cut()
    digester.cut()  # no tail
    item = ItemDigests(0, len(data), 0, len(data), digester.finish())
    return encode_digests(FileDigests((item,)))


def _task(source: Storage, there: bytes, *, blocks: bool) -> CopyTask:
    """A file of a checkpoint: its bytes are ``there`` and should be DATA."""
    source.make_dir("step_1/one")
    source.replace("step_1/one/f", there)
    digest = None if blocks else xxhash.xxh3_128(DATA).hexdigest()
    record = FileRecord("one/f", len(there), "A", SIDECAR if blocks else None, digest)
    if not blocks:
        return CopyTask(record)
    sidecar = _sidecar(DATA)
    source.replace(f"step_1/{SIDECAR}", sidecar)
    return CopyTask(record, FileRecord(SIDECAR, len(sidecar), "A", None, digest_of(sidecar)))


def _copy(source: Storage, target: Storage, task: CopyTask) -> None:
    target.make_dir("attempt/two")
    to = Writable(target, "attempt/two/", "two", "A")  # where begin() made its place
    copy_share([task], Readable(source, "step_1", 0), to, "one")


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "whole"])
@pytest.mark.parametrize(
    "there",
    [DATA[:-1], DATA[: len(DATA) // 2], DATA[:-1] + b"?", b"?" + DATA[1:]],
    ids=["a byte short", "a block short", "last byte", "first byte"],
)
def test_a_damaged_source_never_gets_a_name_at_the_target(there: bytes, blocks: bool) -> None:
    """Truncated or changed, the file is refused, and nothing is found under the name of its copy:
    not even where its manifest lists the size that it has.
    """
    source, target = memory(), memory()
    with pytest.raises(IntegrityError, match=r"one/f is damaged and was not copied"):
        _copy(source, target, _task(source, there, blocks=blocks))
    files = [e.name for e in target.list("attempt/two") if not e.is_dir]
    assert "f" not in files


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "whole"])
def test_a_whole_source_is_copied(blocks: bool) -> None:
    """Byte for byte, its sidecar too."""
    source, target = memory(), memory()
    _copy(source, target, _task(source, DATA, blocks=blocks))
    assert target.read("attempt/two/f") == DATA
    if blocks:
        assert target.read("attempt/two/f.xxh3") == _sidecar(DATA)
