"""Measurements on real engines of this machine: how fast reuse is, and whether answers stay right for minutes."""
