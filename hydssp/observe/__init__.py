"""What a run tells the outside: run folder, event log, metrics, console, summary, environment, log files.

Imports the standard library, numpy and psutil; rich only in ``progress``. Knows no MPI, opens no device and
decides nothing: all of it may be left out without changing a training trajectory. Time is an argument.
"""
