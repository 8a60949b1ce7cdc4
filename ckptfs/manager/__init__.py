"""The checkpoint manager: when to save, what to keep, where to resume."""
