"""`nanoinfer serve`: OpenAI's HTTP interface to an `AsyncLLM`.

app.py          the table of routes, and the stack of middleware
config.py       all options and limits
service.py      what the routes share: the model, its names, the requests to it
routes.py       the routes
openapi.py      the OpenAPI document, from the tables of routes and fields
page_routes.py  the page: files without external resources, and the Markdown of answers
http.py         bodies, responses, and refusals
access.py, limits.py, access_log.py   middleware: keys, Host and Origin; bounds; ids and the log
connections.py  bounds of connections: uvicorn's protocol with time limits, and the limit of open files
metrics.py      Prometheus metrics
run.py          the process: socket, signals, shutdown
"""
