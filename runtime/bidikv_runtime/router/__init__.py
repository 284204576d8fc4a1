"""The router: OpenAI API in front, a prefill leg and a decode leg behind.

Pure modules decide (``session``, ``ring``, ``policy``, ``splice``, ``legs``, ``http1``, ``endpoints``); ``server``,
``upstream`` and ``discovery`` do the I/O; ``proxy`` ties them together for one request. The way of a request is drawn
in the folder's README.
"""
