"""Power cuts under a real filesystem, as many as you like, while a program writes to it.

    with PowerCut("ext4") as disk:                         ready in 0.3 s
        with Witness([python, "writer.py", disk.directory]) as writer:
            armed = disk.arm(after=17, lose=Lose.SOMETHING, seed=3)
            ...                                            what the writer is to do
            cut = armed.made()
            promised = writer.said(cut.at_ns)              what it had acknowledged by then
            with disk.after(cut) as found: ...             what a machine finds that starts again

The filesystem (ext4, xfs, btrfs) is on a loop device over a disk that is a process
(tests/lab/cutdisk.py) with a volatile cache. A cut happens between two of the disk's operations, in
the middle of an fsync as well as anywhere else; no process has to be stopped for it, and the disk and
its writers continue. What the filesystem had not flushed is lost, torn or kept, as ``Lose`` says. The
copy is one moment, and mounting it replays the journal, as after a real cut.

Limits: the kernel, its block layer and the loop device are real, the disk is not: it breaks 4096-byte
sectors nowhere, loses nothing that it has flushed, and knows no FUA (the kernel flushes instead).
btrfs: mounting a copy next to the original takes Linux 6.7. Root, /dev/fuse and loop devices are
needed; ``UnavailableError`` says what is missing.

Everything is below one directory on tmpfs. The keeper of the disk unmounts it when the caller is
gone, by kill -9 too; what is left where both were killed, the next one sweeps away. For a person:
``make lab-powercut`` holds a disk, ``python -m tests.lab.cut`` cuts its power from another shell.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

from tests.lab.cutdisk import NOW, Request
from tests.lab.process import Crew, LabError, UnavailableError, need, run

_BUSY_S = 120.0  # how long a filesystem that is to go may be in use

Filesystem = Literal["ext4", "xfs", "btrfs"]

# The smallest that mkfs makes without being forced, with room for some runs of small checkpoints.
_SIZES: Final[Mapping[str, str]] = {"ext4": "96M", "xfs": "320M", "btrfs": "256M"}
_MKFS: Final[Mapping[str, Sequence[str]]] = {
    "ext4": ("-q", "-E", "lazy_itable_init=0,lazy_journal_init=0"),
    "xfs": ("-q",),
    "btrfs": ("-q",),
}
# A copy has the UUID of the original, which is mounted: xfs refuses it by default, btrfs gives it
# another one for the time of the mount.
_COPY: Final[Mapping[str, Sequence[str]]] = {"xfs": ("nouuid",)}
_ANSWER_S = 240.0
_NAME = "powercut"
_PREFIX = f"ckptfs-lab-{_NAME}-"


class Lose(StrEnum):
    """What a cut takes of what was written and not flushed; see tests/lab/cutdisk.py."""

    NOTHING = "nothing"
    SOMETHING = "something"
    EVERYTHING = "everything"


@dataclass(frozen=True)
class Cut:
    """at_ns: when, by time.monotonic_ns. image: the disk as it was left. cached: writes in its cache
    then; lost: of these, missing in the image or torn. operations: of the disk, from its beginning.
    """

    at_ns: int
    image: Path
    cached: int
    lost: int
    operations: int


class Armed:
    """A cut that a disk was asked for and will make by itself."""

    def __init__(self, run_dir: Path, request: Request) -> None:
        """LabError: the disk is gone."""
        self._run_dir, self._request = run_dir, request
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._line.settimeout(_ANSWER_S)
            self._line.connect(str(run_dir / "control"))
            self._line.sendall(json.dumps(asdict(request)).encode())
        except OSError as error:
            self._line.close()
            raise LabError(f"the disk in {run_dir} cannot be asked: {error}") from error

    def made(self) -> Cut:
        """Wait for it. LabError: it did not come within a minute, or the disk is gone."""
        try:
            with self._line:
                return Cut(image=Path(self._request.to), **json.loads(self._line.recv(1 << 16)))
        except (OSError, ValueError) as error:
            raise LabError(f"the disk in {self._run_dir} made no cut: {error}") from error

    def now(self) -> Cut:
        """Cut now, if it was not made yet. LabError: the disk is gone."""
        with contextlib.suppress(OSError):  # made() reports it
            self._line.sendall(NOW)
        return self.made()


class PowerCut:
    """One filesystem with power that can be cut; see above. A context manager; one thread."""

    def __init__(self, fs: Filesystem, *, options: Sequence[str] = ()) -> None:
        """options: of the mount, of the copies too: "noauto_da_alloc", "commit=1"."""
        self.fs = fs
        self._options = tuple(options)
        self._crew: Crew | None = None
        self._cuts = 0

    @property
    def run_dir(self) -> Path:
        """Where all of it is."""
        assert self._crew is not None
        return self._crew.run_dir

    @property
    def directory(self) -> Path:
        """Where the filesystem is mounted that will lose its power."""
        return self.run_dir / "live"

    def __enter__(self) -> Self:
        _check(self.fs)
        sweep()
        self._crew = Crew(f"{_NAME}-{self.fs}", in_memory=True)
        try:
            self._start(self._crew)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, crew: Crew) -> None:
        mkfs, losetup, cp, truncate = need(f"mkfs.{self.fs}", "losetup", "cp", "truncate")
        fresh, disk = self.run_dir / "fresh", self.run_dir / "disk"
        run([truncate, "-s", _SIZES[self.fs], fresh])
        try:
            run([mkfs, *_MKFS[self.fs], fresh])
        except LabError:
            sweep()  # mkfs.btrfs looks at all loop devices, and trips over one with a killed disk
            run([mkfs, *_MKFS[self.fs], fresh])
        for image in ("volatile", "durable"):
            run([cp, "--sparse=always", fresh, self.run_dir / image])
        fresh.unlink()
        disk.touch()
        self.directory.mkdir()
        server = Path(__file__).with_name("cutdisk.py")
        # It unmounts before it ends, which writes; time for that on a slow machine.
        crew.start("disk", [sys.executable, "-I", "-S", server, self.run_dir], grace_s=12.0)
        crew.wait_for((self.run_dir / "control").exists, "the disk is there")
        device = run([losetup, "--find", "--show", "--direct-io=on", disk]).strip()
        try:
            _mount(self.fs, device, self.directory, self._options)
        finally:
            # While it is mounted: the kernel takes it apart when it no longer is, whatever unmounts.
            run([losetup, "--detach", device])

    def close(self) -> None:
        """Unmount, remove everything; harmless twice. Later writers there get errors."""
        if self._crew is not None:
            self._crew.stop()
            sweep()  # our own, if it broke

    def arm(self, *, after: int, lose: Lose = Lose.SOMETHING, seed: int = 0) -> Armed:
        """Cut the power before the ``after``-th write or flush of the disk from now on; does not wait
        for it. seed: of what is lost. One at a time.
        """
        self._cuts += 1
        image = self.run_dir / f"image-{self._cuts}"
        return Armed(self.run_dir, Request(str(image), after, lose.value, seed))

    def cut(self, *, lose: Lose = Lose.SOMETHING, seed: int = 0) -> Cut:
        """Cut the power now."""
        return self.arm(after=1, lose=lose, seed=seed).now()

    def operations(self) -> int:
        """Writes and flushes of the disk so far."""
        return Armed(self.run_dir, Request("", 1, Lose.NOTHING.value, 0)).now().operations

    @contextlib.contextmanager
    def after(self, cut: Cut) -> Iterator[Path]:
        """The filesystem as it is found when the power is back; writable, gone after the block.

        LabError: it cannot be mounted, or somebody still uses it when the block ends.
        """
        place = Path(tempfile.mkdtemp(prefix="after-", dir=self.run_dir))
        mount_copy(self.fs, cut.image, place, self._options)
        try:
            yield place
        finally:
            _unmount(place)
            place.rmdir()
            cut.image.unlink()

    def describe(self) -> str:
        """For a person at a shell."""
        cut = f"{sys.executable} -m tests.lab.cut {self.run_dir}"
        losses = "|".join(lose.value for lose in Lose)
        return (
            f"# {self.fs} on a disk whose power can be cut is mounted at\ncd {self.directory}\n"
            f"# cut, and mount what is left beside it:\n{cut} [{losses}]\n# Ctrl-C ends it"
        )


def _check(fs: str) -> None:
    """UnavailableError: what this machine lacks."""
    if os.geteuid() != 0:
        raise UnavailableError("power cuts need root: they mount filesystems")
    for device in ("/dev/fuse", "/dev/loop-control"):
        if not os.access(device, os.R_OK | os.W_OK):
            raise UnavailableError(f"power cuts need {device}")
    need(f"mkfs.{fs}", "losetup", "mount", "umount")


def sweep() -> None:
    """Unmount and remove what a disk left behind that was killed together with its keeper."""
    with open("/proc/self/mountinfo") as table:
        places = [line.split()[4] for line in table]
    for disk in [place for place in places if place.endswith("/disk") and _PREFIX in place]:
        run_dir = Path(disk).parent
        try:
            os.stat(disk)
        except OSError as error:
            if error.errno != errno.ENOTCONN:  # somebody else swept
                continue
        else:
            continue
        mounted = [place for place in reversed(places) if place.startswith(f"{run_dir}/")]
        with contextlib.suppress(LabError):  # somebody else sweeps
            run([*need("umount"), "--lazy", *mounted])
        shutil.rmtree(run_dir, ignore_errors=True)


def _unmount(place: Path) -> None:
    """A writer of a log touches it a moment later, from a thread: busy for that moment is no error."""
    deadline = time.monotonic() + _BUSY_S
    while True:
        try:
            run([*need("umount"), place])
        except LabError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def mount_copy(fs: str, image: Path, place: Path, options: Sequence[str] = ()) -> None:
    """Mount the image of a cut, while the filesystem that it is a copy of is mounted too."""
    _mount(fs, image, place, ("loop", *_COPY.get(fs, ()), *options))


def _mount(fs: str, device: str | Path, place: Path, options: Sequence[str]) -> None:
    chosen = ["-o", ",".join(options)] if options else []
    try:
        run([*need("mount"), "-t", fs, *chosen, device, place])
    except LabError as error:
        if "unknown filesystem type" in str(error):
            raise UnavailableError(f"this kernel has no {fs}") from error
        raise
