"""One version of ckptfs in a warm process that forks for each step; started by ``hosts.py``.

    python host.py /path/to/a/tree      PYTHONPATH is that tree, then this one: for tests.faults.victim

    stdin   {"do": "save", "with": {...}, "faults": "kill:*:*:7", "trace": PATH}   -> {"pid": 71}
            {"import": [MODULE, ...]}                     -> {}
    {"wait": 71}                          -> {"value": ...} | {"error": {...}} | {"signal": 9}

What a step does is a function below. Each uses only what both versions have, so this file is the same
program for both; a child that is killed leaves what a killed job leaves.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import io
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

import ckptfs
import ckptfs.cli.change
import ckptfs.cli.copy
import ckptfs.cli.export
import ckptfs.cli.inspect
import ckptfs.cli.look
import ckptfs.cli.verify
import ckptfs.manager.manager
from ckptfs.cli.main import main as command_line
from ckptfs.errors import CkptfsError
from tests.faults import victim

STEP_TIMEOUT_S = 120
Options = dict[str, Any]


# -- what a checkpoint holds -----------------------------------------------------------------------


def state_of(label: str) -> dict[str, Any]:
    """Tensors, a number and a text that all say which save they are of."""
    seed = sum(label.encode())
    return {
        "model": {
            "w": torch.arange(3000, dtype=torch.float32) + seed,
            "b": torch.full((7, 3), float(seed), dtype=torch.bfloat16),
        },
        "label": label,
        "count": seed,
    }


def blank() -> dict[str, Any]:
    """The same, with nothing in it."""
    return {
        "model": {"w": torch.zeros(3000), "b": torch.zeros(7, 3, dtype=torch.bfloat16)},
        "label": "",
        "count": 0,
    }


def label_in(state: dict[str, Any]) -> str:
    """Which save all of it is of; a text that is no label, where it is of several."""
    wanted = state_of(state["label"])
    same = state["count"] == wanted["count"] and all(
        torch.equal(state["model"][key], tensor) for key, tensor in wanted["model"].items()
    )
    return str(state["label"]) if same else f"a mix, with the label {state['label']!r}"


# -- writers ---------------------------------------------------------------------------------------


def save(run: str, name: str, label: str, options: Options, *, replace: bool = False) -> str:
    """A plain save."""
    done = ckptfs.save(
        state_of(label),
        f"{run}/{name}",
        if_exists="replace" if replace else "error",
        storage_options=options,
    )
    return done.save_id


def async_save(run: str, name: str, label: str, options: Options) -> str:
    """One in the background, waited for."""
    return (
        ckptfs.async_save(state_of(label), f"{run}/{name}", storage_options=options)
        .result()
        .save_id
    )


def claim(run: str, options: Options, *, takeover: str = "auto") -> int:
    """Take the run and let it go."""
    with ckptfs.prepare_run(run, takeover=takeover, storage_options=options) as held:  # type: ignore[arg-type]
        return held.generation.number


def force(run: str, name: str, label: str, options: Options) -> str:
    """Take the run from its owner, and save."""
    with ckptfs.prepare_run(run, takeover="force", storage_options=options) as held:
        return ckptfs.save(
            state_of(label), f"{run}/{name}", run=held, storage_options=options
        ).save_id


def clear(run: str, name: str, label: str, options: Options) -> str:
    """Begin the run again: what is there goes with the first commit."""
    with ckptfs.prepare_run(run, mode="overwrite", storage_options=options) as held:
        return ckptfs.save(
            state_of(label), f"{run}/{name}", run=held, storage_options=options
        ).save_id


def manage(
    run: str,
    options: Options,
    *,
    saves: list[list[Any]],
    keep_latest: int | None = None,
    mode: str = "sync",
    unchanged: str = "write",
    kind: str = "checkpoint",
    pin: int | None = None,
    delete: int | None = None,
    copies: list[str] = [],  # noqa: B006 - never changed
    restore: bool = False,
    until: str | None = None,
) -> dict[str, Any]:
    """A manager's life: restore, save (step, label), pin, delete; until: named pipes, see hold."""
    told: dict[str, Any] = {}
    with ckptfs.CheckpointManager(
        run,
        keep_latest=keep_latest,
        mode=mode,  # type: ignore[arg-type]
        unchanged=unchanged,  # type: ignore[arg-type]
        copies=[ckptfs.Copy(uri, storage_options=options) for uri in copies],
        storage_options=options,
    ) as manager:
        if restore:
            fresh = blank()
            restored = manager.restore(fresh)
            told["restored"] = None if restored is None else [restored.step, label_in(fresh)]
        for step, label in saves:
            manager.save(step, state_of(label), {"loss": 1.0 / step}, kind=kind)  # type: ignore[arg-type]
        manager.wait()
        if pin is not None:
            manager.pin(pin)
        if delete is not None:
            manager.delete(delete)
        told["steps"] = manager.steps
        if until is not None:
            hold(until)
            manager.save(1000, state_of("thousand"))
    return told


def hold(path: str) -> None:
    """Two named pipes: say that this place was reached, and wait for leave to continue."""
    with open(f"{path}.reached", "wb"):
        pass
    with open(path, "rb"):
        pass


def parts(run: str, step: int, label: str, options: Options) -> list[str]:
    """One checkpoint of two groups."""
    with ckptfs.CheckpointManager(run, storage_options=options) as manager:
        ticket = manager.begin(step, ["actor", "critic"])
        sealed = [
            ckptfs.save(state_of(f"{label} {part}"), ticket.part(part), storage_options=options)
            for part in ticket.parts
        ]
        ticket.commit(sealed)
        return list(ticket.parts)


def directory(run: str, name: str, label: str, options: Options) -> None:
    """A directory that a framework would write."""
    with (
        ckptfs.checkpoint_dir(f"{run}/{name}", storage_options=options) as path,
        open(f"{path}/label.txt", "w", encoding="utf-8") as file,
    ):
        file.write(label)


def put_object(run: str, name: str, label: str, options: Options) -> None:
    """One object, outside of the log."""
    ckptfs.save_object(state_of(label), f"{run}/{name}", storage_options=options)


def get_object(run: str, name: str, options: Options) -> str:
    """Its label."""
    return label_in(ckptfs.load_object(f"{run}/{name}", storage_options=options))


def stock_save(run: str, name: str, label: str, options: Options) -> None:
    """By torch's own entry point."""
    import torch.distributed.checkpoint as dcp

    writer = ckptfs.StorageWriter(f"{run}/{name}", storage_options=options)
    dcp.save(state_of(label), storage_writer=writer)


def stock_load(run: str, name: str, options: Options) -> str:
    """The same for reading."""
    import torch.distributed.checkpoint as dcp

    state = blank()
    reader = ckptfs.StorageReader(f"{run}/{name}", storage_options=options)
    dcp.load(state, storage_reader=reader)
    return label_in(state)


def safetensors(file: str) -> str:
    """Which save an exported file is of."""
    from safetensors.torch import load_file

    found = load_file(file)
    wanted = float(found["model.b"][0, 0])
    whole = torch.equal(found["model.w"], torch.arange(3000, dtype=torch.float32) + wanted)
    return str(int(wanted)) if whole else "a mix"


# -- the command line ------------------------------------------------------------------------------


def command(*arguments: str) -> dict[str, Any]:
    """Its exit code and its document."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command_line([*arguments, "--json"])
        except SystemExit as ended:
            code = ended.code
    text = out.getvalue()
    return {"exit": code, "document": json.loads(text) if text else None, "err": err.getvalue()}


def _flags(options: Options) -> list[str]:
    return [part for k, v in options.items() for part in ("-o", f"{k}={json.dumps(v)}")]


def cli(words: list[str], options: Options) -> dict[str, Any]:
    """Any command."""
    return command(*words, *_flags(options))


# -- readers ---------------------------------------------------------------------------------------


def observe(run: str, options: Options, *, deep: bool = True) -> dict[str, Any]:
    """All that a reader of this version sees: by the API, and by the command line; deep: also by verify."""
    newest = ckptfs.latest(run, storage_options=options)
    listed = ckptfs.list_checkpoints(run, storage_options=options)
    seen: dict[str, Any] = {
        "latest": None if newest is None else newest.uri.name,
        "listed": [
            [c.uri.name, c.step, c.save_id, c.kind.value, c.origin.value, c.pinned, list(c.parts)]
            for c in listed
        ],
        "labels": {},
        "verdicts": {},
    }
    for found in listed:
        name = found.uri.name
        seen["labels"][name] = _label_of(run, name, found.kind.value, list(found.parts), options)
        if not deep:
            continue
        told = cli(["verify", f"{run}/{name}", "--deep"], options)
        seen["verdicts"][name] = [told["exit"], (told["document"] or {}).get("verdict")]
    told = cli(["latest", run], options)
    document = told["document"] or {}
    checkpoint = document.get("checkpoint") or {}
    seen["cli latest"] = [told["exit"], checkpoint.get("name")]
    told = cli(["ls", run, "-a"], options)
    seen["ls"] = [told["exit"]]
    for place in (told["document"] or {}).get("places", ()):
        seen["ls"] += sorted(
            # Whether an attempt without a seal may live is an opinion for people, and has changed.
            [
                c["name"],
                "unsealed" if c["state"] in {"on its way", "abandoned"} else c["state"],
                c["pinned"],
                str(c["save_id"]),
            ]
            for c in place.get("checkpoints", ())
        )
    told = cli(["log", run], options)
    seen["log"] = [
        [e["number"], e["entry"], e["condition"], e["save_id"], e["name"], e["generation"]]
        for e in (told["document"] or {}).get("entries", ())
    ]
    return seen


def modules(steps: list[list[Any]]) -> list[str]:
    """What these steps import that was not there."""
    before = set(sys.modules)
    for name, told in steps:
        STEPS[name](**told)
    return [name for name in sys.modules if name not in before]


def debris(run: str, options: Options) -> list[list[Any]]:
    """What gc would remove."""
    told = cli(["gc", run, "--older-than", "0s"], options)
    runs = (told["document"] or {}).get("runs", ())
    return sorted([f["kind"], f["name"], f["fate"]] for one in runs for f in one.get("found", ()))


def _label_of(run: str, name: str, kind: str, parts: list[str], options: Options) -> str:
    if kind == "directory":
        # By its catalog: plain names are there once the save is projected, maybe by the next owner.
        with ckptfs.checkpoint_dir(f"{run}/{name}", "read", storage_options=options) as path:
            return Path(path, "label.txt").read_text(encoding="utf-8")
    if parts:
        found = [_label_of(run, f"{name}/{part}", "checkpoint", [], options) for part in parts]
        return " + ".join(found)
    state = blank()
    ckptfs.load(state, f"{run}/{name}", storage_options=options)
    return label_in(state)


STEPS: dict[str, Callable[..., Any]] = {
    step.__name__: step
    for step in (
        save, async_save, claim, force, clear, manage, parts, directory, put_object, get_object,
        stock_save, stock_load, safetensors, cli, observe, debris, modules,
    )
}  # fmt: skip


# -- the warm process ------------------------------------------------------------------------------


def _requests() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def _say(value: Any) -> None:
    print(json.dumps(value), flush=True)


def _child(request: dict[str, Any], pipe: int) -> NoReturn:
    """Do the step and say how it went; never returns into the loop of its parent."""
    faulthandler.dump_traceback_later(STEP_TIMEOUT_S, exit=True)
    told: dict[str, Any]
    try:
        if request.get("faults") or request.get("trace"):
            os.environ["CKPTFS_TEST_FAULT"] = request.get("faults") or ""
            os.environ["CKPTFS_TEST_TRACE"] = request.get("trace") or ""
            victim.install()
        told = {"value": STEPS[request["do"]](**request["with"])}
    except CkptfsError as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        told = {"error": {"types": kinds, "text": str(error), "outcome": error.outcome}}
    except BaseException:  # noqa: BLE001 - the one way out of a fork
        told = {"error": {"types": [], "text": traceback.format_exc(), "outcome": "unknown"}}
    with os.fdopen(pipe, "w") as out:
        json.dump(told, out)
    os._exit(0)


def main(tree: str) -> None:
    """Serve until standard input ends."""
    assert os.path.dirname(ckptfs.__file__) == os.path.join(tree, "ckptfs"), ckptfs.__file__
    logging.disable(logging.CRITICAL)  # what the dying say is judged by what they leave
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # the forks share what is warm: collecting it would copy it
    pipes: dict[int, int] = {}
    _say({"ready": ckptfs.__file__})
    for request in _requests():
        if "import" in request:  # what a step has to import, each fork would import again
            for module in request["import"]:
                with contextlib.suppress(ImportError):
                    importlib.import_module(module)
            _say({})
            continue
        if "wait" in request:
            pid = int(request["wait"])
            with os.fdopen(pipes.pop(pid)) as told:
                text = told.read()
            _, status = os.waitpid(pid, 0)
            signalled = (
                {"signal": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else {"status": status}
            )
            _say(json.loads(text) if text else signalled)
            continue
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(reader)
            _child(request, writer)
        os.close(writer)
        pipes[pid] = reader
        _say({"pid": pid})


if __name__ == "__main__":
    main(sys.argv[1])
