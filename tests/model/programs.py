"""The processes of the search: the real programs of ``ckptfs.commit``, put together as ranks do.

Each yields ``(domain, operation)``. What ranks tell each other over the control plane appears as
facts: ``Tell`` states one, ``Hear`` waits for it. They belong to the model alone.

    saver     one owner's part of one save, as Attempt drives it
    holder    prepare_run, then what the holder does
    reader    finds a live save and reads every file of it
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptfs.commit import decisions
from ckptfs.commit.catalog.catalog import find
from ckptfs.commit.decisions import Refusal, may_claim, unreleased
from ckptfs.commit.delete import deletion_steps
from ckptfs.commit.delete.delete_checkpoint import remove_unheld
from ckptfs.commit.delete.deletion_steps import delete_save, lies_nowhere, record_removal
from ckptfs.commit.log.append import Appended, Means, RefusedAppend, append, append_here, catch_up
from ckptfs.commit.log.entries import Fence, FenceMode, Generation, Kind, Outcome, Seal, Stamp
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.manifest import DomainRecord, FileRecord, Manifest, digest_of, encode_manifest
from ckptfs.commit.operations import (
    AtOnce,
    Read,
    RemoveMany,
    RemoveTree,
    Sync,
    Write,
    WriteFiles,
    is_long,
)
from ckptfs.commit.ownership import recovery
from ckptfs.commit.ownership.run import release_fence
from ckptfs.commit.parts.parts import read_home
from ckptfs.commit.paths import AttemptKeys
from ckptfs.commit.save import owner_steps
from ckptfs.commit.save.foreign_metadata import metadata_at
from ckptfs.commit.save.projection import InHand
from ckptfs.commit.state import catalog, next_seq, save_named
from ckptfs.errors import (
    CkptfsError,
    FencedError,
    IntegrityError,
    ManifestError,
    NotFoundError,
    StorageError,
)
from ckptfs.storage.base import Capabilities, Shape
from tests.model.disk import HalfRemove, Puts

Steps = Generator[Any, Any, Any]

FILESYSTEM = Capabilities(Shape.FILESYSTEM, True, True, False, True)  # noqa: FBT003
OBJECT = Capabilities(Shape.OBJECT, True, True, True, True)  # noqa: FBT003
PLAIN_OBJECT = Capabilities(Shape.OBJECT, True, True, False, True)  # noqa: FBT003


@dataclass(frozen=True, slots=True)
class Tell:
    """Others may learn ``fact`` from now on; ``value`` travels with it."""

    fact: tuple[str, ...]
    value: Any = None


@dataclass(frozen=True, slots=True)
class Hear:
    """Blocks until every one of ``facts`` was sent, and replies with the last one's value; or until
    any one of ``unless``, and replies False.
    """

    facts: tuple[tuple[str, ...], ...]
    unless: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Enter:
    """Blocks until no other process has the turn, and takes it."""

    turn: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Gives the turn to the next one."""

    turn: str


@dataclass(frozen=True, slots=True)
class What:
    """One save of a scenario. gen: of the run that holds it, None for a plain save.

    fine: whether the small files are written one by one (more interleavings). clears: whether it
    deletes what it replaced before it ends, or leaves that to ``clearer``. turns: whether it ends in
    turns with ``retirer``, as threads of one process do. last: whether what it replaced goes when it ends,
    because its run is held for it alone. swaps: an unfenced one that replaces the save which it found under
    its name, if that is the newest of it still (design note 18, not in the package). removes: such a one
    then removes what it replaced, as one that holds nothing.
    """

    save_id: str
    name: str = "s1"
    gen: Generation | None = None
    domains: tuple[str, ...] = ("A",)
    replace: bool = False
    artifact: Kind = Kind.CHECKPOINT
    fine: bool = False
    caps: Capabilities = FILESYSTEM
    clears: bool = True
    turns: bool = False
    last: bool = False
    swaps: bool = False
    removes: bool = False

    @property
    def keys(self) -> AttemptKeys:
        return AttemptKeys(self.caps.shape, self.name, self.save_id)

    def data_path(self, domain: str) -> str:
        """Path of this domain's data file, relative to the step directory."""
        if self.artifact is Kind.DIRECTORY:
            return f"model-{domain}.bin"
        return f"{self.save_id}/__{domain}_0.distcp"

    def data(self, domain: str) -> bytes:
        return f"data of {self.save_id} in {domain}".encode()

    def small(self) -> dict[str, bytes]:
        """The files next to the manifest."""
        files = {} if self.artifact is Kind.DIRECTORY else {".metadata": self.metadata}
        listed = tuple(
            FileRecord(self.data_path(d), len(self.data(d)), domain=d) for d in self.domains
        ) + tuple(FileRecord(f"{self.save_id}/{name}", len(data)) for name, data in files.items())
        manifest = Manifest(
            self.save_id,
            self.name,
            None,
            listed,
            tuple(DomainRecord(d, (0,)) for d in self.domains),
            artifact=self.artifact,
        )
        return {**files, "ckptfs.json": encode_manifest(manifest)}

    @property
    def metadata(self) -> bytes:
        return f"metadata of {self.save_id}".encode()

    def seal(self, base: Generation, seq: int) -> Seal:
        return Seal(
            self.save_id,
            base,
            seq,
            self.gen is not None,
            self.name,
            None,
            self.artifact,
            self.domains,
            digest_of(self.small()["ckptfs.json"]),
        )


def ids(prefix: str) -> Iterator[str]:
    """Write ids that tell their writer."""
    number = 0
    while True:
        yield f"{prefix}-{number}"
        number += 1


def on(domain: str, program: Generator[Any, Any, Any]) -> Steps:
    """Run a program of ``ckptfs.commit`` in one domain; a recursive removal takes two steps, and operations
    that may be done at once as many as they are.
    """
    program = one_by_one(program)
    try:
        op = next(program)
        while True:
            try:
                if isinstance(op, RemoveTree):
                    yield domain, HalfRemove(op.key)
                elif isinstance(op, RemoveMany):
                    yield domain, HalfRemove(keys=op.keys)
                reply = yield domain, op
            except Exception as error:  # noqa: BLE001 - all of them belong to the program
                op = program.throw(error)
            else:
                op = program.send(reply)
    except StopIteration as stop:
        return stop.value


def one_by_one(program: Generator[Any, Any, Any]) -> Steps:
    """The same program on a storage that does one operation at a time, in their order."""
    try:
        op = next(program)
        while True:
            if isinstance(op, AtOnce):
                op = program.send((yield from _answers(op.ops)))
                continue
            if isinstance(op, WriteFiles):
                writes = [Write(f"{op.folder}/{name}", data) for name, data in op.files]
                failed = [one for one in (yield from _answers(writes)) if one is not None]
                if failed:
                    op = program.throw(failed[0])
                    continue
                op = Sync(op.folder)
            try:
                reply = yield op
            except Exception as error:  # noqa: BLE001 - all of them belong to the program
                op = program.throw(error)
            else:
                op = program.send(reply)
    except StopIteration as stop:
        return stop.value


def _answers(ops: Sequence[Any]) -> Steps:
    """Do all of these operations; one that fails is answered with its error."""
    answers: tuple[Any, ...] = ()
    for one in ops:
        try:
            answers += ((yield one),)
        except StorageError as error:
            answers += (error,)
    return answers


def in_turns(domain: str, program: Generator[Any, Any, Any]) -> Steps:
    """Run a program as ``take_turns`` does, next to another thread of the same process."""
    yield domain, Enter(domain)
    program = one_by_one(program)
    failure: Exception | None
    try:
        op = next(program)
        while True:
            away = is_long(op)
            if away:
                yield domain, Leave(domain)
            try:
                if isinstance(op, RemoveTree):
                    yield domain, HalfRemove(op.key)
                reply = yield domain, op
                failure = None
            except Exception as error:  # noqa: BLE001 - all of them belong to the program
                reply, failure = None, error
            if away:
                yield domain, Enter(domain)
            op = program.send(reply) if failure is None else program.throw(failure)
    except StopIteration as stop:
        yield domain, Leave(domain)
        return stop.value


# -- saving -----------------------------------------------------------------------------------


def saver(what: What, domain: str, ending: str = "finish", after: tuple[str, ...] = ()) -> Steps:
    """One owner's part of one save. ``ending``: finish, or give up before the seal (undo)."""
    if after:
        yield domain, Hear((after,))
    lead = domain == what.domains[0]
    means = Means(domain, what.caps, ids(f"{what.save_id}-{domain}"))
    state = yield from on(domain, owner_steps.survey())
    in_hand = yield from _in_hand(what, domain)
    if lead:
        views = {domain: state}
        for other in what.domains[1:]:
            views[other] = yield from on(other, catch_up())
        newest = max(v.generation for v in views.values())
        if what.gen is not None and newest > what.gen:
            return "fenced"
        found = save_named(what.name, views)
        if not (what.replace or what.swaps) and found is not None:
            return "taken"
        base = what.gen or min(v.generation for v in views.values())
        seq = next_seq(base, views, fenced=what.gen is not None)
        expected = found if what.swaps else None
        yield domain, Tell(("base", what.save_id), (base, seq, expected))
        del views, found
    else:
        base, seq, expected = yield domain, Hear((("base", what.save_id),))
    try:
        begun = (means, state, in_hand)
        del state, in_hand
        return (yield from _save(what, domain, begun, base, seq, ending, expected))
    except CkptfsError as error:
        yield domain, Tell(("broke", what.save_id, type(error).__name__))
        return "broke"


def _save(
    what: What,
    domain: str,
    begun: tuple[Means, LogState, InHand | None],
    base: Generation,
    seq: int,
    ending: str,
    expected: Seal | None,
) -> Steps:
    keys = what.keys
    means, state, in_hand = begun
    del begun
    yield from on(domain, owner_steps.begin(keys, base))
    yield from _write(what, domain)
    if len(what.domains) > 1:
        # The barrier before the seals: no owner seals before all have written.
        yield domain, Tell(("written", what.save_id, domain))
        yield domain, Hear(tuple(("written", what.save_id, d) for d in what.domains))
    if ending == "undo":
        return (yield from on(domain, owner_steps.undo(keys, base, means)))
    seal = what.seal(base, seq)
    if expected is None:
        program = owner_steps.seal_save(seal, means, state, replace=what.replace)
    else:
        program = append_here(lambda seen: may_swap(seen, seal, expected), means, state)
    outcome = yield from on(domain, program)
    del program
    sealed = not isinstance(outcome, RefusedAppend)
    state = outcome.state
    reason = "" if sealed else str(outcome.reason)
    del outcome
    # One verdict over all owners, as the control plane would give it.
    yield domain, Tell(("sealed" if sealed else "refused", what.save_id, domain))
    if len(what.domains) > 1:
        verdicts = tuple(("sealed", what.save_id, d) for d in what.domains)
        refusals = tuple(("refused", what.save_id, d) for d in what.domains)
        good = yield domain, Hear(verdicts, unless=refusals)
    else:
        good = sealed
    if not good:
        yield domain, Tell(("failed", what.save_id))
        yield from _give_up(what, domain, means, base, sealed=sealed)
        return f"refused {reason}"
    yield domain, Tell(("acknowledged", what.save_id))
    run = in_turns if what.turns else on
    finishing = owner_steps.finish(
        seal,
        means.held_by(what.gen) if what.gen is not None and what.clears else means,
        state,
        in_hand=in_hand,
        at_once=what.last,
    )
    yield from run(domain, finishing)
    del finishing
    yield domain, Tell(("finished", what.save_id, domain))
    if what.removes and expected is not None:
        state = yield from on(domain, catch_up())
        # One that overtook this one before it was projected may not have projected its own yet.
        if state.generation == base and (yield from _shows(what, domain)):
            yield from on(domain, remove_unheld(expected, means.held_by(base), state))
    return "committed"


def _in_hand(what: What, domain: str) -> Steps:
    """What an Attempt on an object store knows of its name before it writes."""
    if what.caps.shape is Shape.FILESYSTEM:
        return None
    is_fresh = False
    if what.artifact is not Kind.DIRECTORY:
        is_fresh = (yield from on(domain, metadata_at(what.name))) is None
    return InHand(what.small(), is_fresh, leaves_record=False)


def _shows(what: What, domain: str) -> Steps:
    """Whether stock readers see this very save."""
    try:
        there: bytes = yield domain, Read(f"{what.name}/.metadata")
    except NotFoundError:
        return False
    return there == what.metadata


def may_swap(state: LogState, seal: Seal, expected: Seal) -> Seal | RefusedAppend[Refusal]:
    """Seal without a fence in the place of one save, if that is the newest of its name in this log."""
    same = [
        save
        for save in state.saves.values()
        if save.seal is not None
        and save.seal.name == seal.name
        and save.decided is not Outcome.ABORTED
        and not save.aborted
    ]
    newest = max(same, key=lambda save: save.sealed_at or 0, default=None)
    if newest is None or newest.save_id != expected.save_id or newest.deleted:
        return RefusedAppend(Refusal.CONFLICT, state)
    return decisions.may_seal(state, seal, replace=True)


def clearer(gen: Generation, after: What, caps: Capabilities) -> Steps:
    """What a run's background thread does once ``after`` is projected."""
    yield "A", Hear((("finished", after.save_id, "A"),))
    means = Means("A", caps, ids(f"clear-{after.save_id}"))
    outcome = yield from on("A", owner_steps.clear(means.held_by(gen), None))
    return "fenced" if isinstance(outcome, RefusedAppend) else "cleared"


def retirer(gen: Generation, name: str, caps: Capabilities, *, turns: bool = True) -> Steps:
    """What retention does during the next saves: the entry, and the bytes by a thread of its own.

    turns: the saves are of the same process; else of another one that has the same generation.
    """
    means = Means("A", caps, ids(f"retire-{name}")).held_by(gen)
    views = {"A": (yield from on("A", catch_up()))}
    found = [live.seal for live in catalog(views) if live.seal.name == name]
    if not found:
        return "nothing"
    save_id = found[-1].save_id
    program = deletion_steps.retire(found[-1], means, views["A"], reason="keep", together={save_id})
    outcome = yield from on("A", program)
    if isinstance(outcome, RefusedAppend):
        return f"refused {outcome.reason}"
    yield "A", Tell(("retired", save_id))
    del views, found, outcome
    run = in_turns if turns else on
    what, _ = yield from run("A", deletion_steps.erase_retired(save_id, means, None))
    return str(what.value)


def remover(who: str, gen: Generation, name: str, caps: Capabilities) -> Steps:
    """Removes a save by name, without a fence; the run is free since ``gen``."""
    means = Means("A", caps, ids(who))
    state = yield from on("A", catch_up())
    for save in list(state.saves.values()):
        ours = save.seal is not None and save.seal.name == name
        # One that is deleted already is its deleter's: a process that continues it fences first.
        if ours and not (save.aborted or save.gone or save.deleted):
            assert save.seal is not None
            yield from on("A", remove_unheld(save.seal, means.held_by(gen), state))
    return "done"


def _give_up(what: What, domain: str, means: Means, base: Generation, *, sealed: bool) -> Steps:
    """A sure failure: abort where the seal is missing; only then record that where it is not."""
    aborted = yield from on(domain, owner_steps.undo(what.keys, base, means))
    if len(what.domains) == 1:
        return
    yield domain, Tell(("undone" if aborted else "left", what.save_id, domain))
    undone = tuple(("undone", what.save_id, d) for d in what.domains)
    if sealed and (yield domain, Hear((), unless=undone)) is False:
        yield from on(domain, owner_steps.record_abort(what.save_id, means))


def _write(what: What, domain: str) -> Steps:
    keys = what.keys
    data = (f"{keys.data.rpartition('/')[0]}/{what.data_path(domain)}", what.data(domain))
    if what.fine:
        yield domain, Puts((data,))
        yield from on(domain, owner_steps.prepare(keys, what.small()))
        return
    small = what.small()
    files = [data, *((f"{keys.data}/{name}", b) for name, b in small.items())]
    if what.caps.shape is Shape.FILESYSTEM:
        files += [(f"{keys.attempt}/{name}", b) for name, b in small.items()]
    yield domain, Puts(tuple(files))


def person(name: str, domain: str = "A", first: tuple[str, ...] = ()) -> Steps:
    """Somebody with a shell removes a step and everything in it: what is named ``first``, then half of it."""
    for inside in first:
        yield domain, RemoveTree(f"{name}/{inside}")
    yield domain, HalfRemove(name)
    yield domain, RemoveTree(name)
    return "removed"


def saver_again(what: What, spec: Holder) -> Steps:
    """A plain save of a name that is taken, as Attempt makes it: where nothing is there it claims the
    run, records the removal, and saves as ``what``, of that generation.
    """
    own = ids(f"again-{what.save_id}")
    means = Means("A", what.caps, own)
    state = yield from on("A", owner_steps.survey())
    taken = save_named(what.name, {"A": state})
    del state
    if taken is None:
        return "free"
    if not (yield from on("A", lies_nowhere(taken, "A", what.caps.shape))):
        return "taken"
    end = yield from _claim(spec, own)
    if end != "ready":
        return end
    state = yield from on("A", catch_up())
    done = yield from on(
        "A",
        record_removal(taken, means.held_by(spec.gen), state),
    )
    if isinstance(done, RefusedAppend):
        return "lies there"
    del state, done
    return (yield from saver(what, "A"))


def saver_replacing(what: What, spec: Holder) -> Steps:
    """A save that may replace and holds no run, as Attempt makes it. A name that is not known it saves
    plainly; one that is taken it saves under a claim; where it is taken while it is written, the claim comes
    then, spares what was written, and that is sealed.
    """
    own = ids(f"own-{what.save_id}")
    means = Means("A", what.caps, own)
    fenced = replace(what, gen=spec.gen, replace=True, last=True)
    state = yield from on("A", owner_steps.survey())
    if save_named(what.name, {"A": state}) is not None:
        del state
        end = yield from _claim(spec, own)
        if end == "ready":
            end = yield from saver(fenced, "A")
            yield from on("A", release_fence(spec.gen, own, None, Stamp()))
        return end
    base = state.generation
    yield from on("A", owner_steps.begin(what.keys, base))
    yield from _write(what, "A")
    seal = what.seal(base, next_seq(base, {"A": state}, fenced=False))
    outcome = yield from on("A", owner_steps.seal_save(seal, means, state, replace=False))
    if isinstance(outcome, RefusedAppend) and outcome.reason is Refusal.CONFLICT:
        del state, outcome, seal
        return (yield from _seal_again(fenced, base, spec, means))
    if isinstance(outcome, RefusedAppend):
        reason = outcome.reason
        del state, outcome, seal
        yield from on("A", owner_steps.undo(what.keys, base, means))
        return f"refused {reason}"
    yield "A", Tell(("acknowledged", what.save_id))
    yield from on("A", owner_steps.finish(seal, means, outcome.state))
    yield "A", Tell(("finished", what.save_id, "A"))
    return "committed"


def _seal_again(what: What, base: Generation, spec: Holder, means: Means) -> Steps:
    end = yield from _claim(spec, means.ids, keep=(what.save_id,))
    if end != "ready":
        yield from on("A", owner_steps.undo(what.keys, base, means))
        return end
    state = yield from on("A", catch_up())
    seal = what.seal(spec.gen, next_seq(spec.gen, {"A": state}, fenced=True))
    manifest = {"ckptfs.json": what.small()["ckptfs.json"]}
    yield from on("A", owner_steps.prepare(what.keys, manifest))
    outcome = yield from on("A", owner_steps.seal_save(seal, means, state, replace=True))
    if isinstance(outcome, RefusedAppend):
        reason = outcome.reason
        del state, outcome, seal
        yield from on("A", owner_steps.undo(what.keys, spec.gen, means))
        return f"refused {reason}"
    yield "A", Tell(("acknowledged", what.save_id))
    program = owner_steps.finish(seal, means.held_by(spec.gen), outcome.state, at_once=True)
    yield from on("A", program)
    yield "A", Tell(("finished", what.save_id, "A"))
    yield from on("A", release_fence(spec.gen, means.ids, None, Stamp()))
    return "replaced"


# -- holding ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Delete:
    """The holder deletes the live save of a name."""

    name: str = "s1"


@dataclass(frozen=True, slots=True)
class Speak:
    """The holder says what its home says, as a new ticket does."""

    name: str = "new"


@dataclass(frozen=True, slots=True)
class Holder:
    """One prepare_run and what follows. polite: it takes no run that somebody did not release.
    later: its generation once it had to give back what it fenced.
    """

    gen: Generation
    domains: tuple[str, ...] = ("A",)
    acts: tuple[What | Delete | Speak, ...] = ()
    mode: FenceMode = FenceMode.RESUME
    caps: Capabilities = FILESYSTEM
    fenced: bool = field(default=False)
    polite: bool = False
    later: Generation | None = None


def holder(spec: Holder) -> Steps:
    """prepare_run over the reachable domains, then the acts; ``fenced``: it holds the run already."""
    name = f"P{spec.gen.number}{spec.gen.nonce}"
    own = ids(name)
    first = spec.domains[0]
    try:
        if not spec.fenced:
            end = yield from _claim(spec, own)
            if end != "ready":
                return end
        for act in spec.acts:
            if isinstance(act, Delete):
                yield from _delete(spec, act.name, own)
            elif isinstance(act, Speak):
                state = yield from on(first, catch_up())
                yield first, Tell(("word", act.name), read_home(first, "h", state))
            else:
                for domain in act.domains:
                    yield from saver(act, domain)
            yield first, Tell(("did", name, str(act.name)))
    except FencedError:
        return "fenced"
    yield first, Tell(("idle", *_text(spec.gen)))
    return "done"


def _text(gen: Generation) -> tuple[str, str]:
    return str(gen.number), gen.nonce


def _claim(spec: Holder, own: Iterator[str], keep: tuple[str, ...] = ()) -> Steps:
    folded: dict[str, LogState] | None = None
    while folded is None:
        views: dict[str, LogState] = {}
        for domain in spec.domains:
            views[domain] = yield from on(domain, owner_steps.survey())
        if spec.polite and unreleased(views):
            return "busy"
        if any(view.generation >= spec.gen for view in views.values()):
            return "fenced"
        judged = {domain: view.generation for domain, view in views.items()}
        del views
        folded = yield from _fence(spec, judged, own)
        del judged
        if folded is None and spec.later is not None:
            spec = replace(spec, gen=spec.later, later=None)
    reports = {}
    for domain in spec.domains:
        reports[domain] = yield from on(
            domain, recovery.report(domain, spec.gen, spec.caps, folded.pop(domain))
        )
    plan = recovery.plan_recovery(reports, spec.gen, keep)
    if any(v.generation > spec.gen for v in plan.views.values()):
        return "fenced"
    del reports
    for domain in spec.domains:
        yield from on(
            domain, recovery.settle(plan, Means(domain, spec.caps, own).held_by(spec.gen))
        )
    yield spec.domains[0], Tell(("ready", *_text(spec.gen), *spec.domains))
    return "ready"


def _fence(spec: Holder, judged: dict[str, Generation], own: Iterator[str]) -> Steps:
    """Every owner's append; None where one was refused, and what the others took was given back."""
    fence = Fence(spec.gen, spec.mode)
    folded: dict[str, LogState] = {}
    beaten = False
    for domain in spec.domains:
        stood = judged[domain]
        program = append(
            lambda seen, stood=stood: may_claim(seen, fence, stood),  # type: ignore[misc]
            write_id=next(own),
        )
        outcome = yield from on(domain, program)
        if isinstance(outcome, RefusedAppend):
            beaten = True
        else:
            folded[domain] = outcome.state
        del outcome, program
    if not beaten:
        return folded
    for domain, state in folded.items():
        yield from on(domain, release_fence(spec.gen, own, state, Stamp()))
    return None


def _delete(spec: Holder, name: str, own: Iterator[str]) -> Steps:
    views: dict[str, LogState] = {}
    for domain in spec.domains:
        views[domain] = yield from on(domain, catch_up())
    found = [live.seal for live in catalog(views) if live.seal.name == name]
    if not found:
        return
    for domain in found[-1].everywhere:
        if domain not in spec.domains:
            continue
        outcome = yield from on(
            domain,
            delete_save(
                found[-1], views, Means(domain, spec.caps, own).held_by(spec.gen), reason="asked"
            ),
        )
        if isinstance(outcome, RefusedAppend):
            return
        views = {**views, domain: outcome.state}


# -- reading ----------------------------------------------------------------------------------


def reader(what: dict[str, What], name: str, domain: str = "A", tries: int = 3) -> Steps:
    """Read the newest save of a name; a miss while it is still live is an error."""
    caps = next(iter(what.values())).caps
    for _ in range(tries):
        state = yield from on(domain, catch_up())
        lives = [live.seal for live in catalog({domain: state}) if live.seal.name == name]
        if not lives:
            return "nothing"
        seal = lives[-1]
        try:
            found = yield from on(domain, find(seal, caps.shape, name))  # type: ignore[arg-type]
        except NotFoundError:
            found = None
        except (IntegrityError, ManifestError):
            yield domain, Tell(("unreadable", seal.save_id))
            return "unreadable"
        data = None
        if found is not None:
            spec = what[seal.save_id]
            for home in (found.home, name):
                try:
                    data = yield domain, Read(f"{home}/{spec.data_path(domain)}")
                    break
                except NotFoundError:
                    continue
            if data is not None and what[seal.save_id].artifact is Kind.DIRECTORY:
                # Plain names may be taken by a successor: the digest catches it, look again.
                data = data if data == spec.data(domain) else None
            if data is not None:
                if data != spec.data(domain):
                    yield domain, Tell(("mixed", seal.save_id))
                yield domain, Tell(("read", seal.save_id))
                return "read"
        del found, data
        state = yield from on(domain, catch_up())
        if any(live.seal.save_id == seal.save_id for live in catalog({domain: state})):
            yield domain, Tell(("unreadable", seal.save_id))
            return "unreadable"
    return "moving"


__all__ = [
    "FILESYSTEM",
    "OBJECT",
    "PLAIN_OBJECT",
    "Appended",
    "Delete",
    "Enter",
    "Hear",
    "Holder",
    "Leave",
    "Speak",
    "Tell",
    "What",
    "clearer",
    "holder",
    "ids",
    "may_swap",
    "on",
    "person",
    "reader",
    "retirer",
    "saver",
    "saver_again",
    "saver_replacing",
]
