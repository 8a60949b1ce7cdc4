"""Every name of torch that is private or may be absent, one line each with why. Torch stays lazy.

Nothing here imports torch when it is imported: ``import ckptfs`` and every tool that only lists
checkpoints run without it. Lowest layer but errors; it knows nothing of ckptfs.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

# -- control plane: groups and c10d stores -----------------------------------------------------


def has_default_group() -> bool:
    """True when torch.distributed is initialised; never imports torch to find out."""
    dist = sys.modules.get("torch.distributed")
    # A build without distributed has the module and not the function.
    return bool(dist and dist.is_available() and dist.is_initialized())


def is_called_by_dcp() -> bool:
    """Whether the caller acts for torch.distributed.checkpoint, on this thread.

    Its writers hand files to fsspec under names that a copying program uses too, and nothing but the
    caller tells the two apart before the first byte.
    """
    frame = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("torch.distributed.checkpoint"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def rank_and_size(group: Any) -> tuple[int, int]:
    """(rank, size) of this process in a group (None: the default one); rank -1: not a member."""
    import torch.distributed as dist

    return dist.get_rank(group), dist.get_world_size(group)


def group_ranks(group: Any) -> tuple[int, ...]:
    """The global ranks of a group (None: the default one), in order of group rank."""
    import torch.distributed as dist

    return tuple(dist.get_process_group_ranks(group or dist.group.WORLD))


def group_store(group: Any) -> Any:
    """The c10d store of a group (None: the default one).

    _get_default_store, _get_process_group_store, _world.pg_map: torch has no public way to the
    store that init_process_group made, and a second store would mean a port opened unasked.
    """
    from torch.distributed import distributed_c10d as c10d

    if group is None:
        return c10d._get_default_store()  # noqa: SLF001
    held = c10d._world.pg_map.get(group)  # noqa: SLF001
    # A group made by splitting a communicator may be absent from the map: all its members still
    # share the default store, and every control has a namespace of its own there.
    return held[1] if held and held[1] is not None else c10d._get_default_store()  # noqa: SLF001


def group_channel(group: Any) -> tuple[Any, str]:
    """The store over which the ranks of a group talk, and a name that tells the group from others there.

    A group's own store is the default group's under a prefix: another object, and clones of it would
    be connections of their own to the same server. Its name is what torch makes that prefix of.
    """
    own, default = group_store(group), group_store(None)
    if own is default or _below(own) is not _below(default):
        return own, ""
    return default, f"group {group.group_name}"


def _below(store: Any) -> Any:
    """The store under all prefixes. underlying_store: the only way from a PrefixStore to it."""
    from torch.distributed import PrefixStore

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def connect_store(host: str, port: int, timeout_s: float) -> Any:
    """A client of a TCPStore that somebody else hosts (torchrun's agent). Opens no port."""
    from torch.distributed import TCPStore

    wait = timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)


def clone_store(store: Any) -> Any:
    """A store for one more thread: a blocked wait blocks every thread of its client."""
    if hasattr(store, "clone"):  # torch >= 2.8
        return store.clone()
    return reconnect_store(store)


def is_networked(store: Any) -> bool:
    """Whether every client of a store is a connection of its own to a server."""
    from torch.distributed import TCPStore

    return isinstance(_below(store), TCPStore)


def reconnect_store(store: Any) -> Any:
    """What clone() does, for torch 2.6 and 2.7; the prefixes of PrefixStores are dropped.

    Dropped on every rank alike, and a control's keys are unique by their nonce without them.
    """
    from torch.distributed import FileStore, TCPStore

    store = _below(store)
    if isinstance(store, TCPStore):
        wait_s = store.timeout.total_seconds()  # type: ignore[attr-defined] # the stubs lack it
        return connect_store(store.host, store.port, wait_s)
    if isinstance(store, FileStore):
        return FileStore(store.path, -1)  # type: ignore[attr-defined] # the stubs lack it
    return store  # HashStore: threads of one process, its waits block nobody


# -- dcp -------------------------------------------------------------------------------------


def storage_info(path: str, offset: int, length: int) -> Any:
    """Where one item lies, as stock's writer says it and stock's reader insists on."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(path, offset, length)


def storage_info_type() -> type[Any]:
    """The class of the values of ``Metadata.storage_data``; stock's reader insists on it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo


def mem_format_encoding() -> type[Any]:
    """The enum inside every pickled TensorProperties: an unpickler must know it by name."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    return _MEM_FORMAT_ENCODING


def is_sharded_tensor(value: object) -> bool:
    """True for FSDP1's ShardedTensor, which DCP treats apart and which has no public home."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    return isinstance(value, ShardedTensor)


def boxes_here(value: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of the parts of a tensor that lie on this rank, as torch's load planner cuts
    them: private, and nothing public says it of a ShardedTensor and of a tensor that cuts itself.
    """
    from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

    if is_dtensor(value) and value.device_mesh.get_coordinate() is None:
        return []
    return [(tuple(one.offsets), tuple(one.sizes)) for one in _create_chunk_list(value)]


def unsaved_buffers(module: Any) -> frozenset[str]:
    """The names of a module's own buffers that its state_dict leaves out (persistent=False)."""
    return frozenset(module._non_persistent_buffers_set)  # noqa: SLF001 - nothing public tells


def is_wrapper_subclass(value: object) -> bool:
    """True for tensor subclasses without memory of their own (quantised, nested, functional)."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return bool(is_traceable_wrapper_subclass(value))


# -- torch.save ------------------------------------------------------------------------------


def storage_alignment_bytes() -> int:
    """To what multiple torch.save aligns data in its archives; before torch 2.7 always 64."""
    from torch import serialization

    asked = getattr(serialization, "_get_storage_alignment", None)
    return int(asked()) if asked else 64


def save_without_data(tensor: Any, sink: Any) -> None:
    """What torch.save writes of a tensor, its data seeked over and all CRC fields 0.

    PyTorchFileWriter, _save: torch.save would ask a setting of the whole process whether to compute
    CRCs, and changing that is seen by whoever saves at the same time. skip_data is this thread's own.
    """
    import pickle

    import torch
    from torch import serialization

    alignment = (
        () if not hasattr(serialization, "_get_storage_alignment") else (storage_alignment_bytes(),)
    )
    with serialization.skip_data():
        writer = torch._C.PyTorchFileWriter(sink, False, *alignment)  # noqa: FBT003, SLF001
        serialization._save(tensor, writer, pickle, serialization.DEFAULT_PROTOCOL, False)  # noqa: FBT003, SLF001
        writer.write_end_of_file()


# -- staging ---------------------------------------------------------------------------------


def cuda_device() -> int | None:
    """This thread's CUDA device, for another thread; None where this process has not used one."""
    import torch

    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.cuda.current_device() if used else None


def pin_host_memory(memory: Any, device: int | None = None) -> Any:
    """Page-lock a host tensor in place for CUDA; returns how to undo it, None where it cannot be.

    device: the pages are locked in the context of this device; None: of this thread's device. A new thread
    has device 0, where a context would take memory that another rank needs.

    cudart: torch's own pinned allocator rounds sizes up to powers of two and keeps what it once got,
    so a bound on it would not hold. Other accelerators copy from pageable memory.
    """
    import torch

    device = cuda_device() if device is None else device
    if device is None or not memory.numel():
        return None
    runtime: Any = torch.cuda.cudart()
    address, size_bytes = memory.data_ptr(), memory.numel() * memory.element_size()
    with torch.cuda.device(device):
        if int(runtime.cudaHostRegister(address, size_bytes, 0)) != 0:
            return None
    return lambda: runtime.cudaHostUnregister(address)


def wait_for_device(device: Any) -> None:
    """Return when what this thread queued on a device, copies to the host included, is done."""
    import torch

    module: Any = torch.get_device_module(device)
    if hasattr(module, "current_stream"):
        module.current_stream(device).synchronize()
    elif hasattr(module, "synchronize"):  # mps has one stream
        module.synchronize()


def wait_for_accelerator() -> None:
    """As ``wait_for_device`` for this thread's accelerator, where this process has used one.

    torch names the accelerator that it was built for, CUDA in the wheels of PyPI, whether the machine has one
    or not. To ask for a stream where there is no driver raises; to ask a driver that nobody has used yet costs
    a context.
    """
    import torch

    device = torch.accelerator.current_accelerator()
    if device is None:
        return
    module: Any = torch.get_device_module(device)
    if hasattr(module, "is_initialized"):
        used = module.is_initialized()
    else:  # mps
        used = torch.accelerator.is_available()
    if used:
        wait_for_device(device)


# -- state of modules and optimizers ------------------------------------------------------------


def is_dtensor(value: object) -> bool:
    """True for DTensors; torch.distributed.tensor is imported by whoever made one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def unwrapped(module: Any) -> Any:
    """The module without the wrappers around the whole of it, which put their names into its keys.

    _orig_mod: torch.compile's wrapper has no other way to what it compiled.
    """
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    while True:
        if isinstance(module, (DistributedDataParallel, DataParallel)):
            module = module.module
        elif "_orig_mod" in getattr(module, "_modules", {}):
            module = module._orig_mod  # noqa: SLF001
        else:
            return module


def is_flat(module: Any) -> bool:
    """True for modules with FullyShardedDataParallel in them, which whoever made one has imported."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    wrapper = getattr(fsdp, "FullyShardedDataParallel", None)
    return wrapper is not None and any(isinstance(m, wrapper) for m in module.modules())


def clean_name(name: str) -> str:
    """A parameter's name without what wrappers of inner modules put into it."""
    for mark in ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."):
        name = name.replace(mark, "")
    return name


def prime_optimizer(optimizer: Any) -> None:
    """Let a fresh optimizer make its state: one step with zero gradients and zero learning rate.

    _init_optim_state: what torch's own checkpoint helpers do; there is no public way.
    """
    from torch.distributed.checkpoint.state_dict import _init_optim_state

    _init_optim_state(optimizer)


def exchange_barrier(barrier: Any) -> Any:
    """Put another function in the place of torch.distributed.barrier; the one that was there.

    Frameworks look it up when they call it, and there is no hook around it.
    """
    import torch.distributed as dist

    before = dist.barrier
    dist.barrier = barrier
    return before


# -- what is compared with us -------------------------------------------------------------------


def fsspec_writer(uri: str, **options: Any) -> Any:
    """torch's writer over fsspec: torch documents it and ships it in a private module."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    return FsspecWriter(uri, **options)


def fsspec_reader(uri: str, **options: Any) -> Any:
    """torch's reader over fsspec."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    return FsspecReader(uri, **options)


# -- objects in checkpoints ----------------------------------------------------------------------


def load_archive(stream: Any, pickle_module: Any) -> Any:
    """What torch.save wrote, on the host, made by another unpickler.

    _open_zipfile_reader, _load: torch.load takes no unpickler where weights_only is forced, and runs a
    TorchScript archive.
    """
    from torch import serialization

    with serialization._open_zipfile_reader(stream) as archive:  # noqa: SLF001
        return serialization._load(archive, "cpu", pickle_module, encoding="utf-8")  # noqa: SLF001


def local_filesystem() -> Any:
    """What stock's writers have as ``fs``: FileSystem is documented nowhere, and users read it."""
    from torch.distributed.checkpoint.filesystem import FileSystem

    return FileSystem()


def set_element(root: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Put a value where torch's load planner puts an object. _traverse: it has no public way to do that."""
    from torch.distributed.checkpoint._traverse import set_element as put

    put(root, path, value)


def tensor_rebuilders() -> tuple[Any, ...]:
    """What torch.save names in a pickle to make tensors over their storages, as weights_only knows it.

    torch._utils: the names are part of every file that torch.save wrote.
    """
    from torch import _utils

    names = (
        *("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"),
        *("_rebuild_parameter_with_state", "_rebuild_qtensor", "_rebuild_sparse_tensor"),
        *("_rebuild_meta_tensor_no_storage", "_rebuild_nested_tensor"),
        *("_rebuild_wrapper_subclass", "_rebuild_device_tensor_from_numpy"),
        *("_rebuild_device_tensor_from_cpu_tensor",),
    )
    found = (getattr(_utils, name, None) for name in names)
    return tuple(filter(None, found))


def rebuilt_as(function: Any, kind: Any, arguments: tuple[Any, ...], state: Any) -> Any:
    """What a rebuilder makes, as another class and with a state. _rebuild_from_type_v2: named in files too."""
    from torch import _tensor

    return _tensor._rebuild_from_type_v2(function, kind, arguments, state)  # noqa: SLF001
