"""`nanoinfer serve`: OpenAI's HTTP interface to an `AsyncLLM`.

app.py          the routes and the stack of middleware
config.py       all options and limits
service.py      what the routes share: the model, its names, the requests to it
generation.py   /v1/completions and /v1/chat/completions
table.py        the table of routes
routes.py       the other routes
openapi.py      the OpenAPI document, from the tables of routes and fields
page_routes.py  the page: files without external resources
http.py         bodies and responses
auth.py, origins.py, limits.py, access_log.py   middleware: keys, Host and Origin, bounds, ids and the log
errors.py       responses to refused and failed requests
connections.py  bounds of connections: uvicorn's protocol with time limits
metrics.py      Prometheus metrics
roofline.py     the limit of the speed that /info has
run.py          the process: socket, signals, shutdown
"""
