"""Dramatiq: the decorator, the middleware, parking and taking, and the ways of other brokers."""
