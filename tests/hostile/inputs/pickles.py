"""Pickles in .metadata and in object leaves: code to run, bombs, and roots that are something else."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tests.hostile.corpus import READERS, Group, add, hostile
from tests.hostile.place import On, Place, object_bytes

STOP = b"."
_META = ("load", "inspect", "verify", "export", "cp")


class _Calls:
    """Reduces to a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def archive_of_zeros() -> bytes:
    """An archive of 1 MB with a pickle of a GB of zeros, made in pieces."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
        with archive.open("archive/data.pkl", "w", force_zip64=True) as data:
            data.write(b"\x80\x02B" + struct.pack("<I", 1 << 30))
            for _ in range(256):
                data.write(bytes(4 << 20))
            data.write(STOP)
    return buffer.getvalue()


def _named(module: str, name: str, argument: str) -> bytes:
    """A call of a function by its name: GLOBAL, one string, REDUCE."""
    text = argument.encode()
    return b"\x80\x02c%s\n%s\nX%s%s\x85R." % (
        module.encode(), name.encode(), struct.pack("<I", len(text)), text,
    )  # fmt: skip


def _runs(place: Place) -> str:
    return f"touch {place.canary}"


_CALLS = {
    "os-system": ("os", "system", _runs),
    "posix-system": ("posix", "system", _runs),
    "eval": ("builtins", "eval", lambda place: f"open({str(place.canary)!r}, 'w')"),
    "exec": ("builtins", "exec", lambda place: f"open({str(place.canary)!r}, 'w')"),
    "old-eval": ("__builtin__", "eval", lambda place: f"open({str(place.canary)!r}, 'w')"),
    "torch-load": ("torch", "load", lambda place: str(place.data_file)),
    "dotted": ("torch.serialization", "os.system", _runs),
    "of-torch-storage": ("torch.storage", "os.system", _runs),
    "subprocess": ("subprocess", "getoutput", _runs),
    "runpy": ("runpy", "run_path", lambda place: str(place.victim / "secret.txt")),
    "import": ("importlib", "import_module", lambda place: "antigravity"),
    "dill": ("dill", "loads", lambda place: "x"),
    "getattr": ("builtins", "getattr", lambda place: "x"),
    "of-metadata-module": ("torch.distributed.checkpoint.metadata", "pickle.loads", lambda _: "x"),
}


def _call(place: Place, how: tuple[str, str, Callable[[Place], str]], *, leaf: bool) -> None:
    raw = _named(how[0], how[1], how[2](place))
    if leaf:
        place.set_object(_archive(raw))
    else:
        place.set_metadata(raw)


def _archive(data: bytes) -> bytes:
    """A torch.save archive around a pickle of ours."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


for _name, _how in _CALLS.items():
    add(
        f"metadata-calls-{_name}",
        f".metadata has {_how[0]}.{_how[1]} called when it is read.",
        Group.PICKLES,
        partial(_call, how=_how, leaf=False),
        on=On.STOCK,
        commands=_META,
        forged=True,
    )
    add(
        f"object-calls-{_name}",
        f"A saved object has {_how[0]}.{_how[1]} called when it is read.",
        Group.PICKLES,
        partial(_call, how=_how, leaf=True),
        on=On.STOCK,
        commands=("load", "inspect", "export"),
        forged=True,
    )


def _memo_bomb() -> bytes:
    """Lists of lists, 2^40 of them, in 400 bytes."""
    out = [b"\x80\x02]q\x00"]
    out += [
        b"]q" + bytes([n + 1]) + b"(h" + bytes([n]) + b"h" + bytes([n]) + b"e" for n in range(40)
    ]
    return b"".join(out) + STOP


def _nested_tuples(depth: int, *, key: bool) -> bytes:
    """A tuple in a tuple in a tuple, alone or as the key of a dict."""
    body = b")" + b"\x85" * depth
    return b"\x80\x02}" + body + b"Ns." if key else b"\x80\x02" + body + STOP


def _hash_bomb() -> bytes:
    """(t, t) of (t, t), as the key of a dict: 2^44 steps to hash it in 320 bytes."""
    out = [b"\x80\x02})q\x00"]
    out += [b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) for n in range(44)]
    return b"".join(out) + b"Ns."


def _equal_hashes(count: int) -> bytes:
    """Ints with equal hashes, as keys of a dict: quadratic."""
    # Opcode by opcode: making the dict would take the time that reading it takes.
    numbers = (pickle.dumps(n * (2**61 - 1), protocol=2)[2:-1] for n in range(1, count))
    return b"\x80\x02}(" + b"".join(number + b"N" for number in numbers) + b"u" + STOP


_BOMBS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "long-binput": ("A memo index of 2^28 has 4 GB allocated.", lambda: b"\x80\x02Nr\0\0\0\x10."),
    "long-binput-largest": ("A memo index of 2^32 - 1.", lambda: b"\x80\x02Nr\xff\xff\xff\xff."),
    "put-as-text": ("A memo index as text, of 40 digits.", lambda: b"Np" + b"9" * 40 + b"\n."),
    "hash-bomb": ("A key of a dict that takes 2^44 steps to hash.", _hash_bomb),
    "equal-hashes": ("100,000 ints whose hashes are equal, as keys.", lambda: _equal_hashes(100_000)),
    "nested-key": ("Two million nested tuples as a key.", lambda: _nested_tuples(2_000_000, key=True)),
    "nested-tuples": ("Two million nested tuples.", lambda: _nested_tuples(2_000_000, key=False)),
    "nested-lists": ("A million nested lists.", lambda: b"\x80\x02" + b"]" * 10**6 + b"a" * (10**6 - 1) + STOP),
    "memo-bomb": ("2^40 lists through the memo.", _memo_bomb),
    "marks": ("A million marks.", lambda: b"\x80\x02" + b"(" * 10**6 + STOP),
    "long-text": ("A string said to have 2^62 bytes.", lambda: b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + STOP),
    "long-bytes": ("Bytes said to be 2^31.", lambda: b"\x80\x04B" + struct.pack("<I", 1 << 31) + STOP),
    "long-bytearray": ("A bytearray said to have 2^40 bytes.", lambda: b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + STOP),
    "long-frame": ("A frame said to have 2^60 bytes.", lambda: b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N."),
    "long-int": ("An int of 10 MB as text.", lambda: b"I" + b"9" * 10_000_000 + b"\n."),
    "long-negative": ("A LONG4 with a negative size.", lambda: b"\x80\x02\x8b" + struct.pack("<i", -5) + STOP),
}  # fmt: skip

_ODD: dict[str, tuple[str, Callable[[], bytes]]] = {
    "empty": ("No byte at all.", lambda: b""),
    "one-byte": ("One byte.", lambda: b"\x80"),
    "no-stop": ("It ends in the middle.", lambda: b"\x80\x02]"),
    "text": ("It is no pickle.", lambda: b"not a pickle at all\n"),
    "protocol-250": ("A protocol of the future.", lambda: b"\x80\xfaN."),
    "unknown-opcode": ("An opcode that is none.", lambda: b"\x80\x02\xff."),
    "stack-underflow": ("More is taken from the stack than was put there.", lambda: b"\x80\x02\x86."),
    "unmemoized": ("A memo that nobody wrote.", lambda: b"\x80\x02h\x07."),
    "extension": ("An extension code.", lambda: b"\x80\x02\x82\x01."),
    "persistent-id": ("A persistent id.", lambda: b"\x80\x02X\x01\x00\x00\x00xQ."),
    "buffer": ("An out-of-band buffer.", lambda: b"\x80\x05\x97."),
    "none": ("None is the root.", lambda: pickle.dumps(None)),
    "dict": ("A dict is the root.", lambda: pickle.dumps({"state_dict_metadata": {}})),
    "int": ("A number is the root.", lambda: pickle.dumps(2**4000)),
    "itself": ("A list that holds itself.", lambda: b"\x80\x02]q\x00h\x00a."),
    "itself-as-key": ("A tuple that holds a list that holds the tuple.", lambda: b"\x80\x02]q\x00h\x00\x85q\x01ah\x01."),
    "class-alone": ("The class, and no object of it.", lambda: b"ctorch.distributed.checkpoint.metadata\nMetadata\n."),
    "build-on-class": ("BUILD sets attributes of the class.", lambda: b"ctorch.distributed.checkpoint.metadata\nMetadata\n}X\x01\x00\x00\x00xNsb."),
    "build-slots": ("BUILD with the state of slots.", lambda: b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81(N}X\x08\x00\x00\x00__init__Nst b."),
    "no-attributes": ("A Metadata without attributes.", lambda: b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81."),
    "instance-of-str": ("NEWOBJ of a string.", lambda: b"X\x01\x00\x00\x00x)\x81."),
}  # fmt: skip


def _raw(place: Place, make: Callable[[], bytes], *, leaf: bool) -> None:
    if leaf:
        place.set_object(_archive(make()))
    else:
        place.set_metadata(make())


for _name, (_tries, _make) in {**_BOMBS, **_ODD}.items():
    add(
        f"metadata-{_name}",
        f".metadata: {_tries}",
        Group.PICKLES,
        partial(_raw, make=_make, leaf=False),
        on=On.STOCK,
        commands=_META,
        forged=True,
    )
    add(
        f"object-{_name}",
        f"A saved object: {_tries}",
        Group.PICKLES,
        partial(_raw, make=_make, leaf=True),
        on=On.STOCK,
        commands=("load", "inspect", "export"),
        forged=True,
    )


def _of_class(place: Place, value: Any) -> None:
    place.set_object(object_bytes(value))


@hostile(Group.PICKLES, on=On.STOCK, commands=("load", "inspect", "export"), forged=True)
def object_reduces(place: Place) -> None:
    """An object that reduces to a call of os.system."""
    _of_class(place, _Calls(os.system, _runs(place)))


@hostile(Group.PICKLES, on=On.STOCK, commands=("load", "inspect", "export"), forged=True)
def object_of_a_class(place: Place) -> None:
    """A set and a slice: of no class that weights_only knows."""
    _of_class(place, [slice(1), frozenset({1})])


@hostile(Group.PICKLES, on=On.STOCK, commands=("load", "inspect", "export"), forged=True)
def object_bytearray_of_3_gib(place: Place) -> None:
    """bytearray(3 << 30), a call that weights_only allows, in 40 bytes."""
    place.set_object(_archive(b"\x80\x02c__builtin__\nbytearray\nJ\x00\x00\x00\x7f\x85R."))


@hostile(Group.PICKLES, on=On.STOCK, commands=("load", "inspect", "export"), forged=True)
def object_archive_of_zeros(place: Place) -> None:
    """A deflated archive of 1 MB that is a GB of zeros."""
    place.set_object(archive_of_zeros())


@hostile(Group.PICKLES, on=On.STOCK, commands=("load", "inspect", "export"), forged=True)
def object_is_no_archive(place: Place) -> None:
    """The bytes of an object are no archive."""
    place.set_object(b"PK\x03\x04" + bytes(100))


@hostile(Group.PICKLES, on=On.STOCK, commands=("load", "inspect", "export"), forged=True)
def object_is_empty(place: Place) -> None:
    """An object of no bytes."""
    place.set_object(b"")


@hostile(Group.PICKLES, on=On.STOCK, commands=("load", "inspect", "export"), forged=True)
def object_archive_leads_out(place: Place) -> None:
    """An archive with a member ../../canary."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(1))
        archive.writestr("../../../canary", "x")
    place.set_object(buffer.getvalue())


def _shared(outer: bytes, width: int, times: int) -> bytes:
    """A container of containers that are shared: short, and as text as long as ``width ** times``."""
    out = [b"\x80\x02]q\x00(" + b"X\x01\x00\x00\x00x" * 8 + b"e"]
    for n in range(1, times):
        refer = b"j" + struct.pack("<I", n - 1)
        if outer == b"}":
            items = b"".join(b"K" + bytes([at]) + refer for at in range(width))
            out.append(b"}r" + struct.pack("<I", n) + b"(" + items + b"u")
        else:
            out.append(outer + b"r" + struct.pack("<I", n) + b"(" + refer * width + b"e")
    return b"".join(out) + STOP


_REPR: dict[str, tuple[str, Callable[[], bytes]]] = {
    "shared-lists": ("200 kB of text from 60 bytes, in lists of lists.", lambda: _shared(b"]", 4, 9)),
    "shared-lists-wide": ("Lists of 2,000 times the same list.", lambda: _shared(b"]", 2000, 3)),
    "shared-dicts": ("Dicts of 100 times the same dict.", lambda: _shared(b"}", 100, 4)),
    "long-number": ("A number of 5,000 digits, which Python refuses to write.", lambda: pickle.dumps([1 << 17_000], 2)),
    "nested-900": ("900 lists in each other.", lambda: b"\x80\x02" + b"]" * 900 + b"a" * 899 + STOP),
    "long-text-inside": ("60 kB of text in a list.", lambda: pickle.dumps(["\x1b]0;x\x07" * 10_000], 2)),
}  # fmt: skip


def _of_many(place: Place, make: Callable[[], bytes]) -> None:
    """The same bytes as 300 objects: each of them is small, and each is shown."""
    place.set_object(_archive(make()))

    def repeat(metadata: Any) -> None:
        found = next(i for i in metadata.storage_data if i.fqn == "object")
        for number in range(300):
            key = f"object{number}"
            metadata.state_dict_metadata[key] = metadata.state_dict_metadata["object"]
            metadata.planner_data[key] = (key,)
            metadata.storage_data[replace(found, fqn=key)] = metadata.storage_data[found]

    place.change_metadata(repeat)


for _name, (_tries, _make) in _REPR.items():
    add(
        f"objects-shown-{_name}",
        f"300 saved objects: {_tries}",
        Group.PICKLES,
        partial(_of_many, make=_make),
        on=On.STOCK,
        commands=("inspect", "diff", "load", "export"),
        forged=True,
    )


def _of_run(place: Place, make: Callable[[], bytes]) -> None:
    place.set_metadata(make())


for _name in ("hash-bomb", "nested-key", "long-binput", "equal-hashes"):
    add(
        f"sealed-metadata-{_name}",
        f"As metadata-{_name}, below a log that vouches for it: on the way of every rank that resumes.",
        Group.PICKLES,
        partial(_of_run, make=_BOMBS[_name][1]),
        on=On.RUN,
        commands=(*READERS, "latest", "rm"),
        forged=True,
    )
