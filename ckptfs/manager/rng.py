"""RngState: every random generator of this process in one bundle, restored as far as it fits.

    state = {"model": model, "rng": ckptfs.RngState()}

    python        random
    numpy         numpy.random's own generator, where numpy is imported
    torch         the CPU generator
    cuda, ...     each device of the accelerator that this process has used

The bundle belongs to one rank and is saved per rank. It is restored key by key. A key is skipped if
the checkpoint lacks it, if this machine has no such generator, or if no generator of its kind could
have saved the value. What was skipped is logged and listed in ``skipped``; it never fails a
restore. Devices are matched by their number, but the state of the device that was current goes to
the device that is current now: a rank may run on another device than before.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ckptfs.errors import StateError

__all__ = ["RngState"]

logger = logging.getLogger("ckptfs.manager")


class RngState:
    """The random generators of this process, as an object of a state.

    Generators that you made yourself (``numpy.random.default_rng()``, ``torch.Generator()``) are not in it:
    save their states in the state dict.

    Attributes:
        skipped: What the last restore could not restore and why, one line each; () before and when all was
            restored.
    """

    def __init__(self) -> None:
        self.skipped: tuple[str, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators: plain values and tensors. Starts no accelerator."""
        found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            found["numpy"] = _numpy_state(numpy)
        for name, module in _accelerators():
            # The generator of a device that was never used has drawn no number, and reading it would
            # create a context on that device, hundreds of MiB for each rank.
            if _is_started(module):
                found[name] = _device_states(module)
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what fits of ``state``; ``skipped`` lists the rest. Never raises for content."""
        self.skipped = ()
        self._take("python", state, _set_python)
        self._take("torch", state, _set_torch)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            self._take("numpy", state, lambda saved: _set_numpy(numpy, saved))
        elif "numpy" in state:
            self.skip("numpy: saved, but not imported here")
        here = dict(_accelerators())
        for name, module in here.items():
            self._take(name, state, partial(self._devices, name, module))
        for name in sorted(set(state) - {"python", "torch", "numpy", *here}):
            self.skip(f"{name}: saved, and there is none here")

    def skip(self, why: str) -> None:
        """Note one generator that was not restored, and ``why``."""
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
        # The two are swapped: the sequence of this rank's device continues, whatever its number is now.
        places = {was: now, now: was}
        for number in range(count):
            source = places.get(number, number)
            if source in states:
                _set_device(module, number, _bytes_of(states[source]))
            else:
                self.skip(f"{name}:{number}: not among the {len(states)} devices that were saved")
        lost = [n for n in states if places.get(n, n) >= count]
        if lost:
            listed = ", ".join(f"{name}:{n}" for n in lost)
            self.skip(f"{listed}: saved, and there are {count} devices here")


def _numpy_state(numpy: Any) -> dict[str, Any]:
    """Return numpy's state of the generator that its global functions draw from."""
    state: dict[str, Any] = _plain(numpy.random.get_state(legacy=False))
    return state


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if hasattr(value, "astype"):
        # A numpy array would need numpy's own unpickler; a tensor loads with weights_only.
        return torch.from_numpy(value.astype("int64"))
    return value if isinstance(value, str | float) else int(value)


# The largest value of each number in numpy's states. numpy does not check them: with a position beyond
# its buffer it draws from the memory behind that.
_MOST = {
    "pos": 624,
    "buffer_pos": 4,
    "has_gauss": 1,
    "has_uint32": 1,
    "uinteger": 2**32 - 1,
    "state": 2**128 - 1,
    "inc": 2**128 - 1,
}


def _set_numpy(numpy: Any, saved: Mapping[str, Any]) -> None:
    here = numpy.random.get_state(legacy=False)
    numpy.random.set_state(_like("numpy", saved, here))


def _like(name: str, saved: Any, here: Any) -> Any:
    """Return what was saved, as numpy takes it.

    Raises StateError unless it has the structure of ``here``, part by part.
    """
    if isinstance(here, dict):
        if not isinstance(saved, Mapping) or set(saved) != set(here):
            raise StateError(f"{name} is not made of {', '.join(sorted(here))}")
        return {key: _like(key, saved[key], inner) for key, inner in here.items()}
    if isinstance(here, str):
        if saved != here:
            raise StateError(f"{name} is {saved!r}, and {here!r} here")
        return here
    if hasattr(here, "astype"):
        return _array_like(name, saved, here)
    if isinstance(here, float):
        if not isinstance(saved, float):
            raise StateError(f"{name} is no number")
        return saved
    if type(saved) is not int or not 0 <= saved <= _MOST.get(name, -1):
        raise StateError(f"{name} is not from 0 to {_MOST.get(name, 'what is known')}")
    return saved


def _array_like(name: str, saved: Any, here: Any) -> Any:
    fits = isinstance(saved, torch.Tensor) and saved.dtype is torch.int64
    if not fits or tuple(saved.shape) != here.shape:
        raise StateError(f"{name} does not have {here.size} whole numbers")
    array = saved.cpu().numpy()
    made = array.astype(here.dtype)
    if not (made.astype("int64") == array).all():
        raise StateError(f"{name} has numbers that are no {here.dtype}")
    return made


def _set_python(saved: Any) -> None:
    """Restore ``random``.

    It checks all of a state but the number that it keeps for the next call of ``gauss``.
    """
    state = _tuples(saved)
    if not (isinstance(state, tuple) and state and isinstance(state[-1], float | None)):
        raise StateError("it is not a state that random.getstate() returns")
    random.setstate(state)


def _set_torch(saved: Any) -> None:
    torch.set_rng_state(_bytes_of(saved))


def _bytes_of(saved: Any) -> torch.Tensor:
    """Return ``saved`` if it is a row of bytes, else raise StateError.

    The generator itself checks how many bytes there are.
    """
    if not isinstance(saved, torch.Tensor) or saved.dtype is not torch.uint8 or saved.dim() != 1:
        raise StateError("it is not a sequence of bytes")
    return saved.contiguous()


def _accelerators() -> list[tuple[str, Any]]:
    """Return the name and the module of the accelerator of this build of torch, if there is one."""
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
    """Return the device in use; ``unknown`` if finding out would start the accelerator."""
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
    """Turn lists into tuples, at any depth: random.setstate takes nothing else."""
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value
