"""The command line: thin. What it does is in ``ckptfs.tools`` and ``ckptfs.bench``, for programs too.

    main      the group ``ckptfs``; a command's module is imported when that command runs
    output    what every command has: --json, answers, errors as exit codes
    options   ``-o key=value``: storage options; durations

Nothing here is imported by the library.
"""
