"""Hugging Face exports: the real safetensors, transformers and torch's own HuggingFaceStorage next to ours."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.conftest import Cell
from tests.integrations.running import Kill, Mode, Store, story
from tests.multiprocess.harness import Rank, launch

pytestmark = [pytest.mark.integrations]
pytest.importorskip("safetensors", reason="make test-integrations")
SIDECAR = "*model-00001-of-*.safetensors.xxh3"


@pytest.mark.modes("sync")
def test_an_export_that_is_killed_is_not_there_and_training_resumes(
    store: Store, mode: Mode, cell: Cell
) -> None:
    """Rank 1 dies when its file of the second export is whole: that export never was."""
    with cell("Hugging Face safetensors", store, mode, package="safetensors"):
        kill = Kill("open_write", SIDECAR, nth=2, rank=1)
        told = story("safetensors", store, mode, kill=kill)
        assert told.resumed.resumed == "1"


def whole_state() -> dict[str, torch.Tensor]:
    """The same on every rank: what the shards are shards of."""
    generator = torch.Generator().manual_seed(3)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "rows": some(7, 40),  # uneven: 4 and 3
        "columns": some(40, 10).bfloat16(),
        "fp8": some(8, 8).to(torch.float8_e4m3fn),
        "one_row": some(1, 50),  # one rank has nothing
        "replicated": some(33),
        "plain": some(5),
        "large": some(1024, 1024),  # blocks of digests are 1 MiB: less than that is read whole
    }


def sharded(state: dict[str, torch.Tensor], dims: dict[str, int]) -> dict[str, Any]:
    """``state`` as DTensors: sharded over these dimensions, replicated, or plain."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    result: dict[str, Any] = {}
    for key, value in state.items():
        if key == "plain":
            result[key] = value.clone()
            continue
        how = Shard(dims[key]) if key in dims else Replicate()
        # gloo moves no float8; a shard of its bytes is a shard of it
        bits = value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value
        local = distribute_tensor(bits, mesh, [how]).to_local().view(value.dtype)
        result[key] = DTensor.from_local(
            local, mesh, [how], shape=value.shape, stride=value.stride(), run_check=False
        )
    return result


SAVED = {"large": 0, "rows": 0, "columns": 1, "fp8": 0, "one_row": 0}
LOADED = {"large": 0, "rows": 1, "columns": 0, "fp8": 1}


def export_and_import(rank: Rank) -> dict[str, Any]:
    """Export, import into another sharding, and every failure that has to reach both ranks."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    import ckptfs
    from ckptfs.integrations.safetensors import load_safetensors, save_safetensors

    rank.init_group()
    uri, local = rank.args["uri"], rank.args["local"]
    state, state_now = whole_state(), sharded(whole_state(), SAVED)
    tied = {**state_now, "tied": state_now["rows"]}
    saved = save_safetensors(tied, f"{uri}/hf_1", max_shard_size=1000)
    found = sharded({key: torch.zeros_like(value) for key, value in state.items()}, LOADED)
    found["tied"] = found.pop("rows")
    loaded = load_safetensors(found, f"{uri}/hf_1")
    found["rows"] = found.pop("tied")
    same = all(
        (v.float().full_tensor() if k != "plain" else v).equal(state[k].float())
        for k, v in found.items()
    )

    def refused(values: dict[str, Any], name: str = "hf_2") -> str:
        try:
            save_safetensors(values, f"{uri}/{name}", max_shard_size=1000)
        except ckptfs.CkptfsError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    said = {
        "differs": refused({"plain": torch.full((2,), float(rank.number))}),
        "one_rank": refused({"a": torch.zeros(2) if rank.number == 0 else 3}),
        "again": refused(state_now, "hf_1"),
    }
    if rank.number == 1:
        os.environ["CKPTFS_TEST_FAULT"] = "fail=ENOSPC:write:*:3"
    if rank.args["faults"]:
        try:
            save_safetensors(state_now, f"faults+{uri}/hf_2", max_shard_size=1000)
        except ckptfs.CkptfsError as error:
            said["no_space"] = f"{type(error).__name__}: {error}"
    # Stock, on a local path: shards of every rank without an index, and whole tensors with one.
    stock = {k: v for k, v in state_now.items() if k != "fp8"}
    dcp.save(
        stock, storage_writer=HuggingFaceStorageWriter(f"{local}/shards", save_distributed=True)
    )
    dcp.save(
        stock,
        storage_writer=HuggingFaceStorageWriter(
            f"{local}/whole", save_distributed=True, enable_consolidation=True
        ),
    )
    for name in ("shards", "whole"):
        again = sharded({k: torch.zeros_like(state[k]) for k in stock}, LOADED)
        load_safetensors(again, f"{local}/{name}")
        same &= all(
            (v.full_tensor() if k != "plain" else v).equal(state[k]) for k, v in again.items()
        )
    dist.barrier()
    return {
        "same": same,
        "files": saved.mine.files,
        "read": [one.size_bytes for one in loaded.per_rank],
        "said": said,
    }


def test_two_ranks_write_and_read_in_parallel_and_fail_together(
    store: Store, tmp_path: Path
) -> None:
    """Any sharding to any other, bit for bit; files from both ranks; no rank reads all; the same error
    on both; and safetensors' own reader, and torch's, read the same tensors.
    """
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    import ckptfs

    args = {"uri": store.uri, "local": str(tmp_path / "stock"), "faults": store.kind == "file"}
    if store.kind == "file":
        args["uri"] = f"file://{store.uri}"
    with launch(export_and_import, 2, args=args, env=store.env) as ranks:
        results = ranks.values()
    state = whole_state()
    total = sum(value.nbytes for value in state.values())
    for result in results:
        assert result["same"]
        assert result["files"] >= 2  # a file and its digests
        assert all(size < 0.6 * total for size in result["read"])
        said = result["said"]
        assert "other values on rank 1" in said["differs"]
        assert "CollectiveError" in said["one_rank"]
        assert "is a int" in said["one_rank"]
        assert "CommitConflictError" in said["again"]
        if args["faults"]:
            assert "CollectiveError" in said["no_space"]
            assert "No space" in said["no_space"]
    assert results[0]["said"] == results[1]["said"]
    assert [c.uri.name for c in ckptfs.list_checkpoints(store.uri)] == ["hf_1"]
    with ckptfs.checkpoint_dir(store / "hf_1", "read") as path:
        index = json.loads(Path(path, "model.safetensors.index.json").read_text())["weight_map"]
        files = {name: load_file(f"{path}/{name}") for name in set(index.values())}
        for key, value in state.items():
            assert files[index[key]][key].float().equal(value.float())
        blank = {key: torch.zeros_like(value) for key, value in state.items()}
        dcp.load(blank, storage_reader=HuggingFaceStorageReader(path))
    assert all(blank[key].float().equal(state[key].float()) for key in state)


def peak_of_an_export(rank: Rank) -> int:
    """By how many bytes an export of 192 MiB in one file raises this process's memory."""
    from ckptfs.integrations.safetensors import save_safetensors

    def memory(name: str) -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition(f"{name}:")[2].split()[0]) << 10

    state = {f"t{n}": torch.full((16 << 20,), float(n)).half() for n in range(6)}
    save_safetensors({"t": state["t0"][:9]}, f"{rank.args['uri']}/hf_0")  # imports, clients
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins now
    before = memory("VmRSS")
    save_safetensors(state, f"{rank.args['uri']}/hf_1")
    return memory("VmHWM") - before


def test_no_file_is_built_in_memory(store: Store) -> None:
    """192 MiB in one file cost what the storage's writer has under way, not the file."""
    with launch(peak_of_an_export, 1, args={"uri": store.uri}, env=store.env) as ranks:
        [peak] = ranks.values()
    assert peak < (32 << 20 if store.kind == "file" else 160 << 20)


def stock_overwrites(rank: Rank) -> str:
    """Stock's export over an older one; the second time rank 1 dies before it writes."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    class Dies(HuggingFaceStorageWriter):
        """What a node does that loses its power: rank 1 is gone, the others wrote."""

        def write_data(self, *args: Any) -> Any:
            if rank.number == 1:
                rank.hold("written")
                os.kill(os.getpid(), signal.SIGKILL)
            done = super().write_data(*args)
            rank.tell("wrote")
            return done

    rank.init_group()
    for value, kind in ((1.0, HuggingFaceStorageWriter), (2.0, Dies)):
        full = {"w": torch.full((4, 2), value)}
        writer = kind(rank.args["path"], save_distributed=True)
        dcp.save(sharded(full, {"w": 0}), storage_writer=writer)
    return "saved"


def test_stock_has_no_marker_and_loads_half_of_two_exports(tmp_path: Path) -> None:
    """HuggingFaceStorageWriter(save_distributed=True): what a dead rank left half overwritten loads
    without a word, as rows of two checkpoints. Ours is one or the other (the story above).
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    place = tmp_path / "export"
    with launch(stock_overwrites, 2, args={"path": str(place)}) as ranks:
        ranks.wait("wrote", rank=0)
        ranks.release("written", rank=1)
        [_, dead] = ranks.results()
    assert dead.died
    assert sorted(p.name for p in place.iterdir()) == [
        "shard-00001-model-00001-of-00001.safetensors",
        "shard-00002-model-00001-of-00001.safetensors",
    ]
    found = {"w": torch.zeros(4, 2)}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(place)))
    assert found["w"][:, 0].tolist() == [2.0, 2.0, 1.0, 1.0]


def test_transformers_reads_an_export_and_ours_reads_what_it_saved(store: Store) -> None:
    """from_pretrained over checkpoint_dir, tied weights included; save_pretrained's files load here,
    copied to the store by hand.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    import ckptfs
    from ckptfs.integrations.safetensors import load_safetensors, save_safetensors

    sizes = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).bfloat16()
    config = model.config.to_json_string()
    save_safetensors(
        model.state_dict(), store / "hf_1", max_shard_size="4KB", files={"config.json": config}
    )
    with ckptfs.checkpoint_dir(store / "hf_1", "read") as path:
        loaded, told = LlamaForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, output_loading_info=True
        )
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for key, value in model.state_dict().items():
        assert loaded.state_dict()[key].equal(value), key
    with ckptfs.checkpoint_dir(store / "saved") as path:
        model.save_pretrained(path, max_shard_size="8KB")
    fresh = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).bfloat16()
    state = fresh.state_dict()
    del state["lm_head.weight"]  # tied: transformers leaves it out
    load_safetensors(state, store / "saved")
    for key, value in model.state_dict().items():
        assert fresh.state_dict()[key].equal(value), key


def test_the_stock_formats_own_library_agrees_on_every_dtype(tmp_path: Path) -> None:
    """All dtypes that safetensors knows, written by each and read by the other."""
    from safetensors.torch import load_file, save_file

    from ckptfs.dcp.metadata.torch_names import TORCH
    from ckptfs.dcp.safetensors.safetensors_format import dtype_named
    from ckptfs.integrations.safetensors import load_safetensors, save_safetensors

    wide = ["F64", "F32", "F16", "BF16", "C64", "I64", "I32", "I16", "U64", "U32", "U16"]
    dtypes = {n: TORCH[dtype_named(n)] for n in [*wide, "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"]}
    raw = torch.randint(0, 2, (64,), dtype=torch.uint8)
    state = {
        n: raw.view(torch.bool if d is torch.bool else torch.uint8).clone().view(d)
        for n, d in dtypes.items()
        if d
    }

    def bits(tensors: dict[str, torch.Tensor]) -> dict[str, list[int]]:
        return {key: value.view(torch.uint8).tolist() for key, value in tensors.items()}

    save_safetensors(state, tmp_path / "run" / "hf_1")
    read = load_file(tmp_path / "run" / "hf_1" / "model.safetensors")
    assert bits(read) == bits(state)
    assert {key: value.dtype for key, value in read.items()} == dtypes
    (tmp_path / "theirs").mkdir()
    save_file(state, tmp_path / "theirs" / "model.safetensors", metadata={"format": "pt"})
    found = {key: torch.zeros_like(value) for key, value in state.items()}
    load_safetensors(found, tmp_path / "theirs")
    assert bits(found) == bits(state)
    shutil.rmtree(tmp_path / "theirs")
