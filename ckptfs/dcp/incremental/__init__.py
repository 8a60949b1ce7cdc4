"""``unchanged="reference"``: data files that a save takes over from an earlier one.

    reuse    the base, the comparison, which files stay in use, and writing the rest

Entry point: ``reuse``. Only saves use it.
"""
