"""The states to move: names, shapes and dtypes of a training state, and the tensors made from them.

    llm    a decoder and AdamW: bf16 weights, two fp32 moments and a step each    10 bytes per parameter
    moe    the same with experts: 16 of three matrices each in every layer        10
    rl     actor and critic as llm, a frozen reference: weights only              22, by the actor's
    many   tensors of 4 to 64 KiB without any structure
    shapes tensors of 4 to 64 KiB, each of its own shape
    4MB, 16MB, 64MB   tensors of one size: other libraries pay for each tensor, so ratios depend on it
    loop   llm, saved every n steps of a training loop while it runs

With several ranks every tensor of one dimension or more is sharded over all of them along its first
dimension, ``Shard(0)`` of a DTensor, as FSDP2 does. Scalars are on every rank.

    make_state   reproducible noise: the same workload, rank and number of ranks give the same bytes
    make_blank   zeros of the same shapes, for a load to fill
    clear        sets them to zero again, so that no load passes with the data of an earlier one
    differences  the names of tensors with bytes that differ from the saved ones

Tensors are made, cleared and compared outside all measured times. Shapes need no torch, because the
process that starts the ranks needs only sizes and does not import torch.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

from ckptfs.errors import StateError
from ckptfs.text import parse_size, size_text

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any  # shapes need no torch: the functions that make tensors import it

__all__ = [
    "DEFAULT_SIZES",
    "EVEN_SIZES",
    "KINDS",
    "DType",
    "State",
    "TensorSpec",
    "WorkloadSpec",
    "clear",
    "differences",
    "local_of",
    "locals_of",
    "make_blank",
    "make_state",
    "make_workload",
    "parse_params",
    "parse_size",
    "rows_of",
]

_KIB = 1 << 10
_MOST_SMALL = 1_000_000  # their names and shapes alone take memory and minutes
_VOCABULARY = 32_000
_HEAD_WIDTH = 128
_EXPERTS = 16
_TIED_BELOW = 2_000_000_000  # smaller models share the embedding with the head
_SMALL_SIZES = (4 * _KIB, 6 * _KIB, 8 * _KIB, 18 * _KIB, 64 * _KIB)  # 20 KiB on average
EVEN_SIZES = {"4MB": 4_000_000, "16MB": 16_000_000, "64MB": 64_000_000}
_EVEN_WIDTH = 250
_STRIDE = 37  # between the lengths of ``shapes``: large and small ones in turn, none of them twice
_COUNT = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_LEAST_PARAMS = 10_000
_LEAST_WIDTH = 8
_GRAINS = ((2048, 256), (256, 64))  # (from this width on, widths are multiples of this)


class DType(Enum):
    """The dtype of a tensor. The value is torch's name.

    Attributes:
        BF16: 16 bits.
        FP32: 32 bits.
    """

    BF16 = "bfloat16"
    FP32 = "float32"

    @property
    def size_bytes(self) -> int:
        """Bytes of one element."""
        return 2 if self is DType.BF16 else 4


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor, of all ranks together.

    Attributes:
        name: Its key.
        shape: Its global shape; () is a scalar.
        dtype: Its dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of all its shards."""
        return self.numel * self.dtype.size_bytes


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """A whole state.

    Attributes:
        name: Its name.
        tensors: Its tensors.
        told: Its description in words.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    told: str

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def tensor_sizes_bytes(self) -> tuple[int, int, int]:
        """Bytes of the smallest tensor, of the byte-weighted median, and of the largest tensor.

        Tensors up to the size of the median hold half of all bytes.
        """
        sizes = sorted(tensor.size_bytes for tensor in self.tensors)
        sums = accumulate(sizes)
        half = next(
            size for size, total in zip(sizes, sums, strict=True) if 2 * total >= sum(sizes)
        )
        return sizes[0], half, sizes[-1]

    def local_bytes(self, rank: int, ranks: int) -> int:
        """Return the bytes that ``rank`` of ``ranks`` holds: its rows of tensors, all scalars."""
        return sum(
            (b - a) * (t.size_bytes // t.shape[0]) if t.shape else t.size_bytes
            for t in self.tensors
            for a, b in (rows_of(t, rank, ranks),)
        )


def rows_of(tensor: TensorSpec, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first row of a rank's shard and the row after its last one.

    Chunks have equal lengths, the last ones are shorter or empty, as in torch's ``Shard(0)``. A scalar is
    (0, 1) on every rank.

    Args:
        tensor: The tensor.
        rank: The rank.
        ranks: The number of ranks.
    """
    if not tensor.shape:
        return 0, 1
    rows = tensor.shape[0]
    chunk = -(-rows // ranks)
    return min(rank * chunk, rows), min((rank + 1) * chunk, rows)


def parse_params(text: str) -> int:
    """Read a number of parameters such as ``7B``, ``125M`` or ``1.5B``.

    Args:
        text: The text.

    Returns:
        The number.

    Raises:
        ValueError: It is not such a number, or too small for a model.
    """
    found = _parsed(text, _COUNT, "number of parameters such as 7B or 125M")
    if found < _LEAST_PARAMS:
        raise ValueError(f"{text!r}: a model has at least {_LEAST_PARAMS} parameters here")
    return found


def _parsed(text: str, units: Mapping[str, int], what: str) -> int:
    found = _NUMBER.fullmatch(text.strip())
    factor = units.get(str(found[2]).upper()) if found else None
    if found is None or factor is None:
        raise ValueError(f"{text!r} is no {what}")
    return round(float(found[1]) * factor)


def make_workload(
    kind: str, *, params: int | None = None, size_bytes: int | None = None
) -> WorkloadSpec:
    """Make a workload of a kind, by parameters or by bytes, but not both.

    Without both it has its default size. Its size is exact to 3 %, below 100 000 parameters to 15 %.

    Args:
        kind: The kind.
        params: The number of parameters; None: not by parameters.
        size_bytes: The size in bytes; None: not by bytes.

    Returns:
        Its specification.

    Raises:
        StateError: There is no such kind, it is too small, both sizes are given, or parameters are given
            for a kind that is not a model.
    """
    if kind not in KINDS:
        raise StateError(f"no workload is called {kind!r}", hint=f"one of {', '.join(KINDS)}")
    if params is not None and size_bytes is not None:
        raise StateError("a workload has a number of parameters or a size, not both")
    if kind in NO_MODELS:
        if params is not None:
            raise StateError(f"the workload {kind!r} is no model", hint="give it a size in bytes")
        return KINDS[kind](DEFAULT_SIZES[kind] if size_bytes is None else size_bytes)
    if params is None:
        wanted = DEFAULT_SIZES[kind] if size_bytes is None else size_bytes
        params = wanted // _BYTES_PER_PARAM[kind]
    if params < _LEAST_PARAMS:
        raise StateError(
            f"{params} parameters make no workload {kind!r}",
            hint=f"at least {_LEAST_PARAMS}, which are {_LEAST_PARAMS * _BYTES_PER_PARAM[kind]} bytes",
        )
    return KINDS[kind](params)


# -- the kinds ---------------------------------------------------------------------------------


def _llm(params: int, name: str = "llm") -> WorkloadSpec:
    weights = tuple(_decoder("model", params, experts=1))
    return WorkloadSpec(
        name,
        tuple(chain.from_iterable(_with_adamw("optimizer", one) for one in weights)),
        f"{_count_text(params)} parameters: bf16 weights, AdamW with fp32 moments",
    )


def _moe(params: int) -> WorkloadSpec:
    weights = tuple(_decoder("model", params, experts=_EXPERTS))
    return WorkloadSpec(
        "moe",
        tuple(chain.from_iterable(_with_adamw("optimizer", one) for one in weights)),
        f"{_count_text(params)} parameters, {_EXPERTS} experts in every layer: bf16 weights, AdamW "
        "with fp32 moments",
    )


def _rl(params: int) -> WorkloadSpec:
    trained = chain.from_iterable(
        _with_adamw(f"{role}.optimizer", one)
        for role in ("actor", "critic")
        for one in _decoder(f"{role}.model", params, experts=1)
    )
    return WorkloadSpec(
        "rl",
        (*trained, *_decoder("reference.model", params, experts=1)),
        f"actor, critic and frozen reference of {_count_text(params)} parameters each: bf16 weights, "
        "AdamW with fp32 moments for the first two",
    )


def _loop(params: int) -> WorkloadSpec:
    made = _llm(params, "loop")
    return WorkloadSpec("loop", made.tensors, f"{made.told}; saved while training continues")


def _many(size_bytes: int) -> WorkloadSpec:
    _refuse_too_many("many", size_bytes, sum(_SMALL_SIZES) // len(_SMALL_SIZES))

    def tensors() -> Iterator[TensorSpec]:
        left, number = size_bytes, 0
        while left >= _SMALL_SIZES[0]:
            wanted = min(_SMALL_SIZES[number % len(_SMALL_SIZES)], left // _KIB * _KIB)
            yield TensorSpec(f"small.{number}", (wanted // 1024, 256), DType.FP32)
            left -= wanted
            number += 1

    made = tuple(tensors())
    if not made:
        raise StateError(f"{size_bytes} bytes make no tensor of 4 KiB", hint="give more")
    return WorkloadSpec("many", made, f"{len(made)} tensors of 4 to 64 KiB, fp32")


def _shapes(size_bytes: int) -> WorkloadSpec:
    least, most = (edge // DType.FP32.size_bytes for edge in (_SMALL_SIZES[0], _SMALL_SIZES[-1]))
    _refuse_too_many("shapes", size_bytes, (_SMALL_SIZES[0] + _SMALL_SIZES[-1]) // 2)

    def tensors() -> Iterator[TensorSpec]:
        left, number = size_bytes // DType.FP32.size_bytes, 0
        while left >= least:
            again, place = divmod(number * _STRIDE, most - least)
            elements = min(least + place, left)
            more = again // _STRIDE + (
                elements < least + place
            )  # the last one is cut, so its length occurred before
            yield TensorSpec(f"small.{number}", (elements, *(1,) * more), DType.FP32)
            left -= elements
            number += 1

    made = tuple(tensors())
    if not made:
        raise StateError(f"{size_bytes} bytes make no tensor of 4 KiB", hint="give more")
    return WorkloadSpec(
        "shapes", made, f"{len(made)} tensors of 4 to 64 KiB, each of its own shape, fp32"
    )


def _even(name: str, size_bytes: int) -> WorkloadSpec:
    row_bytes = _EVEN_WIDTH * DType.FP32.size_bytes
    rows, left = EVEN_SIZES[name] // row_bytes, size_bytes // row_bytes
    if not left:
        raise StateError(f"{size_bytes} bytes make no tensor of {name}", hint="give more")
    made = tuple(
        TensorSpec(f"even.{n}", (min(rows, left - n * rows), _EVEN_WIDTH), DType.FP32)
        for n in range(-(-left // rows))
    )
    return WorkloadSpec(name, made, f"tensors of {name} each, fp32")


def _refuse_too_many(kind: str, size_bytes: int, mean_bytes: int) -> None:
    if size_bytes > _MOST_SMALL * mean_bytes:
        raise StateError(
            f"{size_text(size_bytes)} would be more than {_MOST_SMALL} small tensors",
            hint=f"give the workload {kind!r} less; large ones are the other workloads' business",
        )


KINDS: Mapping[str, Callable[[int], WorkloadSpec]] = {
    "llm": _llm,
    "many": _many,
    "shapes": _shapes,
    **{name: partial(_even, name) for name in EVEN_SIZES},
    "moe": _moe,
    "rl": _rl,
    "loop": _loop,
}
NO_MODELS = frozenset({"many", "shapes", *EVEN_SIZES})  # sized in bytes only
_BYTES_PER_PARAM = {"llm": 10, "moe": 10, "rl": 22, "loop": 10}
DEFAULT_SIZES: Mapping[str, int] = {
    "llm": 250_000_000,
    "many": 100_000_000,
    "shapes": 100_000_000,
    **dict.fromkeys(EVEN_SIZES, 250_000_000),
    "moe": 250_000_000,
    "rl": 250_000_000,
    "loop": 250_000_000,
}


# -- shapes ------------------------------------------------------------------------------------


def _decoder(prefix: str, params: int, *, experts: int) -> Iterator[TensorSpec]:
    """Yield the weights of a decoder of about ``params`` parameters: Llama's layers of 12 d^2."""
    width, layers, inner = _dimensions(params, experts)
    rows = _vocabulary(params, width)
    tied = params < _TIED_BELOW

    def weight(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(f"{prefix}.{name}", shape, DType.BF16)

    yield weight("embed_tokens.weight", rows, width)
    for layer in range(layers):
        at = f"layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield weight(f"{at}.self_attn.{name}.weight", width, width)
        if experts > 1:
            yield weight(f"{at}.mlp.router.weight", experts, width)
        for expert in range(experts):
            where = f"{at}.mlp.experts.{expert}" if experts > 1 else f"{at}.mlp"
            yield weight(f"{where}.gate_proj.weight", inner, width)
            yield weight(f"{where}.up_proj.weight", inner, width)
            yield weight(f"{where}.down_proj.weight", width, inner)
        yield weight(f"{at}.input_norm.weight", width)
        yield weight(f"{at}.post_attention_norm.weight", width)
    yield weight("norm.weight", width)
    if not tied:
        yield weight("lm_head.weight", rows, width)


def _dimensions(params: int, experts: int) -> tuple[int, int, int]:
    """Return width, number of layers, and the inner width of an expert.

    The inner width takes up the parameters that the rest leaves.
    """
    width = int((params * _HEAD_WIDTH / 12 / experts) ** (1 / 3))
    while True:
        grain = next((grain for least, grain in _GRAINS if width >= least), _LEAST_WIDTH)
        width = max(_LEAST_WIDTH, width // grain * grain)
        body = params - _vocabulary(params, width) * width * (1 if params < _TIED_BELOW else 2)
        layers = max(1, round(width / _HEAD_WIDTH))
        fixed = 4 * width * width + (2 + (experts if experts > 1 else 0)) * width
        inner = round((body / layers - fixed) / (3 * width * experts))
        # A narrow inner width means that the model is too wide for its parameters. Llama has 8/3.
        if inner >= 2 * width / (1 if experts == 1 else 4) or width == _LEAST_WIDTH:
            return width, layers, max(1, inner)
        width -= grain


def _vocabulary(params: int, width: int) -> int:
    """Return the rows of the embedding: at most a fifth of the parameters are in it."""
    return max(1, min(_VOCABULARY, params // 5 // width))


def _with_adamw(prefix: str, weight: TensorSpec) -> Iterator[TensorSpec]:
    yield weight
    name = f"{prefix}.state.{weight.name.partition('model.')[2]}"
    yield TensorSpec(f"{name}.exp_avg", weight.shape, DType.FP32)
    yield TensorSpec(f"{name}.exp_avg_sq", weight.shape, DType.FP32)
    yield TensorSpec(f"{name}.step", (), DType.FP32)


def _count_text(params: int) -> str:
    for unit in ("T", "B", "M", "K"):
        if params >= _COUNT[unit]:
            return f"{params / _COUNT[unit]:.3g}{unit}"
    return str(params)


# -- tensors


State = dict[str, Tensor]


def make_state(workload: WorkloadSpec, rank: int = 0, ranks: int = 1) -> State:
    """Return tensors of uniform noise, which a disk or a network cannot compress to almost nothing.

    Args:
        workload: The specification of the tensors.
        rank: This rank.
        ranks: The number of ranks.
    """
    import torch

    def noise(spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
        seed = zlib.crc32(f"{spec.name}/{rank if shape else 0}/{ranks}".encode())
        made = torch.Generator().manual_seed(seed)
        return torch.empty(shape, dtype=_dtype(spec)).uniform_(-1.0, 1.0, generator=made)

    return _made(workload, rank, ranks, noise)


def make_blank(workload: WorkloadSpec, rank: int = 0, ranks: int = 1) -> State:
    """Return tensors of zeros in touched memory. The arguments are as for ``make_state``."""
    import torch

    def zeros(spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=_dtype(spec)).zero_()

    return _made(workload, rank, ranks, zeros)


def clear(state: Mapping[str, Tensor]) -> None:
    """Set all tensors of ``state`` to zero, in place."""
    for tensor in state.values():
        local_of(tensor).zero_()


def differences(saved: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors in ``saved`` that are missing in ``loaded`` or differ there.

    Every bit, the dtype and the shape of this rank's shards are compared.

    Args:
        saved: The saved tensors.
        loaded: The loaded tensors.
    """
    return [
        name
        for name, tensor in saved.items()
        if name not in loaded or not _same(local_of(tensor), local_of(loaded[name]))
    ]


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's shard of ``tensor``; a plain tensor as it is."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def locals_of(state: Mapping[str, Tensor]) -> State:
    """Return this rank's shards of ``state``, for writers that do not know sharding."""
    return {name: local_of(tensor) for name, tensor in state.items()}


def _same(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    import torch

    # Compare as integers, so that NaN equals itself, and 0.0 does not equal -0.0.
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.view(integer), b.view(integer))


def _made(
    workload: WorkloadSpec,
    rank: int,
    ranks: int,
    make: Callable[[TensorSpec, tuple[int, ...]], Tensor],
) -> State:
    mesh = _mesh(ranks) if ranks > 1 else None
    return {spec.name: _placed(spec, rank, ranks, mesh, make) for spec in workload.tensors}


def _placed(
    spec: TensorSpec,
    rank: int,
    ranks: int,
    mesh: Any,
    make: Callable[[TensorSpec, tuple[int, ...]], Tensor],
) -> Tensor:
    if mesh is None or not spec.shape:
        return make(spec, spec.shape)
    import torch
    from torch.distributed.tensor import DTensor, Shard

    first, after = rows_of(spec, rank, ranks)
    local = make(spec, (after - first, *spec.shape[1:]))
    shape = torch.Size(spec.shape)
    placed: Tensor = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=shape, stride=_stride(spec.shape)
    )
    return placed


def _stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    import torch

    return torch.empty(shape, device="meta").stride()


def _mesh(ranks: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (ranks,))


def _dtype(spec: TensorSpec) -> Any:
    import torch

    return getattr(torch, spec.dtype.value)
