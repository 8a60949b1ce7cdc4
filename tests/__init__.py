"""A regular package, found before the `tests` that some wheels (verl 0.9.1) bring along."""
