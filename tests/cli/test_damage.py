"""Every read-only command, and ``cp``, on a damaged run of every kind.

The table says how each command ends. ``ls`` and ``latest`` look at what there is, not at whether it is
whole: that is ``verify``, which looks at sizes, and at each byte with --deep.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import ckptfs
from ckptfs.cli.main import COMMANDS
from tests.cli.conftest import Cli, Place, Ran, state_of
from tests.cli.damage import DAMAGES, OWNED, VICTIM, state_now

OK, NO, USAGE, NOT_FOUND, ACCESS = 0, 1, 2, 3, 4

# Those that change something have tests of their own; doctor writes, into a corner of its own.
COLUMNS = ("ls", "log", "latest", "inspect", "verify", "deep", "cp", "gc")
ELSEWHERE = {"rm", "pin", "unpin", "export", "doctor", "bench", "watch"}


@dataclass(frozen=True)
class Row:
    """How each command ends, in the order of COLUMNS, and what somebody must say of it.

    ``told``: a pattern, found in what verify says (``by`` names another). kinds: places that are tried
    each time; on the others it is a campaign.
    """

    exits: tuple[int, ...]
    told: str
    by: str = "verify"
    kinds: tuple[str, ...] = ("file",)


def row(text: str, told: str, by: str = "verify", kinds: tuple[str, ...] = ("file",)) -> Row:
    """One digit for each column."""
    return Row(tuple(int(digit) for digit in text), told, by, kinds)


BOTH = ("file", "s3")
SHARD, SIDECAR = r"/__0_0\.distcp\n +", r"/__0_0\.xxh3\n +"
TABLE = {
    #                                   llliv dcg
    "nothing": row("00000000", "clean: 4 checkpoints", kinds=BOTH),
    "truncated shard": row("00001110", SHARD + r"it has \d+ bytes, but \d+ were written"),
    "flipped bit": row("00000110", SHARD + r"bytes \d+ to \d+ differ from what was", "deep", BOTH),
    "missing shard": row("00001110", SHARD + "it is missing"),
    "missing sidecar": row("00001110", SIDECAR + "it is missing"),
    "damaged sidecar": row("00001110", SIDECAR + "damaged sidecar"),
    "missing manifest": row("00011110", "the sealed manifest is missing"),
    "missing projected manifest": row("00001100", f"{VICTIM}/ckptfs.json"),
    "changed manifest": row("00011110", "differs from the one that was sealed|not what was"),
    "future manifest": row("03011110", "needs a reader of format 99"),
    "missing metadata": row("00011110", r"/\.metadata\n +it is missing"),
    "missing projected metadata": row("00001100", rf"{VICTIM}/\.metadata"),
    "garbage metadata": row("00011110", r"/\.metadata\n +it has 7 bytes"),
    "malicious metadata": row("00011110", r"/\.metadata\n +", kinds=BOTH),
    "metadata of another save": row("00011110", r"/\.metadata\n +it is not what was committed"),
    "garbage entry": row("11111111", "not a run log entry"),
    "future entry": row("00000000", "does not know"),
    "missing entry": row("01101101", "entry 2 is missing", kinds=BOTH),
    "missing domain": row("00001101", r"\.ckptfs/domain is missing"),
    "abandoned attempt": row("00000000", "abandoned attempt", "gc"),
    "deleted save": row("00000000", "deleted save +step_10", "gc"),
    "orphaned upload": row("00000000", "unfinished upload", "gc", ("s3",)),
    "leftovers": row("00000000", "temporary file", "gc"),
    "foreign files": row("00000000", "nothing to remove", "gc"),
    "empty run": row("03133330", "no run log here", "gc"),
    "nothing committed": row("03133330", "abandoned attempt", "gc"),
    "nowhere": row("33333333", "there", "ls", BOTH),
    "wrong credentials": row("44444444", "does not accept these credentials", "ls", ("s3",)),
    "stock": row("03030330", "step_5", "ls"),
    "copied without its log": row("03000000", "manifest", "ls"),
    "half copied": row("03011110", "missing"),
}
# An object store has no empty directory: there is nothing where a filesystem shows an empty run.
ON_S3 = {"empty run": row("33333333", "there", "ls")}


def test_every_damage_and_every_command_is_in_the_table() -> None:
    """A new damage, or command, has its answer decided here."""
    assert set(TABLE) == set(DAMAGES)
    assert {len(row.exits) for row in TABLE.values()} == {len(COLUMNS)}
    assert {*COLUMNS, *ELSEWHERE} - {"deep"} == set(COMMANDS)


EACH_TIME = [(kind, name) for name, row in TABLE.items() for kind in row.kinds]
ON_S3_TOO = [
    ("s3", name) for name in TABLE if "s3" in DAMAGES[name].kinds and ("s3", name) not in EACH_TIME
]


@pytest.mark.parametrize(("place", "name"), EACH_TIME, indirect=["place"])
def test_what_each_command_says_of_it(place: Place, cli: Cli, tmp_path: Path, name: str) -> None:
    """The exits of the table; the damage is named; nothing of the run is changed, no pickle is run, and
    what is damaged is not copied.
    """
    judge(place, cli, tmp_path, name)


@pytest.mark.campaign
@pytest.mark.parametrize(("place", "name"), ON_S3_TOO, indirect=["place"])
def test_each_damage_on_s3(place: Place, cli: Cli, tmp_path: Path, name: str) -> None:
    """The same for every other kind on S3."""
    judge(place, cli, tmp_path, name)


def judge(place: Place, cli: Cli, tmp_path: Path, name: str) -> None:
    """One line of the table."""
    expected = (ON_S3 if place.kind == "s3" else {}).get(name, TABLE[name])
    hurt = DAMAGES[name].made(place)
    before = state_now(hurt)
    ran = commands(hurt, cli, tmp_path)
    assert {c: r.exit for c, r in ran.items()} == dict(zip(COLUMNS, expected.exits, strict=True))
    told = ran[expected.by]
    assert re.search(expected.told, told.out + told.err), told.out + told.err
    for command, one in ran.items():
        assert "Traceback" not in one.out + one.err
        assert one.exit == OK or one.out + one.err, f"{command} says nothing"
    assert state_now(hurt) == before
    assert OWNED not in os.environ
    copied = tmp_path / "copies" / VICTIM
    assert copied.exists() == (ran["cp"].exit == OK)
    if copied.exists():
        loaded = state_of(0)
        ckptfs.load(loaded, copied)
        assert str(loaded) == str(state_of(20))


def commands(hurt: Place, cli: Cli, tmp_path: Path) -> dict[str, Ran]:
    """Each command once: on the run, or on the victim where it takes a checkpoint."""
    run, victim, flags = hurt.uri, f"{hurt.uri}/{VICTIM}", hurt.flags
    return {
        "ls": cli("ls", run, *flags),
        "log": cli("log", run, *flags),
        "latest": cli("latest", run, *flags),
        "inspect": cli("inspect", victim, *flags),
        "verify": cli("verify", run, *flags),
        "deep": cli("verify", victim, "--deep", *flags),
        "cp": cli("cp", victim, tmp_path / "copies" / VICTIM, *flags),
        "gc": cli("gc", run, *flags, "--older-than", "0s"),
    }
