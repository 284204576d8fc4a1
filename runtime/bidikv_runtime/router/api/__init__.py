"""What requests, answers and errors of the OpenAI API mean to a router; pure."""
