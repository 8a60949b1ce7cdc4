"""Domains: which ranks see the same bytes at a URI, found by a probe at every process start.

    every node lead        reads or makes .ckptfs/domain: a durable random id, made by one of many
                           (several nodes: and leaves a fresh token in .ckptfs/tmp)
    coordinator            groups the nodes by id                                   group_nodes
    every node lead        reads the id again, and the token of its group's owner
    coordinator            all agree: Placement.  Not yet: again, a few times, then an error

The *node lead* is the lowest rank of a node. Only leads use the storage, with a fixed number of
operations each. Device numbers, inode numbers, hostnames and mount types decide nothing: they may be
equal for private disks of two nodes and differ for one share. An object store is one domain and needs
no token. The ids are stored; the partition is not, because it is true for these processes only.

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
from ckptfs.control.messages import Stage
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
    "Domain",
    "Placement",
    "Probe",
    "ProbeAnswer",
    "Scope",
    "group_nodes",
    "leads_node",
    "node_leads",
    "placement_in",
    "probe_domains",
    "reading_stage",
]

log = logging.getLogger("ckptfs.topology")

Scope = Literal["auto", "shared", "node"]

_HOME = ".ckptfs"
_TMP = ".ckptfs/tmp"
_ID = ".ckptfs/domain"
_TRIES = 4  # repeats of one create after its answer was lost

_ROUNDS = 6  # 0.1 s, 0.2 s, ... between them: 3 s in all, beyond any attribute cache's first tick


@dataclass(frozen=True, slots=True)
class Domain:
    """Ranks that see the same bytes.

    Attributes:
        id: Durable and random, kept in the storage itself, 32 hex digits. "" if a reader found none
            (a checkpoint copied without its ``.ckptfs``); then the domain is one node, because
            nothing shows that it is more.
        ranks: The ranks.
        nodes: Their nodes.
        owner: The lowest of ``ranks``.
    """

    id: str
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    owner: int


@dataclass(frozen=True, slots=True)
class Placement:
    """All domains, in order of owner, and this rank's place among them.

    Attributes:
        domains: All domains.
        mine: The domain of this rank.
        is_owner: This rank makes, publishes and deletes directories.
        is_node_lead: This rank is the lowest of its node, and refreshes the cache of the node.
    """

    domains: tuple[Domain, ...]
    mine: Domain
    is_owner: bool
    is_node_lead: bool


@dataclass(frozen=True, slots=True)
class _Ruling:
    """The coordinator's answer: the domains, final or to be confirmed.

    tokens: The tokens of their owners. Every rank reads this. A final answer that confirms an
    earlier one has no domains, because they are the same.
    """

    domains: tuple[Domain, ...]
    tokens: Mapping[int, str]
    final: bool


def node_leads(worlds: Sequence[World]) -> dict[str, int]:
    """Return the lowest rank of each node, in order of rank."""
    leads: dict[str, int] = {}
    for rank, world in enumerate(worlds):
        leads.setdefault(world.node, rank)
    return leads


def leads_node(control: Control) -> bool:
    """Whether this rank is the lowest of its node."""
    return node_leads(control.worlds)[control.world.node] == control.rank


def group_nodes(worlds: Sequence[World], keys: Mapping[str, str]) -> tuple[Domain, ...]:
    """Group nodes that gave the same key into domains, in order of owner. Pure.

    keys: The answer of each node, which becomes the domain's id. A node that gave "" is a domain of
    its own, because nothing shows that it shares its storage.
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
) -> Placement:
    """Find which ranks share ``storage`` (rooted at a run). Collective, O(1) operations per node.

    With ``write`` it makes the root, ``.ckptfs`` and ``.ckptfs/tmp`` if they are missing. After a
    crash an unused id may exist, which is harmless.

    Args:
        control: The control plane of the ranks.
        storage: The storage, rooted at a run.
        scope: "auto" probes. "shared" (one domain) and "node" (one per node) skip the probe because
            the caller knows the answer.
        name: Ranks that give the same name share storage; equal on all ranks of a node. Then
            ``scope`` does not count.
        write: False for readers: ids are read, nothing is written, and equal ids count as shared.

    Returns:
        The placement of this rank.

    Raises:
        CollectiveError: A node cannot read or write there, or nodes disagree about what they see.
        StateError: ``scope`` or ``name`` contradicts what the storage shows.
    """
    if name is not None:
        return _named(control, storage, name, write=write)
    worlds = control.worlds
    leads = node_leads(worlds)
    is_lead = leads[control.world.node] == control.rank
    tokens = write and scope == "auto" and len(leads) > 1
    probe = Probe(storage, write=write, tokens=tokens)
    stage = _probe_stage(control, lambda: probe, scope, tokens=tokens)
    ruling: _Ruling = control.step(stage.label, stage.local, stage.decide)
    try:
        for attempt in range(_ROUNDS):
            if ruling.final:
                break
            ruling = _confirm(control, probe, ruling, attempt, is_lead=is_lead)
    finally:
        probe.clean()
    return _place(ruling.domains, control.rank, is_lead=is_lead)


def reading_stage(control: Control, probe_of: Callable[[], Probe], scope: Scope) -> Stage:
    """Return the probe of readers, as a stage of a step. It needs no second step: ids are only read.

    Args:
        control: The control plane of the ranks.
        probe_of: Makes the probe of this rank, for which the storage has to be open.
        scope: As for ``probe_domains``.

    Returns:
        The stage; ``placement_in`` reads its answer.
    """
    return _probe_stage(control, probe_of, scope, tokens=False)


def placement_in(control: Control, answer: object) -> Placement:
    """Return the placement of this rank, from the answer of ``reading_stage``."""
    assert isinstance(answer, _Ruling)  # noqa: S101 - what rule() returned
    return _place(answer.domains, control.rank, is_lead=leads_node(control))


def _probe_stage(
    control: Control, probe_of: Callable[[], Probe], scope: Scope, *, tokens: bool
) -> Stage:
    worlds, is_lead = control.worlds, leads_node(control)

    def look() -> ProbeAnswer | NotFoundError | None:
        if not is_lead:
            return None
        probe = probe_of()
        shape = probe.shape
        one = scope == "shared" or (scope == "auto" and shape is Shape.OBJECT)
        if one and control.rank != 0:
            return ProbeAnswer(shape, None)
        try:
            return probe.look(shape)
        except NotFoundError as error:
            if error.of_bucket:
                return error  # a value, so that it is raised as its type
            raise

    def rule(answers: Sequence[ProbeAnswer | NotFoundError | None]) -> _Ruling:
        for answer in answers:
            if isinstance(answer, NotFoundError):
                raise answer
        found = [a for a in answers if not isinstance(a, NotFoundError)]
        return _rule(worlds, found, scope, tokens=tokens)

    return Stage("domain.probe", look, rule)


def _confirm(
    control: Control, probe: Probe, before: _Ruling, attempt: int, *, is_lead: bool
) -> _Ruling:
    """Confirm a ruling: every lead reads, through its own mount, what its owner left."""
    own = next(d for d in before.domains if control.rank in d.ranks)

    def look() -> ProbeAnswer | None:
        if not is_lead:
            return None
        if attempt:
            time.sleep(0.1 * attempt)
        return probe.look_again(before.tokens[own.owner])

    def decide(answers: list[ProbeAnswer | None]) -> _Ruling:
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
    worlds: Sequence[World], answers: Sequence[ProbeAnswer | None], scope: Scope, *, tokens: bool
) -> _Ruling:
    """Group the leads' answers. The result is final if nothing is left to confirm."""
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
    domains = (_shared_domain(worlds, first.id or ""),) if one else group_nodes(worlds, ids)
    if scope == "node":
        _refuse_shared(worlds, domains)
    spread = any(len(d.nodes) > 1 for d in domains)
    left = {d.owner: a.token for d in domains if (a := answers[d.owner]) is not None}
    return _Ruling(
        domains,
        left,
        # Different ids must be read again too: without exclusive create, two leads may each have
        # read an id that the other one overwrote later.
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


def _shared_domain(worlds: Sequence[World], domain_id: str) -> Domain:
    nodes = tuple(dict.fromkeys(w.node for w in worlds))
    return Domain(id=domain_id, ranks=tuple(range(len(worlds))), nodes=nodes, owner=0)


def _place(domains: tuple[Domain, ...], rank: int, *, is_lead: bool) -> Placement:
    own = next(d for d in domains if rank in d.ranks)
    return Placement(domains, own, is_owner=own.owner == rank, is_node_lead=is_lead)


def _named(control: Control, storage: Storage, name: str, *, write: bool) -> Placement:
    """Make domains by the names that ranks give. Only each owner uses the storage."""
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
    own = next(d for d in domains if control.rank in d.ranks)
    probe = Probe(storage, write=write, tokens=False)

    def look() -> str | None:
        return probe.look(storage.capabilities.shape).id if control.rank == own.owner else None

    def with_ids(ids: list[str | None]) -> tuple[Domain, ...]:
        return tuple(Domain(ids[d.owner] or "", d.ranks, d.nodes, d.owner) for d in domains)

    known = control.step("domain.probe", look, with_ids)
    return _place(known, control.rank, is_lead=leads[control.world.node] == control.rank)


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """The result of one node lead. id is None if the id of another lead counts."""

    shape: Shape
    id: str | None
    token: str = ""
    misses: str = ""


class Probe:
    """One node lead's operations: all the I/O of ``probe_domains``."""

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

    @property
    def shape(self) -> Shape:
        """What kind of storage it is."""
        return self._storage.capabilities.shape

    def look(self, shape: Shape) -> ProbeAnswer:
        """Read or make the id, leave a token."""
        found = self._own_id() if self._write else self._read_id_and_more()
        if self.tokens and shape is Shape.FILESYSTEM:
            self._token = f"{_TMP}/probe-{uuid.uuid4().hex}"
            self._storage.replace(self._token, b"")
        return ProbeAnswer(shape, found, token=self._token)

    def look_again(self, owners_token: str) -> ProbeAnswer:
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
            # It was read or made a moment ago. If this view was trusted, one shared directory could be
            # split into two domains, and each would write a checkpoint of its own half.
            misses = misses or f"{storage.uri(_ID)} was there, and is not any more"
        return ProbeAnswer(storage.capabilities.shape, found, self._token, misses)

    def clean(self) -> None:
        """Remove the token. After a crash one empty file stays in tmp."""
        if self._token:
            try:
                self._storage.remove(self._token)
            except StorageError as error:
                log.warning("a probe file was not removed: %s", error)

    def _own_id(self) -> str:
        storage = self._storage
        # Without a check: a missing directory may be a cached answer, and mkdir asks the server.
        storage.make_dir(_TMP)
        fresh = uuid.uuid4().hex
        for _ in range(_TRIES):
            found = self._read_id()
            if found:
                return found
            try:
                # The same id every time: if several of our repeats arrive, they write one id.
                storage.create(_ID, fresh.encode(), staging=f"{_TMP}/{fresh}")
                return fresh
            except UnsupportedError:
                # No exclusive create here: the last writer wins, and the second read of every lead
                # (see _rule) finds out which one it was.
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
