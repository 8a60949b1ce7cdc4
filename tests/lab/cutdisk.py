"""A disk with a volatile cache, as one file: what was not flushed may be lost, torn or reordered.

    python -I -S cutdisk.py RUN_DIR

    ext4, xfs, btrfs -> /dev/loopN -> RUN_DIR/disk (FUSE) -> this process
                                                               |- volatile   what the kernel reads
                                                               |- cache      written since a flush
                                                               '- durable    flushed

A loop device passes writes and flushes of its filesystem on, in the order in which that filesystem
sent them. This process is one thread that serves them one by one; so a cut between two of them is
a moment, however many processes write. At a cut the durable image is copied and of the cache as
much is added as the request says:

    nothing      nothing of it is lost: a disk without a volatile cache
    something    each write is there or not, by a coin; of some a part of the 4096-byte sectors
    everything   all of it is lost

No writer notices: after the copy the disk serves on. A cache of 32 MiB drains by itself, oldest
first, as a disk's does. ``RUN_DIR/control`` takes one request at a time, a JSON object (``Request``):
the cut happens before the after-th write or flush from now on, or at ``NOW``.

SIGTERM: unmounts what is mounted below RUN_DIR and ends, so that a keeper can clean up.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

NOW = b"now"  # after a request: the cut is made at once where it has not come yet
SECTOR_BYTES = 4096
CACHE_BYTES = 32 << 20
WRITE_BYTES = 1 << 20  # the largest write that the kernel sends in one piece

# linux/fuse.h
IN, OUT = struct.Struct("=IIQQIIIHH"), struct.Struct("=IiQ")
INIT_OUT = struct.Struct("=IIIIHHIIHHI28x")
ATTR = struct.Struct("=QQQQQQIIIIIIIIII")
READ_IN = WRITE_IN = struct.Struct("=QQIIQII")
FORGET, GETATTR, SETATTR, OPEN, READ, WRITE, RELEASE = 2, 3, 4, 14, 15, 16, 18
FSYNC, FLUSH, INIT, INTERRUPT, DESTROY, BATCH_FORGET = 20, 25, 26, 36, 38, 42
BIG_WRITES, MAX_PAGES = 1 << 5, 1 << 22
DIRECT_IO = 1  # of an opened file: nothing of it is kept in the kernel's page cache


@dataclass(frozen=True)
class Request:
    """to: the image to make, none if empty. lose: what of the cache, see above; seed: of its coins."""

    to: str
    after: int
    lose: str
    seed: int


class Disk:
    """The two images and the cache between them."""

    def __init__(self, run_dir: str) -> None:
        self._volatile = os.open(f"{run_dir}/volatile", os.O_RDWR)
        self._durable = os.open(f"{run_dir}/durable", os.O_RDWR)
        self.size_bytes = os.fstat(self._volatile).st_size
        self.cache: list[tuple[int, bytes]] = []
        self._cached_bytes = 0

    def read(self, offset: int, size_bytes: int) -> bytes:
        """What was written last."""
        return os.pread(self._volatile, size_bytes, offset)

    def write(self, offset: int, data: bytes) -> None:
        """Into the cache."""
        os.pwrite(self._volatile, data, offset)
        self.cache.append((offset, data))
        self._cached_bytes += len(data)
        while self._cached_bytes > CACHE_BYTES:
            self._drain(1)

    def flush(self) -> None:
        """Everything that was written is durable."""
        self._drain(len(self.cache))

    def _drain(self, count: int) -> None:
        for offset, data in self.cache[:count]:
            os.pwrite(self._durable, data, offset)
            self._cached_bytes -= len(data)
        del self.cache[:count]

    def cut(self, request: Request) -> int:
        """Make the image that a machine finds which lost its power now; how many writes it lacks."""
        coins = random.Random(request.seed)
        image = os.open(request.to, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(image, self.size_bytes)
            for start, end in _data_in(self._durable):
                _copy(self._durable, image, start, end)
            lost = 0
            for offset, data in self.cache:
                kept = list(_surviving(data, request.lose, coins))
                lost += sum(len(piece) for _, piece in kept) < len(data)
                for within, piece in kept:
                    os.pwrite(image, piece, offset + within)
        finally:
            os.close(image)
        return lost


def _surviving(data: bytes, lose: str, coins: random.Random) -> Iterator[tuple[int, bytes]]:
    """The pieces of one cached write that reached the disk, with their offsets in it."""
    fate = {"nothing": 0.0, "everything": 1.0}.get(lose, coins.random())
    if fate < 0.45:
        yield 0, data
    elif fate < 0.55:
        for start in range(0, len(data), SECTOR_BYTES):
            if coins.random() < 0.5:
                yield start, data[start : start + SECTOR_BYTES]


def _data_in(fd: int) -> Iterator[tuple[int, int]]:
    """The stretches of a sparse file that are no holes."""
    end = 0
    while True:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return
        end = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, end


def _copy(source: int, target: int, start: int, end: int) -> None:
    while start < end:
        data = os.pread(source, min(end - start, 1 << 20), start)
        os.pwrite(target, data, start)
        start += len(data)


class Server:
    """Serves the kernel and the processes that ask for cuts."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._disk = Disk(run_dir)
        self._fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._clients: dict[int, socket.socket] = {}
        self._asker: socket.socket | None = None
        self._request: Request | None = None
        self._operations = 0  # writes and flushes, from the beginning
        self._due = 0  # the operation before which the requested cut is made
        self._stopping: subprocess.Popen[bytes] | None = None
        self._woken, self._ring = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        """Until SIGTERM."""
        at = f"{self._run_dir}/disk"
        options = f"fd={self._fuse},rootmode=100600,user_id=0,group_id=0,allow_other"
        subprocess.run(
            ["mount", "-i", "-t", "fuse", "-o", options, "ckptfs-lab-powercut", at],
            pass_fds=[self._fuse],
            check=True,
        )
        signal.set_wakeup_fd(self._ring, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        self._listener.bind(f"{self._run_dir}/control")
        self._listener.listen()
        poll = select.poll()
        poll.register(self._fuse, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while self._stopping is None or self._stopping.poll() is None:
            for fd, _ in poll.poll(None if self._stopping is None else 20):
                if fd == self._fuse:
                    self._serve_kernel()
                elif fd == self._listener.fileno():
                    client, _ = self._listener.accept()
                    self._clients[client.fileno()] = client
                    poll.register(client, select.POLLIN)
                elif fd == self._woken:
                    poll.unregister(fd)
                    self._stop()
                elif not self._hear(self._clients[fd]):
                    poll.unregister(fd)
                    self._clients.pop(fd).close()

    def _stop(self) -> None:
        """Unmount what is on the disk, while it is served, and then the disk."""
        with open("/proc/self/mountinfo") as table:
            places = [line.split()[4] for line in table]
        mounted = [at for at in reversed(places) if at.startswith(f"{self._run_dir}/")]
        self._stopping = subprocess.Popen(["umount", "--lazy", *mounted])

    # -- who asks for cuts ----------------------------------------------------------------

    def _hear(self, client: socket.socket) -> bool:
        """Take a request; False where nothing comes any more."""
        message = client.recv(1 << 16)
        if message == NOW:
            if self._request is not None:
                self._cut(self._request)
        elif message:
            self._asker, self._request = client, Request(**json.loads(message))
            self._due = self._operations + self._request.after
        return bool(message)

    def _before_operation(self) -> None:
        self._operations += 1
        if self._request is not None and self._operations >= self._due:
            self._cut(self._request)

    def _cut(self, request: Request) -> None:
        at_ns, cached = time.monotonic_ns(), len(self._disk.cache)
        lost = self._disk.cut(request) if request.to else 0
        self._request = None
        answer = {"at_ns": at_ns, "cached": cached, "lost": lost, "operations": self._operations}
        assert self._asker is not None
        with contextlib.suppress(OSError):  # it has gone
            self._asker.sendall(json.dumps(answer).encode())

    # -- the kernel ---------------------------------------------------------------------------

    def _serve_kernel(self) -> None:
        try:
            message = os.read(self._fuse, WRITE_BYTES + SECTOR_BYTES)
        except OSError as error:
            if error.errno == errno.ENODEV:  # unmounted
                raise SystemExit(0) from error
            if error.errno in (errno.ENOENT, errno.EINTR):  # it took the request back
                return
            raise
        _, opcode, unique, *_ = IN.unpack_from(message)
        if opcode in (FORGET, BATCH_FORGET, INTERRUPT):
            return
        try:
            answer, error_number = self._answer(opcode, message[IN.size :]), 0
        except OSError as error:
            answer, error_number = b"", error.errno or errno.EIO
        head = OUT.pack(OUT.size + len(answer), -error_number, unique)
        os.write(self._fuse, head + answer)

    def _answer(self, opcode: int, body: bytes) -> bytes:
        if opcode == WRITE:
            _, offset, size_bytes, *_ = WRITE_IN.unpack_from(body)
            self._before_operation()
            self._disk.write(offset, body[WRITE_IN.size : WRITE_IN.size + size_bytes])
            return struct.pack("=II", size_bytes, 0)
        if opcode == READ:
            _, offset, size_bytes, *_ = READ_IN.unpack_from(body)
            return self._disk.read(offset, size_bytes)
        if opcode == FSYNC:
            self._before_operation()
            self._disk.flush()
            return b""
        if opcode == INIT:
            flags = BIG_WRITES | MAX_PAGES
            pages = WRITE_BYTES // 4096
            return INIT_OUT.pack(7, 31, 1 << 20, flags, 64, 48, WRITE_BYTES, 1, pages, 0, 0)
        if opcode in (GETATTR, SETATTR):
            # Good for no time: a later caller finds out whether we are still there.
            return struct.pack("=QII", 0, 0, 0) + self._attributes()
        if opcode == OPEN:
            return struct.pack("=QII", 0, DIRECT_IO, 0)
        if opcode in (RELEASE, FLUSH, DESTROY):
            return b""
        raise OSError(errno.ENOSYS, "not of a disk")

    def _attributes(self) -> bytes:
        size, blocks = self._disk.size_bytes, self._disk.size_bytes // 512
        mode = stat.S_IFREG | 0o600
        return ATTR.pack(1, size, blocks, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, SECTOR_BYTES, 0)


def main() -> None:
    """Serve until asked to stop."""
    Server(sys.argv[1]).serve()


if __name__ == "__main__":
    main()
