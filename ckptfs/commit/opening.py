"""Sitting down at a run: from what a user typed to a Seat, the same on every rank.

The URI is agreed first: relative paths become absolute once, on the coordinator, and ranks that
were given different ones get an error instead of two half checkpoints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptfs.commit.advisory import AdvisoryLog, LogKind, kind_of_log, other_kind, with_log
from ckptfs.commit.layout import CONTROL, step_in
from ckptfs.commit.seat import Common, Seat
from ckptfs.commit.spec import whole_step
from ckptfs.errors import StateError, UriError
from ckptfs.storage.base import Capabilities, Storage
from ckptfs.storage.registry import open_storage
from ckptfs.topology.control import Control, open_control
from ckptfs.topology.domain import Placement, Scope, probe_domains
from ckptfs.uri import Uri

__all__ = ["Place", "agree_uri", "open_seat", "sit_down", "step_of"]


@dataclass(frozen=True, slots=True)
class Place:
    """How to reach a run: options for its storage, and what the caller knows about who shares it."""

    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    scope: Scope = "auto"
    domain: str | None = None


def agree_uri(control: Control, given: object) -> Uri:
    """Collective. The one URI that all ranks were given, absolute on the coordinator's terms.

    Its credentials are each rank's own: what ranks say to each other has none.
    """

    def text() -> str | UriError:
        try:
            parsed = Uri.parse(given)  # type: ignore[arg-type]  # the parser names what it cannot read
        except UriError as error:
            # A value, so that the caller's mistake is raised as its type, with one rank too.
            return error
        relative = parsed.protocol == "file" and "://" not in str(given)
        raw = str(getattr(given, "__fspath__", lambda: given)())
        return raw if relative and not raw.startswith(("/", "~")) else str(parsed)

    def same(told: Sequence[str | UriError]) -> str:
        wrong = next((t for t in told if isinstance(t, UriError)), None)
        if wrong is not None:
            raise wrong
        texts = [t for t in told if isinstance(t, str)]
        if len(set(texts)) > 1:
            odd = next(rank for rank, t in enumerate(texts) if t != texts[0])
            raise UriError(
                f"ranks were given different URIs: {Uri.parse(texts[0])} on rank 0, "
                f"{Uri.parse(texts[odd])} on rank {odd}",
                hint="on node-local disks the path is the same and the domains differ by themselves",
            )
        return str(Uri.parse(texts[0]))

    agreed = control.step("uri", text, same)
    own = Uri.parse(given)  # type: ignore[arg-type]  # it could be read above
    return own if str(own) == agreed else Uri.parse(agreed)


@contextlib.contextmanager
def open_seat(
    run_uri: Uri,
    control: Control,
    place: Place,
    *,
    write: bool,
    common: Common | None = None,
) -> Iterator[Seat]:
    """Collective. A seat at a run; its storage is closed on leaving, the control is not. common: of a
    seat that this process has at that run already.
    """
    _refuse_private_memory(control, run_uri)
    opened = []

    def open_here() -> None:
        opened.append(open_storage(run_uri, place.storage_options))

    try:
        control.step("open", open_here)
        yield sit_down(control, opened[0], place, write=write, common=common)
    finally:
        for storage in opened:  # here, where another rank could not open its own, too
            storage.close()


def _refuse_private_memory(control: Control, uri: Uri) -> None:
    """UriError on every rank: each process would "save" into a memory of its own."""
    processes = {(world.node, world.pid) for world in control.worlds}
    if len(processes) > 1 and uri.protocol.rpartition("+")[2] == "memory":
        raise UriError(
            f"{uri.protocol}:// belongs to one process, and {len(processes)} take part",
            uri=uri,
            hint="use a directory or a bucket that all processes see",
        )


def sit_down(
    control: Control,
    storage: Storage,
    place: Place,
    *,
    write: bool,
    common: Common | None = None,
) -> Seat:
    """Collective. A seat at the run that ``storage`` is rooted at; the storage stays the caller's.
    common: as for ``open_seat``.
    """
    placement = probe_domains(control, storage, scope=place.scope, name=place.domain, write=write)
    if not write:
        storage = _as_readers_see(control, storage, placement)
        return Seat(control, storage, placement, storage.capabilities)
    caps = _agreed_caps(control, storage, placement)
    log = with_log(storage, caps, write=True)
    return Seat(control, log, placement, caps, common=common or Common())


def _as_readers_see(control: Control, storage: Storage, placement: Placement) -> Storage:
    """Collective. The storage with the log that lies there, as each node's lead finds it: a rank that
    failed by itself would leave the others waiting in their next step.
    """
    node = control.world.node

    def local() -> str | None:
        lead = placement.is_node_lead
        return node if lead and kind_of_log(storage) is LogKind.ADVISORY else None

    def decide(nodes: Sequence[str | None]) -> frozenset[str]:
        return frozenset(found for found in nodes if found is not None)

    advisory = control.step("kind of log", local, decide)
    return AdvisoryLog(storage) if node in advisory else storage


def _agreed_caps(control: Control, storage: Storage, placement: Placement) -> Capabilities:
    """Collective. What each owner's probe found, for all ranks of its domain: two ranks that think
    differently of one place would write into different directories.
    """

    def local() -> tuple[str, Capabilities, str | None] | None:
        # A run that exists already was opened without a write: what its log may rely on must be
        # seen before the first entry, or a store that ignores conditions would pass for one of ours.
        if not placement.is_owner:
            return None
        caps = storage.probe(CONTROL)
        return placement.mine.id, caps, other_kind(storage, caps)

    def decide(answers: Sequence[tuple[str, Capabilities, str | None] | None]) -> _Found:
        found = [a for a in answers if a is not None]
        wrong = next((why for _, _, why in found if why is not None), None)
        if wrong is not None:
            raise StateError(
                wrong,
                uri=storage.root,
                hint="use the client and options that wrote it, or begin another run",
            )
        return _Found({domain: caps for domain, caps, _ in found})

    return control.step("capabilities", local, decide).caps[placement.mine.id]


@dataclass(frozen=True, slots=True)
class _Found:
    caps: Mapping[str, Capabilities]


def step_of(name: str, step: int | None) -> int | None:
    """The step that was told, else the number that ends the name (``step_100``, ``ckpt-100``)."""
    return step_in(name) if step is None else whole_step(step)


def control_for(process_group: Any, timeout_s: float | None) -> Control:
    """The ranks' control plane for one call."""
    return open_control(process_group=process_group, timeout_s=timeout_s)
