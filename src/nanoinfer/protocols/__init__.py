"""Requests and responses in the shapes of OpenAI, Anthropic, vLLM, Jina and Cohere, for batches and the HTTP server.

fields.py     the fields of requests: what each means, or why it has no effect; also for the OpenAPI document
requests.py   requests to /v1/completions, /v1/chat/completions, /tokenize and /detokenize
output.py     responses and chunks of the first two
shared.py     what the routes that generate share: shapes, writers of streams, the parts of a message
responses.py  /v1/responses
messages.py   /v1/messages, in Anthropic's shape
pooling.py    /v1/embeddings
errors.py     the body of an error
"""
