"""What the command line does, as functions for programs. They know no terminal and print nothing."""
