"""RngState: every random generator of this process in one bundle, restored as far as it fits.

    state = {"model": model, "rng": ckptfs.RngState()}

    python        random
    numpy         numpy.random's own generator, where numpy is imported
    torch         the CPU generator
    cuda, ...     each device of the accelerator that this process has used

The bundle belongs to one rank and is saved per rank. Restoring takes key by key: what the checkpoint
lacks, or what this machine has not got, is skipped, logged, and told in ``skipped``; it never fails a
restore. Devices go by their number, but the device that was current comes back to the one that is
current now: a rank may find itself on another one.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

__all__ = ["RngState"]

logger = logging.getLogger(__name__)


class RngState:
    """The random generators of this process, as an object of a state.

    skipped: what the last restore could not restore and why, one line each; () before and when all
    was restored. Generators that you made yourself (``numpy.random.default_rng()``,
    ``torch.Generator()``) are not in it: save their states in the state dict.
    """

    def __init__(self) -> None:
        self.skipped: tuple[str, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        """The generators' states: plain values and tensors. Starts no accelerator."""
        found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            found["numpy"] = _numpy_state(numpy)
        for name, module in _accelerators():
            # A generator of a device that was never used has given no number, and asking it would
            # make a context on that device, hundreds of MiB for each rank.
            if _is_started(module):
                found[name] = _device_states(module)
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what is there and fits; ``skipped`` tells the rest. Never raises for content."""
        self.skipped = ()
        self._take("python", state, lambda saved: random.setstate(_tuples(saved)))
        self._take("torch", state, torch.set_rng_state)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            self._take("numpy", state, lambda saved: _set_numpy(numpy, saved))
        elif "numpy" in state:
            self.skip("numpy: saved, and not imported here")
        here = dict(_accelerators())
        for name, module in here.items():
            self._take(name, state, partial(self._devices, name, module))
        for name in sorted(set(state) - {"python", "torch", "numpy", *here}):
            self.skip(f"{name}: saved, and there is none here")

    def skip(self, why: str) -> None:
        """Note one generator that was not restored."""
        self.skipped = (*self.skipped, why)
        logger.warning("random generator not restored: %s", why)

    def _take(self, name: str, state: Mapping[str, Any], restore: Callable[[Any], None]) -> None:
        if name not in state:
            self.skip(f"{name}: not in the checkpoint")
            return
        try:
            restore(state[name])
        except Exception as error:  # noqa: BLE001 - each library refuses a state in its own way
            self.skip(f"{name}: {type(error).__name__}: {error}")

    def _devices(self, name: str, module: Any, saved: Mapping[str, Any]) -> None:
        states, was, count = saved["devices"], saved["current"], _count(module)
        now = _current(module, was)
        # The two change places: what was drawn on this rank's device goes on, whatever it is called.
        places = {was: now, now: was}
        for number in range(count):
            source = places.get(number, number)
            if source in states:
                _set_device(module, number, states[source])
            else:
                self.skip(f"{name}:{number}: not among the {len(states)} devices that were saved")
        lost = [n for n in states if places.get(n, n) >= count]
        if lost:
            listed = ", ".join(f"{name}:{n}" for n in lost)
            self.skip(f"{listed}: saved, and there are {count} devices here")


def _numpy_state(numpy: Any) -> dict[str, Any]:
    state = numpy.random.get_state(legacy=False)
    inner = {
        # A numpy array would need numpy's own unpickler; a tensor loads with weights_only.
        key: torch.from_numpy(value.astype("int64")) if hasattr(value, "astype") else int(value)
        for key, value in state["state"].items()
    }
    return {
        "bit_generator": str(state["bit_generator"]),
        "state": inner,
        "has_gauss": int(state["has_gauss"]),
        "gauss": float(state["gauss"]),
    }


def _set_numpy(numpy: Any, saved: Mapping[str, Any]) -> None:
    inner = {
        key: value.numpy().astype("uint32") if isinstance(value, torch.Tensor) else value
        for key, value in saved["state"].items()
    }
    numpy.random.set_state({**saved, "state": inner})


def _accelerators() -> list[tuple[str, Any]]:
    """The accelerator of this build of torch, if one is there: its name and its module."""
    if not torch.accelerator.is_available():
        return []
    device = torch.accelerator.current_accelerator()
    return [] if device is None else [(device.type, torch.get_device_module(device))]


def _is_started(module: Any) -> bool:
    started = getattr(module, "is_initialized", None)
    return bool(started()) if callable(started) else True


def _device_states(module: Any) -> dict[str, Any]:
    states = {n: _get_device(module, n) for n in range(_count(module))}
    return {"current": _current(module, 0), "devices": states}


def _count(module: Any) -> int:
    return int(module.device_count())


def _current(module: Any, unknown: int) -> int:
    """The device in use; ``unknown`` where asking would start the accelerator."""
    current = getattr(module, "current_device", None)
    if callable(current) and _is_started(module):
        return int(current())
    return unknown if unknown < _count(module) else 0


def _get_device(module: Any, number: int) -> torch.Tensor:
    # Apple's module has one device and takes no number.
    state: torch.Tensor = (
        module.get_rng_state(number)
        if hasattr(module, "current_device")
        else module.get_rng_state()
    )
    return state


def _set_device(module: Any, number: int, state: torch.Tensor) -> None:
    if hasattr(module, "current_device"):
        module.set_rng_state(state, number)
    else:
        module.set_rng_state(state)


def _tuples(value: Any) -> Any:
    """Lists as tuples, at any depth: random.setstate takes no other."""
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value
