"""Who dies where, and how what is left is judged: by readers of both versions, then by the other as owner.

scenario   what the other version left in the run, and what the victim was doing when it was killed
judge      both see the same; it is the old state or the new one; the other continues as the next
           owner, both see that; the version of the victim continues after it
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptfs.storage.registry import open_storage
from tests.versions.hosts import Child, End, Host

__all__ = [
    "SCENARIOS",
    "Pair",
    "Place",
    "Point",
    "Scenario",
    "die",
    "do",
    "overtake",
    "points",
    "same_sight",
]

Step = tuple[str, dict[str, Any]]
Labels = Mapping[str, str]  # of checkpoints, in the order of their commits

WHEN = {"before": "kill", "half": "kill-half", "after": "kill-after"}
_REACH_S = 60.0
_HALVES = frozenset({"write", "create", "replace", "make_dir", "remove_tree", "remove_many"})


@dataclass(frozen=True)
class Place:
    """Where runs are; fresh gives the URI of an unused one."""

    name: str
    fresh: Callable[[], str]
    options: dict[str, Any] = field(default_factory=dict)

    def forget(self, run: str) -> None:
        """Remove a run that was judged: a listing of moto's goes through all names of the bucket."""
        parent, _, name = run.rpartition("/")
        with contextlib.closing(open_storage(parent, self.options)) as storage:
            storage.remove_tree(name)


@dataclass(frozen=True)
class Pair:
    """Two versions: one of them is the victim, or the owner."""

    one: Host
    other: Host

    def __str__(self) -> str:
        return f"{self.one.name} before {self.other.name}"


@dataclass(frozen=True)
class Scenario:
    """old, new: what is committed before and after. between: what readers may see until the next owner
    came. can_restore: the newest is a state dict, so that a manager restores it.
    """

    before: tuple[Step, ...]
    victim: Step
    old: Labels
    new: Labels
    between: tuple[Labels, ...] = ()
    can_restore: bool = True

    @property
    def states(self) -> tuple[Labels, ...]:
        """All that a reader may see."""
        return (self.old, self.new, *self.between)


def _save(name: str, label: str, **more: Any) -> Step:
    return "save", {"name": name, "label": label, **more}


def _manage(*saves: tuple[int, str], **more: Any) -> Step:
    return "manage", {"saves": [list(one) for one in saves], **more}


_ONE = _save("step_1", "one")
_TWO = _manage((1, "one"), (2, "two"))
_TWO_LABELS = {"step_1": "one", "step_2": "two"}

SCENARIOS = {
    "save": Scenario((_ONE,), _save("step_2", "two"), {"step_1": "one"}, _TWO_LABELS),
    "birth": Scenario((), _save("step_1", "one"), {}, {"step_1": "one"}),
    "claim": Scenario((_TWO,), ("claim", {}), _TWO_LABELS, _TWO_LABELS),
    "managed": Scenario((_ONE,), _manage((2, "two"), restore=True), {"step_1": "one"}, _TWO_LABELS),
    "replace": Scenario(
        (_ONE, _save("step_1", "uno", replace=True)),
        _save("step_1", "eins", replace=True),
        {"step_1": "uno"},
        {"step_1": "eins"},
    ),
    "delete": Scenario((_TWO,), _manage(delete=1), _TWO_LABELS, {"step_2": "two"}),
    "rm": Scenario(
        (_TWO,), ("cli", {"words": ["rm", "{run}/step_1", "--yes"]}), _TWO_LABELS, {"step_2": "two"}
    ),
    "retire": Scenario(
        (_TWO,),
        _manage((3, "three"), keep_latest=1),
        _TWO_LABELS,
        {"step_3": "three"},
        between=(
            {"step_2": "two"},
            {**_TWO_LABELS, "step_3": "three"},
            {"step_2": "two", "step_3": "three"},
            {"step_1": "one", "step_3": "three"},
        ),
    ),
    "clear": Scenario(
        (_TWO,),
        ("clear", {"name": "step_3", "label": "three"}),
        _TWO_LABELS,
        {"step_3": "three"},
        between=({},),
    ),
    "gc": Scenario(
        (_TWO, ("dying save", {"name": "step_7", "label": "seven"}), _manage(delete=1)),
        ("cli", {"words": ["gc", "{run}", "--delete", "--yes", "--older-than", "0s"]}),
        {"step_2": "two"},
        {"step_2": "two"},
    ),
    "parts": Scenario(
        (_ONE,),
        ("parts", {"step": 2, "label": "two"}),
        {"step_1": "one"},
        {"step_1": "one", "step_2": "two actor + two critic"},
        can_restore=False,
    ),
    "directory": Scenario(
        (_ONE,),
        ("directory", {"name": "step_2", "label": "two"}),
        {"step_1": "one"},
        _TWO_LABELS,
        can_restore=False,
    ),
}


LOG = "create:*/log/*"  # entries: what is before one is not decided, what is after it is


@dataclass(frozen=True)
class Point:
    """The moment: before, half-way through or after the ``nth`` storage operation of the victim that fits
    the pattern.
    """

    nth: int
    when: str
    op: str
    pattern: str = "*:*"

    def __str__(self) -> str:
        return f"{self.when} {self.op} {self.nth}"

    @property
    def fault(self) -> str:
        """As CKPTFS_TEST_FAULT has it."""
        return f"{WHEN[self.when]}:{self.pattern}:{self.nth}"


def do(host: Host, place: Place, run: str, step: Step, **how: Any) -> End:
    """One step of a scenario, on this run."""
    name, told = step
    if name == "dying save":
        # Its files are there and it is not committed: killed before it enters its seal.
        end = do(host, place, run, ("save", told), faults="kill:create:*/log/*:1")
        assert end.killed
        return end
    if "words" in told:
        told = {"words": [word.replace("{run}", run) for word in told["words"]]}
    else:
        told = {"run": run, **told}
    return host.run(name, options=place.options, **told, **how)


def prepared(scenario: Scenario, host: Host, place: Place) -> str:
    """A run in which ``host`` did what comes before."""
    run = place.fresh()
    for step in scenario.before:
        if step[0] == "dying save":
            do(host, place, run, step)
        else:
            do(host, place, run, step).get()
    return run


def points(scenario: Scenario, pair: Pair, place: Place) -> Iterator[Point]:
    """Every moment of the victim, found by letting it live once."""
    run = prepared(scenario, pair.other, place)
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory, "trace")
        do(pair.one, place, run, scenario.victim, trace=str(trace)).get()
        (file,) = Path(directory).iterdir()
        lines = file.read_text().splitlines()
    met: Counter[str] = Counter()
    for line in lines:
        _, op, _ = line.split(" ", 2)
        # A touch is of a timer, at no fixed place, so each kind of operation is counted by itself.
        if op == "touch":
            continue
        met[op] += 1
        yield Point(met[op], "before", op, f"{op}:*")
        if op in _HALVES:
            yield Point(met[op], "half", op, f"{op}:*")
        if op in {"create", "rename"}:  # done, and without an answer
            yield Point(met[op], "after", op, f"{op}:*")


def same_sight(pair: Pair, place: Place, run: str, *, deep: bool = True) -> dict[str, Any]:
    """What both see of the run; AssertionError where they see different things.

    deep: also by ``verify --deep``, which is half of the cost; every checkpoint is loaded in any case.
    """
    one, other = (
        host.do("observe", run=run, options=place.options, deep=deep)
        for host in (pair.one, pair.other)
    )
    assert one == other, f"{pair.one.name}: {one}\n{pair.other.name}: {other}"
    seen: dict[str, Any] = one
    assert all(verdict == [0, "clean"] for verdict in seen["verdicts"].values()), seen
    order = [line[0] for line in seen["listed"] if line[3] == "checkpoint"]
    assert seen["latest"] == (order[-1] if order else None), seen
    assert seen["cli latest"][1] == seen["latest"], seen
    return seen


def die(scenario: Scenario, pair: Pair, place: Place, point: Point) -> str:
    """Let ``pair.one`` die at this moment in a run of ``pair.other``; "old" or "new", by what was left."""
    run = prepared(scenario, pair.other, place)
    end = do(pair.one, place, run, scenario.victim, faults=point.fault)
    assert end.error is None, end.error
    seen = same_sight(pair, place, run, deep=False)
    labels = seen["labels"]
    assert labels in scenario.states, labels
    assert end.killed or labels == scenario.new, labels
    # The other version is the next owner: it recovers, restores, and saves.
    newest = labels.get(seen["latest"])
    restore = scenario.can_restore or seen["labels"] == scenario.old
    go_on = _manage((50, "fifty"), restore=restore)
    told = do(pair.other, place, run, go_on).get()
    if restore:
        restored = told["restored"]
        # A run that was being cleared is brought back by its next owner, where nothing was committed.
        cleared = not labels and bool(scenario.old)
        assert cleared or (restored and restored[1]) == newest, told
    after = same_sight(pair, place, run)
    kept = {name: label for name, label in after["labels"].items() if name != "step_50"}
    assert after["latest"] == "step_50"
    assert kept in scenario.states, kept
    if labels in (scenario.old, scenario.new):
        assert kept == labels, f"{labels} became {kept}"
    left = [host.do("debris", run=run, options=place.options) for host in (pair.one, pair.other)]
    assert left[0] == left[1]
    # Temporary files go by age alone, and here every age will do.
    assert not [f for f in left[0] if f[2] == "goes" and f[0] != "temporary file"], left[0]
    # And the version of the one that died continues after that.
    do(pair.one, place, run, _save("step_60", "sixty")).get()
    last = same_sight(pair, place, run, deep=False)
    assert last["labels"] == {**after["labels"], "step_60": "sixty"}
    place.forget(run)
    return "old" if labels == scenario.old else "new"


def overtake(scenario: Scenario, pair: Pair, place: Place, point: Point, gate: str) -> bool:
    """Hold ``pair.one`` at this moment, let ``pair.other`` take the run by force, and let it continue.

    False if there was no such moment: threads in the background make more operations at one time than at another.
    """
    run = prepared(scenario, pair.other, place)
    name, told = scenario.victim
    assert "words" not in told
    held = pair.one.start(
        name,
        run=run,
        options=place.options,
        faults=f"hold={gate}:{point.pattern}:{point.nth}",
        **told,
    )
    if not until_reached(gate, held):
        held.end.get()
        return False
    do(pair.other, place, run, ("force", {"name": "step_90", "label": "ninety"})).get()
    between = same_sight(pair, place, run, deep=False)
    Path(gate).touch()
    end = held.end
    after = same_sight(pair, place, run)
    if end.error is not None:
        known = {"FencedError", "CommitConflictError"}
        if pair.one.name == "old":  # it names a missing directory where its attempt was taken away
            known |= {"CollectiveError", "NotFoundError"}
        assert end.error.types[0] in known, end
    # It committed and deleted nothing of before the fence: what both saw then is what there is. Only where
    # it was held before it had begun does it come later than the other, and by right.
    newest = max(row[-1] for row in between["log"] if row[-1] is not None)
    late = [row[-1] for row in after["log"][len(between["log"]) :] if row[-1] is not None]
    if end.error is not None or not late or min(late) < newest:
        assert after["labels"] == between["labels"], (between["labels"], after["labels"])
    assert between["labels"]["step_90"] == "ninety"
    do(pair.one, place, run, _save("step_91", "ninety-one")).get()
    assert same_sight(pair, place, run, deep=False)["latest"] == "step_91"
    place.forget(run)
    return True


def until_reached(gate: str, victim: Child | None = None) -> bool:
    """Wait until a held operation says that it is there, by a file that it makes.

    False if ``victim`` ended before: then it made fewer operations of that kind than were counted.
    """
    end = time.monotonic() + _REACH_S
    reached = Path(f"{gate}.reached")
    while time.monotonic() < end:
        ended = victim is not None and victim.has_ended
        if reached.exists():  # looked at last: it may have been made right before the end
            return True
        if ended:
            return False
        time.sleep(0.002)
    raise AssertionError("the victim never came to that operation")
