"""Who meets whom: the scenarios that the search runs, each small enough to be searched whole.

Generation 1 holds the run at first unless a scenario says otherwise; ``W`` saves under it, ``U``
is a plain save without a run, ``D`` deletes under generation 1, ``P2`` and ``P3`` are newcomers that
fence and recover, ``R`` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from ckptfs.commit.log.append import Means, RefusedAppend, append_here
from ckptfs.commit.log.entries import (
    Body,
    Decided,
    Fence,
    FenceMode,
    Kind,
    Outcome,
    Pin,
    Release,
    Seal,
)
from ckptfs.commit.save import owner_steps
from ckptfs.storage.base import Capabilities, Shape
from tests.model.disk import Disk
from tests.model.lying import G1, G2, G2B, G3, committed_disk
from tests.model.parts_scenarios import PARTS
from tests.model.programs import (
    FILESYSTEM,
    OBJECT,
    PLAIN_OBJECT,
    Delete,
    Holder,
    Tell,
    What,
    clearer,
    holder,
    ids,
    may_swap,
    on,
    person,
    reader,
    remover,
    retirer,
    saver,
    saver_again,
    saver_replacing,
)
from tests.model.search import Scenario

__all__ = ["G1", "G2", "G3", "SCENARIOS", "build", "committed_disk"]

Programs = dict[str, Callable[[], Generator[Any, Any, Any]]]


def _saves(*whats: What) -> dict[str, What]:
    return {what.save_id: what for what in whats}


def _one(
    name: str,
    whats: dict[str, What],
    programs: Programs,
    disk: Disk,
    **more: Any,
) -> Scenario:
    return Scenario(name, whats, programs, {"A": disk}, **more)


F1 = Fence(G1)


def fresh() -> Scenario:
    """W saves, two newcomers recover, R reads."""
    a = What("aaa", gen=G1)
    return _one(
        "fresh",
        _saves(a),
        {
            "W": partial(saver, a, "A"),
            "P2": partial(holder, Holder(G2)),
            "P3": partial(holder, Holder(G3)),
            "R": partial(reader, _saves(a), "s1"),
        },
        committed_disk(Shape.FILESYSTEM, [F1]),
    )


def newcomers() -> Scenario:
    """The run was released; two newcomers that take nothing from a living owner come at once."""
    a = What("aaa", name="s1", gen=G2, clears=False)
    return _one(
        "newcomers",
        _saves(a),
        {
            "P2": partial(holder, Holder(G2, acts=(a,), polite=True)),
            "Q2": partial(holder, Holder(G2B, polite=True)),
            "P3": partial(holder, Holder(G3, polite=True)),
        },
        committed_disk(Shape.FILESYSTEM, [F1, Release(G1)]),
        lost=1,
        polite=frozenset({G2, G2B, G3}),
    )


def newcomers_two_domains() -> Scenario:
    """The run was released in both domains, and two newcomers go through them in another order: each
    may get one of them first.
    """
    return Scenario(
        "newcomers-two-domains",
        {},
        {
            "P2": partial(holder, Holder(G2, ("A", "B"), polite=True)),
            "Q2": partial(holder, Holder(G2B, ("B", "A"), polite=True)),
        },
        {
            domain: committed_disk(Shape.FILESYSTEM, [F1, Release(G1)], domain=domain)
            for domain in ("A", "B")
        },
        lost=1,
        polite=frozenset({G2, G2B}),
    )


def newcomers_fewer_domains() -> Scenario:
    """As before, and one of the two newcomers reaches one domain only."""
    return Scenario(
        "newcomers-fewer-domains",
        {},
        {
            "P2": partial(holder, Holder(G2, ("A",), polite=True)),
            "Q2": partial(holder, Holder(G2B, ("B", "A"), polite=True, later=G3)),
        },
        {
            domain: committed_disk(Shape.FILESYSTEM, [F1, Release(G1)], domain=domain)
            for domain in ("A", "B")
        },
        polite=frozenset({G2, G2B, G3}),
    )


def fine() -> Scenario:
    """W saves file by file, P2 recovers."""
    a = What("aaa", gen=G1, fine=True)
    return _one(
        "fine",
        _saves(a),
        {"W": partial(saver, a, "A"), "P2": partial(holder, Holder(G2))},
        committed_disk(Shape.FILESYSTEM, [F1], trash=False),
    )


def lost() -> Scenario:
    """W saves and answers are lost or late; P2 recovers."""
    a = What("aaa", gen=G1)
    return _one(
        "lost",
        _saves(a),
        {"W": partial(saver, a, "A"), "P2": partial(holder, Holder(G2))},
        committed_disk(Shape.FILESYSTEM, [F1]),
        lost=2,
    )


def replace() -> Scenario:
    """a is there, W replaces it by b, P2 recovers and replaces by c, R reads."""
    a, b = What("aaa", gen=G1), What("bbb", gen=G1, replace=True)
    c = What("ccc", gen=G2, replace=True)
    all_ = _saves(a, b, c)
    return _one(
        "replace",
        all_,
        {
            "W": partial(saver, b, "A"),
            "P2": partial(holder, Holder(G2, acts=(c,))),
            "R": partial(reader, all_, "s1"),
        },
        committed_disk(Shape.FILESYSTEM, [F1, a.seal(G1, 1)], projected=(a,)),
        lost=1,
    )


def replace_recovered_twice() -> Scenario:
    """a is there, W replaces it by b, P2 and P3 recover at once; a foreign file stays."""
    a, b = What("aaa", gen=G1), What("bbb", gen=G1, replace=True)
    foreign = {"s1/notes.txt": b"notes"}
    return _one(
        "replace-recovered-twice",
        _saves(a, b),
        {
            "W": partial(saver, b, "A"),
            "P2": partial(holder, Holder(G2)),
            "P3": partial(holder, Holder(G3)),
        },
        committed_disk(Shape.FILESYSTEM, [F1, a.seal(G1, 1)], projected=(a,), foreign=foreign),
        foreign=foreign,
        lost=1,
    )


def replace_then_next() -> Scenario:
    """W replaces a by b and saves another step, which dooms a; P2 recovers; R reads."""
    a, b = What("aaa", gen=G1), What("bbb", gen=G1, replace=True)
    n = What("nnn", name="s2", gen=G1)
    whats = _saves(a, b, n)
    return _one(
        "replace-then-next",
        whats,
        {
            "W": partial(holder, Holder(G1, acts=(b, n), fenced=True)),
            "P2": partial(holder, Holder(G2)),
            "R": partial(reader, whats, "s1"),
        },
        committed_disk(Shape.FILESYSTEM, [F1, a.seal(G1, 1)], projected=(a,)),
    )


def replace_at_once() -> Scenario:
    """W, which holds the run for one call, replaces a by b, and a goes at once; P2 recovers and replaces by c
    in the same way; R reads.
    """
    a, b = What("aaa", gen=G1), What("bbb", gen=G1, replace=True, last=True)
    c = What("ccc", gen=G2, replace=True, last=True)
    whats = _saves(a, b, c)
    return _one(
        "replace-at-once",
        whats,
        {
            "W": partial(holder, Holder(G1, acts=(b,), fenced=True)),
            "P2": partial(holder, Holder(G2, acts=(c,))),
            "R": partial(reader, whats, "s1"),
        },
        committed_disk(Shape.FILESYSTEM, [F1, a.seal(G1, 1)], projected=(a,)),
    )


def swap_two() -> Scenario:
    """a is there, no one holds the run; U and V both swap their own save for a; P2 prepares; R reads."""
    a, u, v = What("aaa", gen=G1), What("uuu", swaps=True), What("vvv", swaps=True)
    whats = _saves(a, u, v)
    return _one(
        "swap-two",
        whats,
        {
            "U": partial(saver, u, "A"),
            "V": partial(saver, v, "A"),
            "P2": partial(holder, Holder(G2)),
            "R": partial(reader, whats, "s1"),
        },
        committed_disk(Shape.FILESYSTEM, [F1, Release(G1), a.seal(G1, 1)], projected=(a,)),
    )


def swap_removes() -> Scenario:
    """As before, one after the other, and each removes what it replaced; P2 prepares at any time."""
    a, u = What("aaa", gen=G1), What("uuu", swaps=True, removes=True)
    v = What("vvv", swaps=True, removes=True)
    whats = _saves(a, u, v)
    return _one(
        "swap-removes",
        whats,
        {
            "U": partial(saver, u, "A"),
            "V": partial(saver, v, "A", after=("acknowledged", "uuu")),
            "P2": partial(holder, Holder(G2)),
        },
        committed_disk(Shape.FILESYSTEM, [F1, Release(G1), a.seal(G1, 1)], projected=(a,)),
    )


def swap_neighbour() -> Scenario:
    """U swaps its own save for a and removes that, while N saves another name: no one is fenced."""
    a, u = What("aaa", gen=G1), What("uuu", swaps=True, removes=True)
    n = What("nnn", name="s2")
    return _one(
        "swap-neighbour",
        _saves(a, u, n),
        {"U": partial(saver, u, "A"), "N": partial(saver, n, "A")},
        committed_disk(Shape.FILESYSTEM, [F1, Release(G1), a.seal(G1, 1)], projected=(a,)),
    )


def replace_neighbour() -> Scenario:
    """The same as it is: U claims the run to replace a, while N saves another name."""
    a, u, n = What("aaa", gen=G1), What("uuu"), What("nnn", name="s2")
    return _one(
        "replace-neighbour",
        _saves(a, u, n),
        {
            "U": partial(saver_replacing, u, Holder(G2, polite=True)),
            "N": partial(saver, n, "A"),
        },
        committed_disk(Shape.FILESYSTEM, [F1, Release(G1), a.seal(G1, 1)], projected=(a,)),
        polite=frozenset({G2}),
    )


def swap_beside_holder() -> Scenario:
    """The holder, who lives, replaces a by c and saves n, which dooms a; U swaps its own for a; R reads."""
    a, u = What("aaa", gen=G1), What("uuu", swaps=True)
    c, n = What("ccc", gen=G1, replace=True), What("nnn", name="s2", gen=G1)
    whats = _saves(a, u, c, n)
    return _one(
        "swap-beside-holder",
        whats,
        {
            "U": partial(saver, u, "A"),
            "W": partial(holder, Holder(G1, acts=(c, n), fenced=True)),
            "R": partial(reader, whats, "s1"),
        },
        committed_disk(Shape.FILESYSTEM, [F1, a.seal(G1, 1)], projected=(a,)),
    )


def swap_beside_delete() -> Scenario:
    """The holder, who lives, deletes a; U swaps its own for a; P2 prepares."""
    a, u = What("aaa", gen=G1), What("uuu", swaps=True)
    whats = _saves(a, u)
    return _one(
        "swap-beside-delete",
        whats,
        {
            "U": partial(saver, u, "A"),
            "D": partial(holder, Holder(G1, acts=(Delete(),), fenced=True)),
            "P2": partial(holder, Holder(G2)),
        },
        committed_disk(Shape.FILESYSTEM, [F1, a.seal(G1, 1)], projected=(a,)),
    )


def replace_siblings() -> Scenario:
    """U and V may replace, and save names that are free, at once: neither claims the run."""
    u, v = What("uuu"), What("vvv", name="s2")
    return _one(
        "replace-siblings",
        _saves(u, v),
        {
            "U": partial(saver_replacing, u, Holder(G2, polite=True)),
            "V": partial(saver_replacing, v, Holder(G3, polite=True)),
        },
        committed_disk(Shape.FILESYSTEM, [F1, Release(G1)]),
        polite=frozenset({G2, G3}),
    )


def replace_taken_meanwhile() -> Scenario:
    """U and V may replace, and save one name that is free at their begin; who is second claims the run
    then, and seals what it has written. R reads.
    """
    u, v = What("uuu", fine=True), What("vvv")
    whats = _saves(u, v)
    return _one(
        "replace-taken-meanwhile",
        whats,
        {
            "U": partial(saver_replacing, u, Holder(G2, polite=True)),
            "V": partial(saver_replacing, v, Holder(G3, polite=True)),
            "R": partial(reader, whats, "s1"),
        },
        committed_disk(Shape.FILESYSTEM, [F1, Release(G1)]),
        polite=frozenset({G2, G3}),
    )


def delete_saved_again() -> Scenario:
    """D deletes a and stalls anywhere; P2 recovers and saves the same name again."""
    a, c = What("aaa", gen=G1), What("ccc", gen=G2)
    foreign = {"s1/notes.txt": b"notes"}
    return _one(
        "delete-saved-again",
        _saves(a, c),
        {
            "D": partial(holder, Holder(G1, acts=(Delete(),), fenced=True)),
            "P2": partial(holder, Holder(G2, acts=(c,))),
        },
        committed_disk(Shape.FILESYSTEM, [F1, a.seal(G1, 1)], projected=(a,), foreign=foreign),
        foreign=foreign,
        lost=1,
    )


def delete_beside_foreign() -> Scenario:
    """Stock torch saved over the projection of a; the holder deletes a: theirs stays."""
    a = What("aaa", gen=G1)
    foreign = {
        "s1/.metadata": b"stock",
        "s1/ckptfs.json": b"not ours",
        "s1/__0_0.distcp": b"theirs",
    }
    return _one(
        "delete-beside-foreign",
        _saves(a),
        {"D": partial(holder, Holder(G1, acts=(Delete(),), fenced=True))},
        committed_disk(Shape.FILESYSTEM, [F1, a.seal(G1, 1)], projected=(a,), foreign=foreign),
        foreign=foreign,
    )


def delete_three_generations() -> Scenario:
    """D deletes a, P2 saves the name again, P3 recovers."""
    a, c = What("aaa", gen=G1), What("ccc", gen=G2)
    return _one(
        "delete-three-generations",
        _saves(a, c),
        {
            "D": partial(holder, Holder(G1, acts=(Delete(),), fenced=True)),
            "P2": partial(holder, Holder(G2, acts=(c,))),
            "P3": partial(holder, Holder(G3)),
        },
        committed_disk(Shape.FILESYSTEM, [F1, a.seal(G1, 1)], projected=(a,)),
        lost=1,
    )


def save_delete_save() -> Scenario:
    """W saves a, P2 recovers, deletes it and saves b under the name; R reads."""
    a, b = What("aaa", gen=G1), What("bbb", gen=G2)
    return _one(
        "save-delete-save",
        _saves(a, b),
        {
            "W": partial(saver, a, "A"),
            "P2": partial(holder, Holder(G2, acts=(Delete(), b))),
        },
        committed_disk(Shape.FILESYSTEM, [F1]),
        lost=1,
    )


def delete_the_replacement() -> Scenario:
    """b replaced a; D deletes b: a must not come back to life. P2 recovers; R reads."""
    a, b = What("aaa", gen=G1), What("bbb", gen=G1, replace=True)
    whats = _saves(a, b)
    home = {f"s1/aaa/{n}": d for n, d in a.small().items()} | {
        f"s1/{a.data_path('A')}": a.data("A")
    }
    return _one(
        "delete-the-replacement",
        whats,
        {
            "D": partial(holder, Holder(G1, acts=(Delete(),), fenced=True)),
            "P2": partial(holder, Holder(G2)),
            "R": partial(reader, whats, "s1"),
        },
        committed_disk(
            Shape.FILESYSTEM,
            [F1, a.seal(G1, 1), b.seal(G1, 2)],
            projected=(b,),
            foreign=home,
        ),
    )


def delete_while_plain_save() -> Scenario:
    """The living holder deletes a; a plain save takes the name as soon as it is free; P2 recovers."""
    a, u = What("aaa", gen=G1), What("uuu")
    return _one(
        "delete-while-plain-save",
        _saves(a, u),
        {
            "D": partial(holder, Holder(G1, acts=(Delete(),), fenced=True)),
            "U": partial(saver, u, "A"),
            "P2": partial(holder, Holder(G2)),
        },
        committed_disk(Shape.FILESYSTEM, [F1, a.seal(G1, 1)], projected=(a,)),
        lost=1,
    )


def delete_unfenced() -> Scenario:
    """Two remove a by its name under a generation without a holder; a plain save takes the name as
    soon as it is free; P2 recovers.
    """
    a, u = What("aaa", gen=G1), What("uuu")
    return _one(
        "delete-unfenced",
        _saves(a, u),
        {
            "D": partial(remover, "D", G1, "s1", FILESYSTEM),
            "E": partial(remover, "E", G1, "s1", FILESYSTEM),
            "U": partial(saver, u, "A"),
            "P2": partial(holder, Holder(G2)),
        },
        committed_disk(Shape.FILESYSTEM, [F1, a.seal(G1, 1)], projected=(a,), trash=False),
        lost=1,
    )


def delete_unfenced_late() -> Scenario:
    """D and E look at a run without a holder. D stalls anywhere in its removal, and E before its own
    until P2 has fenced: E must not give D a trash again.
    """
    a = What("aaa", gen=G1)
    return _one(
        "delete-unfenced-late",
        _saves(a),
        {
            "D": partial(remover, "D", G1, "s1", FILESYSTEM),
            "E": partial(remover, "E", G1, "s1", FILESYSTEM),
            "P2": partial(holder, Holder(G2)),
        },
        committed_disk(Shape.FILESYSTEM, [F1, a.seal(G1, 1)], projected=(a,), trash=False),
    )


def delete_unprojected() -> Scenario:
    """U committed a and stalls before its projection; the holder deletes a and saves c there."""
    a, c = What("aaa"), What("ccc", gen=G1)
    return _one(
        "delete-unprojected",
        _saves(a, c),
        {
            "U": partial(saver, a, "A"),
            "P": partial(holder, Holder(G1, acts=(Delete(), c), fenced=True)),
            "P2": partial(holder, Holder(G2)),
        },
        committed_disk(Shape.FILESYSTEM, [F1]),
    )


def plain() -> Scenario:
    """A plain save meets prepare_run."""
    u = What("uuu")
    return _one(
        "plain",
        _saves(u),
        {"U": partial(saver, u, "A"), "P2": partial(holder, Holder(G2))},
        committed_disk(Shape.FILESYSTEM, [F1]),
        lost=1,
    )


def plain_first() -> Scenario:
    """The very first save of a run, plain, on an empty disk; P2 and P3 prepare."""
    u = What("uuu")
    return _one(
        "plain-first",
        _saves(u),
        {
            "U": partial(saver, u, "A"),
            "P2": partial(holder, Holder(G2)),
            "P3": partial(holder, Holder(G3)),
        },
        Disk.of({}),
    )


def plain_two() -> Scenario:
    """Two plain saves of one name; P2 prepares."""
    u, v = What("uuu"), What("vvv")
    return _one(
        "plain-two",
        _saves(u, v),
        {
            "U": partial(saver, u, "A"),
            "V": partial(saver, v, "A"),
            "P2": partial(holder, Holder(G2)),
        },
        committed_disk(Shape.FILESYSTEM, [F1]),
    )


def plain_replaced() -> Scenario:
    """U commits b into a directory with somebody's file and stalls; the holder replaces by c."""
    b, c = What("bbb"), What("ccc", gen=G1, replace=True)
    foreign = {"s1/data.pt": b"driver state"}
    whats = _saves(b, c)
    return _one(
        "plain-replaced",
        whats,
        {
            "U": partial(saver, b, "A"),
            "P": partial(holder, Holder(G1, acts=(c,), fenced=True)),
            "P2": partial(holder, Holder(G2)),
        },
        committed_disk(Shape.FILESYSTEM, [F1], foreign=foreign),
        foreign=foreign,
        lost=1,
    )


def plain_replaced_doomed() -> Scenario:
    """b waits for its projection; the holder replaces it by c, saves n, which dooms b."""
    b, c = What("bbb"), What("ccc", gen=G1, replace=True)
    n = What("nnn", name="s2", gen=G1)
    whats = _saves(b, c, n)
    return _one(
        "plain-replaced-doomed",
        whats,
        {
            "U": partial(saver, b, "A"),
            "P": partial(holder, Holder(G1, acts=(c, n), fenced=True)),
        },
        committed_disk(Shape.FILESYSTEM, [F1]),
    )


def plain_overtaken() -> Scenario:
    """While U writes, the holder saves the same name and deletes it again."""
    u, c = What("uuu"), What("ccc", gen=G1)
    return _one(
        "plain-overtaken",
        _saves(u, c),
        {
            "U": partial(saver, u, "A"),
            "P": partial(holder, Holder(G1, acts=(c, Delete()), fenced=True)),
        },
        committed_disk(Shape.FILESYSTEM, [F1]),
    )


def undo() -> Scenario:
    """W gives its attempt up while P2 recovers."""
    a = What("aaa", gen=G1)
    return _one(
        "undo",
        _saves(a),
        {
            "W": partial(saver, a, "A", "undo"),
            "P2": partial(holder, Holder(G2)),
            "P3": partial(holder, Holder(G3)),
        },
        committed_disk(Shape.FILESYSTEM, [F1]),
    )


def removed_by_hand() -> Scenario:
    """Somebody removes a by hand; U and V save its name again, each claims the run for that."""
    a, u, v = What("aaa", gen=G1), What("uuu", gen=G2), What("vvv", gen=G3)
    return _one(
        "removed-by-hand",
        _saves(a, u, v),
        {
            "H": partial(person, a.name),
            "U": partial(saver_again, u, Holder(G2)),
            "V": partial(saver_again, v, Holder(G3)),
        },
        committed_disk(Shape.FILESYSTEM, [F1, Release(G1), a.seal(G1, 1)], projected=(a,)),
        removed=frozenset({"aaa"}),
    )


def taken_while_it_moves() -> Scenario:
    """W commits a and stalls anywhere in its projection; U finds the name taken. Nothing is removed, so
    nothing may be recorded as removed.
    """
    a, u = What("aaa"), What("uuu", gen=G2)
    return _one(
        "taken-while-it-moves",
        _saves(a, u),
        {
            "W": partial(saver, a, "A"),
            "U": partial(saver_again, u, Holder(G2)),
        },
        committed_disk(Shape.FILESYSTEM, [F1, Release(G1)], foreign={"s1/notes.txt": b"notes"}),
        foreign={"s1/notes.txt": b"notes"},
        lost=1,
    )


def directory_deleted_plain() -> Scenario:
    """An artifact of plain names is deleted by the living holder; a plain one takes the name."""
    a = What("aaa", gen=G1, artifact=Kind.DIRECTORY)
    u = What("uuu", artifact=Kind.DIRECTORY)
    return _one(
        "directory-deleted-plain",
        _saves(a, u),
        {
            "D": partial(holder, Holder(G1, acts=(Delete(),), fenced=True)),
            "U": partial(saver, u, "A"),
            "P2": partial(holder, Holder(G2)),
            "R": partial(reader, _saves(a, u), "s1"),
        },
        committed_disk(Shape.FILESYSTEM, [F1, a.seal(G1, 1)], projected=(a,)),
    )


def overwrite() -> Scenario:
    """P2 overwrites and saves; P3 resumes: a comes back if nothing was committed, else it goes."""
    a, z, b = What("aaa", gen=G1), What("zzz", name="s0", gen=G1), What("bbb", gen=G2)
    whats = _saves(a, z, b)
    return _one(
        "overwrite",
        whats,
        {
            "P2": partial(holder, Holder(G2, acts=(b,), mode=FenceMode.OVERWRITE)),
            "P3": partial(holder, Holder(G3)),
            "R": partial(reader, whats, "s1"),
        },
        committed_disk(Shape.FILESYSTEM, [F1, z.seal(G1, 1), a.seal(G1, 2)], projected=(z, a)),
        lost=1,
    )


def overwrite_plain() -> Scenario:
    """P2 overwrites and saves s2; a plain save takes the hidden name s1 at the same time."""
    a, u, b = What("aaa", gen=G1), What("uuu"), What("bbb", name="s2", gen=G2)
    whats = _saves(a, u, b)
    return _one(
        "overwrite-plain",
        whats,
        {
            "P2": partial(holder, Holder(G2, acts=(b,), mode=FenceMode.OVERWRITE)),
            "U": partial(saver, u, "A"),
        },
        committed_disk(Shape.FILESYSTEM, [F1, a.seal(G1, 1)], projected=(a,)),
    )


def pinned() -> Scenario:
    """a is pinned and replaced by b; the holder deletes b: a's bytes stay."""
    a, b = What("aaa", gen=G1), What("bbb", gen=G1, replace=True)
    whats = _saves(a, b)
    home = {f"s1/aaa/{n}": d for n, d in a.small().items()} | {
        f"s1/{a.data_path('A')}": a.data("A")
    }
    return _one(
        "pinned",
        whats,
        {
            "D": partial(holder, Holder(G1, acts=(Delete(),), fenced=True)),
            "P2": partial(holder, Holder(G2)),
        },
        committed_disk(
            Shape.FILESYSTEM,
            [F1, a.seal(G1, 1), b.seal(G1, 2), Pin("aaa")],
            projected=(b,),
            foreign=home,
        ),
    )


def retired_beside() -> Scenario:
    """Retention lets a go; its bytes are removed while W saves b under the name; P2 recovers."""
    a, b = What("aaa", gen=G1), What("bbb", gen=G1, replace=True, clears=False, turns=True)
    whats = _saves(a, b)
    return _one(
        "retired-beside",
        whats,
        {
            "D": partial(retirer, G1, "s1", FILESYSTEM),
            "W": partial(saver, b, "A", after=("retired", "aaa")),
            "P2": partial(holder, Holder(G2)),
        },
        committed_disk(Shape.FILESYSTEM, [F1, a.seal(G1, 1)], projected=(a,)),
    )


def retired_beside_session() -> Scenario:
    """As ``retired-beside``, but the save is made by another process of the same generation, which takes no
    turns with the removal.
    """
    return _beside_session("retired-beside-session")


def retired_beside_session_recovered() -> Scenario:
    """The same, and P2 recovers."""
    return _beside_session("retired-beside-session-recovered", P2=partial(holder, Holder(G2)))


def _beside_session(name: str, **more: Callable[[], Generator[Any, Any, Any]]) -> Scenario:
    a, b = What("aaa", gen=G1), What("bbb", gen=G1, replace=True, clears=False)
    whats = _saves(a, b)
    return _one(
        name,
        whats,
        {
            "D": partial(retirer, G1, "s1", FILESYSTEM, turns=False),
            "W": partial(saver, b, "A", after=("retired", "aaa")),
            **more,
        },
        committed_disk(Shape.FILESYSTEM, [F1, a.seal(G1, 1)], projected=(a,)),
    )


def tie() -> Scenario:
    """Two newcomers take the same generation number and save."""
    a, b = What("aaa", gen=G2), What("bbb", name="s2", gen=G2B)
    return _one(
        "tie",
        _saves(a, b),
        {
            "P2": partial(holder, Holder(G2, acts=(a,))),
            "P2b": partial(holder, Holder(G2B, acts=(b,))),
        },
        committed_disk(Shape.FILESYSTEM, [F1]),
        lost=1,
    )


def directory() -> Scenario:
    """An artifact of plain names, projected into a directory with somebody's file."""
    a = What("aaa", gen=G1, artifact=Kind.DIRECTORY)
    foreign = {"s1/notes.txt": b"notes"}
    return _one(
        "directory",
        _saves(a),
        {
            "W": partial(saver, a, "A"),
            "P2": partial(holder, Holder(G2)),
            "P3": partial(holder, Holder(G3)),
            "R": partial(reader, _saves(a), "s1"),
        },
        committed_disk(Shape.FILESYSTEM, [F1], foreign=foreign),
        foreign=foreign,
    )


def directory_deleted() -> Scenario:
    """An artifact of plain names is deleted; P2 recovers and saves the name again."""
    a = What("aaa", gen=G1, artifact=Kind.DIRECTORY)
    c = What("ccc", gen=G2, artifact=Kind.DIRECTORY)
    foreign = {"s1/notes.txt": b"notes"}
    return _one(
        "directory-deleted",
        _saves(a, c),
        {
            "D": partial(holder, Holder(G1, acts=(Delete(),), fenced=True)),
            "P2": partial(holder, Holder(G2, acts=(c,))),
        },
        committed_disk(Shape.FILESYSTEM, [F1, a.seal(G1, 1)], projected=(a,), foreign=foreign),
        foreign=foreign,
    )


# -- two domains ------------------------------------------------------------------------------

AB = ("A", "B")


def _both(bodies: list[Body], shape: Shape = Shape.FILESYSTEM, **more: Any) -> dict[str, Disk]:
    return {d: committed_disk(shape, bodies, domain=d, **more) for d in AB}


def two_domains() -> Scenario:
    """The owners of A and B save, P2 recovers both."""
    a = What("aaa", gen=G1, domains=AB)
    return Scenario(
        "two-domains",
        _saves(a),
        {
            "WA": partial(saver, a, "A"),
            "WB": partial(saver, a, "B"),
            "P2": partial(holder, Holder(G2, AB)),
        },
        _both([F1]),
    )


def two_domains_other_order() -> Scenario:
    """The same; P2 goes to B first."""
    a = What("aaa", gen=G1, domains=AB)
    return Scenario(
        "two-domains-other-order",
        _saves(a),
        {
            "WA": partial(saver, a, "A"),
            "WB": partial(saver, a, "B"),
            "P2": partial(holder, Holder(G2, ("B", "A"))),
        },
        _both([F1]),
    )


def two_domains_plain() -> Scenario:
    """A plain save over two domains; P2 recovers both."""
    u = What("uuu", domains=AB)
    return Scenario(
        "two-domains-plain",
        _saves(u),
        {
            "UA": partial(saver, u, "A"),
            "UB": partial(saver, u, "B"),
            "P2": partial(holder, Holder(G2, AB)),
        },
        _both([]),
    )


def two_domains_partial() -> Scenario:
    """P2 reaches A only."""
    a = What("aaa", gen=G1, domains=AB)
    return Scenario(
        "two-domains-partial",
        _saves(a),
        {
            "WA": partial(saver, a, "A"),
            "WB": partial(saver, a, "B"),
            "P2": partial(holder, Holder(G2)),
        },
        _both([F1]),
    )


def two_domains_partial_then_both() -> Scenario:
    """P2 reaches A only and replaces the name there; then P3 reaches both."""
    a = What("aaa", gen=G1, domains=AB)
    c = What("ccc", gen=G2, replace=True)
    return Scenario(
        "two-domains-partial-then-both",
        _saves(a, c),
        {
            "W": partial(_both_sealed, a),
            "P2": partial(holder, Holder(G2, acts=(c,))),
            "P3": partial(holder, Holder(G3, AB)),
        },
        _both([F1], waiting=(a,)),
    )


def _both_sealed(
    what: What, order: tuple[str, ...] = AB, expected: Seal | None = None
) -> Generator[Any, Any, Any]:
    """The end of a save over two domains with its data ready: seal, seal, finish, finish; or, when
    one of them refuses, undo, undo, record. expected: what it swaps itself for.
    """
    base, seq = G1, 1
    yield "A", Tell(("base", what.save_id), (base, seq))
    states: dict[str, Any] = {}
    seal = what.seal(base, seq)
    for domain in order:
        means = Means(domain, what.caps, ids(f"{what.save_id}-{domain}"))
        if expected is None:
            program = owner_steps.seal_save(seal, means, None, replace=False)
        else:
            program = append_here(lambda seen: may_swap(seen, seal, expected), means, None)
        out = yield from on(domain, program)
        del program
        if isinstance(out, RefusedAppend):
            break
        states[domain] = out.state
    if len(states) < len(order):
        yield "A", Tell(("failed", what.save_id))
        yield from _undone(what, order, states)
        return "refused"
    yield "A", Tell(("acknowledged", what.save_id))
    for domain in order:
        means = Means(domain, what.caps, ids(f"{what.save_id}-{domain}f"))
        brings = means if what.gen is None else means.held_by(what.gen)
        yield from on(domain, owner_steps.finish(seal, brings, states[domain]))
        yield domain, Tell(("finished", what.save_id, domain))
    return "committed"


def _undone(what: What, order: tuple[str, ...], states: dict[str, Any]) -> Generator[Any, Any, Any]:
    aborted = []
    for domain in order:
        means = Means(domain, what.caps, ids(f"{what.save_id}-{domain}u"))
        aborted.append((yield from on(domain, owner_steps.undo(what.keys, G1, means))))
    if any(aborted):
        for domain in states:
            means = Means(domain, what.caps, ids(f"{what.save_id}-{domain}r"))
            yield from on(domain, owner_steps.record_abort(what.save_id, means))


def two_domains_plain_replaced() -> Scenario:
    """A plain save over two domains commits and stalls before it records that; P replaces it."""
    u = What("uuu", domains=AB)
    c = What("ccc", gen=G1, domains=AB, replace=True)
    return Scenario(
        "two-domains-plain-replaced",
        _saves(u, c),
        {
            "U": partial(_both_sealed, u),
            "CA": partial(saver, c, "A"),
            "CB": partial(saver, c, "B"),
        },
        _both([F1], waiting=(u,)),
    )


def two_domains_delete() -> Scenario:
    """D deletes a save of two domains; P2 recovers both; one domain may be read alone."""
    a = What("aaa", gen=G1, domains=AB)
    bodies: list[Body] = [F1, a.seal(G1, 1), Decided("aaa", Outcome.COMMITTED)]
    return Scenario(
        "two-domains-delete",
        _saves(a),
        {
            "D": partial(holder, Holder(G1, AB, acts=(Delete(),), fenced=True)),
            "P2": partial(holder, Holder(G2, AB)),
        },
        _both(bodies, projected=(a,)),
    )


def two_domains_tie() -> Scenario:
    """Two newcomers with one number fence two domains in opposite orders."""
    return Scenario(
        "two-domains-tie",
        {},
        {
            "P2": partial(holder, Holder(G2, AB)),
            "P2b": partial(holder, Holder(G2B, ("B", "A"))),
        },
        _both([F1]),
    )


def two_domains_conflict() -> Scenario:
    """Two plain saves of one name seal two domains in opposite orders; both may have to give up."""
    u, v = What("uuu", domains=AB), What("vvv", domains=AB)
    return Scenario(
        "two-domains-conflict",
        _saves(u, v),
        {
            "U": partial(_both_sealed, u),
            "V": partial(_both_sealed, v, ("B", "A")),
            "P2": partial(holder, Holder(G2, AB)),
        },
        _both([F1], waiting=(u, v)),
    )


def swap_two_domains() -> Scenario:
    """U and V both swap their own save for a, which is in two domains, and seal these in opposite orders;
    both may have to give up. P2 prepares.
    """
    a = What("aaa", gen=G1, domains=AB)
    u, v = What("uuu", domains=AB, swaps=True), What("vvv", domains=AB, swaps=True)
    bodies: list[Body] = [F1, a.seal(G1, 1), Decided("aaa", Outcome.COMMITTED), Release(G1)]
    return Scenario(
        "swap-two-domains",
        _saves(a, u, v),
        {
            "U": partial(_both_sealed, u, expected=a.seal(G1, 1)),
            "V": partial(_both_sealed, v, ("B", "A"), expected=a.seal(G1, 1)),
            "P2": partial(holder, Holder(G2, AB)),
        },
        _both(bodies, projected=(a,), waiting=(u, v)),
    )


def two_domains_overwrite() -> Scenario:
    """P2 overwrites both domains and saves; P3 resumes."""
    a = What("aaa", gen=G1, domains=AB)
    b = What("bbb", gen=G2, domains=AB)
    bodies: list[Body] = [F1, a.seal(G1, 1), Decided("aaa", Outcome.COMMITTED)]
    return Scenario(
        "two-domains-overwrite",
        _saves(a, b),
        {
            "P2": partial(holder, Holder(G2, AB, mode=FenceMode.OVERWRITE)),
            "BA": partial(saver, b, "A", after=("ready", "2", "y", *AB)),
            "BB": partial(saver, b, "B"),
            "P3": partial(holder, Holder(G3, AB)),
        },
        _both(bodies, projected=(a,)),
    )


def two_domains_lost_then_both() -> Scenario:
    """Both owners save; P2 reaches A only; P3 reaches both."""
    a = What("aaa", gen=G1, domains=AB)
    return Scenario(
        "two-domains-lost-then-both",
        _saves(a),
        {
            "WA": partial(saver, a, "A"),
            "WB": partial(saver, a, "B"),
            "P2": partial(holder, Holder(G2)),
            "P3": partial(holder, Holder(G3, AB)),
        },
        _both([F1]),
    )


# -- object stores ----------------------------------------------------------------------------


def _object(caps: Capabilities = OBJECT) -> dict[str, Any]:
    windows = set() if caps.conditional_replace else {"stale-projection", "late-put"}
    return {"shape": Shape.OBJECT, "windows": frozenset(windows)}


def object_plain() -> Scenario:
    """A plain save on an object store meets prepare_run; answers are lost or late."""
    u = What("uuu", caps=OBJECT, fine=True)
    return _one(
        "object-plain",
        _saves(u),
        {
            "U": partial(saver, u, "A"),
            "P2": partial(holder, Holder(G2, caps=OBJECT)),
        },
        committed_disk(Shape.OBJECT, [F1]),
        lost=2,
        **_object(),
    )


def object_replace() -> Scenario:
    """W saves a, P2 recovers and replaces it by b, R reads."""
    a = What("aaa", gen=G1, caps=OBJECT)
    b = What("bbb", gen=G2, caps=OBJECT, replace=True)
    return _one(
        "object-replace",
        _saves(a, b),
        {
            "W": partial(saver, a, "A"),
            "P2": partial(holder, Holder(G2, acts=(b,), caps=OBJECT)),
            "R": partial(reader, _saves(a, b), "s1"),
        },
        committed_disk(Shape.OBJECT, [F1]),
        **_object(),
    )


def object_replace_late() -> Scenario:
    """The same with a PUT in flight, then P3 repairs."""
    a = What("aaa", gen=G1, caps=OBJECT)
    b = What("bbb", gen=G2, caps=OBJECT, replace=True)
    return _one(
        "object-replace-late",
        _saves(a, b),
        {
            "W": partial(saver, a, "A"),
            "P2": partial(holder, Holder(G2, acts=(b,), caps=OBJECT)),
            "P3": partial(holder, Holder(G3, caps=OBJECT)),
        },
        committed_disk(Shape.OBJECT, [F1]),
        lost=1,
        **_object(),
    )


def object_replace_unconditional() -> Scenario:
    """The same without conditional PUTs: stock views may be stale, ours never."""
    a = What("aaa", gen=G1, caps=PLAIN_OBJECT)
    b = What("bbb", gen=G2, caps=PLAIN_OBJECT, replace=True)
    n = What("nnn", name="s2", gen=G2, caps=PLAIN_OBJECT)
    return _one(
        "object-replace-unconditional",
        _saves(a, b, n),
        {
            "W": partial(saver, a, "A"),
            "P2": partial(holder, Holder(G2, acts=(b, n), caps=PLAIN_OBJECT)),
            "R": partial(reader, _saves(a, b), "s1"),
        },
        committed_disk(Shape.OBJECT, [F1]),
        **_object(PLAIN_OBJECT),
    )


def object_delete_saved_again() -> Scenario:
    """D deletes a and stalls anywhere; P2 recovers and saves the same name again; P3 repairs."""
    a, c = What("aaa", gen=G1, caps=OBJECT), What("ccc", gen=G2, caps=OBJECT)
    return _one(
        "object-delete-saved-again",
        _saves(a, c),
        {
            "D": partial(holder, Holder(G1, acts=(Delete(),), caps=OBJECT, fenced=True)),
            "P2": partial(holder, Holder(G2, acts=(c,), caps=OBJECT)),
            "R": partial(reader, _saves(a, c), "s1"),
        },
        committed_disk(Shape.OBJECT, [F1, a.seal(G1, 1)], projected=(a,)),
        shape=Shape.OBJECT,
        windows=frozenset({"stalled-deleter"}),
    )


def object_delete() -> Scenario:
    """W saves a, P2 recovers and deletes it; R reads."""
    a = What("aaa", gen=G1, caps=OBJECT)
    return _one(
        "object-delete",
        _saves(a),
        {
            "W": partial(saver, a, "A"),
            "P2": partial(holder, Holder(G2, acts=(Delete(),), caps=OBJECT)),
            "R": partial(reader, _saves(a), "s1"),
        },
        committed_disk(Shape.OBJECT, [F1]),
        lost=1,
        shape=Shape.OBJECT,
        windows=frozenset({"late-put"}),
    )


def object_cleared_beside() -> Scenario:
    """W replaced a by b and saved n; its clearing dooms a and runs during W's next replacement."""
    a = What("aaa", gen=G1, caps=OBJECT)
    b = What("bbb", gen=G1, caps=OBJECT, replace=True)
    n = What("nnn", name="s2", gen=G1, caps=OBJECT, clears=False)
    c = What("ccc", gen=G1, caps=OBJECT, replace=True, clears=False)

    def saves() -> Generator[Any, Any, Any]:
        yield from saver(n, "A")
        return (yield from saver(c, "A"))

    return _one(
        "object-cleared-beside",
        _saves(a, b, n, c),
        {
            "W": saves,
            "B": partial(clearer, G1, n, OBJECT),
            "P2": partial(holder, Holder(G2, caps=OBJECT)),
            "R": partial(reader, _saves(a, b, c), "s1"),
        },
        _both_lie(a, b),
        shape=Shape.OBJECT,
        windows=frozenset({"late-put", "stalled-deleter"}),
    )


def object_removed_by_hand() -> Scenario:
    """Somebody removes a by hand; U saves its name again, P3 recovers."""
    a, u = What("aaa", gen=G1, caps=OBJECT), What("uuu", gen=G2, caps=OBJECT)
    return _one(
        "object-removed-by-hand",
        _saves(a, u),
        {
            "H": partial(person, a.name),
            "U": partial(saver_again, u, Holder(G2, caps=OBJECT)),
            "P3": partial(holder, Holder(G3, caps=OBJECT)),
        },
        committed_disk(Shape.OBJECT, [F1, Release(G1), a.seal(G1, 1)], projected=(a,)),
        removed=frozenset({"aaa"}),
        **_object(),
    )


def _both_lie(old: What, new: What) -> Disk:
    """``old`` was replaced by ``new``; both have their data, and the name shows the new one."""
    disk = committed_disk(
        Shape.OBJECT, [F1, old.seal(G1, 1), new.seal(G1, 2)], projected=(old, new)
    )
    files = {**disk.files, **{f"{new.name}/{n}": data for n, data in new.small().items()}}
    return Disk.of(files)


SCENARIOS: dict[str, Callable[[], Scenario]] = {
    function().name: function
    for function in (
        fresh,
        newcomers,
        newcomers_two_domains,
        newcomers_fewer_domains,
        fine,
        lost,
        replace,
        replace_recovered_twice,
        replace_then_next,
        replace_at_once,
        swap_two,
        swap_neighbour,
        replace_neighbour,
        swap_removes,
        swap_beside_holder,
        swap_beside_delete,
        swap_two_domains,
        replace_siblings,
        replace_taken_meanwhile,
        delete_saved_again,
        delete_beside_foreign,
        delete_three_generations,
        save_delete_save,
        delete_the_replacement,
        delete_while_plain_save,
        delete_unfenced,
        delete_unfenced_late,
        delete_unprojected,
        plain,
        plain_first,
        plain_two,
        plain_replaced,
        plain_replaced_doomed,
        plain_overtaken,
        undo,
        removed_by_hand,
        taken_while_it_moves,
        overwrite,
        overwrite_plain,
        pinned,
        retired_beside,
        retired_beside_session,
        retired_beside_session_recovered,
        tie,
        directory,
        directory_deleted,
        directory_deleted_plain,
        two_domains,
        two_domains_other_order,
        two_domains_plain,
        two_domains_partial,
        two_domains_partial_then_both,
        two_domains_plain_replaced,
        two_domains_delete,
        two_domains_tie,
        two_domains_conflict,
        two_domains_overwrite,
        two_domains_lost_then_both,
        object_plain,
        object_replace,
        object_replace_late,
        object_replace_unconditional,
        object_delete,
        object_delete_saved_again,
        object_cleared_beside,
        object_removed_by_hand,
    )
} | PARTS


def build(name: str) -> Scenario:
    """A fresh scenario of that name."""
    return SCENARIOS[name]()
