"""The HTTP server in OpenAI's shape: routes, middleware, metrics and the page."""
