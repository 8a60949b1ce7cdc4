"""``unchanged="reference"``: data files that a save takes over from an earlier one.

    reuse    the base, the comparison, which files stay in use, and writing the rest

Way in: ``reuse``. Nothing but saves knows it.
"""
