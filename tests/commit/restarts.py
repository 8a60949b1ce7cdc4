"""A job on two nodes that dies again and again, each time somewhere else; prints what it leaves.

    python -m tests.commit.restarts DIRECTORY     one JSON line per life, the last one in peace

A process of its own, without threads, so that every life can be a fork of it. Each life claims the
run, saves twice, retains two checkpoints, and is killed at an operation that moves on from life to
life: in the claim, between writes, between seals, while deleting.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys

from ckptfs.commit.ownership.claim import claim
from ckptfs.commit.session import RunSession
from ckptfs.retention.deletion import Retirer
from ckptfs.retention.policy import Keep
from tests.crash.rig import TWO_DOMAINS, Mortal, save, sessions, values

LIVES = 45
STRIDE = 7
LIFE_TIMEOUT_S = 200.0


def life(session: RunSession, number: int) -> None:
    """What every life does, as far as it comes."""
    with claim(session) as run:
        retirer = Retirer(run, Keep(2), lambda _: True)
        try:
            retirer.after_commit(
                run.session
            )  # what the life before committed and did not come to remove
            retirer.make_room()
            for part in (1, 2):
                save(run.session, f"step_{number}_{part}", str(number), run)
                retirer.after_commit(run.session)
                retirer.make_room()
        finally:
            retirer.close(30.0)


def found(run: str) -> dict[str, int]:
    """What is on one disk: dead attempts, trash directories and what is in them, checkpoints."""
    control = f"{run}/.ckptfs"
    generations = _names(f"{control}/trash")
    return {
        "attempts": len(_names(f"{control}/attempts")),
        "generations": len(generations),
        "trash": sum(len(_names(f"{control}/trash/{g}")) for g in generations),
        "temporary": len(_names(f"{control}/tmp")),
        "steps": len([n for n in _names(run) if n != ".ckptfs"]),
    }


def _names(path: str) -> list[str]:
    return os.listdir(path) if os.path.isdir(path) else []


def live_and_die(base: str, number: int) -> bool:
    """One life in a fork; whether it was killed. The last one is not."""
    if (pid := os.fork()) == 0:
        faulthandler.dump_traceback_later(LIFE_TIMEOUT_S, exit=True)
        last = number == LIVES
        nth = None if last else 1 + number * STRIDE % (LIVES * STRIDE // 2)
        plan = Mortal(nth, "half" if number % 3 == 0 else "before", alone=False)
        plans = {number % 2: plan}
        values(
            sessions(
                TWO_DOMAINS, base, lambda session: life(session, number), job="job", plans=plans
            )
        )
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status == 0 or os.WIFSIGNALED(status), f"life {number} ended with status {status}"
    return os.WIFSIGNALED(status)


def main(base: str) -> None:
    """All lives, reported on standard output."""
    logging.disable(logging.CRITICAL)
    for number in range(1, LIVES + 1):
        killed = live_and_die(base, number)
        disks = {node: found(path) for node, path in TWO_DOMAINS.directories(base).items()}
        print(json.dumps({"killed": killed, "disks": disks}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
