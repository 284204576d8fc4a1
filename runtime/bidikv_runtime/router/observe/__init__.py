"""What the router tells about itself: metrics, access log, traces, sessions."""
