"""The copy of the state that ``async_save`` writes from, made while training waits.

    tensors --pack--> where each lies in the copy --stage--> buffers (host memory, bounded, kept)

Ways in:

    staging    makes the copy, and hands it out as a rank's share of a save
    buffers    ``HostBuffers``: what saves borrow, of which there is never more than a bound
"""
