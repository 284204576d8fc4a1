"""The router: OpenAI API in front, prefill and decode engines behind. The folder's README draws a request's way."""
