"""seqserve on Ray Serve: many replicas, on one machine or many, behind one address.

A replica is the application of `seqserve serve` with one model, without its socket. Where there are
several models, gateways stand in front of them: the same application, whose models run elsewhere.
Whatever moves between machines is moved by Ray. Only `deployments.py` and `command.py` import it.
"""
