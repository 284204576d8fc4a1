"""The bidikv operator: reconciles ``BidiKVInference`` resources into prefill, decode and router workloads."""
