"""One checkpoint that several groups of processes write and one process commits.

    driver       begin_parts --> Ticket --pickled--> groups        tickets
    each group   a part: an attempt with a seal that is a promise  parts
    driver       Ticket.commit: the one seal, in the home domain   tickets
    each group   Decision.publish: its domains learn of it         parts

    directory_parts   the same for directories that a framework writes

All three are ways in, for layers above: no other room of ``commit`` knows of parts but by their entries.
"""
