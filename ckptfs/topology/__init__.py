"""Which nodes see the same disk, and directories that all nodes can use.

    every node lead   reads or makes .ckptfs/domain, leaves a token      storage_domains.Probe
    coordinator       groups the nodes by what they saw                  storage_domains

Entry points:

    storage_domains   Placement: which ranks share storage
    ensure_dir        ensure_dir: a directory that every rank of every node can use

No contents of files, no tensors. The ranks talk through ``ckptfs.control``.
"""
