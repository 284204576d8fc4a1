"""With this folder on the path, ``python3 -m vllm.entrypoints.openai.api_server`` is a simulated engine."""
