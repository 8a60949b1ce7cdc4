"""fsspec filesystems ``ckptfs+file://`` ``ckptfs+s3://`` ...: our commit for programs with fsspec.

    filesystem    the filesystem that users see: plain files, and checkpoints committed as a whole
    plain         its plain half: names, files, event loops
    files         the file objects that it opens for writing
    underlying    what reads below it: fsspec's own filesystem, or a view of a ``Storage``
    arrivals      files that come one by one and are committed together, of torch's writers and of copies
    stock_save    the commit of a stock save that has arrived; imports torch
    listings      fsspec's cached listing of a directory

Entry points name the classes below.
"""

from ckptfs.integrations.fsspec.filesystem import (
    ABFSCheckpoints,
    ABFSSCheckpoints,
    ADLCheckpoints,
    AZCheckpoints,
    ChainedCheckpoints,
    CheckpointFileSystem,
    FileCheckpoints,
    GCSCheckpoints,
    GSCheckpoints,
    HDFSCheckpoints,
    MemoryCheckpoints,
    S3Checkpoints,
)

__all__ = [
    "ABFSCheckpoints",
    "ABFSSCheckpoints",
    "ADLCheckpoints",
    "AZCheckpoints",
    "ChainedCheckpoints",
    "CheckpointFileSystem",
    "FileCheckpoints",
    "GCSCheckpoints",
    "GSCheckpoints",
    "HDFSCheckpoints",
    "MemoryCheckpoints",
    "S3Checkpoints",
]
