"""What a machine finds when the power is back, held against what was promised.

every name that the catalog lists      loads, and a seed explains its every bit
the names that were acknowledged       are listed; the newest is the newest, or one under way
verify(deep=True)                      finds nothing
latest, the file                       names a directory that is committed
then the next job                      claims the run, saves; and all of it is asked again, by
torch.distributed.checkpoint too
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch.distributed.checkpoint as dcp

import ckptfs
from ckptfs.commit.catalog.catalog import Checkpoint
from ckptfs.tools.findings import Verdict
from ckptfs.tools.verifying import verify
from tests.cuts.contents import FILES, blank_state, file_of, seed_in, seed_of_file, state_of
from tests.cuts.promises import Promised, promised

_NEXT_STEP = 1_000_000
_NEXT_SEED = 7


def faults_after(directory: Path, said: Sequence[str]) -> list[str]:
    """All that is not as it was promised, one line each; none is what it should be."""
    places = promised(said)
    looks: list[tuple[str, Callable[[], list[str]]]] = []
    for place, looking in (("run", _states), ("files", _files), ("copies", _states)):
        if place in places:
            looks.append((place, partial(_faults, directory / place, places[place], looking)))
    if "plain" in places:
        looks.append(("plain", partial(_plain, directory / "plain", places["plain"])))
    if any(line.startswith("done prepare") for line in said):
        run = places.get("run", Promised())
        looks.append(("the next job", partial(_next_job, directory / "run", run)))
    if "files" in places:
        files = partial(_next_directory, directory / "files", places["files"])
        looks.append(("the next job with files", files))
    if "copies" in places:
        copies = partial(_next_copy, directory / "copies", places["copies"])
        looks.append(("the next copy", copies))
    told: list[str] = []
    for what, look in looks:
        try:
            told += look()
        except (ckptfs.CkptfsError, OSError) as error:
            told.append(f"{what} fails: {type(error).__name__}: {error}")
    return told


def _faults(
    run: Path, place: Promised, looking: Callable[[Checkpoint], int | None], *, stock: bool = False
) -> list[str]:
    told, found = [], {}
    for checkpoint in ckptfs.list_checkpoints(run):
        name = checkpoint.uri.name
        try:
            found[name] = looking(checkpoint)
        except ckptfs.CkptfsError as error:
            told.append(f"{name} is listed and cannot be read: {error}")
        if stock and _stock(run / name) != found.get(name):
            told.append(f"{name} is something else to torch itself")
    told += place.faults(found, _newest(run, looking))
    if looking is _files:
        told += _pointer(run, found, place)
    if found:
        verified = verify([run], deep=True, jobs=1)
        if verified.verdict is not Verdict.CLEAN:
            told.append(f"verify says {verified.verdict}: {verified.all_findings}")
    return [f"{run.name}: {one}" for one in told]


def _newest(run: Path, looking: Callable[[Checkpoint], int | None]) -> str | None:
    newest = ckptfs.latest(run, "directory" if looking is _files else "checkpoint")
    return None if newest is None else newest.uri.name


def _stock(directory: Path) -> int | None:
    state = blank_state()
    try:
        dcp.load(state, checkpoint_id=directory)
    except (dcp.api.CheckpointException, OSError):  # the former is no Exception
        return None
    return seed_in(state)


def _states(checkpoint: Checkpoint) -> int | None:
    state = blank_state()
    ckptfs.load(state, checkpoint.uri)
    return seed_in(state)


def _files(checkpoint: Checkpoint) -> int | None:
    with ckptfs.checkpoint_dir(checkpoint.uri, "read") as place:
        seeds = {seed_of_file(name, Path(place, name).read_bytes()) for name in FILES}
    return seeds.pop() if len(seeds) == 1 else None


def _pointer(run: Path, found: dict[str, int | None], place: Promised) -> list[str]:
    try:
        name = (run / "latest").read_text()
    except FileNotFoundError:
        return [] if None in place.newest else ["the file latest is lost"]
    if name not in found or name not in place.newest:
        return [f"the file latest says {name!r}; there are {[*found]}, promised {place.newest}"]
    return []


def _plain(directory: Path, place: Promised) -> list[str]:
    found = {
        path.name: seed_of_file(FILES[0], path.read_bytes())
        for path in (directory.iterdir() if directory.exists() else ())
        if path.name != "temporary"
    }
    newest = max(found, key=lambda name: int(name.partition("_")[2]), default=None)
    return [f"plain: {one}" for one in place.faults(found, newest)]


def _next_job(run: Path, place: Promised) -> list[str]:
    with ckptfs.prepare_run(run, takeover="force") as held:
        newest, promised_newest = _newest(run, _states), {*place.newest}
        name = f"step_{_NEXT_STEP}"
        place.begin(name, _NEXT_SEED, None)
        ckptfs.save(state_of(_NEXT_SEED), run / name, run=held)
        place.done(name, _NEXT_SEED)
        told = _faults(run, place, _states, stock=True)
    if newest not in promised_newest:
        told.append(
            f"{run.name}: once claimed, the newest is {newest}, not one of {promised_newest}"
        )
    return told


def _next_directory(run: Path, place: Promised) -> list[str]:
    with ckptfs.DirectoryManager(run, pointer="latest", takeover="force") as manager:
        name = f"step_{_NEXT_STEP}"
        place.begin(name, _NEXT_SEED, None)
        with manager.writing(_NEXT_STEP) as there:
            for file in FILES:
                path = Path(there, file)
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(file_of(file, _NEXT_SEED))
        place.done(name, _NEXT_SEED)
    return _faults(run, place, _files)


def _next_copy(run: Path, place: Promised) -> list[str]:
    with ckptfs.prepare_run(run, takeover="force"):
        return _faults(run, place, _states, stock=True)
