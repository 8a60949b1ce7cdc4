"""``StorageWriter`` and ``StorageReader``, for torch's own ``dcp.save`` and ``dcp.load``.

    dcp.save -> storage_writer --plans, files--> commit_agent: a thread per rank that commits at the end
    dcp.load -> storage_reader
                boundary: errors that survive torch's gather, places in the words of stock's readers

Ways in:

    storage_writer, storage_reader    the two classes, which ``ckptfs`` exports
"""
