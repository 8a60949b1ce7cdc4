"""What a real NFS client shows of another's changes: the plain call fails, ours does not.

One test for each thing that Linux clients do with default caching. Client b looks first, so that its
cache holds the old answer for 30 s; then a changes something, and b acts: within one tick of the server's
clock, so that an NFSv3 client cannot tell the directory from what it was, or a little later.
"""

from __future__ import annotations

import errno
import os
import signal
import time

import pytest

from ckptfs.errors import IntegrityError, NotFoundError, StaleError
from tests.lab.nfs import NfsLab
from tests.nfs.clock import stopped
from tests.nfs.concurrent import at_once
from tests.nfs.gaps import GAP_S, Gap, gaps, hides, rounds, shows, until_shown
from tests.nfs.views import (
    close_all,
    goes_stale,
    hold,
    hold_mapped,
    hold_reader,
    is_absent,
    maps,
    naive_absences,
    naive_absences_after_useless_looks,
    naive_read,
    naive_rmtree,
    our_reads,
    ours,
    ours_fresh,
    read_held,
    read_held_naively,
    replace_for,
    rewrite,
    touch_mapped,
    write,
)

# -- what was absent ----------------------------------------------------------------------------


@gaps
@pytest.mark.parametrize("path", ["x", "x/y/z"])
@until_shown
def test_a_directory_that_was_absent_is_used_by_an_operation_on_its_name(
    lab: NfsLab, path: str, gap: Gap
) -> None:
    """A cached absence hides a new directory from every plain call; mkdir of its name does not care, at
    any depth: it goes up until somebody knows better, and down again.
    """
    run = lab.fresh()
    levels = [path[:n] for n in range(1, len(path) + 1, 2)]
    with gap.between(lab):
        for level in levels:
            shows(all(lab.b.call(naive_absences, f"{run}/{level}").values()))
        gap.wait()
        lab.a.call(ours, run, "make_dir", path)
        gap.wait()
        for level in levels:
            shows(all(lab.b.call(naive_absences, f"{run}/{level}").values()))
        shows(all(lab.b.call(naive_absences_after_useless_looks, f"{run}/x").values()))
        lab.b.call(ours, run, "make_dir", path)
        lab.b.call(ours, run, "replace", f"{path}/f", b"from b")
    assert lab.server.call(os.listdir, f"{lab.behind(run)}/{path}") == ["f"]


@until_shown
def test_a_tree_that_was_absent_is_read_after_a_refresh(lab: NfsLab) -> None:
    """Readers make nothing: opening the nearest directory that is there, then down, is enough."""
    run = lab.fresh()
    for path in ("x/y", "x"):
        shows(all(lab.b.call(naive_absences, f"{run}/{path}").values()))
    time.sleep(GAP_S)
    lab.a.call(ours, run, "make_dir", "x/y")
    lab.a.call(ours, run, "replace", "x/y/f", b"deep")
    time.sleep(GAP_S)
    shows(lab.b.call(is_absent, f"{run}/x/y/f"))
    assert lab.b.call(ours_fresh, run, "read", "x/y/f") == b"deep"


@gaps
@until_shown
def test_a_file_that_was_absent_is_read_after_its_parent_was_opened(lab: NfsLab, gap: Gap) -> None:
    """A plain open believes the cached absence; after a refresh of its directory it is asked for again.

    Over v3 and within one tick the refresh sees nothing new either: the next change of the directory,
    for which the log's writers see (``touch``), ends that.
    """
    hidden = 0
    for _ in range(rounds(lab, gap)):
        run = lab.fresh()
        with gap.between(lab):
            lab.a.call(ours, run, "touch", "")  # this tick's first change
            for _ in range(2):
                assert lab.b.call(is_absent, f"{run}/f")
            gap.wait()
            lab.a.call(ours, run, "replace", "f", b"here")
            gap.wait()
            shows(lab.b.call(is_absent, f"{run}/f"))
            try:
                assert lab.b.call(ours_fresh, run, "read", "f") == b"here"
            except NotFoundError:
                hidden += 1
        if hidden:
            time.sleep(GAP_S)
            lab.a.call(ours, run, "touch", "")
            assert lab.b.call(ours_fresh, run, "read", "f") == b"here"
            break
    if hides(lab, gap):
        shows(hidden > 0)
    else:
        assert hidden == 0, f"{hidden} were not seen"


@gaps
@until_shown
def test_a_listing_is_no_synchronisation(lab: NfsLab, gap: Gap) -> None:
    """Over v3 a directory that changed twice within one tick is listed as it was after the first; a name
    that is asked for by an operation is answered by the server all the same.
    """
    run, missed = lab.fresh(), 0
    with gap.between(lab):
        for n in range(rounds(lab, gap)):
            lab.a.call(ours, run, "make_dir", f"p{n}")
            gap.wait()
            lab.b.call(os.listdir, run)
            lab.a.call(ours, run, "make_dir", f"q{n}")
            gap.wait()
            missed += f"q{n}" not in lab.b.call(os.listdir, run)
            lab.b.call(ours, run, "make_dir", f"q{n}")
            lab.b.call(ours, run, "replace", f"q{n}/f", b"")
            if missed:
                break
    if hides(lab, gap):
        shows(missed > 0)
    else:
        assert missed == 0, f"{missed} listings missed a name"
    assert len(lab.server.call(os.listdir, lab.behind(run))) == 2 * n + 2


# -- what is replaced ---------------------------------------------------------------------------


@gaps
@until_shown
def test_a_file_that_was_replaced_reads_as_the_new_one(lab: NfsLab, gap: Gap) -> None:
    """A plain open of what another node renamed over gets the old one, where its inode lives on by a
    second name; with the directory opened first it is the new one.
    """
    run, plain, stale = lab.fresh(), 0, 0
    lab.a.call(ours, run, "replace", "pointer", b"0000")
    with gap.between(lab):
        for n in range(rounds(lab, gap)):
            old, new = b"%04d" % n, b"%04d" % (n + 1)
            lab.a.call(os.link, f"{run}/pointer", f"{run}/kept{n}")
            gap.wait()
            if not hides(lab, gap):
                assert lab.b.call(ours_fresh, run, "read", "pointer") == old
            lab.b.call(naive_read, f"{run}/pointer")
            gap.wait()
            lab.a.call(ours, run, "replace", "pointer", new)
            gap.wait()
            plain += lab.b.call(naive_read, f"{run}/pointer") != new
            stale += lab.b.call(ours_fresh, run, "read", "pointer") != new
            if plain and stale:
                break
    shows(plain > 0)
    if hides(lab, gap):
        shows(stale > 0)
    else:
        assert stale == 0, f"{stale} were the old one"


@until_shown
def test_a_rewrite_in_place_is_missed_and_a_replacement_is_not(lab: NfsLab) -> None:
    """Over v3 a reader misses what was rewritten with the same size within one tick. Nothing in ckptfs
    does that: whatever changes is another file under the name.
    """
    run, plain = lab.fresh(), 0
    behind = f"{lab.behind(run)}/f"
    with stopped(lab):
        lab.a.call(write, f"{run}/plain", b"0000")
        for n in range(rounds(lab, Gap.NONE)):
            lab.b.call(naive_read, f"{run}/plain")
            lab.a.call(rewrite, f"{run}/plain", b"%04d" % (n + 1))
            plain += lab.b.call(naive_read, f"{run}/plain") != b"%04d" % (n + 1)
            if plain:
                break
    if lab.version == "3":
        shows(plain > 0)
    lab.a.call(ours, run, "replace", "f", b"old!")
    before = lab.server.call(os.stat, behind).st_ino
    assert lab.b.call(ours_fresh, run, "read", "f") == b"old!"
    time.sleep(GAP_S)
    lab.a.call(ours, run, "replace", "f", b"new!")
    assert lab.server.call(os.stat, behind).st_ino != before
    assert lab.b.call(ours_fresh, run, "read", "f") == b"new!"


@until_shown
def test_a_file_that_is_replaced_all_the_time_is_read_whole(lab: NfsLab) -> None:
    """Reads in a loop during replacements by another node: old or new, never torn, no ESTALE comes out."""
    run = lab.fresh()
    lab.a.call(ours, run, "replace", "f", b"0" * 4000)
    count, found = at_once(
        lambda: lab.a.call(replace_for, run, "f", 1.5),
        lambda: lab.b.call(our_reads, run, "f", 1.5),
    )
    assert count > 1
    assert set(found) == {"whole"}, found


# -- what is held open --------------------------------------------------------------------------


@until_shown
def test_a_held_file_that_is_replaced_reads_old_or_new_but_whole(lab: NfsLab) -> None:
    """A descriptor of a file that another node has replaced gives ESTALE over v3; the library's reader
    opens the name again, and says so where another file has taken it.
    """
    run = lab.fresh()
    try:
        for name in ("f", "g"):
            lab.a.call(ours, run, "replace", name, b"old!")
            lab.b.call(hold, name, f"{run}/{name}")
            lab.b.call(hold_reader, f"ours {name}", run, name)
        lab.a.call(ours, run, "replace", "f", b"new!")
        lab.a.call(ours, run, "replace", "g", b"longer than before")
        if lab.version == "3":
            # The server keeps a file that it has just served for a moment.
            shows(lab.b.call(goes_stale, "f", 20.0))
            shows(lab.b.call(goes_stale, "g", 20.0))
            assert lab.b.call(read_held, "ours f", 4) == b"new!"
            with pytest.raises(StaleError):
                lab.b.call(read_held, "ours g", 4)
        else:
            for name in ("f", "g"):
                assert lab.b.call(read_held_naively, name, 4) == b"old!"
                assert lab.b.call(read_held, f"ours {name}", 4) == b"old!"
    finally:
        lab.b.call(close_all)


@until_shown
def test_a_mapped_file_that_is_cut_short_is_zeros_or_a_dead_process(lab: NfsLab) -> None:
    """A map of a file that another node truncates shows zeros over 4.2 and kills over v3 (SIGBUS); the
    library's reader maps nothing, and names what it misses.
    """
    run, size_bytes = lab.fresh(), 64 << 10
    try:
        lab.a.call(write, f"{run}/f", b"x" * size_bytes)
        assert lab.b.call(hold_mapped, "map", f"{run}/f") == b"xxxx"
        lab.b.call(hold_reader, "ours", run, "f")
        lab.a.call(os.truncate, f"{run}/f", 100)
        time.sleep(GAP_S)
        lab.b.call(os.listdir, run)
        lab.b.call(naive_read, f"{run}/f")  # any open informs the client
        ended, byte = lab.b.call(touch_mapped, "map", size_bytes - 1)
        assert ended == signal.SIGBUS or byte == b"\0", (ended, byte)
        with pytest.raises(IntegrityError, match="ends at byte 100"):
            lab.b.call(read_held, "ours", size_bytes)
        assert lab.b.call(maps, run) == [f"{run}/f"]
    finally:
        lab.b.call(close_all)
    assert lab.b.call(maps, run) == []


@until_shown
def test_a_tree_with_a_file_that_is_open_on_this_node_is_removed_but_for_it(lab: NfsLab) -> None:
    """rmtree fails with "Directory not empty", because the client keeps an open file under another name;
    ours removes the rest, and what stayed goes at the last close (needs: kills the trainer).
    """
    run = lab.fresh()
    for tree in ("plain", "ours"):
        lab.a.call(ours, run, "make_dir", f"{tree}/below")
        for name in ("f", "below/g"):
            lab.a.call(ours, run, "replace", f"{tree}/{name}", b"data")
        lab.b.call(hold, tree, f"{run}/{tree}/f")
    try:
        assert lab.b.call(naive_rmtree, f"{run}/plain") == os.strerror(errno.ENOTEMPTY)
        lab.b.call(ours, run, "remove_tree", "ours")
        (left,) = lab.b.call(os.listdir, f"{run}/ours")
        assert left.startswith(".nfs")
        assert lab.b.call(read_held_naively, "ours", 4) == b"data"
    finally:
        lab.b.call(close_all)
    lab.b.call(ours, run, "remove_tree", "ours")
    with pytest.raises(NotFoundError):
        lab.b.call(ours, run, "list", "ours")
