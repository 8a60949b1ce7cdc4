"""The kinds of entries of the run log, and their encoding as bytes.

    seal      this save is complete in this domain
    part      this part of a save is complete in this domain: a promise that its home keeps or releases
    abort     this save will never be sealed here
    decided   the outcome that all domains reached together (a record, never the decision)
    fence     a new owner; older generations cannot append any more
    release   the owner gave up the run in good order
    delete    this save is deleted; its bytes are removed later
    gone      the bytes of a deleted save are gone here: its name is free for plain saves
    pin       retention must leave this save alone, or may touch it again
    snapshot  the fold of all entries below this number

An entry is one JSON object of a few hundred bytes: the body's fields, ``kind``, the ``id`` of the
write that made it (by which its writer recognises it after a lost answer), and ``at``/``by``, which are
for people and decide nothing. Unknown fields are ignored. Unknown kinds, and kinds with an unknown word
in a closed field, are kept as ``Foreign``, so that an older reader can read the log of a newer writer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptfs.commit.paths import PLAIN_ENTRY_BYTES
from ckptfs.errors import ManifestError
from ckptfs.schema import Component, Number, Schema, SchemaError, Word, kind_in, parse

__all__ = [
    "GENESIS",
    "Abort",
    "Body",
    "Decided",
    "Delete",
    "EncodedSave",
    "Entry",
    "Fence",
    "FenceMode",
    "Foreign",
    "Generation",
    "Gone",
    "Kind",
    "Outcome",
    "Part",
    "PartRef",
    "Pin",
    "Release",
    "Seal",
    "Snapshot",
    "Stamp",
    "Step",
    "body_fields",
    "decode_entry",
    "encode_entry",
    "encode_parts",
]

FORMAT = 1

if TYPE_CHECKING:
    Step = int | None
else:
    Step = Number | float | bool | None  # 1.5 and true were written once, and must stay readable


class Generation(NamedTuple):
    """Who owns the run: ordered as a pair, so that two newcomers with one number never tie.

    Attributes:
        number: Rises with each owner.
        nonce: Random; no two owners have the same.
    """

    number: Number
    nonce: str


GENESIS = Generation(0, "")


class Kind(StrEnum):
    """What a save is. Each kind has its own latest.

    Attributes:
        CHECKPOINT: A sharded training state.
        WEIGHTS: Weights only, for samplers.
        DIRECTORY: Files with plain names, written by any program.
    """

    CHECKPOINT = "checkpoint"
    WEIGHTS = "weights"
    DIRECTORY = "directory"


class Outcome(StrEnum):
    """The outcome of a save."""

    COMMITTED = "committed"
    ABORTED = "aborted"


class FenceMode(StrEnum):
    """What a new owner does about older saves."""

    RESUME = "resume"
    OVERWRITE = "overwrite"  # they leave the catalog; the first later commit deletes them


@dataclass(frozen=True, slots=True)
class Stamp:
    """Who wrote an entry and when, for people; no decision ever reads it."""

    at: str = ""
    host: str = ""
    pid: int = 0
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class PartRef:
    """A part of a save that another group of processes sealed.

    Attributes:
        name: The name of the part.
        save_id: The id of the part alone.
        digest: The digest of the part's manifest.
        domains: The domains that hold the part.
        hosts: The hosts of each domain in turn, for people who look for the part.
    """

    name: Component
    save_id: Component
    digest: str
    domains: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Seal:
    """The save is complete here. The same seal is appended in every listed domain.

    Attributes:
        save_id: The id of the save.
        base: The generation that the save began under.
        seq: Its place among the saves of that base.
        fenced: Whether its writer held the run.
        name: The checkpoint's name in the run.
        step: Completed optimizer steps; None where there is no number.
        artifact: A checkpoint, weights or a directory.
        domains: Ids of the domains that hold it. If it has ``parts``, this is the home alone: the
            home's seal is the decision, and the same seal in another domain records that decision
            there.
        digest: xxh3_128 of the immutable manifest.
        references: save_ids with files that this save uses.
        parts: The parts that other groups of processes wrote.
        failure: Whether it was saved by a run that was failing.
        metrics: The user's numbers about the model, for retention; not written if there are none.
        origins: save_ids that wrote bytes which this save uses too. Unlike references they may be
            deleted, and those bytes stay. Not written if there are none.
    """

    save_id: Component
    base: Generation
    seq: Number
    fenced: bool
    name: Component
    step: Step
    artifact: Kind
    domains: tuple[str, ...]
    digest: str
    references: tuple[str, ...] = ()
    parts: tuple[PartRef, ...] = ()
    failure: bool = False
    metrics: tuple[tuple[str, float], ...] = ()
    origins: tuple[str, ...] = ()

    @property
    def everywhere(self) -> tuple[str, ...]:
        """Every domain that holds bytes of it: its own, and those of its parts."""
        return tuple(dict.fromkeys([*self.domains, *(d for p in self.parts for d in p.domains)]))


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a save is complete here. The same entry is appended in every listed domain.

    It commits nothing: only the home's seal of the whole does, and only the home's abort or delete
    releases it.

    Attributes:
        save_id: The id of this part alone.
        of: The id of the whole.
        part: This part's name.
        base: The generation that the whole began under.
        name: The name of the whole in the run.
        step: Completed optimizer steps; None where there is no number.
        home: The domain that decides.
        home_host: A host that reaches the home.
        domains: Ids of the domains that hold the part.
        digest: xxh3_128 of this part's manifest.
    """

    save_id: Component
    of: Component
    part: Component
    base: Generation
    name: Component
    step: Step
    home: str
    home_host: str
    domains: tuple[str, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Abort:
    """The save will not be sealed here. Void after a seal. ``by``: the generation that aborts."""

    save_id: Component
    by: Generation


@dataclass(frozen=True, slots=True)
class Decided:
    """A record of the outcome that all listed domains reached."""

    save_id: Component
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Fence:
    """A new owner. The other fields describe it, for RunBusyError and for takeover."""

    generation: Generation
    mode: FenceMode = FenceMode.RESUME
    host: str = ""
    pid: Number = 0
    job: str | None = None
    node: str = ""
    started: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """The owner of this generation gave up the run, which is free now."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Delete:
    """The save is deleted. Bytes are removed later.

    The entry in any one of the save's listed domains is enough.
    """

    save_id: Component
    by: Generation
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Gone:
    """The owner of generation ``by`` removed the deleted save's bytes in this domain.

    Until then a plain save does not get the name, because its projection would collide with the
    deletion.
    """

    save_id: Component
    by: Generation


@dataclass(frozen=True, slots=True)
class Pin:
    """Retention leaves a pinned save alone."""

    save_id: Component
    pinned: bool = True


class EncodedSave(str):
    """A save of a snapshot that is JSON already.

    Most of a long log never changes, so each save is encoded only once.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """``state`` equals the fold of all entries below this entry's number (see fold.py).

    In a snapshot that is to be written, items of ``state["saves"]`` may be ``EncodedSave``.
    """

    state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Foreign:
    """A kind of entry that this version does not know."""

    kind: str


Body = Seal | Part | Abort | Decided | Fence | Release | Delete | Gone | Pin | Snapshot | Foreign


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the log.

    Attributes:
        write_id: The id of this append, by which its writer recognises the entry after a lost answer.
        body: The content.
        stamp: The time and the process.
        partial: Whether a newer writer put fields into it that this version does not know.
    """

    write_id: str
    body: Body
    stamp: Stamp = Stamp()
    partial: bool = field(default=False, compare=False)


_KINDS: dict[str, type] = {
    "seal": Seal,
    "part": Part,
    "abort": Abort,
    "decided": Decided,
    "fence": Fence,
    "release": Release,
    "delete": Delete,
    "gone": Gone,
    "pin": Pin,
    "snapshot": Snapshot,
}
_NAMES = {cls: name for name, cls in _KINDS.items()}
_OMITTED_WHEN_EMPTY = ("metrics", "hosts", "origins")
_SAVES = "\0saves"  # placeholder for saves that are inserted as text; no word has a NUL
_WORDS: dict[str, type[StrEnum]] = {"outcome": Outcome, "mode": FenceMode, "artifact": Kind}


def encode_entry(entry: Entry) -> bytes:
    """Return the bytes of ``entry``: JSON with sorted keys and one final newline.

    Args:
        entry: The entry to write.

    Raises:
        TypeError: It is of a kind that this version does not know.
    """
    if isinstance(entry.body, Foreign):
        raise TypeError("a foreign entry cannot be written")
    record: dict[str, Any] = {"v": FORMAT, "kind": _NAMES[type(entry.body)], "id": entry.write_id}
    record |= body_fields(entry.body)
    saves = ""
    if isinstance(entry.body, Snapshot):
        listed = entry.body.state.get("saves", ())
        texts = (one if isinstance(one, EncodedSave) else _json(one) for one in listed)
        saves = f"[{','.join(texts)}]"
        record["state"] = {**entry.body.state, "saves": _SAVES}
    stamp = entry.stamp
    record["at"] = stamp.at
    record["by_host"], record["by_pid"], record["by_rank"] = stamp.host, stamp.pid, stamp.rank
    text = _json(record)
    if isinstance(entry.body, Snapshot):
        text = text.replace(_json(_SAVES), saves, 1)
    return text.encode() + b"\n"


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def body_fields(body: Body) -> dict[str, Any]:
    """Return a body's fields as JSON values."""
    return _fields(body)


def _fields(value: Any) -> dict[str, Any]:
    values = {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    # This field was added after the format was frozen: without it the bytes are the same as before.
    return {name: v for name, v in values.items() if name not in _OMITTED_WHEN_EMPTY or v}


def _plain(value: Any) -> Any:
    if isinstance(value, PartRef):
        return _fields(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


@dataclass(frozen=True, slots=True)
class _Envelope:
    """The fields that every entry has, whatever its kind."""

    kind: Word
    id: str
    at: str = ""
    by_host: str = ""
    by_pid: Number = 0
    by_rank: Number | None = None


_ENVELOPE_SCHEMA = Schema(_Envelope)
_SCHEMAS: dict[type, Schema[Any]] = {cls: Schema(cls) for cls in _KINDS.values()}


def decode_entry(data: bytes, where: str) -> Entry:
    """Return the entry in ``data``.

    Args:
        data: The bytes of one file of the log.
        where: The name of the file, for the message.

    Raises:
        ManifestError: It is no entry, is damaged, or is too long for its kind.
    """
    if len(data) > PLAIN_ENTRY_BYTES and kind_in(data) != _NAMES[Snapshot]:
        # JSON takes up to 20 times its length in memory. Only a snapshot has a reason to be so
        # long.
        raise ManifestError(
            f"not a run log entry: it has {len(data)} bytes, and only a snapshot may have "
            f"more than {PLAIN_ENTRY_BYTES}",
            uri=where,
            hint="no version of ckptfs writes such an entry: it was placed by hand",
        )
    try:
        record = parse(data)
        head = _ENVELOPE_SCHEMA.convert(record)
        stamp = Stamp(head.at, head.by_host, head.by_pid, head.by_rank)
        cls = _KINDS.get(head.kind)
        if cls is None or _has_unknown_word(cls, record):
            return Entry(head.id, Foreign(head.kind), stamp)
        partial = not {*_names_of(cls), *_names_of(_Envelope), "v"}.issuperset(record)
        return Entry(head.id, _SCHEMAS[cls].convert(record), stamp, partial)
    except SchemaError as error:
        raise ManifestError(
            f"not a run log entry: {error}",
            uri=where,
            hint="ckptfs never rewrites an entry: this file was damaged or placed by hand",
        ) from error


def _names_of(cls: type) -> list[str]:
    return [one.name for one in fields(cls)]


def _has_unknown_word(cls: type, record: Mapping[str, Any]) -> bool:
    """Whether a closed field has a word that this version does not know.

    Such an entry means something only to a newer version.
    """
    return any(
        isinstance(word := record.get(name), str) and word not in [*kind]
        for name, kind in _WORDS.items()
        if name in cls.__dataclass_fields__  # type: ignore[attr-defined]
    )


def encode_parts(parts: Sequence[PartRef]) -> list[dict[str, Any]]:
    """Return references to parts as JSON values."""
    return [_fields(part) for part in parts]
