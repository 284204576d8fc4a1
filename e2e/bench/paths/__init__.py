"""How long a turn takes on each of the router's paths, what the router chooses, and what local turns do to others."""
