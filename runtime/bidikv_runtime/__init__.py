"""What runs inside the pods: the router, and the KV connector that is loaded into vLLM."""
