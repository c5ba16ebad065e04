"""The interface of a plugin's classes: their names, signatures and declarations, each read once and in a guarded call.

`registry` asks at registration, `core` where it makes impls and builders, and the conformance kit for its messages.
"""
