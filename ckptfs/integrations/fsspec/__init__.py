"""fsspec filesystems ``ckptfs+file://`` ``ckptfs+s3://`` ...: whoever speaks fsspec gets our commit.

    filesystem   whole      the filesystem that users see, and its plain half
    files                   the file objects that it opens for writing
    bare   view             what reads below it: fsspec's own filesystem, or a view of a ``Storage``
    arrivals   arriving     files of torch's writers that wait for one commit of all ranks
    copied                  stock checkpoints that a program copies in, file by file
    agreement               the id that the ranks of one save agree on without a collective
    listings                what fsspec remembers of a directory

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
