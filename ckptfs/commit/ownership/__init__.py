"""The owner of a run: how a newcomer takes a run over, and how it recovers what was left.

    claim            survey the logs, watch the lease, append a fence in every domain     every rank
      lease          whether the owner is alive
      recovery_plan  what to do with what was left: one decision over all domains, pure   coordinator
      recovery       carries the plan out                                                 owners
        |
        v
    run              Run: held until it is released; its lease is kept
      background_owner   background tasks of the owner, so that training does not wait for them

Entry points:

    claim            ``claim``
    run              Run
    lease            who an owner is and whether it is alive
    recovery_plan    what becomes of an attempt, for tools that only read

``recovery`` is for the other folders of ``commit``, and for tools that report what it would do.
"""
