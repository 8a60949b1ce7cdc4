"""Who takes part, who sees the same bytes, and how all of them reach one answer.

    world       World: this process among its peers
    control     Control: one collective step, one answer on every rank (solo, c10d store)
    domain      Placement: which ranks share storage, found by a probe
    directory   ensure_dir: a directory that every rank may use

No contents of files, no tensors; torch only through ``ckptfs._torch``, when it is needed.
"""
