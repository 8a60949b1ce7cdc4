"""A save that several groups of processes wrote: which pieces it has, and where each lies. Pure.

    whole    step_100            sealed in its home, with a reference to every part
    part     step_100/actor      a checkpoint of its own, under an id of its own, in its own domains

A piece looks like the seal of a save (name, save_id, digest, domains), so that it is found, projected
and erased by the same programs. A save without parts is its own and only piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckptfs.commit.entries import Kind, Part, PartRef, Seal
from ckptfs.commit.fold import LogState

__all__ = [
    "part_in",
    "part_name",
    "piece",
    "piece_ids",
    "pieces",
    "promise",
    "promised_here",
    "split_name",
]


def part_name(whole: str, part: str) -> str:
    """The name of a part below the run."""
    return f"{whole}/{part}"


def split_name(name: str) -> tuple[str, str | None]:
    """The name of a checkpoint, and of a part of it or None."""
    whole, _, part = name.partition("/")
    return whole, part or None


def piece(whole: Seal, ref: PartRef) -> Seal:
    """One part as if it were a save of its own."""
    return replace(
        whole,
        save_id=ref.save_id,
        name=part_name(whole.name, ref.name),
        digest=ref.digest,
        domains=ref.domains,
        parts=(),
    )


def pieces(whole: Seal, domain: str) -> list[Seal]:
    """What of a save lies in a domain; the whole comes last, and in every domain."""
    return [*(piece(whole, ref) for ref in whole.parts if domain in ref.domains), whole]


def piece_ids(whole: Seal) -> set[str]:
    """The ids of a save and of its parts."""
    return {whole.save_id, *(ref.save_id for ref in whole.parts)}


def part_in(save_id: str, views: Mapping[str, LogState]) -> Part | None:
    """The part of that id, as any reached log tells it; None where it is no sealed part."""
    return next((p for v in views.values() if (p := v.save(save_id).part) is not None), None)


def promise(part: Part) -> Seal:
    """A sealed part, before its home decided, as if it were a save of its own."""
    return Seal(
        save_id=part.save_id,
        base=part.base,
        seq=0,
        fenced=True,
        name=part_name(part.name, part.part),
        step=part.step,
        artifact=Kind.CHECKPOINT,
        domains=part.domains,
        digest=part.digest,
    )


def promised_here(state: LogState) -> dict[str, list[Part]]:
    """The parts that a log holds, by the id of the whole."""
    found: dict[str, list[Part]] = {}
    for save in state.saves.living.values():
        if save.part is not None:
            found.setdefault(save.part.of, []).append(save.part)
    return found
