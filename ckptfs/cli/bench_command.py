"""How a call of ``ckptfs bench`` stands in its result: one that can be repeated, without secrets. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from ckptfs.bench.messages import Asked
from ckptfs.storage.options import OURS
from ckptfs.uri import mask_credentials

__all__ = ["command_text"]

_MASK = "***"
# Options whose value is shown: where and how, never who. Everything else may be a secret.
_SHOWN = frozenset((*OURS, "anon", "endpoint_url", "region", "region_name", "use_ssl", "verify"))


def command_text(asked: Asked, told: Mapping[str, Any], out: str | None) -> str:
    """The words, quoted for a shell. told: the options as the command line was read."""
    words = ["ckptfs", "bench", *(str(target.place) for target in asked.targets)]
    for workload in asked.workloads:
        words += ["--workload", workload.kind]
    for name in ("params", "size"):
        if told[name] is not None:
            words += [f"--{name}", str(told[name])]
    if asked.engines:
        words += ["--engines", ",".join(asked.engines)]
    words += ["--rounds", str(asked.rounds)] if asked.within_s is None else []
    if told["ranks"] is not None:
        words += ["--ranks", str(told["ranks"])]
    words += [] if asked.durable else ["--no-durable"]
    if any(workload.kind == "loop" for workload in asked.workloads):
        words += ["--steps", str(asked.loop.steps), "--every", str(asked.loop.every)]
    words += ["--keep"] if asked.keep else []
    for key, value in _flat(told["storage_options"]):
        words += ["-o", f"{key}={_shown(key, value)}"]
    words += ["--out", out] if out else []
    return shlex.join(words)


def _flat(options: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _shown(key: str, value: Any) -> str:
    return mask_credentials(str(value)) if key.rpartition(".")[2] in _SHOWN else _MASK
