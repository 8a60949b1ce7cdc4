"""Domains: which ranks see the same bytes at a URI, found by a probe at every process start.

    every node lead        reads or makes .ckptfs/domain: a durable random id, made by one of many
                           (several nodes: and leaves a fresh token in .ckptfs/tmp)
    coordinator            groups the nodes by id                                   group_nodes
    every node lead        reads the id again, and the token of its group's owner
    coordinator            all agree: Placement.  Not yet: again, a few times, then an error

The *node lead* is the lowest rank of a node; only leads touch storage, a fixed number of operations
each. Device numbers, inode numbers, hostnames and mount types decide nothing: they are equal for
private disks of two nodes and differ for one share. An object store is one domain and needs no
token. The partition is never stored: it is true for these processes only; the ids are.

``Probe`` holds all I/O: look (make .ckptfs and .ckptfs/tmp, read or make the id, leave a token), look_again
(read the id, and the token that another node left) and clean (remove the token).
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ckptfs.control.control import Control
from ckptfs.control.world import World
from ckptfs.errors import (
    AlreadyExistsError,
    AnswerLostError,
    CollectiveError,
    Failure,
    NotFoundError,
    StaleError,
    StateError,
    StorageError,
    UnsupportedError,
)
from ckptfs.storage.base import SMALL_BYTES, Shape, Storage

__all__ = [
    "Answer",
    "Domain",
    "Placement",
    "Probe",
    "Scope",
    "group_nodes",
    "node_leads",
    "probe_domains",
]

log = logging.getLogger("ckptfs.topology")

Scope = Literal["auto", "shared", "node"]

_HOME = ".ckptfs"
_TMP = ".ckptfs/tmp"
_ID = ".ckptfs/domain"
_TRIES = 4  # repeats of one create whose answer was lost

_ROUNDS = 6  # 0.1 s, 0.2 s, ... between them: 3 s in all, beyond any attribute cache's first tick


@dataclass(frozen=True, slots=True)
class Domain:
    """Ranks that see the same bytes. id: durable and random, kept in the storage itself, 32 hex
    digits; "" where a reader found none (a checkpoint copied without its ``.ckptfs``), and then the
    domain is one node, because nothing shows that it is more. owner: the lowest of ``ranks``.
    """

    id: str
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    owner: int


@dataclass(frozen=True, slots=True)
class Placement:
    """All domains, in order of owner, and this rank's place among them.

    is_owner: this rank makes, publishes and deletes directories. is_node_lead: this rank is the
    lowest of its node, the one that revalidates what the node's cache holds.
    """

    domains: tuple[Domain, ...]
    mine: Domain
    is_owner: bool
    is_node_lead: bool


@dataclass(frozen=True, slots=True)
class _Ruling:
    """The coordinator's answer: the domains, final or to be confirmed. tokens: of their owners.

    What every rank reads: a final one that confirms another has no domains, they are the same.
    """

    domains: tuple[Domain, ...]
    tokens: Mapping[int, str]
    final: bool


def node_leads(worlds: Sequence[World]) -> dict[str, int]:
    """The lowest rank of each node, in order of rank."""
    leads: dict[str, int] = {}
    for rank, world in enumerate(worlds):
        leads.setdefault(world.node, rank)
    return leads


def group_nodes(worlds: Sequence[World], keys: Mapping[str, str]) -> tuple[Domain, ...]:
    """Group nodes that gave the same key into domains, in order of owner. Pure.

    keys: each node's answer; it becomes the domain's id. A node that gave "" is a domain of its
    own: nothing shows that it shares with anybody.
    """
    members: dict[str, list[int]] = {}
    for rank, world in enumerate(worlds):
        key = keys[world.node]
        members.setdefault(f"id:{key}" if key else f"node:{world.node}", []).append(rank)
    return tuple(
        Domain(
            id=keys[worlds[ranks[0]].node],
            ranks=tuple(ranks),
            nodes=tuple(dict.fromkeys(worlds[rank].node for rank in ranks)),
            owner=ranks[0],
        )
        for ranks in members.values()
    )


def probe_domains(
    control: Control,
    storage: Storage,
    *,
    scope: Scope = "auto",
    name: str | None = None,
    write: bool = True,
    also: Sequence[Callable[[], object]] = (),
) -> Placement:
    """Find who shares ``storage`` (rooted at a run) with whom; collective, O(1) operations per node.

    scope: "auto" probes; "shared" (one domain) and "node" (one per node) skip what the caller
    knows. name: ranks that give the same name share; equal on all ranks of a node; scope is not
    asked. write=False (readers): ids are read, nothing is written, equal ids count as shared. also: of a reader,
    further calls to the storage, made by the process that reads the id at the same time; their answers are dropped.

    With ``write`` it makes the root, ``.ckptfs`` and ``.ckptfs/tmp`` where they are missing; after
    a crash an id may exist that nobody used yet, which is harmless.
    CollectiveError: a node cannot read or write there, or nodes disagree about what they see.
    StateError: ``scope`` or ``name`` contradicts what the storage shows.
    """
    if name is not None:
        return _named(control, storage, name, write=write)
    worlds = control.worlds
    leads = node_leads(worlds)
    is_lead = leads[control.world.node] == control.rank
    tokens = write and scope == "auto" and len(leads) > 1
    probe = Probe(storage, write=write, tokens=tokens, also=also)

    def look() -> Answer | NotFoundError | None:
        if not is_lead:
            return None
        shape = storage.capabilities.shape
        one = scope == "shared" or (scope == "auto" and shape is Shape.OBJECT)
        if one and control.rank != 0:
            return Answer(shape, None)
        try:
            return probe.look(shape)
        except NotFoundError as error:
            if error.of_bucket:
                return error  # a value, so that it is raised as its type
            raise

    def rule(answers: Sequence[Answer | NotFoundError | None]) -> _Ruling:
        for answer in answers:
            if isinstance(answer, NotFoundError):
                raise answer
        found = [a for a in answers if not isinstance(a, NotFoundError)]
        return _rule(worlds, found, scope, tokens=probe.tokens)

    ruling = control.step("domain.probe", look, rule)
    try:
        for attempt in range(_ROUNDS):
            if ruling.final:
                break
            ruling = _confirm(control, probe, ruling, attempt, is_lead=is_lead)
    finally:
        probe.clean()
    return _place(ruling.domains, control.rank, is_lead=is_lead)


def _confirm(
    control: Control, probe: Probe, before: _Ruling, attempt: int, *, is_lead: bool
) -> _Ruling:
    """One round: every lead looks again, through its own mount, for what its owner left."""
    mine = next(d for d in before.domains if control.rank in d.ranks)

    def look() -> Answer | None:
        if not is_lead:
            return None
        if attempt:
            time.sleep(0.1 * attempt)
        return probe.look_again(before.tokens[mine.owner])

    def decide(answers: list[Answer | None]) -> _Ruling:
        after = _rule(control.worlds, answers, "auto", tokens=True)
        missed = {rank: a.misses for rank, a in enumerate(answers) if a and a.misses}
        if after.domains == before.domains and not missed:
            return _Ruling((), {}, final=True)
        if attempt + 1 == _ROUNDS:
            raise _disagreement(control.worlds, before, after, missed)
        return after

    after = control.step("domain.confirm", look, decide)
    return replace(after, domains=after.domains or before.domains)


def _rule(
    worlds: Sequence[World], answers: Sequence[Answer | None], scope: Scope, *, tokens: bool
) -> _Ruling:
    """Group the leads' answers. Final where nothing is left to confirm."""
    found = {worlds[rank].node: a for rank, a in enumerate(answers) if a is not None}
    if len({a.shape for a in found.values()}) > 1:
        raise StateError(
            "the same URI is an object store on some nodes and a filesystem on others: "
            + ", ".join(f"{a.shape.value} on {_at(worlds, node)}" for node, a in found.items()),
            hint="give every rank the same URI and storage_options",
        )
    first = found[worlds[0].node]
    ids = {node: first.id or "" if a.id is None else a.id for node, a in found.items()}
    one = any(a.id is None for a in found.values())
    domains = (_whole(worlds, first.id or ""),) if one else group_nodes(worlds, ids)
    if scope == "node":
        _refuse_shared(worlds, domains)
    spread = any(len(d.nodes) > 1 for d in domains)
    left = {d.owner: a.token for d in domains if (a := answers[d.owner]) is not None}
    return _Ruling(
        domains,
        left,
        # Different ids need a second look too: on a place without exclusive create, two leads may
        # each have read back an id that the other has overwritten since.
        final=one or not tokens or (not spread and len(domains) == 1),
    )


def _refuse_shared(worlds: Sequence[World], domains: Sequence[Domain]) -> None:
    shared = next((d for d in domains if len(d.nodes) > 1), None)
    if shared is not None:
        raise StateError(
            f"scope='node', but nodes {', '.join(_at(worlds, n) for n in shared.nodes)} "
            f"have the same domain id {shared.id}: they share this storage, or a run was "
            "copied with its .ckptfs",
            hint="use scope='auto', or copy checkpoints without their .ckptfs directory",
        )


def _disagreement(
    worlds: Sequence[World], before: _Ruling, after: _Ruling, missed: Mapping[int, str]
) -> CollectiveError:
    nodes = ", ".join(_at(worlds, worlds[rank].node) for rank in missed)
    what = (
        f"nodes {nodes} do not read what was written for them to read"
        if missed
        else f"the nodes' domain ids keep changing: {_ids(before)}, then {_ids(after)}"
    )
    failures = {
        rank: Failure(rank, worlds[rank].node, "ckptfs.errors.StaleError", why)
        for rank, why in missed.items()
    }
    return CollectiveError(
        f"nodes disagree about what they share: {what}",
        failures=failures,
        hint="remove .ckptfs/domain from the copies of a run that was copied to several disks; "
        "let a network mount cache directories for at most 3 s",
    )


def _ids(ruling: _Ruling) -> str:
    return " ".join(sorted(d.id for d in ruling.domains))


def _at(worlds: Sequence[World], node: str) -> str:
    return next(w.place for w in worlds if w.node == node)


def _whole(worlds: Sequence[World], domain_id: str) -> Domain:
    nodes = tuple(dict.fromkeys(w.node for w in worlds))
    return Domain(id=domain_id, ranks=tuple(range(len(worlds))), nodes=nodes, owner=0)


def _place(domains: tuple[Domain, ...], rank: int, *, is_lead: bool) -> Placement:
    mine = next(d for d in domains if rank in d.ranks)
    return Placement(domains, mine, is_owner=mine.owner == rank, is_node_lead=is_lead)


def _named(control: Control, storage: Storage, name: str, *, write: bool) -> Placement:
    """Domains by the names that ranks give; only each owner touches storage."""
    worlds = control.worlds
    leads = node_leads(worlds)

    def group(names: list[str]) -> tuple[Domain, ...]:
        for rank, given in enumerate(names):
            lead = leads[worlds[rank].node]
            if given != names[lead] or not given:
                raise StateError(
                    f"domain {given!r} on rank {rank}, {names[lead]!r} on rank {lead} of its node",
                    hint="ranks of one node see the same storage: give them one name, not empty",
                )
        return group_nodes(worlds, {node: names[rank] for node, rank in leads.items()})

    domains = control.step("domain.name", lambda: name, group)
    mine = next(d for d in domains if control.rank in d.ranks)
    probe = Probe(storage, write=write, tokens=False)

    def look() -> str | None:
        return probe.look(storage.capabilities.shape).id if control.rank == mine.owner else None

    def with_ids(ids: list[str | None]) -> tuple[Domain, ...]:
        return tuple(Domain(ids[d.owner] or "", d.ranks, d.nodes, d.owner) for d in domains)

    known = control.step("domain.probe", look, with_ids)
    return _place(known, control.rank, is_lead=leads[control.world.node] == control.rank)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one node lead found. id is None where the id of another lead counts."""

    shape: Shape
    id: str | None
    token: str = ""
    misses: str = ""


class Probe:
    """One node lead's operations; all the I/O of ``probe_domains``."""

    def __init__(
        self,
        storage: Storage,
        *,
        write: bool,
        tokens: bool,
        also: Sequence[Callable[[], object]] = (),
    ) -> None:
        self.tokens = tokens
        self._also = also
        self._storage = storage
        self._write = write
        self._token = ""

    def look(self, shape: Shape) -> Answer:
        """Read or make the id, leave a token."""
        found = self._own_id() if self._write else self._read_id_and_more()
        if self.tokens and shape is Shape.FILESYSTEM:
            self._token = f"{_TMP}/probe-{uuid.uuid4().hex}"
            self._storage.replace(self._token, b"")
        return Answer(shape, found, token=self._token)

    def look_again(self, owners_token: str) -> Answer:
        """Read the id and the owner's token through this node's mount."""
        storage = self._storage
        misses = ""
        try:
            # Without this an NFS client answers from a directory that it cached before the probe.
            storage.refresh(_TMP)
            if owners_token != self._token:
                storage.read_small(owners_token, SMALL_BYTES)
        except (NotFoundError, StaleError) as error:
            misses = str(error)
        found = self._read_id()
        if self._write and not found:
            # It was read or made a moment ago. Believed, a view that flickers would split one shared
            # directory into two domains, each of which writes a checkpoint of its own half.
            misses = misses or f"{storage.uri(_ID)} was there, and is not any more"
        return Answer(storage.capabilities.shape, found, self._token, misses)

    def clean(self) -> None:
        """Remove the token. What stays after a crash is one empty file in tmp."""
        if self._token:
            try:
                self._storage.remove(self._token)
            except StorageError as error:
                log.warning("a probe file was not removed: %s", error)

    def _own_id(self) -> str:
        storage = self._storage
        # Unconditional: that it is missing may be a cached answer, and mkdir of a name is fresh.
        storage.make_dir(_TMP)
        fresh = uuid.uuid4().hex
        for _ in range(_TRIES):
            found = self._read_id()
            if found:
                return found
            try:
                # The same id every time: whichever of our own repeats arrives, it is one id.
                storage.create(_ID, fresh.encode(), staging=f"{_TMP}/{fresh}")
                return fresh
            except UnsupportedError:
                # No exclusive create here: the last writer wins, and the second look of every lead
                # (see _rule) finds out who that was.
                storage.replace(_ID, fresh.encode())
            except (AlreadyExistsError, AnswerLostError):
                continue  # read what is there; ours or another's, it is the domain's id
        raise NotFoundError(
            "the domain id can be neither written nor read",
            uri=storage.uri(_ID),
            hint="`ckptfs doctor` tests what this storage does",
        )

    def _read_id_and_more(self) -> str:
        found, *_ = self._storage.at_once([self._read_id, *self._also])
        if isinstance(found, StorageError):
            raise found
        return str(found)

    def _read_id(self) -> str:
        self._storage.refresh(_HOME)
        try:
            return self._storage.read_small(_ID, SMALL_BYTES).decode("ascii").strip()
        except NotFoundError as error:
            if error.of_bucket:
                raise
            return ""
        except UnicodeDecodeError:
            raise StateError("the domain id is not text", uri=self._storage.uri(_ID)) from None
