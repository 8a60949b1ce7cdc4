"""The command line. The work is done in ``ckptfs.tools`` and ``ckptfs.bench``, for programs too.

    main      the group ``ckptfs``; a command's module is imported when that command runs
    output    what all commands share: --json, answers, errors as exit codes
    options   ``-o key=value``: storage options; durations

Each other module is one command, or a few that look at or change the same thing.

The library imports nothing from here.
"""
