"""Process 1 of a node: makes what the node sees, says so, and reaps whatever is left behind.

    unshare --mount --uts --ipc --pid ... python -I -S node_init.py SPEC.json

    a root of its own     every top-level directory of the host, bound; so that a mount point such as
                          /scratch can be made and the host never sees it
    the mounts of SPEC    disks and shared directories, bound where the node looks for them
    /proc                 shows this node's processes only (fresh_proc: false leaves the host's)
    /dev/shm, /var/tmp    empty and its own: two machines share no memory and no temporary files

Prints "ready". When this process is killed the kernel kills every other one of the node.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys

BIND, RECURSIVE, DETACH = 0x1000, 0x4000, 2
_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str | None = None, flags: int = 0) -> None:
    """mount(2)."""
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    if _libc.mount(*words, ctypes.c_ulong(flags), None):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"{source} on {target}")


def pivot(root: str) -> None:
    """Make ``root`` the root of this mount namespace, and release the old one."""
    os.chdir(root)
    mount("none", "/", flags=1 << 18)  # private: what happens here stays here
    _libc.syscall(155 if os.uname().machine == "x86_64" else 41, b".", b".")  # pivot_root
    if _libc.umount2(b".", DETACH):
        raise OSError(ctypes.get_errno(), "the old root stays mounted")
    os.chdir("/")


def build(root: str) -> None:
    """An empty root, and in it all that the host has at its top."""
    mount("tmpfs", root, "tmpfs")
    for entry in os.scandir("/"):
        target = f"{root}/{entry.name}"
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), target)
        elif entry.is_dir():
            os.mkdir(target)
            mount(entry.path, target, flags=BIND | RECURSIVE)


def main() -> None:
    """Build, tell, wait."""
    with open(sys.argv[1]) as file:
        spec = json.load(file)
    socket.sethostname(spec["hostname"])
    root = spec["root"]
    build(root)
    mount(spec["hosts"], f"{root}/etc/hosts", flags=BIND)
    for target, source in spec["mounts"].items():
        os.makedirs(root + target, exist_ok=True)
        mount(source, root + target, flags=BIND)
    mount("tmpfs", root + spec["hide"], "tmpfs")  # the disks of the other nodes
    for target in ("/dev/shm", "/var/tmp"):
        mount("tmpfs", root + target, "tmpfs")
    pivot(root)
    if spec["fresh_proc"]:
        mount("proc", "/proc", "proc")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps what is left to us
    print("ready", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
