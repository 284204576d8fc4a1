"""Which engines serve a turn, and on which path: decides and remembers, without I/O."""
