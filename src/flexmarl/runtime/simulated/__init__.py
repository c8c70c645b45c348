"""Virtual time: the same orchestrator, services and rules; the clock jumps to the next timer. Read `runtime.py`."""

from flexmarl.runtime.simulated.objects import MemoryObjectPlane
from flexmarl.runtime.simulated.runtime import SimulatedRuntime, run_virtual
from flexmarl.runtime.simulated.virtual_time import VirtualDeadlock, VirtualTimeLoop

__all__ = ["MemoryObjectPlane", "SimulatedRuntime", "VirtualDeadlock", "VirtualTimeLoop", "run_virtual"]
