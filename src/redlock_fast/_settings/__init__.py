"""The parts of `redlock_fast.options`: one for each form that a master may be given in.

Each part turns what users pass into plain values. None opens a socket, looks a name up or imports
redis-py or valkey-py. What one of them does not understand it says by raising `values.Refused`,
which `options.parse_masters` turns into a `ConfigurationError`.
"""
