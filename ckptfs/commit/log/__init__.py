"""The run log of one domain: its entries, what they mean together, and appending to it.

    .ckptfs/log/00000000 00000001 ... n-1      immutable, created one by one
        |  entries     bytes <-> Seal, Abort, Fence, Delete, ...
        v
    LogState = fold(0 .. n-1)                  fold; saves keeps the settled ones small
        |
        v
    append(decide)                             decide(LogState) -> the entry n, or why not; a process that
                                               finds n taken folds it and decides again

Entry points:

    entries        the kinds of entries, and their encoding as bytes
    fold           LogState
    append         catch_up, append, write_snapshot, and Means, what an owner needs for them
    advisory_log   the same on a storage without exclusive creates

The log imports no other folder of ``commit``. ``saves`` is internal to it.
"""
