"""Who holds a run, how a newcomer takes it over, and how it recovers what was left.

    claim            survey the logs, watch the lease, append a fence in every domain     every rank
      lease          does the owner live?
      recovery_plan  what to do with what was left: one decision over all domains, pure   coordinator
      recovery       does it                                                              owners
        |
        v
    run              Run: held until it is released; its lease is kept
      background_owner   chores of the owner that training must not wait for

Ways in:

    claim            ``claim``
    run              Run
    lease            who an owner is and whether it lives
    recovery_plan    what becomes of an attempt, for tools that only look

``recovery`` is for the rooms of ``commit`` and for tools that report what it would do.
"""
