"""Bytes under a URI: the protocol (``base``), its backends, and ``registry.open_storage``."""
