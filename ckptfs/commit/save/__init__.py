"""One save, over all ranks: from its plan to what stock readers see.

    spec, planning     whether it may begin; its id, its base, its place in the order  coordinator
    owner_steps        survey, begin, prepare, finish: programs of one domain          owners
    sealing            the seal in every domain, and one verdict over all of them      owners, coordinator
    projection         attempts/<id>/ becomes step_N/                                  owners

    attempt            Attempt: puts these in order, one control step each             every rank

Entry points for layers above:

    spec               SaveSpec, WrittenPart, Committed: the arguments and results of a save
    attempt            the collective save
    shared_attempt     files that arrive one by one, and copies that the next process resumes
    foreign_metadata   whether a ``.metadata`` was written by a save of this log

The other modules are for the other folders of ``commit``: recovery projects again, a ticket seals in the home,
and a deletion reads what is projected.
"""
