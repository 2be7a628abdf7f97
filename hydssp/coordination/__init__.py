"""Clocks, paradigms and the coordinator: pure decisions about which worker goes on.

Standard library only; nothing here reads a clock, draws a random number or knows torch, MPI or Hydra.
"""

from hydssp.coordination.controller import extension
from hydssp.coordination.coordinator import Coordinator
from hydssp.coordination.events import Cause, Decision, Outcome, ProtocolError, Push
from hydssp.coordination.paradigms import ASP, BSP, DSSP, SSP, Paradigm, Rules
from hydssp.coordination.ranges import BatchRange, Dealer, RangeDealer, ShardDealer

__all__ = [
    "ASP",
    "BSP",
    "DSSP",
    "SSP",
    "BatchRange",
    "Cause",
    "Coordinator",
    "Dealer",
    "Decision",
    "Outcome",
    "Paradigm",
    "ProtocolError",
    "Push",
    "RangeDealer",
    "Rules",
    "ShardDealer",
    "extension",
]
