"""What one rank does to the corner and sees; one module per theme, the doctor's only I/O."""
