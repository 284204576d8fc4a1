"""HTTP/1.1 on both sides, over the event loop's transports: no routing, no JSON."""
