"""Checkpoints of parts: what tickets, sealed parts and decisions promise, on one disk and on several."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckptfs.commit.catalog.catalog import find
from ckptfs.commit.catalog.locate import locate
from ckptfs.commit.catalog.unlogged import list_unlogged
from ckptfs.commit.decisions import may_abort, may_seal, may_seal_part
from ckptfs.commit.delete.deletion_steps import REMOVED_BY_HAND
from ckptfs.commit.log.append import catch_up
from ckptfs.commit.log.entries import Abort, Decided, Delete, Gone, Outcome, Part, PartRef
from ckptfs.commit.log.fold import fold_entries, fold_entry
from ckptfs.commit.operations import drive
from ckptfs.commit.ownership.claim import claim
from ckptfs.commit.ownership.recovery import encode_record
from ckptfs.commit.ownership.run import Run
from ckptfs.commit.parts.parts import read_home, state_from_word
from ckptfs.commit.parts.tickets import Ticket, TicketPart, begin_parts
from ckptfs.commit.paths import ATTEMPTS, LOG
from ckptfs.commit.save.spec import IfExists
from ckptfs.commit.session import Place, start_session
from ckptfs.commit.state import Standing, standing
from ckptfs.control.control import Control
from ckptfs.errors import (
    AccessError,
    CollectiveError,
    CommitConflictError,
    CommitInDoubtError,
    FencedError,
    IncompleteCheckpointError,
    NoSpaceError,
    NotFoundError,
    StateError,
    UriError,
)
from ckptfs.storage.local import LocalStorage
from ckptfs.testing.faults import Action, Fail, Fault, FaultyStorage, Lose, Plan
from ckptfs.testing.world import simulate
from ckptfs.uri import Uri
from tests.commit.logs import G1, G2, fence, folded, reread, seal
from tests.crash import rig
from tests.crash.cast import HOME, NAME_OF, PARTS, ROOT, Cast, contents, save_part


@pytest.fixture(params=[True, False], ids=["shared", "nodes"])
def cast(request: pytest.FixtureRequest, tmp_path: Path) -> Cast:
    """A driver and two groups, on one disk or each with its own."""
    return Cast(str(tmp_path), request.param)


@pytest.fixture
def apart(tmp_path: Path) -> Cast:
    """Each with a disk of its own."""
    return Cast(str(tmp_path), shared=False)


@pytest.fixture
def together(tmp_path: Path) -> Cast:
    """All with one disk."""
    return Cast(str(tmp_path), shared=True)


@pytest.fixture
def held(cast: Cast) -> Iterator[Run]:
    """The run, held by the driver."""
    with cast.session(HOME) as session, claim(session) as run:
        yield run


def part(save_id: str = "p", of: str = "s", **more: object) -> Part:
    """A sealed part in B of save ``s``, which has its home in A."""
    made = Part(save_id, of, "actor", G1, "step_1", 1, "A", "host-a", ("B",), "d")
    return replace(made, **more)  # type: ignore[arg-type]


WHOLE = seal("s", "step_1", parts=(PartRef("actor", "p", "d", ("B",), ("host-b",)),))


# -- what logs mean --------------------------------------------------------------------------------


def test_a_sealed_part_commits_nothing() -> None:
    """By its own log alone it is in doubt, with its home not committed; only home's seal commits."""
    alone = {"B": folded(part())}
    assert standing("p", alone) is Standing.IN_DOUBT
    assert standing("p", {**alone, "A": folded(fence(G1))}) is Standing.PENDING
    assert standing("p", {**alone, "A": folded(WHOLE)}) is Standing.COMMITTED
    assert standing("p", {"B": folded(part(), WHOLE)}) is Standing.COMMITTED
    assert standing("s", {"B": folded(part(), WHOLE)}) is Standing.COMMITTED


def test_only_home_releases_a_sealed_part() -> None:
    """An abort in its own log is void; home's abort, delete, or commit of another try is not."""
    assert standing("p", {"B": folded(part(), Abort("p", G2))}) is Standing.IN_DOUBT
    here = folded(part())
    assert standing("p", {"B": here, "A": folded(Abort("s", G2))}) is Standing.ABORTED
    deleted = {"B": here, "A": folded(WHOLE, Delete("s", G1))}
    assert standing("p", deleted) is Standing.DELETED
    other = replace(WHOLE, parts=(replace(WHOLE.parts[0], save_id="p2"),))
    assert standing("p", {"B": here, "A": folded(other)}) is Standing.ABORTED


def test_a_part_is_sealed_under_its_own_generation_only() -> None:
    """A newer fence, an abort of the whole or of the part, and a whole that is sealed refuse it."""
    assert may_seal_part(folded(fence(G1)), part()) == part()
    for state in (
        folded(fence(G2)),
        folded(Abort("s", G1)),
        folded(Abort("p", G1)),
        folded(Decided("s", Outcome.ABORTED)),
        folded(WHOLE),
    ):
        assert may_seal_part(state, part()) != part()


def test_home_seals_only_parts_that_its_own_log_holds() -> None:
    """Of parts that are in home itself the seal is refused unless they are promised there as said."""
    ref = replace(WHOLE.parts[0], domains=("A",))
    whole, mine = replace(WHOLE, parts=(ref,)), part(domains=("A",))
    assert may_seal(folded(fence(G1), mine), whole, replace=False) == whole
    for state in (folded(fence(G1)), folded(fence(G1), replace(mine, digest="other"))):
        assert may_seal(state, whole, replace=False) != whole


def test_a_sealed_part_cannot_be_aborted() -> None:
    """No process appends an abort of it, whatever its generation."""
    assert not isinstance(may_abort(folded(part()), "p", G2), Abort)


def test_versions_without_parts_judge_no_part() -> None:
    """They abort what has a lower ``base`` in its record: a part's record has none by that name, and
    this version finds it under another.
    """
    raw = json.loads(encode_record("p", "step_1/actor", G1, of="s", home="A"))
    assert "base" not in raw
    assert raw["part_base"] == list(G1)
    assert raw["of"] == "s"


def test_a_log_that_refers_to_itself_is_read_to_an_end() -> None:
    """A log in a bucket is not trusted: a part of itself is just a part of nothing."""
    assert standing("p", {"B": folded(part(of="p"))}) is Standing.IN_DOUBT


def test_a_word_stands_for_homes_log() -> None:
    """Committed, aborted and deleted are reported; older ones that it leaves out are gone; those of its
    own generation are open.
    """
    other = replace(WHOLE, save_id="gone", seq=2)
    home = folded(fence(G1), WHOLE, other, Delete("gone", G1), Abort("bad", G1), fence(G2))
    word = read_home("A", "host-a", home)
    assert word.live == (WHOLE,)
    here = folded(
        part(), part("q", "old"), part("r", "open", base=G2), part("x", "not ours", home="Z")
    )
    state = state_from_word(word, here)
    assert state.save("s").seal == WHOLE
    assert state.save("old").deleted
    assert state.save("bad").aborted
    assert state.save("gone").deleted
    assert not {"open", "not ours"} & set(state.saves)


def test_a_word_tells_of_what_ended_without_walking_it() -> None:
    """Settled ones too, as many as a word holds, and only of what other disks may hold a part of."""
    state = folded(fence(G1))
    for n in range(300):
        ref = replace(WHOLE.parts[0], save_id=f"p{n}")
        whole = seal(f"s{n}", f"step_{n}", seq=n + 1, parts=(ref,))
        other = seal(f"here{n}", f"other_{n}", seq=n + 1)
        state = fold_entries(
            state,
            [Abort(f"bad{n}", G1)]
            + [body for one in (other, whole) for body in (one, Delete(one.save_id, G1))]
            + [Gone(other.save_id, G1), Gone(whole.save_id, G1)],
        )
    state = fold_entry(state, seal("last", seq=301))
    assert set(state.saves.living) == {"last"}
    word = read_home("A", "host-a", state)
    assert word.deleted == tuple(f"s{n}" for n in range(300 - 256, 300))
    assert word.aborted == tuple(f"bad{n}" for n in range(300 - 256, 300))
    assert read_home("A", "host-a", reread(state)) == word


def test_a_word_is_short_where_all_parts_lie_at_home() -> None:
    """On shared storage a ticket carries no seals: everybody reads the log."""
    ref = replace(WHOLE.parts[0], domains=("A",))
    assert read_home("A", "h", folded(replace(WHOLE, parts=(ref,)))).live == ()


# -- tickets ---------------------------------------------------------------------------------------


def test_what_travels_shows_no_credentials_and_commits_nothing(held: Run, cast: Cast) -> None:
    """A ticket that was pickled gives the same parts, refuses to commit, and hides its options."""
    options = {"key": "AKIA-secret"}
    ticket = begin_parts(held, "step_1", 1, ["actor"], storage_options=options)
    copy: Ticket = pickle.loads(pickle.dumps(ticket))
    assert copy.part("actor") == ticket.part("actor")
    assert copy.part("actor").storage_options == options
    for shown in (copy, ticket.part("actor")):
        assert "secret" not in repr(shown)
    with pytest.raises(StateError, match="this ticket is a copy"):
        copy.commit([])
    with pytest.raises(StateError, match="no part 'critic'"):
        ticket.part("critic")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("step_1", []),
        ("step_1", ["a", "a"]),
        ("step_1", ["a/b"]),
        ("step_1", [".metadata"]),
        ("step_1", ["ckptfs.json"]),
        ("step_1", [""]),
        (".ckptfs", ["a"]),
        ("a/b", ["a"]),
    ],
)
def test_names_that_cannot_be_directories_are_refused(
    together: Cast, name: str, parts: list[str]
) -> None:
    """Before anything is made."""
    with together.session(HOME) as session, claim(session) as run:
        before = os.listdir(f"{together.directory(HOME)}/{ATTEMPTS}")
        with pytest.raises((StateError, UriError)):
            begin_parts(run, name, 1, parts)
        assert os.listdir(f"{together.directory(HOME)}/{ATTEMPTS}") == before


def test_commit_says_which_part_is_missing_and_may_be_called_again(held: Run, cast: Cast) -> None:
    """Nothing is decided without all parts; with them it is, once; calling again gives the same."""
    ticket = begin_parts(held, "step_1", 1, list(PARTS))
    sealed = {name: cast.save(ticket, name, "one") for name in PARTS}
    with pytest.raises(IncompleteCheckpointError, match="part critic of step_1 is missing"):
        ticket.commit([sealed["actor"], sealed["driver"]])
    assert cast.look("one", "driver") == "none"
    decision = ticket.commit(list(sealed.values()), metrics={"loss": 0.5})
    assert decision.seal.metrics == (("loss", 0.5),)
    assert ticket.commit(list(sealed.values())).seal == decision.seal
    assert cast.look("one", "driver") == "whole"


@pytest.mark.parametrize("after", range(3, 15, 3))
def test_a_commit_in_doubt_is_settled_by_committing_again(together: Cast, after: int) -> None:
    """The seal's answer is lost and it lands later, at any moment of the second call, which has another
    part: one seal counts, the decision is that one, and the manifest is the one that it names.
    """
    plan = together.plan = Plan()
    with together.session(HOME) as session, claim(session) as run:
        together.plan = None
        ticket = begin_parts(run, "step_1", 1, list(PARTS))
        sealed = [together.save(ticket, name, "one") for name in PARTS]
        other = together.save(ticket, "actor", "one")
        plan.add(Fault("create", "*/log/*", 1, Lose(done=False, later=True, after=after + 1)))
        plan.add(Fault("create", "*/log/*", 2, Fail(AccessError("not now"))))
        with pytest.raises(CommitInDoubtError):
            ticket.commit(sealed)
        decision = ticket.commit([other, *sealed[1:]])  # too late for another part
        plan.deliver()
    assert all(together.look("one", name) == "whole" for name in PARTS)
    with together.session(HOME, write=False) as session:
        state = drive(catch_up(), session.storage)
        sealed_at = state.save(ticket.save_id).seal
        assert sealed_at is not None
        assert sealed_at == decision.seal
        assert (
            drive(find(sealed_at, session.caps.shape, ROOT), session.storage).manifest is not None
        )


def test_parts_of_another_ticket_are_refused(held: Run, cast: Cast) -> None:
    """A sealed part belongs to the ticket that it was saved for."""
    first = begin_parts(held, "step_1", 1, ["actor"])
    second = begin_parts(held, "step_2", 2, ["actor"])
    sealed = cast.save(first, "actor", "one")
    with pytest.raises(StateError, match="not saved for this ticket"):
        second.commit([sealed])


def test_the_nodes_of_a_part_are_recorded(held: Run, cast: Cast) -> None:
    """Every sealed part, and the seal of the whole, tell which node holds it."""
    ticket = begin_parts(held, "step_1", 1, list(PARTS))
    sealed = [cast.save(ticket, name, "one") for name in PARTS]
    decision = ticket.commit(sealed)
    for name, ref in zip(PARTS, decision.seal.parts, strict=True):
        assert ref.hosts[0].startswith(f"{PARTS[name]}/")
    assert sealed[0].nodes == {sealed[0].ref.domains[0]: sealed[0].ref.hosts[0]}


def test_a_part_that_is_saved_again_is_taken_once(held: Run, cast: Cast) -> None:
    """The last one that is passed is committed; the next owner removes the other's bytes."""
    ticket = begin_parts(held, "step_1", 1, ["actor"])
    cast.save(ticket, "actor", "two")  # other bytes, of a group that then died, say
    decision = ticket.commit([cast.save(ticket, "actor", "one")])
    cast.publish(decision)
    assert cast.look("one", "actor") == "whole"
    held.release()
    cast.play("three")
    assert cast.look("one", "actor") == "whole"
    assert not cast.debris()


def test_an_abandoned_ticket_leaves_nothing_that_home_reaches(held: Run, cast: Cast) -> None:
    """Parts at home go at once, those elsewhere with the next word; a late part is refused."""
    ticket = begin_parts(held, NAME_OF["two"], 2, list(PARTS))
    cast.save(ticket, "driver", "two")
    cast.save(ticket, "actor", "two")
    ticket.abandon()
    if cast.shared:
        assert not cast.debris()
        with pytest.raises(CommitConflictError, match="given up"):
            cast.save(ticket, "critic", "two")
    cast.act(held, "three")
    assert not cast.debris()
    assert cast.look("two", "actor") == "none"


def test_a_ticket_of_a_fenced_driver_is_void(cast: Cast) -> None:
    """After a takeover neither its parts nor its commit change anything."""
    with cast.session(HOME) as session:
        old = claim(session)
        ticket = begin_parts(old, NAME_OF["two"], 2, list(PARTS))
        sealed = [cast.save(ticket, name, "two") for name in PARTS]
        cast.play("three")
        with pytest.raises(FencedError, match="taken over by generation 2"):
            ticket.commit(sealed)
        with pytest.raises(FencedError, match="generation 2"):
            begin_parts(old, "step_4", 4, ["actor"])
        for name in PARTS:
            with pytest.raises(FencedError, match="generation 2"):
                cast.save(ticket, name, "two")
        old.release()
    assert cast.look("two", "driver") == "none"
    assert not cast.debris()


class _Takeover(Plan):
    """Lets another process take the run right before an operation of the driver."""

    def __init__(self, cast: Cast) -> None:
        super().__init__()
        self.cast, self.before = cast, ("", "")

    def begin(self, op: str, key: str) -> Action | None:
        wanted, part = self.before
        if wanted and op == wanted and part in key:
            self.before = ("", "")
            self.cast.play("three")
        return super().begin(op, key)


def test_a_driver_that_loses_the_run_while_it_begins_is_told_so(together: Cast) -> None:
    """The error is not that the directory of its attempt is missing: it would begin again."""
    plan = together.plan = _Takeover(together)
    with together.session(HOME) as session:
        old = claim(session)
        together.plan = None
        plan.before = ("sync", f"{ATTEMPTS}/")
        with pytest.raises(FencedError, match="taken over by generation 2"):
            begin_parts(old, NAME_OF["two"], 2, list(PARTS))
        old.release()
    assert not together.debris()


def test_a_driver_that_loses_the_run_while_it_commits_is_told_so(together: Cast) -> None:
    """Not of a missing file of its own, and nothing of its checkpoint is committed."""
    plan = together.plan = _Takeover(together)
    with together.session(HOME) as session:
        old = claim(session)
        together.plan = None
        ticket = begin_parts(old, NAME_OF["two"], 2, list(PARTS))
        sealed = [together.save(ticket, name, "two") for name in PARTS]
        plan.before = ("open_write", "ckptfs.json")
        with pytest.raises(FencedError, match="taken over by generation 2"):
            ticket.commit(sealed)
        old.release()
    assert together.look("two", "driver") == "none"


def test_a_group_knows_a_newer_owner_that_home_does_not(apart: Cast) -> None:
    """Somebody claimed the group's own disk: the ticket is refused there and nothing is written."""
    with apart.session("a") as session:
        for _ in range(2):
            claim(session).release()
    with apart.session(HOME) as session, claim(session) as run:
        ticket = begin_parts(run, "step_1", 1, ["actor"])
        with pytest.raises(FencedError, match="generation 2"):
            apart.save(ticket, "actor", "one")
    assert not [path for path in apart.debris() if "/a/" in path]


# -- names that are used again -------------------------------------------------------------------


def again(run: Run, cast: Cast, label: str, name: str) -> None:
    """Replace the checkpoint of a name by parts with other bytes."""
    ticket = begin_parts(run, name, None, list(PARTS), if_exists=IfExists.REPLACE)
    decision = ticket.commit([cast.save(ticket, part, label) for part in PARTS])
    cast.publish(decision)


def holds(cast: Cast, label: str, name: str, part: str = "actor") -> bool:
    """Whether a reader finds the bytes of ``label`` under ``name``."""
    with cast.session(PARTS[part], write=False) as session:
        found = locate(session, f"{name}/{part}")
        assert found.manifest is not None
        data = next(f for f in found.manifest.files if f.path.endswith(".distcp"))
        return session.storage.read(f"{found.home}/{data.path}") == contents(label, part)


def test_a_taken_name_is_refused_unless_replacing_is_asked(held: Run, cast: Cast) -> None:
    """The old parts stay until the new ones are committed, and go after a further commit."""
    cast.act(held, "one")
    with pytest.raises(CommitConflictError, match="committed already"):
        begin_parts(held, "step_1", 1, list(PARTS))
    again(held, cast, "uno", "step_1")
    assert holds(cast, "uno", "step_1")
    cast.act(held, "two")
    cast.act(held, "three")  # its tickets tell the groups what went
    assert holds(cast, "uno", "step_1")
    for name, node in PARTS.items():
        where = Path(cast.directory(node), "step_1", name)
        assert len([*where.glob("*/*.distcp")]) == 1, name
    assert not cast.debris()


def test_parts_replace_a_save_without_parts_and_the_other_way(together: Cast) -> None:
    """Nothing of the old kind stays visible: no ``.metadata`` next to parts, no part next to it."""
    run_at = Path(together.directory(HOME))
    with together.session(HOME) as session, claim(session) as run:
        rig.save(session, "step_1", "plain", run)
        again(run, together, "uno", "step_1")
        together.act(run, "two")
        assert holds(together, "uno", "step_1")
        assert not Path(run_at, "step_1/.metadata").exists()
        rig.save(session, "step_1", "eins", run, replace=True)
        together.act(run, "three")
        names = {path.name for path in Path(run_at, "step_1").iterdir()}
        assert not names & set(PARTS)
        assert {".metadata", "ckptfs.json"} <= names
        assert not together.debris()


def test_parts_that_were_removed_by_hand_are_saved_again(
    together: Cast, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says that they were removed, whatever takes the name then: parts again, or a save without."""
    step = Path(together.directory(HOME), "step_1")
    with together.session(HOME) as session, claim(session) as run:
        together.act(run, "one")
        shutil.rmtree(step)
        together.act(run, "uno")
        assert "step_1 was removed by hand" in caplog.text
        assert holds(together, "uno", "step_1")
        deletes = deletes_in(together, HOME)
        assert [entry["reason"] for entry in deletes] == [REMOVED_BY_HAND]
        assert not together.debris()
        shutil.rmtree(step)
        rig.save(session, "step_1", "plain", run)
        shutil.rmtree(step)
        together.act(run, "one")
    assert holds(together, "one", "step_1")
    with together.session(HOME, write=False) as session:
        state = drive(catch_up(), session.storage)
    assert [s.gone for s in state.saves.living.values() if s.deleted] == []
    assert len(deletes_in(together, HOME)) == 3


def test_parts_of_which_anything_is_left_keep_their_name(together: Cast) -> None:
    """One part, the manifest of the whole, or a part that waits for its projection: nothing is entered."""
    step = Path(together.directory(HOME), "step_1")
    with together.session(HOME) as session, claim(session) as run:
        decision = together.act(run, "one")
        entries = len(os.listdir(session.storage.local_path(LOG) or ""))
        for left in PARTS:
            for other in {*PARTS} - {left}:
                shutil.move(step / other, f"{together.base}/{other}")
            shutil.move(step / "ckptfs.json", f"{together.base}/ckptfs.json")
            shutil.move(step / decision.seal.save_id, f"{together.base}/whole")
            with pytest.raises(CommitConflictError, match="committed already"):
                begin_parts(run, "step_1", 1, list(PARTS))
            shutil.move(f"{together.base}/whole", step / decision.seal.save_id)
            shutil.move(f"{together.base}/ckptfs.json", step / "ckptfs.json")
            for other in {*PARTS} - {left}:
                shutil.move(f"{together.base}/{other}", step / other)
        for part in PARTS:
            shutil.rmtree(step / part)
        with pytest.raises(CommitConflictError, match="committed already"):
            begin_parts(run, "step_1", 1, list(PARTS))
        assert len(os.listdir(session.storage.local_path(LOG) or "")) == entries


def test_parts_on_a_disk_that_the_driver_does_not_reach_keep_their_name(apart: Cast) -> None:
    """They may be there, or not: only a driver with ranks that reach all disks records what was removed."""
    apart.play("one")
    for node in {*PARTS.values()}:
        shutil.rmtree(f"{apart.directory(node)}/step_1")
    with (
        apart.session(HOME) as session,
        claim(session) as run,
        pytest.raises(CommitConflictError, match="committed already"),
    ):
        begin_parts(run, "step_1", 1, list(PARTS))
    assert deletes_in(apart, HOME) == []

    nodes = (HOME, "a", "b")

    def together(control: Control) -> Ticket:
        where = apart.directory(nodes[control.rank])
        session = start_session(control, LocalStorage(ROOT, directory=where), Place(), write=True)
        with claim(session) as run:
            ticket = begin_parts(run, "step_1", 1, list(PARTS))
            mine = [name for name, node in PARTS.items() if node == nodes[control.rank]]
            ticket.commit([apart.save(ticket, name, "uno") for name in mine])
        return ticket

    for end in simulate(3, together, nodes=nodes, job_id="job:cast"):
        end.get()
    for node in nodes:
        assert [entry["reason"] for entry in deletes_in(apart, node)] == [REMOVED_BY_HAND], node
    for name in PARTS:
        assert holds(apart, "uno", "step_1", name)


def deletes_in(cast: Cast, node: str) -> list[dict[str, object]]:
    """The deletes that a node's log holds."""
    paths = sorted(Path(cast.directory(node), LOG).iterdir())
    entries = [json.loads(path.read_text()) for path in paths]
    return [entry for entry in entries if entry["kind"] == "delete"]


# -- several ranks, several domains ----------------------------------------------------------------

NODES = ("a", "a", "b")


def in_group(cast: Cast, ticket: TicketPart, plan: Plan | None = None) -> list[object]:
    """Three ranks on two nodes save one part; what each came to."""

    def save(control: Control) -> object:
        where = cast.directory(control.world.node)
        storage: LocalStorage | FaultyStorage = LocalStorage(ROOT, directory=where)
        if plan is not None and control.rank == 1:
            storage = FaultyStorage(storage, plan)
        session = start_session(control, storage, Place(), write=True)
        return save_part(session, ticket, contents("one", "actor"))

    return [
        end.value if end.error is None else end.error
        for end in simulate(len(NODES), save, nodes=NODES, job_id="group")
    ]


def test_a_group_of_several_nodes_saves_one_part(held: Run, cast: Cast) -> None:
    """One sealed part, equal on all ranks, with a domain for each disk and the hosts of each."""
    ticket = begin_parts(held, "step_1", 1, ["actor"])
    sealed = in_group(cast, ticket.part("actor"))
    refs = {one.ref for one in sealed}  # type: ignore[attr-defined]
    assert len(refs) == 1
    (ref,) = refs
    assert len(ref.domains) == len(ref.hosts) == (1 if cast.shared else 2)
    decision = ticket.commit([sealed[0]])  # type: ignore[list-item]
    cast.publish(decision)
    for node in ("a", "b"):
        assert cast.look("one", "actor", at=node) == "whole"


def test_a_failure_of_one_rank_fails_the_part_on_all_and_it_can_be_saved_again(
    held: Run, cast: Cast
) -> None:
    """Nothing is sealed, nothing stays, and the ticket is as good as before."""
    ticket = begin_parts(held, "step_1", 1, ["actor"])
    plan = Plan([Fault("open_write", "*.distcp", 1, Fail(NoSpaceError("no space")))])
    for error in in_group(cast, ticket.part("actor"), plan):
        assert isinstance(error, CollectiveError)
        assert error.all_are(NoSpaceError)
    sealed = in_group(cast, ticket.part("actor"))
    ticket.commit([sealed[2]])  # type: ignore[list-item]


def test_a_driver_of_several_domains_publishes_where_it_reaches(apart: Cast) -> None:
    """A run held by ranks on home's and another disk: the commit is known on both at once."""

    def drive_it(control: Control) -> str:
        where = apart.directory((HOME, "a")[control.rank])
        session = start_session(control, LocalStorage(ROOT, directory=where), Place(), write=True)
        with claim(session) as run:
            ticket = begin_parts(run, "step_1", 1, ["actor"])
            sealed = [apart.save(ticket, "actor", "one")] if control.rank == 0 else []
            ticket.commit(sealed)
        return "done"

    ends = simulate(2, drive_it, nodes=(HOME, "a"), job_id="job")
    assert [end.get() for end in ends] == ["done", "done"]
    assert apart.look("one", "actor") == "whole"
    assert apart.stock("one", "actor")


# -- finding ---------------------------------------------------------------------------------------


def test_a_whole_of_parts_is_no_checkpoint_to_load(cast: Cast) -> None:
    """Asked for the whole, or for a part that it has not, the reader gets the names of its parts."""
    cast.play("one")
    with cast.session(HOME, write=False) as session:
        with pytest.raises(StateError, match="consists of parts: actor, critic, driver"):
            locate(session, "step_1")
        with pytest.raises(NotFoundError, match="no part optimizer"):
            locate(session, "step_1/optimizer")


def test_on_the_wrong_node_a_reader_is_told_where_the_part_is(apart: Cast) -> None:
    """Which domain on which node: the one that has to be started again."""
    apart.play("one")
    said = apart.look("one", "actor", at="b")
    assert "part actor of step_1 is in domain" in said
    assert "on a/" in said
    missing = apart.look("one", "critic", at=HOME)
    assert "on b/" in missing


def test_a_copied_part_is_a_checkpoint_by_itself(together: Cast, tmp_path: Path) -> None:
    """``cp -r step_1 elsewhere``: each part is listed and found there without a log."""
    together.play("one")
    shutil.copytree(f"{together.directory(HOME)}/step_1", tmp_path / "copies")
    storage = LocalStorage(Uri.parse(f"{tmp_path}/copies"))

    def look(control: Control) -> set[str]:
        session = start_session(control, storage, Place(), write=False)
        over = LocalStorage(Uri.parse(str(tmp_path)))
        above = start_session(control, over, Place(), write=False)
        for name in PARTS:
            found = locate(session, name)
            assert found.manifest is not None
            assert found.manifest.name == name
        with pytest.raises(StateError, match="consists of parts"):
            locate(above, "copies")
        found_here = drive(list_unlogged({}, storage.root), storage)
        return {checkpoint.uri.name for checkpoint in found_here}

    (end,) = simulate(1, look)
    assert end.get() == set(PARTS)
