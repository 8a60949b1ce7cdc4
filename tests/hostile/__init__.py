"""Hostile inputs: what a stranger may put into a checkpoint or a run, against every command.

An input is a function in ``inputs/`` that changes a fresh tree (``place.Place``)::

    @hostile(Group.FILES, on=On.RUN, commands=READERS)
    def fifo_as_metadata(place: Place) -> None:
        '''A FIFO is in the place of .metadata: a reader that opens it hangs.'''
        place.remove(place.metadata)
        os.mkfifo(place.metadata)

Each (input, command) runs in a child of its own, forked from one process that has torch already, with
limits on memory, on the size of files, on processor time and on the wall clock (``warm``). It passes if
the child ended by itself with a result that is right or with an error of ckptfs, if no code of the input
ran, nothing outside the run was touched, nothing from outside came out, and the output has no
control characters.

In CI some 290 of the 690 inputs meet one command each; ``make campaign-hostile`` runs every pair, and
``python -m tests.hostile 'fifo*'`` prints a table of those that match. A pair that does not hold yet is in
``known.toml`` with its finding, as a strict xfail: the commit that mends it takes the line out.
"""
