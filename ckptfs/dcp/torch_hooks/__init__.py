"""``StorageWriter`` and ``StorageReader``, for torch's own ``dcp.save`` and ``dcp.load``.

    dcp.save -> storage_writer --plans, files--> commit_agent: a thread per rank that commits at the end
    dcp.load -> storage_reader
                boundary: errors that survive torch's gather, arguments as stock's readers name them

Entry points:

    storage_writer, storage_reader    the two classes, which ``ckptfs`` exports
"""
