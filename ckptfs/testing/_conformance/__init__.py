"""The parts of ``ckptfs.testing.conformance``, by what they ask about."""
