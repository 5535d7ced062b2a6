"""`nanoinfer bench`: backends in processes of their own, interleaved, checked before they are timed.

Its suites measure every engine and peer in the same way. The scripts in the repository's folder benchmarks/ measure
what no suite does (servers, files, GPU kernels, quality), and make the tables of the docs from results of suites.
"""
