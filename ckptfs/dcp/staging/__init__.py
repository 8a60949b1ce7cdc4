"""The copy of the state that ``async_save`` writes from, made while training waits.

    tensors --pack--> the place of each in the copy --stage--> buffers (host memory, bounded, kept)

Entry points:

    staging    makes the copy, and provides it as a rank's share of a save
    buffers    ``HostBuffers``: the memory that saves borrow; it never exceeds a bound
"""
