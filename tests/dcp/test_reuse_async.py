"""unchanged="reference" under async_save: compared are the staged copies, or the caller's while it waits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptfs

SIZE = 400_000


@pytest.mark.parametrize("host_memory_bytes", [None, 0, 2 * SIZE * 4])
def test_what_is_compared_is_what_was_staged(tmp_path: Path, host_memory_bytes: int | None) -> None:
    """Tensors are changed as soon as they are staged: what had not changed at the call is referenced,
    and every step is what it was at its call; with room for all, for some and for
    nothing. The progress counts what is referenced as done.
    """
    run = f"{tmp_path}/run"
    frozen = {f"f{n}": torch.arange(float(SIZE)) + n for n in range(4)}
    trained = torch.zeros(1000)
    with ckptfs.prepare_run(run) as held:
        for step in (1, 2, 3):
            trained.fill_(step)
            pending = ckptfs.async_save(
                {**frozen, "w": trained},
                f"{run}/step_{step}",
                run=held,
                unchanged="reference",
                host_memory_bytes=host_memory_bytes,
            )
            pending.staged.result(60)
            trained.fill_(-1)
            if step == 2:
                frozen["f0"].add_(1)
            saved = pending.result(60)
            told = pending.progress()
            assert (told.written_items, told.written_bytes) == (told.items, told.size_bytes)
            if step > 1:
                kept = 3 if step == 3 else 4
                assert kept * SIZE * 4 < saved.total.referenced_bytes < (kept + 1) * SIZE * 4
    for step in (1, 2, 3):
        got = {**{key: torch.zeros(SIZE) for key in frozen}, "w": torch.zeros(1000)}
        ckptfs.load(got, f"{run}/step_{step}")
        first = 1 if step == 3 else 0
        assert got["f0"][0] == first
        assert torch.equal(got["f3"], torch.arange(float(SIZE)) + 3)
        assert torch.equal(got["w"], torch.full((1000,), float(step)))
