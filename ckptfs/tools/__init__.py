"""The commands of the command line as functions for programs: no terminal, no printing."""
