"""Saving one part of a checkpoint that several groups of processes write.

    save_part(state, ticket.part("actor"), ...)   -> SealedPart, the same on every rank

As ``ckptfs.save``, but for the end: what is written is sealed for its ticket, and becomes part of a
checkpoint when the process that began the ticket commits it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ckptfs.commit.opening import Place, open_seat
from ckptfs.commit.parts import PartAttempt, PartPlan
from ckptfs.commit.pieces import part_name
from ckptfs.commit.spec import SaveSpec
from ckptfs.commit.tickets import SealedPart, TicketPart
from ckptfs.dcp.saving import WriteOptions, save_at
from ckptfs.errors import StateError
from ckptfs.topology.control import Control

__all__ = ["save_part"]


def save_part(
    state_dict: Mapping[str, Any],
    ticket: TicketPart,
    control: Control,
    place: Place,
    *,
    per_rank: tuple[str, ...] = (),
    options: WriteOptions = WriteOptions(),
) -> SealedPart:
    """Collective over the group's own control. Write and seal one part; durable when it returns.

    place: how this group reaches the run. CommitConflictError: the ticket was committed or given up.
    FencedError: the run has a newer owner. Other errors, and what is left after them, are as for
    ``ckptfs.save``; the part may be saved again with the same ticket.
    """
    started = time.perf_counter()
    plan = control.step("ticket", lambda: ticket.plan, _same)
    with open_seat(ticket.run, control, place, write=True) as seat:
        spec = SaveSpec(
            part_name(plan.name, plan.part),
            plan.step,
            run=plan.word.generation,
            per_rank=per_rank,
        )
        attempt = PartAttempt(seat, plan, spec)
        result = save_at(
            state_dict, seat, ticket.uri, spec, options, started=started, attempt=attempt
        )
        return SealedPart(plan.part, plan.of, attempt.ref, result)


def _same(plans: Sequence[PartPlan]) -> PartPlan:
    other = next((p for p in plans if (p.of, p.part) != (plans[0].of, plans[0].part)), None)
    if other is not None:
        raise StateError(
            f"ranks were given different tickets: {plans[0].name}/{plans[0].part} and "
            f"{other.name}/{other.part}",
            hint="all ranks of a group save the same part with copies of one ticket",
        )
    return plans[0]
