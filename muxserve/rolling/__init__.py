"""Prefill that rolls over replicas: EcoServe's partially disaggregated scheduling (arXiv:2504.18154), as pure policies.

A replica prefills *or* decodes at any time. Several form a macro instance, whose members open their prefill windows one
after the other, so that one is always open. docs/rolling.md has the formulas.
"""
