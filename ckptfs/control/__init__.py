"""The control plane: who takes part, and how all of them reach one answer.

    open_control(...) -> Control       control              SoloControl: one process
                                       tcpstore_control     StoreControl: many, over a c10d store

    control.step("save.begin", local, decide)
        every rank      local() -> its value, or how it failed     messages, rank_errors
        coordinator     decide(values) -> the one answer
        every rank      returns it, or raises the same typed error

    world                   World: this process among its peers; Life: whether a process still lives
    handshake               the ranks find each other under keys that no older run has used
    tcpstore_client         store clients that cannot hang their caller; the keys of one step
    heartbeat               who is dead, silent, or stuck in a system call
    framework_collectives   barriers and broadcasts of frameworks, made to carry failures

Ways in: ``world``, ``control``, ``messages`` (``apart``), ``rank_errors`` and ``framework_collectives``; the
rest is inside. No contents of files, no tensors; torch only through ``ckptfs._torch``, when it is needed.
"""
