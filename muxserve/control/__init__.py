"""Changing a running fleet: scale a model, drain a unit, add a model, remove one.

The controller listens on a Unix socket in the fleet's directory (`FleetSpec.control_address`); the commands find
that directory by its lock. Every change either happens or changes nothing, and says why.

    FleetControl    what the controller can do (`muxserve/control/changes.py`)
    ControlServer   takes the commands and calls it (`muxserve/control/server.py`)
    running_fleets, ControlClient   the commands' side (`muxserve/control/client.py`)
"""
