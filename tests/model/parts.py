"""Checkpoints of several parts in the search: what they consist of, and who writes and commits them.

driver       begins a ticket in home, waits for all parts, commits or abandons it
driver_again the same of a name that is taken: where nothing is there the logs record that first
part_saver   one owner's part of one part, as an attempt with PartStrategy drives it
``heeder``   what Decision.publish, or the next part's save, does in a domain
part_reader  reads one part wherever its log says that it is committed
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptfs.commit.catalog.catalog import find
from ckptfs.commit.decisions import may_seal_part
from ckptfs.commit.delete.deletion_steps import discard_own_attempt, lies_nowhere, record_removal
from ckptfs.commit.log.append import Means, RefusedAppend, append_here, catch_up
from ckptfs.commit.log.entries import Generation, Kind, Part, PartRef, Seal
from ckptfs.commit.manifest import DomainRecord, FileRecord, Manifest, digest_of, encode_manifest
from ckptfs.commit.operations import Read
from ckptfs.commit.ownership.recovery import encode_record
from ckptfs.commit.parts import parts as real
from ckptfs.commit.paths import AttemptKeys
from ckptfs.commit.save import owner_steps
from ckptfs.commit.state import catalog, next_seq, part_name, piece, promised_here, save_named
from ckptfs.errors import CkptfsError, IntegrityError, ManifestError, NotFoundError
from ckptfs.storage.base import Capabilities, Shape
from tests.model.disk import Puts
from tests.model.programs import FILESYSTEM, Hear, Steps, Tell, ids, on

G1 = Generation(1, "x")

__all__ = [
    "PartWhat",
    "Whole",
    "driver",
    "driver_again",
    "heeder",
    "part_reader",
    "part_saver",
    "teller",
    "whole",
]


@dataclass(frozen=True, slots=True)
class PartWhat:
    """One part of a scenario's checkpoint; to the judge it looks like a save."""

    save_id: str
    part: str
    of: str
    domains: tuple[str, ...] = ("A",)
    whole_name: str = "s1"
    gen: Generation | None = None
    caps: Capabilities = FILESYSTEM
    home: str = "A"
    artifact: Kind = Kind.CHECKPOINT

    @property
    def name(self) -> str:
        return part_name(self.whole_name, self.part)

    @property
    def keys(self) -> AttemptKeys:
        return AttemptKeys(self.caps.shape, self.name, self.save_id)

    def data_path(self, domain: str) -> str:
        return f"{self.save_id}/__{domain}_0.distcp"

    def data(self, domain: str) -> bytes:
        return f"data of {self.save_id} in {domain}".encode()

    @property
    def metadata(self) -> bytes:
        return f"metadata of {self.save_id}".encode()

    def small(self) -> dict[str, bytes]:
        listed = (
            *(FileRecord(self.data_path(d), len(self.data(d)), domain=d) for d in self.domains),
            FileRecord(f"{self.save_id}/.metadata", len(self.metadata)),
        )
        domains = tuple(DomainRecord(d, (0,)) for d in self.domains)
        manifest = Manifest(self.save_id, self.part, None, listed, domains)
        return {".metadata": self.metadata, "ckptfs.json": encode_manifest(manifest)}

    @property
    def record(self) -> bytes:
        """Its attempt.json."""
        return encode_record(self.save_id, self.name, self.gen or G1, of=self.of, home=self.home)

    @property
    def ref(self) -> PartRef:
        digest = digest_of(self.small()["ckptfs.json"])
        return PartRef(self.part, self.save_id, digest, self.domains)

    def entry(self, base: Generation) -> Part:
        return Part(
            self.save_id, self.of, self.part, base, self.whole_name, None, self.home, "h",
            self.domains, self.ref.digest,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Whole:
    """What the home commits: a manifest of its own, and the parts."""

    save_id: str
    parts: tuple[PartWhat, ...]
    name: str = "s1"
    gen: Generation = G1
    home: str = "A"
    replace: bool = False
    caps: Capabilities = FILESYSTEM
    artifact: Kind = Kind.CHECKPOINT

    @property
    def domains(self) -> tuple[str, ...]:
        return (self.home,)

    @property
    def keys(self) -> AttemptKeys:
        return AttemptKeys(self.caps.shape, self.name, self.save_id)

    def data_path(self, domain: str) -> None:
        return None

    @property
    def metadata(self) -> bytes:
        return b"there is none"

    def small(self) -> dict[str, bytes]:
        refs = tuple(part.ref for part in self.parts)
        domains = (DomainRecord(self.home, (0,)),)
        manifest = Manifest(self.save_id, self.name, None, (), domains, parts=refs)
        return {"ckptfs.json": encode_manifest(manifest)}

    def seal(self, base: Generation, seq: int) -> Seal:
        return Seal(
            self.save_id, base, seq, True, self.name, None, Kind.CHECKPOINT, self.domains,  # noqa: FBT003
            digest_of(self.small()["ckptfs.json"]), parts=tuple(p.ref for p in self.parts),
        )  # fmt: skip

    def whats(self) -> dict[str, Any]:
        return {self.save_id: self, **{p.save_id: p for p in self.parts}}


def whole(save_id: str, *parts: tuple[str, str, tuple[str, ...]], **more: Any) -> Whole:
    """A checkpoint of these (id, name, domains) parts."""
    made = Whole(save_id, (), **more)
    return replace(
        made,
        parts=tuple(
            PartWhat(part_id, name, save_id, domains, made.name, made.gen, made.caps, made.home)
            for part_id, name, domains in parts
        ),
    )


def driver(what: Whole, ending: str = "commit", after: tuple[str, ...] = ()) -> Steps:
    """Home's side of one ticket. ``ending``: commit, or abandon when the first part is there."""
    home, means = what.home, Means(what.home, what.caps, ids(f"{what.save_id}-{what.home}"))
    if after:
        yield home, Hear((after,))
    try:
        state = yield from on(home, catch_up())
        if state.generation != what.gen:
            return "fenced"
        for save_id in what.whats():
            yield home, Tell(("base", save_id), (what.gen, 0))
        yield from on(home, owner_steps.begin(what.keys, what.gen))
        yield home, Tell(("ticket", what.save_id), real.read_home(home, "h", state))
        if ending == "abandon":
            return (yield from _abandon(what, means))
        yield home, Hear(tuple(("part", part.save_id) for part in what.parts))
        return (yield from _commit(what, means, state))
    except CkptfsError as error:
        yield home, Tell(("broke", what.save_id, type(error).__name__))
        return "broke"


def driver_again(what: Whole, domains: tuple[str, ...] = ("A",)) -> Steps:
    """A ticket of a name that is taken, as HomeSide begins it. domains: those that the run's ranks reach."""
    views: dict[str, Any] = {}
    for domain in domains:
        views[domain] = yield from on(domain, catch_up())
    taken = save_named(what.name, views)
    if taken is None:
        return "free"
    if set(taken.everywhere) - set(domains):
        return "out of reach"
    for domain in taken.everywhere:
        if not (yield from on(domain, lies_nowhere(taken, domain, what.caps.shape))):
            return "taken"
    for domain in taken.everywhere:
        means = Means(domain, what.caps, ids(f"again-{what.save_id}-{domain}"))
        program = record_removal(taken, means.held_by(what.gen), views[domain])
        if isinstance((yield from on(domain, program)), RefusedAppend):
            return "lies there"
    del views, program, taken, means
    return (yield from driver(what))


def _commit(what: Whole, means: Means, state: Any) -> Steps:
    home = what.home
    state = yield from on(home, catch_up(state))
    seq = next_seq(what.gen, {home: state}, fenced=True)
    yield home, Puts(_small(what))
    seal = what.seal(what.gen, seq)
    outcome = yield from on(home, owner_steps.seal_save(seal, means, state, replace=what.replace))
    state = outcome.state
    if isinstance(outcome, RefusedAppend):
        yield home, Tell(("failed", what.save_id))
        return f"refused {outcome.reason}"
    yield home, Tell(("acknowledged", what.save_id))
    state = yield from on(home, owner_steps.finish(seal, means.held_by(what.gen), state))
    yield home, Tell(("finished", what.save_id, home))
    yield home, Tell(("decision", what.save_id), real.read_home(home, "h", state))
    return "committed"


def _abandon(what: Whole, means: Means) -> Steps:
    home = what.home
    yield home, Hear(tuple(("part", part.save_id) for part in what.parts[:1]))
    yield home, Tell(("failed", what.save_id))
    if (yield from on(home, owner_steps.undo(what.keys, what.gen, means))):
        state = yield from on(home, catch_up())
        for part in promised_here(state).get(what.save_id, []):
            name = part_name(part.name, part.part)
            yield from on(home, discard_own_attempt(part.save_id, name, what.caps))
    state = yield from on(home, catch_up())
    yield home, Tell(("decision", what.save_id), real.read_home(home, "h", state))
    return "abandoned"


def _small(what: Whole | PartWhat, domain: str | None = None) -> tuple[tuple[str, bytes], ...]:
    keys, small = what.keys, what.small()
    files = [(f"{keys.data}/{name}", data) for name, data in small.items()]
    if what.caps.shape is Shape.FILESYSTEM:
        files += [(f"{keys.attempt}/{name}", data) for name, data in small.items()]
    if isinstance(what, PartWhat) and domain is not None:
        home = keys.data.rpartition("/")[0]
        files.append((f"{home}/{what.data_path(domain)}", what.data(domain)))
    return tuple(files)


def part_saver(part: PartWhat, domain: str) -> Steps:
    """One owner's part of one part: as PartStrategy does it, verdicts by facts."""
    means = Means(domain, part.caps, ids(f"{part.save_id}-{domain}"))
    word = yield domain, Hear((("ticket", part.of),))
    try:
        program = real.apply_word(word, domain, part.caps, ids=means.ids)
        state = yield from on(domain, program)
        known = state.save(part.of)
        if known.seal is not None or known.deleted or known.aborted:
            return "late"
        base = word.generation
        yield from on(domain, owner_steps.begin(part.keys, base, of=part.of, home=word.home))
        yield domain, Puts(_small(part, domain))
        if len(part.domains) > 1:
            yield domain, Tell(("written", part.save_id, domain))
            yield domain, Hear(tuple(("written", part.save_id, d) for d in part.domains))
        entry = part.entry(base)
        outcome = yield from on(
            domain, append_here(lambda seen: may_seal_part(seen, entry), means, state)
        )
        sealed = not isinstance(outcome, RefusedAppend)
        del outcome, state, known
        return (yield from _part_verdict(part, domain, means, base, sealed=sealed))
    except CkptfsError as error:
        yield domain, Tell(("broke", part.save_id, type(error).__name__))
        return "broke"


def _part_verdict(
    part: PartWhat, domain: str, means: Means, base: Generation, *, sealed: bool
) -> Steps:
    yield domain, Tell(("sealed" if sealed else "refused", part.save_id, domain))
    good: Any = sealed
    if len(part.domains) > 1:
        good = yield (
            domain,
            Hear(
                tuple(("sealed", part.save_id, d) for d in part.domains),
                unless=tuple(("refused", part.save_id, d) for d in part.domains),
            ),
        )
    if good:
        yield domain, Tell(("part", part.save_id))
        return "sealed"
    aborted = yield from on(domain, owner_steps.undo(part.keys, base, means))
    yield domain, Tell(("undone" if aborted else "left", part.save_id, domain))
    undone = tuple(("undone", part.save_id, d) for d in part.domains)
    if sealed and (yield domain, Hear((), unless=undone)) is False:
        yield from on(domain, owner_steps.record_abort(part.save_id, means))
    return "refused"


def teller(words: Mapping[str, real.HomeWord]) -> Steps:
    """What home said, at several times."""
    for name, word in words.items():
        yield word.home, Tell(("word", name), word)


def heeder(fact: tuple[str, ...], domain: str, caps: Capabilities = FILESYSTEM) -> Steps:
    """A group hears a word and makes its domain know it."""
    word = yield domain, Hear((fact,))
    try:
        own = ids(f"heed-{'-'.join(fact)}-{domain}")
        yield from on(domain, real.apply_word(word, domain, caps, ids=own))
    except CkptfsError as error:
        return type(error).__name__
    return "heeded"


def _data(part: PartWhat, domain: str, homes: tuple[str, ...]) -> Steps:
    for home in homes:
        try:
            return (yield domain, Read(f"{home}/{part.data_path(domain)}"))
        except NotFoundError:
            continue
    return None


def part_reader(what: Whole, part: PartWhat, domain: str, tries: int = 3) -> Steps:
    """Read a part by one domain's log alone; a miss while it is still live is an error."""
    for _ in range(tries):
        state = yield from on(domain, catch_up())
        seal = next(
            (x.seal for x in catalog({domain: state}) if x.seal.save_id == what.save_id), None
        )
        if seal is None:
            return "nothing"
        try:
            found = yield from on(
                domain,
                find(piece(seal, part.ref), part.caps.shape, part.name),  # type: ignore[arg-type]
            )
            data = yield from _data(part, domain, (found.home, part.name))
        except NotFoundError:
            data = None
        except (IntegrityError, ManifestError):
            yield domain, Tell(("unreadable", part.save_id))
            return "unreadable"
        if data is not None:
            if data != part.data(domain):
                yield domain, Tell(("mixed", part.save_id))
            yield domain, Tell(("read", what.save_id))
            return "read"
        state = yield from on(domain, catch_up())
        if any(live.seal.save_id == what.save_id for live in catalog({domain: state})):
            yield domain, Tell(("unreadable", part.save_id))
            return "unreadable"
    return "moving"
