"""Every name of torch that is private or may be absent, one line each with why. Torch stays lazy.

Importing this module does not import torch: ``import ckptfs`` and every tool that only lists
checkpoints run without it. It is the lowest layer except for errors, and depends on nothing else of
ckptfs.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

# -- control plane: groups and c10d stores -----------------------------------------------------


def has_default_group() -> bool:
    """True when torch.distributed is initialised; never imports torch to find out."""
    dist = sys.modules.get("torch.distributed")
    # A build without distributed has the module, but not the function.
    return bool(dist and dist.is_available() and dist.is_initialized())


def is_called_by_dcp() -> bool:
    """Whether the caller acts for torch.distributed.checkpoint, on this thread.

    DCP's writers pass files to fsspec under names that a copying program uses too. Before the first
    byte, only the caller distinguishes the two.
    """
    frame = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("torch.distributed.checkpoint"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def rank_and_size(group: Any) -> tuple[int, int]:
    """Return (rank, size) of this process in a group (None: the default one).

    Rank -1: it is no member.
    """
    import torch.distributed as dist

    return dist.get_rank(group), dist.get_world_size(group)


def group_ranks(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a group (None: the default one), in order of group rank."""
    import torch.distributed as dist

    return tuple(dist.get_process_group_ranks(group or dist.group.WORLD))


def group_store(group: Any) -> Any:
    """Return the c10d store of a group (None: the default one).

    _get_default_store, _get_process_group_store, _world.pg_map: torch has no public way to the
    store that init_process_group made, and a second store would open a port that the user did not
    ask for.
    """
    from torch.distributed import distributed_c10d as c10d

    if group is None:
        return c10d._get_default_store()  # noqa: SLF001
    held = c10d._world.pg_map.get(group)  # noqa: SLF001
    # A group made by splitting a communicator may be absent from the map. Its members still share the
    # default store, and every control has a namespace of its own there.
    return held[1] if held and held[1] is not None else c10d._get_default_store()  # noqa: SLF001


def group_channel(group: Any) -> tuple[Any, str]:
    """Return the store over which a group's ranks communicate, and a name that is unique in it.

    A group's own store is the default group's under a prefix. It is another object, and its clones
    would be further connections to the same server. The name is the text from which torch makes
    that prefix.
    """
    own, default = group_store(group), group_store(None)
    if own is default or _below(own) is not _below(default):
        return own, ""
    return default, f"group {group.group_name}"


def _below(store: Any) -> Any:
    """Return the store under all prefixes.

    underlying_store: the only way from a PrefixStore to it.
    """
    from torch.distributed import PrefixStore

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def connect_store(host: str, port: int, timeout_s: float) -> Any:
    """Return a client of a TCPStore that another process hosts (torchrun's agent).

    Opens no port.
    """
    from torch.distributed import TCPStore

    wait = timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)


def clone_store(store: Any) -> Any:
    """Return a store for one more thread: a blocked wait blocks every thread of its client."""
    if hasattr(store, "clone"):  # torch >= 2.8
        return store.clone()
    return reconnect_store(store)


def is_networked(store: Any) -> bool:
    """Whether every client of a store has its own connection to a server."""
    from torch.distributed import TCPStore

    return isinstance(_below(store), TCPStore)


def reconnect_store(store: Any) -> Any:
    """Do what clone() does, for torch 2.6 and 2.7; the prefixes of PrefixStores are dropped.

    They are dropped on every rank alike, and a control's keys are unique without them, by their
    nonce.
    """
    from torch.distributed import FileStore, TCPStore

    store = _below(store)
    if isinstance(store, TCPStore):
        wait_s = store.timeout.total_seconds()  # type: ignore[attr-defined] # the stubs lack it
        return connect_store(store.host, store.port, wait_s)
    if isinstance(store, FileStore):
        return FileStore(store.path, -1)  # type: ignore[attr-defined] # the stubs lack it
    return store  # HashStore: threads of one process, and a wait blocks no other thread


# -- dcp -------------------------------------------------------------------------------------


def storage_info(path: str, offset: int, length: int) -> Any:
    """Return where one item is, as stock's writer records it and stock's reader requires."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(path, offset, length)


def storage_info_type() -> type[Any]:
    """Return the class of the values of ``Metadata.storage_data``; stock's reader requires it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo


def mem_format_encoding() -> type[Any]:
    """Return the enum inside every pickled TensorProperties: an unpickler must know it by name."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    return _MEM_FORMAT_ENCODING


def is_sharded_tensor(value: object) -> bool:
    """True for FSDP1's ShardedTensor, which DCP treats apart and which has no public home."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    return isinstance(value, ShardedTensor)


def boxes_here(value: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return offsets and sizes of a tensor's parts on this rank, as torch's load planner cuts it.

    The planner's function is private: nothing public gives them for a ShardedTensor or for a tensor
    that cuts itself.
    """
    from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

    if is_dtensor(value) and value.device_mesh.get_coordinate() is None:
        return []
    return [(tuple(one.offsets), tuple(one.sizes)) for one in _create_chunk_list(value)]


def unsaved_buffers(module: Any) -> frozenset[str]:
    """Return the names of a module's own buffers that are not saved (persistent=False)."""
    return frozenset(module._non_persistent_buffers_set)  # noqa: SLF001 - there is no public way


def is_wrapper_subclass(value: object) -> bool:
    """True for tensor subclasses without memory of their own (quantised, nested, functional)."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return bool(is_traceable_wrapper_subclass(value))


# -- torch.save ------------------------------------------------------------------------------


def storage_alignment_bytes() -> int:
    """Return the multiple to which torch.save aligns data in archives; 64 before torch 2.7."""
    from torch import serialization

    getter = getattr(serialization, "_get_storage_alignment", None)
    return int(getter()) if getter else 64


def save_without_data(tensor: Any, sink: Any) -> None:
    """Write what torch.save writes of a tensor, its data seeked over and all CRC fields 0.

    PyTorchFileWriter, _save: a setting of the whole process decides whether torch.save computes
    CRCs, and changing it would affect other threads that save at the same time. skip_data is local
    to this thread.
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
    """Return this thread's CUDA device, for another thread; None if the process used none."""
    import torch

    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.cuda.current_device() if used else None


def pin_host_memory(memory: Any, device: int | None = None) -> Any:
    """Page-lock a host tensor in place for CUDA; return a function that undoes it, or None.

    None means that it cannot be locked. The pages are locked in the context of ``device``; None: of
    this thread's device. A new thread has device 0, where a context would take memory that another
    rank needs.

    cudart: torch's own pinned allocator rounds sizes up to powers of two and never returns memory,
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
    """Wait until this thread's queued work on a device is done, copies to the host too."""
    import torch

    module: Any = torch.get_device_module(device)
    if hasattr(module, "current_stream"):
        module.current_stream(device).synchronize()
    elif hasattr(module, "synchronize"):  # mps has one stream
        module.synchronize()


def wait_for_accelerator() -> None:
    """Wait as ``wait_for_device`` does for this thread's accelerator, if this process has used one.

    torch names the accelerator that it was built for, CUDA in the wheels of PyPI, whether or not
    the machine has one. Asking for a stream raises if there is no driver, and creates a context if
    the driver was not used yet.
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
    """True for DTensors. It does not import torch.distributed.tensor: a DTensor's maker did."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def unwrapped(module: Any) -> Any:
    """Return the module without the wrappers around all of it, which change its keys.

    _orig_mod: torch.compile's wrapper has no other way to the module that it compiled.
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
    """True for modules with FullyShardedDataParallel in them.

    It does not import that class: the module's maker did.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    wrapper = getattr(fsdp, "FullyShardedDataParallel", None)
    return wrapper is not None and any(isinstance(m, wrapper) for m in module.modules())


def clean_name(name: str) -> str:
    """Return a parameter's name without the additions of wrappers of inner modules."""
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
    """Replace torch.distributed.barrier by another function; return the one that was there.

    Frameworks look it up when they call it, and there is no hook around it.
    """
    import torch.distributed as dist

    before = dist.barrier
    dist.barrier = barrier
    return before


# -- what ckptfs is compared with ----------------------------------------------------------------


def fsspec_writer(uri: str, **options: Any) -> Any:
    """Return torch's writer over fsspec: torch documents it and ships it in a private module."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    return FsspecWriter(uri, **options)


def fsspec_reader(uri: str, **options: Any) -> Any:
    """Return torch's reader over fsspec."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    return FsspecReader(uri, **options)


# -- objects in checkpoints ----------------------------------------------------------------------


def load_archive(stream: Any, pickle_module: Any) -> Any:
    """Return what torch.save wrote, on the host, made by another unpickler.

    _open_zipfile_reader, _load: torch.load takes no unpickler if weights_only is forced, and runs a
    TorchScript archive.
    """
    from torch import serialization

    with serialization._open_zipfile_reader(stream) as archive:  # noqa: SLF001
        return serialization._load(archive, "cpu", pickle_module, encoding="utf-8")  # noqa: SLF001


def local_filesystem() -> Any:
    """Return the ``fs`` of stock's writers: FileSystem is not documented, but users read it."""
    from torch.distributed.checkpoint.filesystem import FileSystem

    return FileSystem()


def set_element(root: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Put a value where torch's load planner puts an object.

    _traverse: torch has no public way to do that.
    """
    from torch.distributed.checkpoint._traverse import set_element as put

    put(root, path, value)


def tensor_rebuilders() -> tuple[Any, ...]:
    """Return the functions that a pickle of torch.save names to make tensors over their storages.

    weights_only permits the same ones. torch._utils: the names are part of every file that
    torch.save wrote.
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
    """Return what a rebuilder makes, as another class and with a state.

    _rebuild_from_type_v2: it is named in files too.
    """
    from torch import _tensor

    return _tensor._rebuild_from_type_v2(function, kind, arguments, state)  # noqa: SLF001
