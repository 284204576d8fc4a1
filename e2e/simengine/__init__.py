"""A simulated vLLM engine: what router, operator, other engines and clients see of one, without torch and vLLM."""
