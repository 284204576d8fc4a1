"""What requests, answers and errors of the APIs (OpenAI's, Anthropic's) mean to a router; pure."""
