"""docs/scale.md says what the formulas say, which other tests compare with counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptfs
from ckptfs.commit.catalog.catalog import LocatedCheckpoint
from ckptfs.commit.catalog.locate import following, reading_session
from ckptfs.commit.session import Place
from ckptfs.control.control import Control
from ckptfs.dcp.loading import MetadataAhead, load_at
from tests.scale.formulas import phase_table, save_table
from tests.scale.lockstep import lockstep
from tests.scale.simulation import Kind, Sizes, run_world

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"


def test_the_tables_of_the_page_are_made_of_the_formulas() -> None:
    """Row for row; a formula that changes changes the page."""
    lines = set(PAGE.read_text().splitlines())
    assert [row for row in save_table() if row not in lines] == []


@pytest.mark.parametrize("kind", Kind, ids=lambda k: k.name.lower())
def test_the_phases_of_the_page_are_made_of_the_formulas(kind: Kind) -> None:
    """Row for row, for each kind of storage."""
    lines = set(PAGE.read_text().splitlines())
    assert [row for row in phase_table(kind) if row not in lines] == []


def test_a_held_save_makes_the_steps_of_the_page(tmp_path: Path) -> None:
    """Step for step, in their order; each of them is a round of all ranks."""
    _, _, rest = PAGE.read_text().partition("| step | sent by all ranks |")
    rows = rest.splitlines()[2:]
    listed = [row.split("|")[1].strip() for row in rows[: rows.index("")]]
    steps = run_world(Sizes(8, 4), Kind.SHARED, tmp_path)["save"].steps
    assert [step.label for step in steps] == listed
    assert f"A save has {_NUMBERS[len(listed)]} steps" in PAGE.read_text().replace("\n", " ")


def test_a_load_makes_the_steps_of_the_page(tmp_path: Path) -> None:
    """In their order; the plan comes before the read."""
    ckptfs.save({"w": torch.zeros(4)}, tmp_path / "run" / "step_1")
    ends, steps = lockstep(
        2,
        lambda control: _load_through(control, tmp_path / "run" / "step_1"),
    )
    for end in ends:
        end.get()
    page = " ".join(PAGE.read_text().split())
    names = [step.label for step in steps]
    assert f"A load has {_NUMBERS[len(names)]} steps: {', '.join(names)}." in page


def _load_through(control: Control, target: Path) -> None:
    with reading_session(target, control, Place()) as (session, at, name):
        metadata = MetadataAhead(session)
        state = {"w": torch.ones(4)}

        def load(found: LocatedCheckpoint) -> None:
            load_at(state, session, at, found, metadata)

        following(session, name, load, metadata.read)
    assert not state["w"].any()


_NUMBERS = {6: "six", 7: "seven", 8: "eight", 9: "nine", 10: "ten"}
