"""Several replicas and several models behind one port: the front, the replicas, and the connections between them."""
