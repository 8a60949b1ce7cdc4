"""Every floor that ckptfs' speed is held to: one row of a table, one command."""
