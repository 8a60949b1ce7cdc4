"""Checkpoints of parts: a driver in home, groups that home does not reach, newcomers, and the lost.

``W`` is the driver, ``G`` and ``H`` are owners of groups, ``N`` publishes, ``P2`` is a newcomer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ckptfs.commit.log.entries import Body, Delete, Fence, Gone
from ckptfs.commit.parts.parts import read_home
from ckptfs.storage.base import Shape
from tests.model.disk import Disk
from tests.model.judge import fold_disk
from tests.model.lying import G1, G2, G3, committed_disk
from tests.model.parts import driver, driver_again, heeder, part_reader, part_saver, teller, whole
from tests.model.programs import OBJECT, Holder, Speak, holder, person
from tests.model.search import Scenario

__all__ = ["PARTS"]

F1 = Fence(G1)
A, B, AB = ("A",), ("B",), ("A", "B")


def _disks(a: list[Body], b: list[Body] | None = None, **more: Any) -> dict[str, Disk]:
    disks = {"A": committed_disk(Shape.FILESYSTEM, a, **more)}
    if b is not None:
        disks["B"] = committed_disk(Shape.FILESYSTEM, b, domain="B", **more)
    return disks


def parts_shared() -> Scenario:
    """One disk: a group saves its part, the driver commits, P2 recovers, R reads the part."""
    w = whole("sss", ("ppp", "p", A))
    return Scenario(
        "parts-shared",
        w.whats(),
        {
            "W": partial(driver, w),
            "G": partial(part_saver, w.parts[0], "A"),
            "P2": partial(holder, Holder(G2)),
            "R": partial(part_reader, w, w.parts[0], "A"),
        },
        _disks([F1]),
        lost=1,
    )


def parts_shared_two() -> Scenario:
    """One disk, two groups; P2 recovers."""
    w = whole("sss", ("ppp", "p", A), ("qqq", "q", A))
    return Scenario(
        "parts-shared-two",
        w.whats(),
        {
            "W": partial(driver, w),
            "G": partial(part_saver, w.parts[0], "A"),
            "H": partial(part_saver, w.parts[1], "A"),
            "P2": partial(holder, Holder(G2)),
        },
        _disks([F1]),
    )


def parts_remote() -> Scenario:
    """The part is in B, which the driver does not reach; N publishes there, R reads there."""
    w = whole("sss", ("ppp", "p", B))
    return Scenario(
        "parts-remote",
        w.whats(),
        {
            "W": partial(driver, w),
            "G": partial(part_saver, w.parts[0], "B"),
            "N": partial(heeder, ("decision", "sss"), "B"),
            "R": partial(part_reader, w, w.parts[0], "B"),
        },
        _disks([F1], []),
        lost=1,
    )


def parts_remote_restart() -> Scenario:
    """P2 takes the home over and gives a new ticket; its word reaches B."""
    w = whole("sss", ("ppp", "p", B))
    return Scenario(
        "parts-remote-restart",
        w.whats(),
        {
            "W": partial(driver, w),
            "G": partial(part_saver, w.parts[0], "B"),
            "P2": partial(holder, Holder(G2, acts=(Speak(),))),
            "N": partial(heeder, ("word", "new"), "B"),
        },
        _disks([F1], []),
    )


def parts_remote_both() -> Scenario:
    """P2 reaches home and B."""
    w = whole("sss", ("ppp", "p", B))
    return Scenario(
        "parts-remote-both",
        w.whats(),
        {
            "W": partial(driver, w),
            "G": partial(part_saver, w.parts[0], "B"),
            "P2": partial(holder, Holder(G2, AB)),
        },
        _disks([F1], []),
    )


def parts_home_lost() -> Scenario:
    """P2 reaches B only: the home is lost to it. Later P3 reaches both."""
    w = whole("sss", ("ppp", "p", B))
    return Scenario(
        "parts-home-lost",
        w.whats(),
        {
            "W": partial(driver, w),
            "G": partial(part_saver, w.parts[0], "B"),
            "P2": partial(holder, Holder(G2, B)),
            "P3": partial(holder, Holder(G3, AB)),
        },
        _disks([F1], []),
    )


def parts_two_places() -> Scenario:
    """One part in home and one in B; P2 takes over the home, its word reaches B."""
    w = whole("sss", ("ppp", "p", A), ("qqq", "q", B))
    return Scenario(
        "parts-two-places",
        w.whats(),
        {
            "W": partial(driver, w),
            "G": partial(part_saver, w.parts[0], "A"),
            "H": partial(part_saver, w.parts[1], "B"),
            "P2": partial(holder, Holder(G2, acts=(Speak(),))),
            "N": partial(heeder, ("word", "new"), "B"),
        },
        _disks([F1], []),
    )


def parts_over_both() -> Scenario:
    """One part of a group that spans home and B; P2 reaches B only, P3 both."""
    w = whole("sss", ("ppp", "p", AB))
    return Scenario(
        "parts-over-both",
        w.whats(),
        {
            "W": partial(driver, w),
            "GA": partial(part_saver, w.parts[0], "A"),
            "GB": partial(part_saver, w.parts[0], "B"),
            "P3": partial(holder, Holder(G3, AB)),
        },
        _disks([F1], [F1]),
    )


def parts_abandoned() -> Scenario:
    """The driver gives up when p is there and q is on its way; its word reaches B."""
    w = whole("sss", ("ppp", "p", B), ("qqq", "q", B))
    return Scenario(
        "parts-abandoned",
        w.whats(),
        {
            "W": partial(driver, w, "abandon"),
            "G": partial(part_saver, w.parts[0], "B"),
            "H": partial(part_saver, w.parts[1], "B"),
            "N": partial(heeder, ("decision", "sss"), "B"),
        },
        _disks([F1], []),
    )


def parts_deleted() -> Scenario:
    """Committed, not recorded in B, deleted at home: the word from before the delete and the one after
    it reach B at once.
    """
    w = whole("sss", ("ppp", "p", B))
    before: list[Body] = [F1, w.seal(G1, 1), Fence(G2)]
    after = [*before, Delete("sss", G2), Gone("sss", G2)]
    b: list[Body] = [F1, w.parts[0].entry(G1)]
    words = {
        name: read_home("A", "h", fold_disk(committed_disk(Shape.FILESYSTEM, bodies)))
        for name, bodies in (("old", before), ("new", after))
    }
    return Scenario(
        "parts-deleted",
        w.whats(),
        {
            "W": partial(teller, words),
            "N": partial(heeder, ("word", "old"), "B"),
            "N2": partial(heeder, ("word", "new"), "B"),
        },
        {
            "A": committed_disk(Shape.FILESYSTEM, after),
            "B": committed_disk(Shape.FILESYSTEM, b, domain="B", waiting=w.parts),
        },
    )


def parts_next_ticket() -> Scenario:
    """Two tickets of one generation are open; their groups write to B, in any order."""
    s = whole("sss", ("ppp", "p", B))
    t = whole("ttt", ("qqq", "p", B), name="s2")
    return Scenario(
        "parts-next-ticket",
        {**s.whats(), **t.whats()},
        {
            "W": partial(driver, s),
            "G": partial(part_saver, s.parts[0], "B"),
            "V": partial(driver, t),
            "H": partial(part_saver, t.parts[0], "B"),
        },
        _disks([F1], [F1]),
    )


def parts_replaced() -> Scenario:
    """t replaces s, which is committed with parts here and in B; P2 recovers both."""
    s = whole("sss", ("ppp", "p", A))
    t = whole("ttt", ("qqq", "p", A), replace=True)
    return Scenario(
        "parts-replaced",
        {**s.whats(), **t.whats()},
        {
            "W": partial(driver, s),
            "G": partial(part_saver, s.parts[0], "A"),
            "V": partial(driver, t, after=("acknowledged", "sss")),
            "H": partial(part_saver, t.parts[0], "A"),
            "R": partial(part_reader, s, s.parts[0], "A"),
        },
        _disks([F1]),
    )


def parts_removed_by_hand() -> Scenario:
    """Somebody removes s, its part last; the driver saves its name again as t, P2 takes the run."""
    s = whole("sss", ("ppp", "p", A))
    t = whole("ttt", ("qqq", "p", A))
    log: list[Body] = [F1, s.parts[0].entry(G1), s.seal(G1, 1)]
    return Scenario(
        "parts-removed-by-hand",
        {**s.whats(), **t.whats()},
        {
            "H": partial(person, s.name, first=(s.save_id, "ckptfs.json", ".metadata")),
            "W": partial(driver_again, t),
            "G": partial(part_saver, t.parts[0], "A"),
            "P2": partial(holder, Holder(G2)),
        },
        _disks(log, projected=(s, *s.parts)),
        removed=frozenset(s.whats()),
    )


def parts_removed_in_two_places() -> Scenario:
    """As before, with the part in B: a driver that reaches both disks records it in both, and may die
    between them; P2 takes over.
    """
    s = whole("sss", ("ppp", "p", B))
    t = whole("ttt", ("qqq", "p", B))
    here: list[Body] = [F1, s.seal(G1, 1)]
    there: list[Body] = [F1, s.parts[0].entry(G1), s.seal(G1, 1)]
    return Scenario(
        "parts-removed-in-two-places",
        {**s.whats(), **t.whats()},
        {
            "H": partial(person, s.name),
            "I": partial(person, s.name, "B"),
            "W": partial(driver_again, t, AB),
            "G": partial(part_saver, t.parts[0], "B"),
            "P2": partial(holder, Holder(G2, AB)),
        },
        {
            "A": committed_disk(Shape.FILESYSTEM, here, projected=(s,)),
            "B": committed_disk(Shape.FILESYSTEM, there, domain="B", projected=s.parts),
        },
        removed=frozenset(s.whats()),
    )


def object_parts() -> Scenario:
    """An object store: keys are final, only the plain names wait for the commit."""
    w = whole("sss", ("ppp", "p", A), caps=OBJECT)
    return Scenario(
        "object-parts",
        w.whats(),
        {
            "W": partial(driver, w),
            "G": partial(part_saver, w.parts[0], "A"),
            "P2": partial(holder, Holder(G2, caps=OBJECT)),
            "R": partial(part_reader, w, w.parts[0], "A"),
        },
        {"A": committed_disk(Shape.OBJECT, [F1])},
        lost=1,
        shape=Shape.OBJECT,
    )


PARTS: dict[str, Callable[[], Scenario]] = {
    function().name: function
    for function in (
        parts_shared,
        parts_shared_two,
        parts_remote,
        parts_remote_restart,
        parts_remote_both,
        parts_home_lost,
        parts_two_places,
        parts_over_both,
        parts_abandoned,
        parts_deleted,
        parts_next_ticket,
        parts_replaced,
        parts_removed_by_hand,
        parts_removed_in_two_places,
        object_parts,
    )
}
