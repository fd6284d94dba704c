"""Forms of ``ops.attention`` beyond one matrix of queries and keys: packed sequences, segments, caches, logsumexp.

``specs`` builds a spec for each form, ``visible_keys`` the range of keys that each query sees, and ``calls`` goes from the arguments of a
call to the op of a form.
"""
