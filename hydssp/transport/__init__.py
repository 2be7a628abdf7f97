"""Server and worker ends behind the two protocols of ``protocol.py``.

Imports nothing itself, so that a program that uses only the in-process transport never loads MPI.
"""
