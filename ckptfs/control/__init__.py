"""The control plane: the ranks that take part, and how all of them reach one answer.

    open_control(...) -> Control       control              SoloControl: one process
                                       tcpstore_control     StoreControl: many, over a c10d store

    control.step("save.begin", local, decide)
        every rank      local() -> its value, or how it failed     messages, rank_errors
        coordinator     decide(values) -> the one answer
        every rank      returns it, or raises the same typed error

    world                   World: this process among its peers; Life: whether a process is still running
    handshake               the ranks find each other under keys that no older run has used
    tcpstore_client         store clients that cannot hang their caller; the keys of one step
    heartbeat               which ranks are dead, silent, or stuck in a system call
    framework_collectives   barriers and broadcasts of frameworks that carry failures

Entry points: ``world``, ``control``, ``messages`` (``apart``), ``rank_errors`` and ``framework_collectives``. The
other modules are internal. No contents of files, no tensors; torch only through ``ckptfs._torch``, when needed.
"""
