"""One checkpoint that several groups of processes write and one process commits.

    driver       begin_parts --> Ticket --pickled--> groups        tickets
    each group   a part: an attempt with a seal that is a promise  parts
    driver       Ticket.commit: the one seal, in the home domain   tickets
    each group   Decision.publish: its domains learn of it         parts

    directory_parts   the same for directories that a framework writes

All three are entry points for layers above. The other folders of ``commit`` know parts only by their entries.
"""
