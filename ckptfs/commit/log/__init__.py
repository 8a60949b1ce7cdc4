"""The run log of one domain: its entries, what they mean together, and appending to it.

    .ckptfs/log/00000000 00000001 ... n-1      immutable, created one by one
        |  entries     bytes <-> Seal, Abort, Fence, Delete, ...
        v
    LogState = fold(0 .. n-1)                  fold; saves keeps the settled ones small
        |
        v
    append(decide)                             decide(LogState) -> the entry n, or why not; whoever finds
                                               n taken folds it and decides again

Ways in:

    entries        the vocabulary, and how an entry looks as bytes
    fold           LogState
    append         catch_up, append, write_snapshot, and Means, what an owner needs for them
    advisory_log   the same on a storage where nobody can win a create

The log knows no other room. ``saves`` is inside.
"""
