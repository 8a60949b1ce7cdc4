"""The log of a run: entries, hint, domain, and what attempts say of themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.hostile.corpus import Group, add, hostile
from tests.hostile.inputs.manifests import RAW, VALUES
from tests.hostile.place import On, Place

COMMANDS = ("prepare_run", "latest", "ls", "log", "gc", "restore", "verify-run")
SAVE = "20261124T053851-aaaaaaaaaaaa"

SEAL_FIELDS: dict[str, tuple[str, ...]] = {
    "v": ("infinite", "text", "list", "huge"),
    "kind": ("list", "escape", "null"),
    "id": ("list", "escape", "infinite"),
    "name": ("list", "escape", "null"),
    "save_id": ("list", "escape", "null", "infinite"),
    "step": ("infinite", "text", "huge", "negative", "escape"),
    "base": ("infinite", "text", "null", "dict"),
    "digest": ("list", "null", "infinite"),
    "domains": ("infinite", "text", "dict", "null"),
    "references": ("infinite", "text", "dict"),
    "parts": ("infinite", "text", "list", "dict"),
    "seq": ("infinite", "text", "negative", "huge"),
    "artifact": ("list", "text", "null"),
    "failure": ("text", "list"),
    "at": ("list", "escape", "surrogate"),
    "by_host": ("list", "escape", "surrogate"),
    "by_pid": ("infinite", "text", "list"),
    "by_rank": ("infinite", "text", "list"),
}
SNAPSHOTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "state-text": {"state": "x"},
    "state-null": {"state": None},
    "state-infinite": {"state": {"next": float("inf")}},
    "saves-text": {"saves": "x", "state": {"saves": "x"}},
    "saves-lead-out": {"saves": [{"save_id": "../../../victim", "name": "step_2"}]},
}
NAMES = {
    "up": "../../victim",
    "absolute": "/etc",
    "control": "\x1b]0;owned\x07",
    "own": ".ckptfs",
    "shared": "_data",
    "empty": "",
    "dot": ".",
    "surrogate": "\udc80",
    "nul": "a\0b",
    "long": "n" * 5000,
}


def _add(name: str, tries: str, build: Callable[[Place], None]) -> None:
    add(name, tries, Group.RUN_LOG, build, on=On.RUN, commands=COMMANDS, forged=True)


def _seal(place: Place, field: str, value: Any) -> None:
    place.change_seal(lambda record: record.update({field: value}))


def _entry(place: Place, data: bytes) -> None:
    place.log(place.log_end).write_bytes(data)


def _middle(place: Place, data: bytes) -> None:
    place.log(2).write_bytes(data)


def _file(place: Place, name: str, data: bytes) -> None:
    (place.control / name).write_bytes(data)


def _snapshot(place: Place, fields: dict[str, Any]) -> None:
    number = place.log_end
    place.append({"kind": "snapshot", **fields}, number)
    (place.control / "hint").write_text(json.dumps({"snapshot": number, "next": number + 1}))


def _fence(place: Place, generation: Any) -> None:
    place.append({"kind": "fence", "generation": generation, "mode": "resume"})


def _attempt(place: Place, record: bytes) -> None:
    place.attempt(SAVE, record)


def _attempt_named(place: Place, name: str) -> None:
    record = {"name": name, "base": [1, "86dfbd05"], "save_id": SAVE}
    place.attempt(SAVE, json.dumps(record).encode())


for _field, _values in SEAL_FIELDS.items():
    for _value in _values:
        _add(
            f"seal-{_field}-{_value}",
            f"{_field} of an entry of the log is {_value}.",
            partial(_seal, field=_field, value=VALUES[_value]),
        )

for _name, _value in NAMES.items():
    _add(
        f"seal-of-{_name}",
        f"An entry seals a checkpoint called {_value[:40]!r}.",
        partial(_seal, field="name", value=_value),
    )
    _add(
        f"attempt-of-{_name}",
        f"An attempt says that it is of {_value[:40]!r}.",
        partial(_attempt_named, name=_value),
    )

for _name, (_tries, _data) in RAW.items():
    _add(f"entry-is-{_name}", f"The last entry of the log: {_tries}", partial(_entry, data=_data))
    _add(f"hint-is-{_name}", f"The hint: {_tries}", partial(_file, name="hint", data=_data))
    _add(f"domain-is-{_name}", f"The domain: {_tries}", partial(_file, name="domain", data=_data))
    _add(f"lease-is-{_name}", f"The lease: {_tries}", partial(_file, name="lease", data=_data))
    _add(f"attempt-is-{_name}", f"attempt.json: {_tries}", partial(_attempt, record=_data))

for _name in ("not-json", "deep", "empty"):
    _add(
        f"entry-2-is-{_name}",
        f"An entry in the middle of the log: {RAW[_name][0]}",
        partial(_middle, data=RAW[_name][1]),
    )

for _name, _fields in SNAPSHOTS.items():
    _add(
        f"snapshot-{_name}",
        "A snapshot, to which the hint leads, says something else than a state.",
        partial(_snapshot, fields=_fields),
    )

for _name, _number in {
    "infinite": float("inf"),
    "long": 10**3999,
    "negative": -1,
    "text": "x",
}.items():
    _add(
        f"fence-{_name}",
        f"A fence whose generation is {_name}.",
        partial(_fence, generation=[_number, "86dfbd05"]),
    )

for _name, _hint in {
    "infinite": '{"snapshot": 1e400}',
    "negative": '{"snapshot": -1}',
    "far": '{"snapshot": 99999999999999999999}',
    "nan": '{"snapshot": NaN}',
}.items():
    _add(
        f"hint-{_name}",
        f"The hint leads to a snapshot with the number {_name}.",
        partial(_file, name="hint", data=_hint.encode()),
    )


@hostile(Group.RUN_LOG, on=On.RUN, commands=COMMANDS, forged=True)
def entry_of_100_mb(place: Place) -> None:
    """An entry of the log that has 100 MB."""
    with place.log(place.log_end).open("wb") as file:
        file.write(b'{"v": 1, "kind": "')
        file.truncate(100 << 20)


@hostile(Group.RUN_LOG, on=On.RUN, commands=COMMANDS, forged=True)
def log_that_ends_in_giants(place: Place) -> None:
    """A log so long that its entries are read many at once, and then entries that have 100 MB each."""
    for number in range(40):
        place.append({"kind": "pin", "save_id": f"{SAVE}{number}", "pinned": True})
    for _ in range(32):
        entry_of_100_mb(place)


@hostile(Group.RUN_LOG, on=On.RUN, commands=COMMANDS, forged=True)
def one_entry_many_times(place: Place) -> None:
    """One file of 15 MB, linked as 200 entries: 3 GB to read, each of them a valid entry."""
    place.append({"kind": "pin", "save_id": SAVE, "pinned": True, "x": " " * (15 << 20)})
    first = place.log(place.log_end - 1)
    for _ in range(200):
        place.log(place.log_end).hardlink_to(first)


@hostile(Group.RUN_LOG, on=On.RUN, commands=COMMANDS, forged=True)
def log_with_a_gap(place: Place) -> None:
    """An entry is missing, and one is far behind."""
    place.append({"kind": "release", "generation": [1, "x"]}, 99_999_999)


@hostile(Group.RUN_LOG, on=On.RUN, commands=COMMANDS)
def stray_file_in_the_log(place: Place) -> None:
    """A file in the log that is no entry."""
    (place.control / "log" / "notes.txt").write_text("x")
    (place.control / "log" / ("9" * 200)).write_text("x")


@hostile(Group.RUN_LOG, on=On.RUN, commands=COMMANDS, forged=True)
def job_name_with_escapes(place: Place) -> None:
    """A fence with a host and a job that move the cursor."""
    generation = [2, "86dfbd06"]
    odd = "\x1b[2J\x1b]0;owned\x07\r\n"
    place.append(
        {
            "kind": "fence", "generation": generation, "mode": "resume", "host": odd, "job": odd,
            "by_host": odd, "at": odd, "node": "x", "pid": 1, "started": "1",
        }
    )  # fmt: skip
