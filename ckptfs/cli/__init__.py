"""The command line: thin. What it does is in ``ckptfs.tools`` and ``ckptfs.bench``, for programs too.

    main      the group ``ckptfs``; a command's module is imported when that command runs
    command   what every command has: --json, -o, and errors as exit codes
    answer    what a command returns, and how it is printed
    exits     the documented exit codes, and which error is which
    options   ``-o key=value``: storage options
    text      bytes, ages and counts as a person reads them

Nothing here is imported by the library.
"""
