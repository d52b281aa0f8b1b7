"""The scheduling core of a unit: what runs next, with which share, and how many pages each model may hold.

Pure: it takes events and the time, and answers decisions. The live unit scheduler and the simulator drive the very
same objects, so nothing here opens a socket, reads a clock or imports torch or vLLM.
"""
