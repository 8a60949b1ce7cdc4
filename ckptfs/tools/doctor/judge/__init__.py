"""From what all ranks saw to findings; one module per theme. Pure: no I/O, no clock."""
