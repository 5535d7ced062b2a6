"""`nanoinfer serve`: OpenAI's HTTP interface to an `AsyncLLM`.

app.py          the routes and the stack of middleware
config.py       all options and limits
service.py      what the routes share: the model, its names, the requests to it
generation.py   /v1/completions and /v1/chat/completions
routes.py       the other routes
http.py         bodies, responses and disconnects
auth.py, origins.py, limits.py, access_log.py   middleware: keys, Host and Origin, bounds, ids and the log
errors.py       responses to refused and failed requests
connections.py  bounds of connections: uvicorn's protocol with time limits
metrics.py      Prometheus metrics
run.py          the process: socket, signals, shutdown
"""
