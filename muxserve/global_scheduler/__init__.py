"""The global scheduler, live: one process that says where requests of models with several replicas go, which replicas
give requests to which, and how many there are.

The deciding is `muxserve.replicas`; here are messages and sockets around it. It holds nothing that it does not get back
by itself when it is started again, and while it is away gateways choose units by a simple rule.
"""
