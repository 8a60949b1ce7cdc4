"""The pieces of ``ckptfs.testing.proxy``: what goes wrong (faults), HTTP on the wire, the relay."""
