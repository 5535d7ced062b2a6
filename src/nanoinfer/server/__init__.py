"""`nanoinfer serve`: OpenAI's HTTP interface to an `AsyncLLM`.

app.py          the routes and the stack of middleware
config.py       all options and limits
service.py      what the routes share: the model, its names, the requests to it
generation.py   /v1/completions and /v1/chat/completions
routes.py       the other routes
http.py         bodies, responses and disconnects
run.py          the process: socket, signals, shutdown
"""
