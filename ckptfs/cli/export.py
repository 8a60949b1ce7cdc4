"""``ckptfs export``: export a checkpoint as safetensors, one torch.save file, or plain DCP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckptfs.cli.options import storage_options
from ckptfs.cli.output import CommandResult, command, place_text
from ckptfs.progress import progress
from ckptfs.text import counted, size_text
from ckptfs.tools.exporting import Exported, ExportFormat, Selection
from ckptfs.tools.exporting import export as export_this
from ckptfs.uri import Uri

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["export"]

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_MOST = 5


@command("export", answers=(Exported,))
@click.argument("uri")
@click.argument("target")
@click.option(
    "--format",
    "to",
    type=click.Choice([to.value for to in ExportFormat]),
    required=True,
    help="safetensors: a directory, with an index if there are several files. torch: one file for "
    "torch.load. dcp: a directory for torch.distributed.checkpoint.load.",
)
@click.option(
    "--filter", "filters", multiple=True, metavar="GLOB", help="Export only keys that match."
)
@click.option(
    "--strip",
    default="",
    metavar="PREFIX",
    help="Remove this from the start of the keys, for example model.",
)
@click.option("--key-prefix", default="", metavar="PREFIX", help="Put this in front of the keys.")
@click.option("--max-shard-size", default="5GB", show_default=True, help="Of a file; not of torch.")
@click.option("--dtype", type=click.Choice(_DTYPES), help="Convert floating point tensors.")
@click.option("--overwrite", is_flag=True, help="Replace an older export of this format.")
@click.option(
    "--follow-links", is_flag=True, help="Read what symbolic links in the checkpoint lead to."
)
@click.option(
    "--scratch",
    type=click.Path(file_okay=False, exists=True),
    metavar="DIR",
    help="torch: map the tensors from a file there instead of holding all of them in memory.",
)
@storage_options()
@storage_options("--target-option", "--target-storage-option", of="TARGET, where they differ")
def export(  # noqa: PLR0917 - one parameter for each option of the command line
    uri: str,
    target: str,
    to: str,
    filters: tuple[str, ...],
    strip: str,
    key_prefix: str,
    max_shard_size: str,
    dtype: str | None,
    overwrite: bool,  # noqa: FBT001 - click passes flags by name
    follow_links: bool,  # noqa: FBT001
    scratch: str | None,
    storage_options: dict[str, Any],
    target_storage_options: dict[str, Any],
) -> CommandResult:
    """Convert a checkpoint, or a part of one, to another format at any URI.

    All bytes that are read are compared with their digests. Where the storage allows it, the target appears
    completely or not at all. --overwrite replaces the files of an older export of this format and nothing
    else. It refuses a target with runs, checkpoints, directories, links or other files.
    """
    import torch

    chosen = Selection(filters, strip, key_prefix, None if dtype is None else getattr(torch, dtype))
    with progress(f"exporting {Uri.parse(uri)}") as meter:
        done = export_this(
            uri,
            target,
            to,
            chosen,
            storage_options=storage_options,
            target_options=target_storage_options or None,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            scratch=scratch,
            follow_links=follow_links,
            meter=meter,
        )
    return CommandResult(done, lambda console: _show(done, console))


def _show(done: Exported, console: Console) -> None:
    objects = f", {counted(done.objects, 'object')}" if done.objects else ""
    console.print(
        f"{place_text(done.uri)}: {counted(done.tensors, 'tensor')}{objects}, "
        f"{size_text(done.tensor_bytes)} in {counted(len(done.files), 'file')}"
    )
    if done.left_out:
        more = len(done.left_out) - _MOST
        more_text = f" and {more} more" if more > 0 else ""
        console.print(
            f"left out, because they are not tensors: {', '.join(done.left_out[:_MOST])}{more_text}"
        )
