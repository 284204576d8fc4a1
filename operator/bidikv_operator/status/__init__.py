"""The resource's status: conditions and counts are computed here, purely, and written by ``write.py``."""
