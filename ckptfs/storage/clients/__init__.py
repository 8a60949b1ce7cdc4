"""Thin clients of object stores: one file per library, all behind ``base.ObjectClient``."""
