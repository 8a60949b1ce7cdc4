"""Runs one program and ends with it; ends it, and all that it started, when the caller is gone.

    python -I -S keeper.py CALLER_PID GRACE_S DIRECTORY PROGRAM ARGUMENTS...

    the program exits           -> so do we, with its status
    we get SIGTERM              -> it gets SIGTERM, SIGKILL after GRACE_S; then whatever it left behind
    the caller dies, by kill -9 -> the same, and DIRECTORY is removed: nothing else would
    we die, by kill -9          -> the kernel kills the program

A death signal alone would not do: it follows the *thread* that started the program, and is lost to
daemons that fork. The caller's end is seen on a pidfd; orphans are adopted and found as children.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def _children() -> list[int]:
    """Our child processes, adopted ones too."""
    with open(f"/proc/self/task/{os.getpid()}/children") as listing:
        return [int(pid) for pid in listing.read().split()]


def _wait_or_die(program: subprocess.Popen[bytes], caller: int, alarm: int) -> None:
    """Return when the program has ended, the caller has, or a signal says so."""
    poll = select.poll()
    watched = [os.pidfd_open(program.pid), os.pidfd_open(caller), alarm]
    if os.getppid() != caller:  # it died before we looked: that pid is somebody else's by now
        return
    for descriptor in watched:
        poll.register(descriptor, select.POLLIN)
    poll.poll()


def main() -> int:
    """Run until one of the three ends."""
    caller, grace_s, directory = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    alarm, ring = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(ring, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    program = subprocess.Popen(
        sys.argv[4:],
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # noqa: PLW1509 - we have one thread
    )
    with contextlib.suppress(ProcessLookupError):  # the caller was gone before we looked
        _wait_or_die(program, caller, alarm)
    program.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(timeout=grace_s)
    _kill_all(program)
    if os.getppid() != caller:
        shutil.rmtree(directory, ignore_errors=True)  # the keepers of its other programs do it too
    return program.wait()


def _kill_all(program: subprocess.Popen[bytes]) -> None:
    """Kill our children until there are none: the orphans of each one become our children too."""
    while children := _children():
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            if pid == program.pid:
                program.wait()
            else:
                os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.exit(main() & 0x7F)
